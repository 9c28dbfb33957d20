"""From rows to figures: columns, blocks of the summary, validity, drift, and `summary.json` itself.

Pure: rows and histograms in, values out. Opens no run and prints nothing.
"""
