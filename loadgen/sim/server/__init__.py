"""The simulated server as an HTTP endpoint, with fault injection.

`endpoint.py` waits for sockets, `connection.py` reads requests, `request_handler.py` starts
responses, and `response_sender.py` sends them as their tokens become due.
"""
