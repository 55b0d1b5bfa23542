"""A decoder that runs the program in its argument."""

import sys

exec(sys.argv[1])
