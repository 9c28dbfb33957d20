"""List the results of a directory and show them in a browser (`loadgen ui`).

The server listens on this machine only and changes no result.
"""
