"""Plan, rehearse and check a curve of MLPerf Endpoints (`loadgen mlperf endpoints`), unofficially.

`regions.py` and `points.py` place the measurement points, and `plan.py` computes their time and
cost. `curve_run.py` runs them, and `steady_window.py` finds the steady-state window of each.
`rule_checks.py` checks the rules of `rules.py`.
"""
