"""The result of another tool, and the functions that the readers of such files share. Pure.

Other tools define TTFT, TPOT and ITL differently. `COUNTS` says how each tool counts, and every result carries that
text.
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


WITH_FIRST = "tpot_with_first_ms"  # E2E / n, which includes TTFT: not a metric of loadgen; shown, not compared


class ForeignResult(msgspec.Struct, frozen=True, kw_only=True):
    """What another tool has reported.

    `figures`: path of our nearest metric (`ttft_ms.p99`) -> value in our units. `called`: our metric -> the tool's own
    name for it. `counts`: how the tool counts.
    """

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


# -- shared --------------------------------------------------------------------------------------------------


def as_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def numbers(figures: Mapping[str, Any], scales: Mapping[str, float] | None = None) -> dict[str, float]:
    """The figures that are finite numbers, each multiplied by its scale (1 without one)."""
    known = {}
    for path, value in figures.items():
        number = as_number(value)
        if number is not None:
            known[path] = number * (scales or {}).get(path, 1.0)
    return known


_STATS = {"p50": ("p50", "median", "50.0"), "p90": ("p90", "90.0"), "p95": ("p95", "95.0"), "p99": ("p99", "99.0")}
_STATS |= {"p99_9": ("p999", "p99_9", "99.9"), "mean": ("mean", "avg"), "min": ("min",), "max": ("max",)}


def statistics(name: str, stats: Any, scale: float = 1.0) -> dict[str, float]:
    """A block of statistics, under any usual spelling of its keys, as `name.p50` and so on, times `scale`."""
    if not isinstance(stats, Mapping):
        return {}
    nested = stats.get("percentiles")
    fields = {**(nested if isinstance(nested, Mapping) else {}), **stats}
    known = {}
    for our_name, spellings in _STATS.items():
        number = next(
            (parsed for spelling in spellings if (parsed := as_number(fields.get(spelling))) is not None), None
        )
        if number is not None:
            known[f"{name}.{our_name}"] = number * scale
    return known


def counted(ok: Any, failed: Any) -> dict[str, float]:
    ok_count, failed_count = as_number(ok), as_number(failed) or 0.0
    if ok_count is None:
        return {}
    counts = {"requests.ok": ok_count, "requests.failed": failed_count, "requests.scheduled": ok_count + failed_count}
    return counts | ({"ok_share": ok_count / (ok_count + failed_count)} if ok_count + failed_count else {})


def result(tool: str, where: str, figures: dict[str, float], called: dict[str, str], **rest: Any) -> ForeignResult:
    texts = {name: str(rest.get(name) or "") for name in ("version", "model", "target", "load", "started")}
    notes = tuple(rest.get("notes", ()))
    return ForeignResult(
        tool=tool, file=where, figures=figures, called=called, counts=COUNTS[tool], notes=notes, **texts
    )


def in_flight(lanes: Any, rate: Any) -> str:
    """The load in words, from fields of the vLLM family. Its infinite rate means "as fast as lanes are free"."""
    number = rate if isinstance(rate, int | float) else None
    unlimited = number is None or not math.isfinite(number) or rate == "inf"
    words = [] if unlimited else [f"{number:g}/s"]
    words += [f"{lanes} in flight at most"] if lanes else []
    return ", ".join(words) or "everything at once"
