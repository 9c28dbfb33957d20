"""Send requests over sockets: TLS, HTTP/1.1, exchanges, the connection pool.

Under load, only `reactor.py`, `receiver.py`, `connection.py` and `timer.py` touch a socket or a
timer. `http1.py`, `plain_events.py`, `exchange.py`, `tls.py` and `target.py` do no I/O.
"""
