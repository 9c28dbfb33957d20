"""The model of a simulated server: continuous batching, iteration latency and routing.

The model is pure: its caller passes the time.
"""
