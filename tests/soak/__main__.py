"""`python -m tests.soak`, which `scripts/soak` runs."""

import sys

from tests.soak.command import main

sys.exit(main())
