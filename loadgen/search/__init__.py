"""What is the highest load under an SLO? `loadgen sweep` and `loadgen search`.

`load_search.py`, `belief.py`, `ahead.py`, `watch.py` and `sweep.py` are pure; `trials.py` runs one load at a time.
"""
