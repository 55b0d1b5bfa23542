"""What operators see of requests: a log line, a trace, and where each is; never what it says."""
