"""Compare results and report each difference with its confidence interval (`loadgen compare`).

The comparison first checks whether both sides did the same work. Named baselines are stored here,
too. With `--live`, `live_run.py` measures two targets in alternating blocks, and
`alternating_blocks.py` judges them.
"""
