"""Split the difference between a run and the result of another tool into parts (`explain`).

`latency_parts.py`, `rate_parts.py` and `count_parts.py` replace one definition of loadgen after the
other by that of the tool and compute each metric again. `other_result.py` reads the file of the
tool, and `comparability.py` checks whether both measured the same load.
"""
