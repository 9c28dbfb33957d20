"""Statistics: quantiles, confidence intervals, the end of a warm-up, early stopping.

Pure functions over numbers and arrays. Knows nothing of requests, runs or files.
"""
