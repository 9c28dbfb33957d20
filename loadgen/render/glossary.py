"""The words that every page uses: folded at the end of each, and in docs/glossary.md. Values only."""

WORDS = {
    "SLO": "the limits that each request, or a share of them, has to keep: TTFT p95 at most 2 s.",
    "met, held, missed": "a load that keeps every limit of the SLO to its end meets it, or holds; else it misses it.",
    "VALID, INVALID": "whether the measurement is sound; not whether the server is good.",
    "TTFT": "time to first token: from when a request was due to the first token of its answer.",
    "TPOT": "time per output token: the rest of the answer's time over its tokens but the first.",
    "E2E": "end to end: from when a request was due to the last token of its answer.",
    "p95": "95 of 100 requests were at most so slow. p50 is the median.",
    "goodput": "the part of the completed requests per second that met every term of the SLO.",
    "SLO attainment": "the share of the measured requests that met every term of the SLO. Failed "
    "and dropped requests are misses.",
    "steady-state window": "from the first to the last due time of the measured requests. Headline "
    "rates cover it.",
    "interval": "where the true value lies, with the certainty that stands beside it: 29.8 [29.1, 30.4].",
    "trial": "one load that a search tries; at full length it confirms, over a longer time it shows that a load lasts.",
    "capacity": "the highest load that met the SLO: confirmed at full length, sustained where longer too.",
    "offered load": "what the timetable really brought: 40.16/s where 40/s were asked for, as arrivals are random.",
    "horizon": "a verdict holds for what comes back within this time; what is rarer was not looked for.",
    "independent samples": "what a load is worth: requests that come together fare alike, so fewer than its requests.",
    "probe": "the few requests before a load that find out what the target is.",
    "SIMULATED": "a model of a server answered; nothing was measured on hardware.",
}


def document() -> str:
    """The text of docs/glossary.md."""
    rows = "\n".join(f"- **{word}**: {meaning}" for word, meaning in WORDS.items())
    return (
        "# Glossary\n\nThe words of texts and pages; each page has them at its end. Exact definitions: "
        f"[metrics.md](metrics.md).\n\n{rows}\n"
    )
