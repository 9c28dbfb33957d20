"""The simulated server as an HTTP endpoint: parses requests, writes responses, injects faults on demand.

IO is in `endpoint.py`, `connection.py`, `process.py` and `embedded.py`. The other modules convert values to bytes.
"""
