"""The simulated server as an HTTP endpoint, with fault injection.

I/O is in `endpoint.py`, `connection.py`, `process.py` and `embedded.py`. The other modules convert
values to bytes.
"""
