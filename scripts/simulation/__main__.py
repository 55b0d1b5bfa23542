"""`python -m scripts.simulation`, which `scripts/simulate_scale` runs."""

import sys

from scripts.simulation.command import main

sys.exit(main())
