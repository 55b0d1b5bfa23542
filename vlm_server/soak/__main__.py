"""Where `scripts/soak` begins."""

import sys

from vlm_server.soak.command import main

sys.exit(main())
