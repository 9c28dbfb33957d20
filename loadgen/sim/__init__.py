"""Simulate a server: its latency model, its HTTP endpoint, presets, and runs in virtual time.

Every result of a simulation is labelled as simulated.
"""
