"""Bytes on the wire: sockets, TLS, HTTP/1.1, one exchange, the pool of connections.

Only `wire.py`, `receiver.py` (its reads) and `clock.py` (its timer) touch a socket under load; `http1.py`, `plain.py`,
`exchange.py` and `target.py` are sans IO.
"""
