"""The result of another tool, and the functions that the readers of such files share. Pure.

Other tools define TTFT, TPOT and ITL differently. `COUNTS` says how each tool counts, and every result carries that
text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


def result(
    tool: str,
    where: str,
    value: Mapping[str, Any],
    *,
    latencies: Mapping[str, tuple[str, str] | tuple[str, str, float]],
    figures: Mapping[str, str],
    ok: str,
    failed: Sequence[str],
    **about: Any,
) -> ForeignResult:
    """What a file says, by where it says it: dotted paths into `value`.

    `latencies`: our metric -> path of its block of statistics, the tool's name for it, and its unit in ms (1 without
    one). `figures`: our path -> theirs. `ok`, `failed`: paths of the counts of requests. `about`: as in `made`.
    """
    read: dict[str, float] = {}
    for our_name, (path, _, *unit) in latencies.items():
        read |= statistics(our_name, at(value, path), *unit)
    for our_name, path in figures.items():
        if (number := as_number(at(value, path))) is not None:
            read[our_name] = number
    read |= counted(at(value, ok), sum(at(value, path) or 0 for path in failed))
    return made(tool, where, read, {our_name: called for our_name, (_, called, *_) in latencies.items()}, **about)


def made(
    tool: str,
    where: str,
    figures: dict[str, float],
    called: dict[str, str],
    *,
    version: Any = "",
    model: Any = "",
    target: Any = "",
    load: str = "",
    started: Any = "",
    notes: Sequence[str] = (),
) -> ForeignResult:
    """The result with its texts; what the file does not say is ""."""
    return ForeignResult(
        tool=tool,
        file=where,
        figures=figures,
        called=called,
        counts=COUNTS[tool],
        version=str(version or ""),
        model=str(model or ""),
        target=str(target or ""),
        load=load,
        started=str(started or ""),
        notes=tuple(notes),
    )


def at(value: Any, path: str) -> Any:
    """The value at a dotted path; a number in it is a place in a list. None where there is nothing."""
    for key in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list) and key.isdigit():
            value = value[int(key)] if int(key) < len(value) else None
        else:
            return None
    return value


def as_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


_STATS = {
    "p50": ("p50", "median", "50.0"),
    "p90": ("p90", "90.0"),
    "p95": ("p95", "95.0"),
    "p99": ("p99", "99.0"),
    "p99_9": ("p999", "p99_9", "p99.9", "99.9"),
    "mean": ("mean", "avg"),
    "min": ("min",),
    "max": ("max",),
}
_UNITS = {"ms": 1.0, "s": 1e3, "sec": 1e3, "us": 1e-3, "ns": 1e-6}


def statistics(name: str, stats: Any, scale: float = 1.0) -> dict[str, float]:
    """A block of statistics, under any usual spelling of its keys, as `name.p50` and so on in ms.

    Its values are in units of `scale` ms, unless the block names its unit.
    """
    if not isinstance(stats, Mapping):
        return {}
    nested = stats.get("percentiles")
    fields = {**(nested if isinstance(nested, Mapping) else {}), **stats}
    scale = _UNITS.get(str(stats.get("unit")), scale)
    known = {}
    for our_name, spellings in _STATS.items():
        numbers = (as_number(fields.get(spelling)) for spelling in spellings)
        if (number := next((number for number in numbers if number is not None), None)) is not None:
            known[f"{name}.{our_name}"] = number * scale
    return known


def counted(ok: Any, failed: Any) -> dict[str, float]:
    ok_count, failed_count = as_number(ok), as_number(failed) or 0.0
    if ok_count is None:
        return {}
    counts = {"requests.ok": ok_count, "requests.failed": failed_count, "requests.scheduled": ok_count + failed_count}
    return counts | ({"ok_share": ok_count / (ok_count + failed_count)} if ok_count + failed_count else {})
