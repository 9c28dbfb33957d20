"""What is true of several runs of one load? Figures by their path, means over runs, the capacity found.

Pure: summaries in, values out. Below the shell, whose options repeat a load, and below pricing; wings print by it.
"""
