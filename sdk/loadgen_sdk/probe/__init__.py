"""Find out about a target before a load: its server, its model, and how it counts tokens.

`probe.py` sends requests through functions that its caller passes, and `fetch.py` sends each
request over a connection of its own.
"""
