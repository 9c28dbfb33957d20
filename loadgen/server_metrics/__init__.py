"""Metrics that the servers publish about themselves during a run: the scraper process, and the series that it records.

`scraper.py` uses the network, in a process of its own; `series.py` is pure. Neither depends on the load.
"""
