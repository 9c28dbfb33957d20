"""Compute the metrics of a run from its records, and judge whether they can be trusted.

Everything here is a pure function of records and histograms.
"""
