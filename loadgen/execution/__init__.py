"""Carries out a run: plans it, builds bodies ahead, drives the clock and the sockets, collects what workers leave.

Decides nothing about figures: rows go to `results/`, and `metrics/` reads them there. `driver.py`
sends and waits; the others prepare, start workers and collect.
"""
