"""The command line: commands, options, help, completion, streams, signals and exit codes.

No arithmetic, and no feature package by name: commands and kinds of results are rows of tables. A
command is imported when it is used.
"""
