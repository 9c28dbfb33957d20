"""The formats of each kind of server: request bodies, server-sent events, answers, and the table of quirks.

Pure: no socket, no clock.
"""
