"""Explain a run: causes of slow requests, latency breakdown, differences between replicas.

Each module computes one section of summary.json from the records of a run.
"""
