"""Check whether a target and this host are ready for a measurement (`loadgen doctor`).

It sends a few requests and no load. `target_checks.py` and `host_checks.py` judge what was found.
"""
