"""Stands in for the decoder process: runs the program in its argument."""

import sys

exec(sys.argv[1])
