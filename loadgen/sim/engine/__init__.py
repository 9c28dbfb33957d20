"""The engine of a simulated server: continuous batching, latency model, routing over replicas.

Pure: the caller passes the time. No socket, no file, no sleeping.
"""
