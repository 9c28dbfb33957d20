"""Score responses against references and against those of another endpoint (`loadgen answers`).

`completions.py` sends the prompts a few at a time and creates no load.
"""
