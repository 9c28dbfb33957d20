"""Summarize several runs of one load: means with intervals, and the capacity of a search.

Pure: summaries in, values out.
"""
