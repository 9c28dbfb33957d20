"""Ways to carry out a run: in this process, in several processes, on the nodes of a Ray cluster, or in virtual time.

Each takes a plan and leaves rows; none of them judges a figure.
"""
