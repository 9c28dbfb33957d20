"""Validate a service against the terms of a contract file (`loadgen validate`).

`run.py` runs the load of a contract, `evaluate.py` and `verdict.py` judge its terms,
`prediction.py` forecasts the verdict on a simulated server, and `stored_validation.py` reads the
result of an earlier validation.
"""
