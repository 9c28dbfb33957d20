"""Create the requests of a load: prompts of exact lengths, data sets, traces, tasks and classes.

A request is a function of the workload, the seed, the salt and its id.
"""
