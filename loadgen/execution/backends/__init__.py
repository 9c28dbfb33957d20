"""Ways to carry out a run: in this process, in several processes, on the nodes of a Ray cluster, or in virtual time.

Each but `virtual` takes a job and returns a `Share`; `virtual` makes the folder of a whole run.
"""
