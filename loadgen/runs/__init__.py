"""Run a load and report it (`loadgen run`): live view, text, page, repeats and exports.

The package is not called `run`, because `loadgen.run` is a function.
"""
