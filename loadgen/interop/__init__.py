"""What do other tools say? Their result files under their own definitions, our runs in their formats, traces, `fit`.

Reads and writes files and runs no load.
"""
