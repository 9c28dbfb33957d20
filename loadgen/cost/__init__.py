"""Compute the cost of a request and the machines for a load (`cost`, `size`).

Only `size` runs a load, if it has to search for a capacity.
"""
