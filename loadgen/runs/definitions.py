"""The definitions that a page prints. `core.metrics.request_metrics` computes the metrics."""

from __future__ import annotations

from loadgen.figures import METRICS

_PLACES = {"latency", "client"}
"""The tables whose metrics are defined on the page."""

DEFINITIONS: tuple[tuple[str, str], ...] = (
    ("Scheduled time", "the time at which a request has to start by the schedule"),
    ("Sent", "the time at which the first byte of a request was passed to the kernel"),
    *(
        (definition.label, definition.meaning)
        for definition in METRICS.builtin_rows
        if _PLACES & set(definition.places)
    ),
    (
        "Goodput",
        "requests that completed in the steady-state window and met every objective of the SLO, "
        "per second of that window. It is never larger than the request throughput",
    ),
    (
        "SLO attainment",
        "the percentage of measured requests that met every objective of the SLO. Failed, dropped "
        "and lost requests are violations, and so are unfinished ones that had exceeded a limit",
    ),
    (
        "Output tok/s",
        "the output tokens that arrived in the steady-state window, per second of that window",
    ),
    (
        "Steady-state window",
        "from the first to the last scheduled time of the measured requests. The time in which "
        "requests of an earlier stage are in flight is excluded and, in a closed loop, the time in "
        "which not all virtual users are active. Headline rates cover this window",
    ),
    (
        "Measurement window",
        "from the first scheduled time to the last output token of the measured requests. Its "
        "rates are the headline of a run without a steady-state window",
    ),
    ("Full run", "from the start of the run to the end of its last response, warm-up included"),
    ("In flight", "sent and not yet ended"),
    (
        "Offered, sent, completed",
        "the rates of the schedule, of sent requests, and of responses",
    ),
    (
        "Percentile",
        "the sample at floor(n * p) of the sorted samples, as in MLPerf LoadGen. It is supported "
        "if n samples allow one violation at 99 % confidence: p50 11, p90 64, p95 130, p99 662, "
        "p99.9 6,636",
    ),
    (
        "Valid",
        "the client did not distort the measurement: requests were sent on time, timestamps are "
        "certain, the load generator was not busy, and nearly all requests ended. This does not "
        "say whether the SLO was met",
    ),
)
