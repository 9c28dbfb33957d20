"""What another tool has reported, whichever it is, and the pieces that the readers of their files share. Pure.

What a tool calls TTFT, TPOT or ITL is not what is called so here; `COUNTS` says how each counts, and nothing made of
these figures hides it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

COUNTS: dict[str, str] = {
    "vllm bench serve": (
        "From sent. TTFT is the first event with a choice: in chat the role event, which carries no token. TPOT is "
        "(E2E - TTFT) / (n - 1), E2E up to the last event, usage too. ITL is pooled, with the gap from the role event "
        "to the first token in it. Percentiles are interpolated"
    ),
    "SGLang bench_serving": (
        "From sent. TTFT is the first event with text. TPOT is (E2E - TTFT) / (n - 1). ITL is pooled over events. "
        "Percentiles are interpolated"
    ),
    "AIPerf": (
        "From sent. TTFT is the first event with content. ITL is one value per request, (E2E - TTFT) / (n - 1), which "
        "is called TPOT here; inter-chunk latency is pooled. Percentiles are interpolated"
    ),
    "GuideLLM": (
        "From sent. TTFT is the first event with text. TPOT is (last token - sent) / n: the first token's wait is "
        "in it. ITL is one value per request, (last - first) / (n - 1), weighted by its tokens: "
        "nearest to TPOT as it is here"
    ),
    "inference-perf": (
        "From sent, the wait to be sent apart (schedule_delay). TPOT is (last - first) / (n - 1). ITL is pooled. "
        "Percentiles are interpolated"
    ),
    "genai-bench": "From sent. TPOT is (E2E - TTFT) / (n - 1). No gaps between events. Percentiles are interpolated",
    "mlcommons/endpoints": (
        "From issue. TPOT is (E2E - TTFT) / (n - 1), with TTFT from the stream and E2E from its end; negative ones "
        "stay in. No gaps between events"
    ),
    "MLPerf LoadGen": (
        "From the scheduled instant in Server, else from issue. TPOT is (E2E - TTFT) / (n - 1) in whole ns. "
        "Percentiles are elements of the sample, as here"
    ),
}


WITH_FIRST = "tpot_with_first_ms"  # E2E / n, the first token's wait in it: not a metric here; shown, not compared


class ForeignResult(msgspec.Struct, frozen=True, kw_only=True):
    """What another tool has reported. `figures`: by the path of the nearest thing here (`ttft_ms.p99`), in our units;
    `called`: what the tool itself calls each family of them."""

    tool: str
    version: str
    file: str
    model: str
    target: str
    load: str
    started: str
    figures: dict[str, float]
    called: dict[str, str]
    counts: str
    notes: tuple[str, ...] = ()


# -- pieces --------------------------------------------------------------------------------------------------


def as_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def numbers(figures: Mapping[str, Any], scales: Mapping[str, float] | None = None) -> dict[str, float]:
    """Those that are numbers."""
    found = {}
    for path, value in figures.items():
        number = as_number(value)
        if number is not None:
            found[path] = number * (scales or {}).get(path, 1.0)
    return found


_STATS = {"p50": ("p50", "median", "50.0"), "p90": ("p90", "90.0"), "p95": ("p95", "95.0"), "p99": ("p99", "99.0")}
_STATS |= {"p99_9": ("p999", "p99_9", "99.9"), "mean": ("mean", "avg"), "min": ("min",), "max": ("max",)}


def statistics(name: str, stats: Any, scale: float = 1.0) -> dict[str, float]:
    """A block of statistics under any of the field's spellings, as `name.p50` and so on."""
    if not isinstance(stats, Mapping):
        return {}
    inner = stats.get("percentiles")
    places = {**(inner if isinstance(inner, Mapping) else {}), **stats}
    found = {}
    for ours, spellings in _STATS.items():
        number = next((n for s in spellings if (n := as_number(places.get(s))) is not None), None)
        if number is not None:
            found[f"{name}.{ours}"] = number * scale
    return found


def counted(ok: Any, failed: Any) -> dict[str, float]:
    good, bad = as_number(ok), as_number(failed) or 0.0
    if good is None:
        return {}
    found = {"requests.ok": good, "requests.failed": bad, "requests.scheduled": good + bad}
    return found | ({"ok_share": good / (good + bad)} if good + bad else {})


def result(tool: str, where: str, figures: dict[str, float], called: dict[str, str], **rest: Any) -> ForeignResult:
    words = {name: str(rest.get(name) or "") for name in ("version", "model", "target", "load", "started")}
    notes = tuple(rest.get("notes", ()))
    return ForeignResult(
        tool=tool, file=where, figures=figures, called=called, counts=COUNTS[tool], notes=notes, **words
    )


def in_flight(lanes: Any, rate: Any) -> str:
    """The load in words, as the vLLM family stores it: inf is its word for "as fast as lanes are free"."""
    number = rate if isinstance(rate, int | float) else None
    unlimited = number is None or not math.isfinite(number) or rate == "inf"
    words = [] if unlimited else [f"{number:g}/s"]
    words += [f"{lanes} in flight at most"] if lanes else []
    return ", ".join(words) or "everything at once"
