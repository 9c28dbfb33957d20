"""For applications: the client, `instrument`, retries, throttles, measurements, telemetry, traces of shapes.

Built on the rooms below; the load generator itself uses none of it.
"""
