"""Score responses against references and against those of another endpoint (`loadgen answers`).

`ask.py` sends the prompts one at a time and creates no load.
"""
