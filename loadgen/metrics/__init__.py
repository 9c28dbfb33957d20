"""From rows to figures: columns, blocks of the summary, validity, drift, and `summary.json` itself.

Pure: rows and histograms in, values out. Reads no file and prints nothing.
"""
