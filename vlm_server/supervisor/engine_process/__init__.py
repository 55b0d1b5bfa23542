"""One engine process and its ranks: start, messages, watchdog, and the history of its ends."""
