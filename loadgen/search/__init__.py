"""The highest load under an SLO: which load to try next, the trials, the folder of an experiment, sweeps.

A judgement: renders nothing and knows no other judgement. `load_search.py`, `belief.py`, `watch.py`, `sweep.py` and
`adaptive.py` are pure; `trials.py` runs one load at a time through `execution/`, `adaptive_run.py` one that finds its
limit.
"""
