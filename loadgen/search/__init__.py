"""What is the highest load under an SLO? `loadgen sweep`, `loadgen search`, and the search within one run.

`load_search.py`, `belief.py`, `ahead.py`, `watch.py`, `sweep.py` and `adaptive.py` are pure; `trials.py` runs one load
at a time, `adaptive_run.py` one that finds its limit.
"""
