"""Why a run is as it is: causes, where latency goes, differences between replicas and over time, recovery, fairness.

Pure: records in, one section of summary.json out. `core/run_summary.py` adds the sections to what `metrics/` computes.
"""
