"""The calls of an application, as the SDK wrote them (one `Measurement` as JSON per line), summed up label by label."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loadgen.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.stats.quantiles import Distribution

VALUES_SHOWN = 20  # of one label: those with the most calls; the others are summed up in one group
ALL, OTHERS, NONE = "all calls", "(others)", "(none)"


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """Calls with the same value of a label. Figures are of those that are ok; tokens and cost of all."""

    label: str  # "" for all calls together
    value: str
    calls: int
    ok: int
    ttft_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution
    input_tokens: int
    output_tokens: int
    cost: float | None = None  # None: no call has one


def is_calls(path: Path) -> bool:
    """Whether this file begins with a measurement of the SDK."""
    with path.open("rb") as file:
        try:
            first = msgspec.json.decode(file.readline(1 << 20))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
    return isinstance(first, dict) and {"api", "status", "started_unix_ns", "labels"} <= first.keys()


def read(path: Path) -> list[Calls]:
    """All calls together, then those of each value of each label. Raises UserError for a line that is none."""
    calls: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            call = msgspec.json.decode(line)
            calls.append({name: call[name] for name in _NEEDED})
        except (msgspec.DecodeError, TypeError, KeyError):
            hint = "each line is a Measurement of loadgen_sdk (to_json)"
            raise UserError(
                "wrong_format", "this line is no call of an application", f"{path}:{number}", hint
            ) from None
    names = sorted({name for call in calls for name in call["labels"]})
    return [_group("", ALL, calls), *(group for name in names for group in _by_value(name, calls))]


_NEEDED = ("status", "labels", "ttft_ms", "tpot_ms", "e2e_ms", "input_tokens", "output_tokens", "cost")


def _by_value(name: str, calls: Sequence[dict[str, Any]]) -> list[Calls]:
    by_value: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for call in calls:
        by_value[str(call["labels"].get(name, NONE))].append(call)
    ranked = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[0]))
    groups = [_group(name, value, theirs) for value, theirs in ranked[:VALUES_SHOWN]]
    if rest := [call for _, theirs in ranked[VALUES_SHOWN:] for call in theirs]:
        groups.append(_group(name, OTHERS, rest))
    return groups


def _group(name: str, value: str, calls: Sequence[dict[str, Any]]) -> Calls:
    ok = [call for call in calls if call["status"] == "ok"]
    costs = [call["cost"] for call in calls if call["cost"] is not None]
    return Calls(
        label=name,
        value=value,
        calls=len(calls),
        ok=len(ok),
        ttft_ms=_distribution(ok, "ttft_ms"),
        tpot_ms=_distribution(ok, "tpot_ms"),
        e2e_ms=_distribution(ok, "e2e_ms"),
        input_tokens=sum(call["input_tokens"] or 0 for call in calls),
        output_tokens=sum(call["output_tokens"] or 0 for call in calls),
        cost=sum(costs) if costs else None,
    )


def _distribution(calls: Sequence[dict[str, Any]], name: str) -> Distribution:
    import numpy as np

    from loadgen.stats.quantiles import Distribution, exact

    values = [call[name] for call in calls if call[name] is not None]
    return exact(np.rint(np.array(values) * 1e6).astype(np.int64)) if values else Distribution()
