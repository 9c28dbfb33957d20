"""Is this promise kept? The contract file, its lint, the figure of each term, the verdict: `loadgen validate`.

`run.py` carries a contract out, `stored.py` reads its folder again, `prediction.py` tries it on a simulated server;
`schema.py`, `lint.py`, `evaluate.py`, `verdict.py` and `planning.py` are pure.
"""
