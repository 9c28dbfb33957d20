"""Bytes on the wire: sockets, TLS, HTTP/1.1, one exchange, the pool of connections.

Under load only `wire.py` and its timer, `clock.py`, use sockets. The other modules do no IO of their own.
"""
