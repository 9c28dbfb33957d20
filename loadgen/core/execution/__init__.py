"""Carries out a run: plans it, builds request bodies, sends them on time, and collects the files of the workers.

Decides nothing about figures: rows go to `results/`, and `metrics/` reads them there. `driver.py`
sends and waits; the others prepare, start workers and collect.
"""
