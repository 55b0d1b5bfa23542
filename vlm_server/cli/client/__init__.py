"""Client of a server, over HTTP, for the commands and the soak test."""
