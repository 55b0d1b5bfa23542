"""A server that speaks as much of the hub's API as a download needs, and misbehaves when told."""
