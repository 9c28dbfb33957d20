"""Processes that accompany a run: metrics scraper, profiler, compaction of the record log.

They follow a run by its files or its events, and never decide what is sent.
"""
