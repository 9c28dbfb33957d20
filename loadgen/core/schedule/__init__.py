"""Decide when each request starts: arrival processes, the schedule and the dispatcher.

Everything is pure: no clock, no socket, no sleeping. All random numbers are drawn before the run
starts.
"""
