"""The public terms of loadgen and what each one means.

Code, options, output, JSON texts and documentation use exactly these terms. Every page of a report
ends with the terms, and `docs/reference/glossary.md` is generated from them.
"""

from __future__ import annotations

GLOSSARY = {
    # Load
    "workload": "A YAML file that describes the requests (prompts, output lengths, sessions), "
    "the load and the SLO.",
    "load": "How requests are started over time: the arrival process, the rate or the "
    "concurrency, and the duration.",
    "load point": "One load of a sweep, for example 20 req/s or 64 concurrent requests.",
    "stage": "A part of a run with one load, for example a warm-up followed by the measured load.",
    "open loop": "Requests start at scheduled times, whether or not earlier ones have finished. "
    "This is how independent users behave.",
    "closed loop": "A fixed number of virtual users each start a request when their previous "
    "one has finished.",
    "virtual user": "One of the concurrent clients of a closed loop. It waits for a response "
    "before it sends again.",
    "concurrency": "The number of requests that are in flight at the same time.",
    "arrival process": "The rule that draws the times between requests, for example Poisson, "
    "gamma or constant.",
    "CV": "Coefficient of variation: standard deviation divided by mean. The inter-arrival "
    "times of Poisson arrivals have a CV of 1.",
    "schedule": "The list of scheduled times of all requests. It is drawn from the seed before "
    "the run starts.",
    "scheduled time": "The time at which a request has to start by the schedule. Latencies count "
    "from it, so that queueing in the client is included.",
    "coordinated omission": "The error of measuring only from the time of sending: a client "
    "that is held up by a slow server then hides the waiting time.",
    "offered load": "The load that the schedule really contains. Random arrivals with a target "
    "of 40 req/s may offer 40.2 req/s.",
    "session": "A conversation or an agent task of several turns. Each turn starts after the "
    "previous response.",
    "turn": "One request of a session.",
    "request class": "A named group of requests with its own share of the load, and possibly "
    "with its own SLO.",
    "seed": "The number from which lengths, texts and arrival times are drawn. The same seed "
    "gives the same requests.",
    "salt": "A random text that makes the prompts of a run unique, so that a prefix cache does "
    "not know them.",
    "warm-up": "Requests before the measured load. They are recorded and excluded from all "
    "metrics.",
    "drain": "The time after the last request was sent, until all responses have ended.",
    # Metrics
    "TTFT": "Time to first token: from the scheduled time of a request to the first token of "
    "its response.",
    "TPOT": "Time per output token after the first one: (last token - first token) / (output "
    "tokens - 1).",
    "ITL": "Inter-token latency: the time between two consecutive tokens of a response.",
    "ICL": "Inter-chunk latency: the time between two consecutive events of a response that "
    "carry output. It replaces ITL if an event carries several tokens.",
    "max ITL": "The longest pause between two tokens of a response.",
    "E2E latency": "From the scheduled time of a request to the last token of its response.",
    "p95": "The 95th percentile: 95 of 100 requests had at most this value. p50 is the median.",
    "throughput": "Completed requests per second (req/s) or tokens per second (tok/s).",
    "goodput": "Completed requests per second that met every objective of the SLO.",
    "SLO attainment": "The percentage of measured requests that met every objective of the SLO. "
    "Failed and dropped requests count as violations.",
    "accepted length": "The mean number of tokens per step of the model under speculative "
    "decoding: accepted draft tokens and one token of its own.",
    "token deadline": "When a token has to arrive: the first one within the TTFT limit, each later "
    "one a TPOT limit after the token before it.",
    "fluidity index": "The percentage of token deadlines that were met. Early tokens leave slack "
    "for later ones, and a late token misses several deadlines.",
    "steady-state window": "The time from the first to the last scheduled time of the measured "
    "requests. Rates are computed over it.",
    "full run": "The time from the first scheduled time to the last response, drain included.",
    "prefix cache hit rate": "The percentage of prompt tokens that the server took from its cache.",
    "tokens per user": (
        "The rate at which one user sees tokens: 1 / TPOT p50, or by other definitions 1 / TPOT "
        "p90 (MLPerf Endpoints) or 1 / p90 of E2E per output token (InferenceX AgentX)."
    ),
    # Requests
    "ok": "A request whose response was complete: with a finish reason and without an error.",
    "failed": "A request that the server or the network answered with an error, incompletely or "
    "not at all.",
    "dropped": "A request that was not sent, because the in-flight limit was reached.",
    "unfinished": "A request that was still in flight when the drain ended. It counts neither "
    "as ok nor as failed.",
    "finish reason": "Why the server ended a response, for example `stop` or `length`.",
    # Objectives and outcomes
    "SLO": "Service level objective: limits for percentiles of latency, errors or goodput.",
    "objective": "One limit of an SLO, for example TTFT p95 of at most 2 s. It is met or missed.",
    "violation": "A request that exceeds the limit of an objective.",
    "contract": "A file with terms that a service has to pass: SLO, errors, quality, cost and "
    "more.",
    "term": "One requirement of a contract. Its outcome is PASS, FAIL or INCONCLUSIVE.",
    "trial": "One load that a search tries. It passes or fails.",
    "capacity": "The highest load that met the SLO in a trial of full length.",
    "confirmed": "A load that met the SLO in a trial of full length on a server that was idle "
    "before.",
    "sustained": "A load under which neither TTFT nor concurrency grows over time.",
    "recurrence horizon": "A verdict covers slowdowns that recur at least once within this "
    "time. Rarer ones may have been missed.",
    # Statistics
    "confidence interval": "The range that contains the true value with the stated probability: "
    "29.8 [29.1, 30.4].",
    "effective sample size": "The number of independent requests that give the same certainty. "
    "It is below the number of requests, because requests at the same time are similarly fast.",
    "minimum detectable change": "The smallest change that nine of ten such comparisons would "
    "find.",
    "trend": "A change of a metric during the steady-state window.",
    # Validity
    "VALID, INVALID": "Whether the client measured correctly. It does not say whether the "
    "server is fast.",
    "caveat": "A part of a valid result that is less certain, or a metric that is not reported.",
    "timestamp uncertainty": "How much earlier a token may have arrived than its timestamp says.",
    "send delay": "From the scheduled time of a request to the time at which it was sent.",
    "receive delay": "From the arrival of data in the kernel to the time at which the client "
    "read it.",
    "SIMULATED": "The responses came from a performance model. Nothing was measured on hardware.",
    "fingerprint": "A checksum of what was run. Results with equal fingerprints ran the same "
    "workload.",
    # Servers and cost
    "target": "The endpoint that receives the load: its URL, server type and model.",
    "replica": "One of several copies of a model behind a URL.",
    "preflight": "The few requests before a load that find out what the target is and what it "
    "supports.",
    "instance type": "The kind of machine that a cloud rents, with its price per hour.",
}
"""Each public term with its meaning in one or two sentences."""


def render_markdown() -> str:
    """Return the text of `docs/reference/glossary.md`."""
    rows = "\n".join(f"- **{term}**: {meaning}" for term, meaning in GLOSSARY.items())
    return (
        "# Glossary\n\n"
        "This page lists the terms that loadgen uses in its output, its options and its "
        "documentation. It is for anyone who meets a word in a report that they do not know. Every "
        "HTML report ends with the same list. [Metrics](metrics.md) has the exact definitions.\n\n"
        f"{rows}\n\n"
        "## Next\n\n"
        "- [Read the report](../get-started/read-the-report.md) shows these terms in a report.\n"
        "- [Metrics](metrics.md) defines each metric exactly.\n"
    )
