"""Promises about a service: the contract file, its lint, the evaluation of its terms, the verdict.

A judgement, but for `load.py` and `run.py`, which read everything a contract names and carry it out.
"""
