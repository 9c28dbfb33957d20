"""What would a server do, where there is none? Its latency model, HTTP endpoint, presets, and runs in virtual time.

`engine/` is pure, `server/` does the IO, `presets/` are data. Every result from it is labelled as simulated.
"""
