"""What the readers of result files of other tools share. Pure.

Other tools define TTFT, TPOT and ITL differently: the row of each in `loadgen.formats` says how it counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from loadgen.core import format
from loadgen.formats import ForeignResult, ToolFile

WITH_FIRST = "tpot_with_first_ms"  # E2E / n, which includes TTFT: not a metric of loadgen; shown, not compared


def result(
    file: ToolFile,
    value: Mapping[str, Any],
    *,
    latencies: Mapping[str, tuple[str, str] | tuple[str, str, float]],
    figures: Mapping[str, str],
    ok: str,
    failed: Sequence[str],
    **about: Any,
) -> ForeignResult:
    """What a file says, by where it says it: dotted paths into `value`, which is its own or a part of it.

    `latencies`: our metric -> path of its block of statistics, the tool's name for it, and its unit in ms (1 without
    one). `figures`: our path -> theirs. `ok`, `failed`: paths of the counts of requests,
    none where nobody counted the failed ones. `about`: as in `made`.
    """
    read: dict[str, float] = {}
    for our_name, (path, _, *unit) in latencies.items():
        read |= statistics(our_name, at(value, path), *unit)
    for our_name, path in figures.items():
        if (number := as_number(at(value, path))) is not None:
            read[our_name] = number
    read |= counted(at(value, ok), sum(at(value, path) or 0 for path in failed) if failed else None)
    if file.lines:
        about["notes"] = (
            *about.get("notes", ()),
            f"the last of {format.counted(file.lines, 'result')} in the file",
        )
    return made(
        file.where,
        read,
        {our_name: called for our_name, (_, called, *_) in latencies.items()},
        **about,
    )


def made(
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
        file=where,
        metrics=figures,
        called=called,
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
    """Of requests. `failed` None: nobody counted them, so that neither their number nor a share is known."""
    ok_count, failed_count = as_number(ok), as_number(failed) or 0.0
    if ok_count is None:
        return {}
    if failed is None:
        return {"requests.ok": ok_count}
    counts = {
        "requests.ok": ok_count,
        "requests.failed": failed_count,
        "requests.scheduled": ok_count + failed_count,
    }
    return counts | (
        {"ok_share": ok_count / (ok_count + failed_count)} if ok_count + failed_count else {}
    )
