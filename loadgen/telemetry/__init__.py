"""Publish the metrics of a running load to Prometheus and its metrics and spans to OpenTelemetry.

Each exporter is a process of its own that follows the files of the run.
"""
