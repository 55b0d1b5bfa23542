"""The engine process: start-up, wiring, its channel to the front, warm-up, process memory."""
