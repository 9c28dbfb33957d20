"""Validate a service against the terms of a contract file (`loadgen validate`).

`schema.py` and `terms.py` define the contract file, and `lint.py` checks it. `run.py` runs the load
of a contract, `evaluate.py` computes the metric of each term, and `judge.py` compares it with its
limit. `prediction.py` forecasts the verdict on a simulated server, and `stored_validation.py` reads
the result of an earlier validation, and `extension.py` adds runs to it.
"""
