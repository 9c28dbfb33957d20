"""The physics of a simulated server: continuous batching, latency model, routing over replicas.

Pure: told the time by whoever has a clock. No socket, no file, no sleeping.
"""
