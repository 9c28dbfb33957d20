"""Statistics: quantiles, histograms, confidence intervals, trend tests and early stopping.

Pure functions of numbers and arrays, without any knowledge of requests or runs.
"""
