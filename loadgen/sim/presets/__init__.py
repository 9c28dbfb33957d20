"""The simulated machines as data (`*.yaml`), and their reader.

Reads a file and checks it; nothing else.
"""
