"""Statistics: quantiles, confidence intervals, the end of a warm-up, early stopping.

Pure functions of numbers and arrays. This package knows nothing of requests, runs or files.
"""
