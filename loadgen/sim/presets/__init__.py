"""The simulated machines as data (`*.yaml`), and the module that reads and checks such a file.

It does nothing else.
"""
