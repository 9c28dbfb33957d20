"""The wire formats of servers: request bodies, server-sent events, responses and server profiles.

Pure: no socket and no clock.
"""
