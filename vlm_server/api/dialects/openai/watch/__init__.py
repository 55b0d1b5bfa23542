"""`/v1/watch`: standing questions about streams of frames."""
