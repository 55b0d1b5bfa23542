"""`python -m vlm_server.cli` is `vlm-server`."""

import sys

if not sys.flags.safe_path:  # `-m` puts the working folder first, where a `queue.py` may lie
    del sys.path[0]

from vlm_server.cli.process import main

sys.exit(main())
