"""What the MLPerf Inference rules say of a run: limits, early stopping, VALID or INVALID, LoadGen's log files.

A judgement, but for `run.py` and `official_loadgen.py`, which carry a test out and stand above the others.
"""
