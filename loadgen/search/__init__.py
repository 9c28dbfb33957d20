"""Find the highest load under an SLO, and measure a range of loads (`search`, `sweep`).

`trials.py` runs one load at a time. The decision which load is tried next is pure.
"""
