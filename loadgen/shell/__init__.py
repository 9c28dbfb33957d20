"""The frame of the command line: options, help, completion, streams, faults as exit codes, and what reads any result.

No arithmetic, and no wing by name: commands and kinds of results are rows of tables. A command is imported when it is
asked for, so that `loadgen --help` answers at once.
"""
