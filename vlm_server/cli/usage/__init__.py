"""How commands are parsed, and what help and the manual page say of them."""
