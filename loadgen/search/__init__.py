"""Find the highest load under an SLO, and measure a range of loads (`search`, `sweep`).

`load_search.py` decides which load is tried next, and does no I/O. `trial_runner.py` runs one load.
"""
