"""Compare results and report each difference with its confidence interval (`loadgen compare`).

The comparison first checks whether both sides did the same work. Named baselines are stored here,
too.
"""
