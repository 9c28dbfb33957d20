"""What the servers' own metrics pages say while a run goes: the scraper process, and the series it leaves.

`scraper.py` talks to the network from a process of its own; `series.py` is pure. Nothing here knows the load.
"""
