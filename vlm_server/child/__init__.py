"""Our own helper processes: work on hostile bytes that can be stopped, or may crash."""
