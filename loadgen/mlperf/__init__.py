"""What do MLPerf's rules say? Limits, early stopping, VALID or INVALID, LoadGen's log files: `loadgen mlperf`.

`run.py` and `official_loadgen.py` carry a test out; `rules.py`, `result.py`, `log_files.py` and `accuracy.py` are pure.
"""
