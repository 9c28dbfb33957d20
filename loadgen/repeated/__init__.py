"""Repeat a load and summarize the runs: means with intervals, and the capacity of a search.

All modules but `repeat_loop.py` are pure: they turn summaries into values and tables.
"""
