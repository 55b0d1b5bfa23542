"""Connections: bytes on a socket to requests, and responses back, with bounds on a client's cost.

`protocol.HttpConnection` is what uvicorn makes for each connection in place of its own. It shares
the interface of ASGI with the application, and knows no route and no dialect.
"""
