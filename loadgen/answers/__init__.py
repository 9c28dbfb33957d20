"""Whether answers are still right: scores against references, and against those of another endpoint.

A judgement: renders nothing and knows no other judgement. Only `ask.py` asks the endpoints; it sends no load.
"""
