"""How families write tool calls, and what reads them."""
