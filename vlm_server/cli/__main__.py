"""`python -m vlm_server.cli` is `vlm-server`."""

import sys

from vlm_server.cli.entry import main

sys.exit(main())
