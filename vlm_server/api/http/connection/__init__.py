"""Connections: bytes on a socket to requests, and responses back, with bounds on a client's cost.

`protocol.HttpConnection` replaces uvicorn's own protocol. It talks ASGI to the application, and
knows no route and no dialect.
"""
