"""What a target is, found out before any load: server, model, how it counts tokens.

`probe.py` asks through functions it is given; `fetch.py` is a connection per question, not for load.
"""
