"""Send requests over sockets: TLS, HTTP/1.1, one exchange, the connection pool.

Under load, only `wire.py`, `receiver.py` and `clock.py` touch a socket or a timer. `http1.py`,
`plain.py`, `exchange.py` and `target.py` do no I/O.
"""
