"""A load while it goes, where others look: Prometheus asks for its figures, OpenTelemetry is sent them and its spans.

Processes of their own, which follow a run by its files. They judge no figure and decide nothing of the load.
"""
