"""Carries out a run: plans it, builds request bodies, sends them on time, and collects the files of the workers.

Computes no metric: rows go to `results/`, and `metrics/` reads them there.
"""
