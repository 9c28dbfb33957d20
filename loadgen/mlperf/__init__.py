"""Run tests by the rules of MLPerf Inference and check their logs (`loadgen mlperf`).

`run.py` runs a test with this load generator and `official_loadgen.py` with MLCommons LoadGen.
`rules.py`, `result.py` and `log_files.py` implement the rules.
"""
