"""Connections: from bytes on a socket to requests, and back. Bounds what a client may cost.

`protocol.HttpConnection` is what uvicorn makes for each connection in place of its own. It shares
the interface of ASGI with the application, and knows no route and no dialect.
"""
