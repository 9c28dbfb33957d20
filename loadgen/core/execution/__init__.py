"""Execute a run: plan it, build request bodies, send them on time and collect the records.

`run.py` coordinates a run, `driver.py` sends requests from one process, and `worker_resources.py`
prepares what the driver needs.
"""
