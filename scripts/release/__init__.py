"""What must hold of a package before it is released: `scripts/release_check`."""
