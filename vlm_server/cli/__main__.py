"""`python -m vlm_server.cli` is `vlm-server`."""

import sys

from vlm_server.cli.main import main

sys.exit(main())
