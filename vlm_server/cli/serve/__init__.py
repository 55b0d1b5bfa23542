"""`vlm-server serve`: the front process, its sockets, signals and new settings."""
