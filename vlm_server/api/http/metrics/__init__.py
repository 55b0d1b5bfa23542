"""What is measured of answers in the front, for the log, metrics, traces and `Server-Timing`."""
