"""Ways to carry out a run: in several processes, on the nodes of a Ray cluster, or in virtual time.

In this process alone, `driver.py` does it. Each takes a plan and leaves rows; none of them judges a figure.
"""
