"""`python -m vlm_server.cli` is `vlm-server`."""

import sys

if not sys.flags.safe_path:  # `-m` put the working folder first: a checkpoint's, with a `queue.py`?
    del sys.path[0]

from vlm_server.cli.entry import main

sys.exit(main())
