"""The definitions of metrics as printed on a page. Text only; the formulas are in `loadgen_sdk.measures`."""

from __future__ import annotations

DEFINITIONS: tuple[tuple[str, str], ...] = (
    ("due", "the instant at which a request was planned to be sent, by the timetable made before the run"),
    ("sent", "its first byte was handed to the kernel"),
    (
        "TTFT",
        "time to first token: first event that carries generated output, from due. Role-only, empty and comment events "
        "do not count; reasoning does. The wait for a connection and the generator's lateness are inside. "
        "TTFT from sent starts at sent",
    ),
    ("First answer", "first output that is not reasoning, from due"),
    (
        "TPOT",
        "time per output token of one request: (last token - first token) / (n - n1), n output tokens as the server "
        "counts them less reasoning that was never streamed, n1 tokens of the first output event where the server says "
        "it, else 1. An answer with n <= n1 has none",
    ),
    ("Gap between events", "every gap between successive output events, all requests pooled"),
    ("ITL", "inter-token latency: the same gaps, when every event carries one token; else it is not given"),
    ("Largest gap", "the largest gap between output events of one request"),
    ("E2E", "last output or finish event, from due; never the end of the body"),
    (
        "Goodput",
        "requests per second that keep every promise of the SLO each; failed, dropped and lost ones are misses, and "
        "unfinished ones where they were over a limit already when they were cut",
    ),
    ("Output tokens/s", "output tokens of ok requests, over the measured window or, where it says so, under load"),
    ("Measured window", "first measured due to last measured token"),
    (
        "Under load",
        "first to last measured due, while no earlier stage's request is in flight and all lanes are at work (steady)",
    ),
    ("In flight", "sent and not done"),
    ("Offered, sent, completed", "what the timetable asked, what was sent, what came back: three numbers"),
    ("Send lag", "sent - due: the generator's own doing"),
    ("Client lag", "first token: from the kernel's stamp to its reading"),
    ("Stamp error", "how wrong an arrival stamp can be: 0 when the read carried one packet's worth"),
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
