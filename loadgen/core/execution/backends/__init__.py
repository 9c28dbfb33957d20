"""Who sends a load over HTTP: processes of this machine, or workers on the nodes of a Ray cluster.

In this process alone, `driver.py` does it. Each takes a plan and leaves rows; none of them judges a figure.
"""
