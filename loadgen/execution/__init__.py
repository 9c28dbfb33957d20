"""Carries out a run: plans it, builds bodies ahead, drives the clock and the sockets, collects what workers leave.

The only room that waits. Decides nothing about figures: rows go to `results/`, and `metrics/` reads them there.
"""
