"""What is true of several runs of one load? Figures by their path, their means over runs, when there are runs enough.

Pure: summaries in, values out. Below the shell, whose options repeat a load; wings compare and print by it.
"""
