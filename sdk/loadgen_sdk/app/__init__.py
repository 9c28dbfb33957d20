"""For applications: the client, `instrument`, retries, throttles, measurements, telemetry, traces of shapes.

Built on the rooms below, which know nothing of it. A load is sent through
`transport/` itself, not through this room.
"""
