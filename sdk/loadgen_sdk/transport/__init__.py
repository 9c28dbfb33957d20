"""Bytes on the wire: sockets, TLS, HTTP/1.1, one exchange, the pool of connections.

Only `wire.py` (and `clock.py`, its timer) touches a socket under load; the rest is sans IO.
"""
