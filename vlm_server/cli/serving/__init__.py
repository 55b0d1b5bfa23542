"""The front process of `vlm-server serve`: its sockets, signals, log file and new settings."""
