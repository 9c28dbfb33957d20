"""What goes along with a run: the scraper of servers, the profiler, the compactor of its rows.

Each follows a run by its files or by what `execute` tells, most from a process of its own. None decides what is sent.
"""
