"""The simulated server as an HTTP endpoint: requests parsed, answers written, faults injected on demand.

IO is in `endpoint.py`, `connection.py`, `process.py` and `embedded.py`; the rest is values in, bytes out.
"""
