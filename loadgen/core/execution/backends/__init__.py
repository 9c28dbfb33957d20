"""Who sends a load over HTTP: processes of this machine, or workers that another backend places elsewhere.

In this process alone, `driver.py` does it. Each takes a plan and leaves rows; none of them judges a figure.
"""
