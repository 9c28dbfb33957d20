"""What the MLPerf Inference rules say of a run: limits, early stopping, VALID or INVALID, LoadGen's log files.

A judgement: runs no load, renders nothing, knows no other judgement. Only `run.py` and `official_loadgen.py`, which
carry a test out, stand above the judgements.
"""
