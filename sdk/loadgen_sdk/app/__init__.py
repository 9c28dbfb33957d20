"""For applications: the client, `instrument`, retries, throttles, measurements, telemetry, shape-only traces.

It is built on `transport`, `dialects` and `probe`. The load generator itself does not use it.
"""
