"""Apply the rules of MLPerf Endpoints: the steady-state window of a measurement point.

`super_passes.py` groups the queries of a run, and `steady_window.py` finds the window and judges
it. Both are pure.
"""
