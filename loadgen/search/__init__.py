"""Search for the highest load under an SLO, and sweeps: the next load, the trials, the folder of an experiment.

`load_search.py` is pure (ask and tell). `trials.py` runs one load at a time. Nothing here renders.
"""
