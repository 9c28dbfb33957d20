"""Tools for applications: client, `instrument`, retries, throttling, measurements and telemetry.

Load is sent through `transport/` directly and not through this package.
"""
