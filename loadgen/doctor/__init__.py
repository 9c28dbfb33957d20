"""Is this target, is this host fit for a measurement, and what does each fact mean for the numbers? `loadgen doctor`.

Sends a handful of requests and no load. `target_checks.py` and `host_checks.py` judge facts and send nothing.
"""
