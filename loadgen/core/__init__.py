"""Everything that a single run needs, from the workload file to its summary.

This package imports no feature package, no rendering and no command line.
"""
