"""The simulated server: its physics, its HTTP endpoint, and the machines it stands for.

`engine/` is pure, `server/` does the IO, `presets/` are data. Whatever it serves is called simulated, everywhere.
"""
