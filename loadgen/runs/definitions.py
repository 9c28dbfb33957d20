"""The definitions of metrics as printed on a page. Text only; the formulas are in `loadgen_sdk.measures`."""

from __future__ import annotations

from loadgen.figures import METRICS

DEFINITIONS: tuple[tuple[str, str], ...] = (
    (
        "due",
        "the instant at which a request was planned to be sent, by the timetable made before the run",
    ),
    ("sent", "its first byte was handed to the kernel"),
    *((row.words, row.meaning) for row in METRICS.own if {"latency", "client"} & set(row.shown)),
    (
        "Goodput",
        "requests that were completed in the steady-state window and met every term of the SLO, per "
        "second of that window. It counts a part of the completed requests, so it is never larger "
        "than the completed rate",
    ),
    (
        "SLO attainment",
        "the share of all counted requests due in the measured time that met every term of the SLO. "
        "Failed, dropped and lost requests are misses, and so are unfinished ones that already "
        "exceeded a limit when they were cut",
    ),
    (
        "Output tokens/s",
        "the output tokens that arrived in the steady-state window, per second of that window",
    ),
    (
        "Steady-state window",
        "from the first to the last due time of the measured requests, without the time in which "
        "requests of an earlier stage are in flight or, in a closed loop, not all virtual users are "
        "at work. Headline rates cover this window",
    ),
    (
        "Measurement window",
        "from the first due time to the last output token of the measured requests. Its rates are the "
        "headline of a run without a steady-state window",
    ),
    ("Whole run", "from the start of the run to the end of its last response, warm-up included"),
    ("In flight", "sent and not done"),
    (
        "Offered, sent, completed",
        "what the timetable asked, what was sent, what came back: three numbers",
    ),
    (
        "Quantile",
        "the sample at floor(n * p) of the sorted ones, as MLPerf LoadGen takes it. It is supported when n allows one "
        "sample over the limit at 99 % confidence: p50 11, p90 64, p95 130, p99 662, p99.9 6,636",
    ),
    (
        "Valid",
        "the measurement can be trusted: requests were sent in time, stamps are sure, the generator was not busy, and "
        "nearly all requests came back. It says nothing about the SLO",
    ),
)
