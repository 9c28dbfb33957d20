"""What the bytes of each server mean: request bodies, server-sent events, answers, and the table of quirks.

Pure: no socket, no clock.
"""
