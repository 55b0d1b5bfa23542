"""What outlives the process: prefixes and encoder outputs on disk, from and to device arrays."""
