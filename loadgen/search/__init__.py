"""The highest load under an SLO: which load to try next, the trials, the folder of an experiment, sweeps.

`load_search.py` is pure (ask, tell). `trials.py` carries out one load at a time; nothing here renders.
"""
