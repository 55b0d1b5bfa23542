"""How much may be in flight and wait, shared by clients, and for how long."""
