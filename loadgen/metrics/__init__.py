"""Metrics of a run: columns of its rows, the blocks of the summary, validity, drift, and `summary.json` itself.

Pure: rows and histograms in, values out. This package reads no file and prints nothing.
"""
