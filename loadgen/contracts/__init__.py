"""Promises about a service: the contract file, its lint, the figure of each term, the verdict.

A judgement: runs no load, renders nothing, knows no other judgement. Only `load.py`, which reads what a contract
names, `run.py`, which carries it out and writes its report, and `stored.py`, which reads its folder again, stand above
the judgements.
"""
