"""The command line: from arguments to settings to a run. Nothing below imports it."""
