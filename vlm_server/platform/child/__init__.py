"""Helper processes, for work on untrusted bytes: they can be killed, and may crash."""
