"""The simulated server: its latency model, its HTTP endpoint, and presets of the machines it simulates.

`engine/` is pure, `server/` does the IO, `presets/` are data. Every result from it is labelled as simulated.
"""
