"""The definitions of metrics as printed on a page. Text only; the formulas are in `loadgen_sdk.measures`."""

from __future__ import annotations

from loadgen.figures import FIGURES

DEFINITIONS: tuple[tuple[str, str], ...] = (
    (
        "due",
        "the instant at which a request was planned to be sent, by the timetable made before the run",
    ),
    ("sent", "its first byte was handed to the kernel"),
    *((row.words, row.meaning) for row in FIGURES.own if {"latency", "client"} & set(row.shown)),
    (
        "Goodput",
        "requests per second that keep every promise of the SLO each; failed, dropped and lost ones are misses, and "
        "unfinished ones where they were over a limit already when they were cut",
    ),
    (
        "Output tokens/s",
        "output tokens of ok requests, over the measured window or, where it says so, under load",
    ),
    ("Measured window", "first measured due to last measured token"),
    (
        "Under load",
        "first to last measured due, while no earlier stage's request is in flight and all lanes are at work (steady)",
    ),
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
