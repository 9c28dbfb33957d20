"""Ways to carry out a run: in this process, in several processes, on the nodes of a Ray cluster, or in virtual time.

Each takes a job and leaves rows and a `Share`; none of them judges a figure.
"""
