"""Send requests over sockets: TLS, HTTP/1.1, one exchange, the connection pool.

Under load, only `reactor.py`, `receiver.py` and `timer.py` touch a socket or a timer. `http1.py`,
`plain_events.py`, `exchange.py` and `target.py` do no I/O.
"""
