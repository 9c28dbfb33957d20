"""Is a result better, worse or the same? First whether the work was the same, then each difference with its interval.

`loadgen compare` and baselines by name. It reads finished results by the table of result kinds and runs no load.
"""
