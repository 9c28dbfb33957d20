"""The command line: commands, options, help, completion, streams, signals and exit codes.

Commands and kinds of results are rows of tables, so that no feature package is imported before its
command is used.
"""
