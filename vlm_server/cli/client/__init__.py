"""Asks a server over HTTP, as `ask`, `bench` and the soak test do."""
