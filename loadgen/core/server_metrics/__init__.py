"""What the servers' own metrics pages say while a run goes: the scraper process, and the series it leaves.

Knows nothing of the load. `scraper.py` asks the servers from a process of its own; `series.py` is pure.
"""
