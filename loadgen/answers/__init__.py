"""Are the answers still right? Scores against references, and against those of another endpoint: `loadgen answers`.

Only `ask.py` asks the endpoints; it sends no load.
"""
