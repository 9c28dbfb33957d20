"""What can be asked of a target and of this host before a load, and what each fact means for the numbers.

Sends a handful of requests and no load. `target_checks.py` and `host_checks.py` judge facts and send nothing.
"""
