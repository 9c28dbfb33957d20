"""Find out about a target before a load: server, model, and how it counts tokens.

`probe.py` sends requests through functions that its caller passes, and `fetch.py` opens one
connection per request.
"""
