"""`vlm-server service`: the daemon as a user's background service (launchd, systemd)."""
