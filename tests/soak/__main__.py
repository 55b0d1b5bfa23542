"""Where `scripts/soak` begins."""

import sys

from tests.soak.command import main

sys.exit(main())
