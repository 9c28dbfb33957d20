"""When each request starts: arrival laws, the timetable, and the dispatcher that decides what starts next.

Pure: no clock, no socket, no sleeping. All randomness is spent before the run begins.
"""
