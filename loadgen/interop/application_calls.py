"""The calls of an application, as the SDK wrote them (one `Measurement` as JSON per line), summed up label by label."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from loadgen.core.errors import UserError
from loadgen.core.stats.quantiles import Distribution

VALUES_SHOWN = 20  # of one label: those with the most calls; the others are summed up in one group
ALL, OTHERS, NONE = "all calls", "(others)", "(none)"

_Milliseconds = (
    Annotated[float, msgspec.Meta(ge=0, le=1e12)] | None
)  # a number beyond that is of no call
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] | None


class _Call(msgspec.Struct, frozen=True):
    """What is read of a line; `Measurement.to_json` of the SDK writes it."""

    status: str
    labels: dict[str, str]
    ttft_ms: _Milliseconds
    tpot_ms: _Milliseconds
    e2e_ms: _Milliseconds
    input_tokens: _Count
    output_tokens: _Count
    cost: float | None


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
        except (ValueError, RecursionError):
            return False
    return (
        isinstance(first, dict) and {"api", "status", "started_unix_ns", "labels"} <= first.keys()
    )


def read(path: Path) -> list[Calls]:
    """All calls together, then those of each value of each label. Raises UserError for a line that is none."""
    calls: list[_Call] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            calls.append(msgspec.json.decode(line, type=_Call))
        except (ValueError, RecursionError) as error:
            hint = "each line is a Measurement of loadgen_sdk (to_json)"
            what = f"this line is no call of an application: {error}"
            raise UserError("wrong_format", what, f"{path}:{number}", hint) from None
    names = sorted({name for call in calls for name in call.labels})
    return [_group("", ALL, calls), *(group for name in names for group in _by_value(name, calls))]


def _by_value(name: str, calls: Sequence[_Call]) -> list[Calls]:
    by_value: defaultdict[str, list[_Call]] = defaultdict(list)
    for call in calls:
        by_value[call.labels.get(name, NONE)].append(call)
    ranked = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[0]))
    groups = [_group(name, value, theirs) for value, theirs in ranked[:VALUES_SHOWN]]
    if rest := [call for _, theirs in ranked[VALUES_SHOWN:] for call in theirs]:
        groups.append(_group(name, OTHERS, rest))
    return groups


def _group(name: str, value: str, calls: Sequence[_Call]) -> Calls:
    ok = [call for call in calls if call.status == "ok"]
    costs = [call.cost for call in calls if call.cost is not None]
    return Calls(
        label=name,
        value=value,
        calls=len(calls),
        ok=len(ok),
        ttft_ms=_distribution(ok, "ttft_ms"),
        tpot_ms=_distribution(ok, "tpot_ms"),
        e2e_ms=_distribution(ok, "e2e_ms"),
        input_tokens=sum(call.input_tokens or 0 for call in calls),
        output_tokens=sum(call.output_tokens or 0 for call in calls),
        cost=sum(costs) if costs else None,
    )


def _distribution(calls: Sequence[_Call], name: str) -> Distribution:
    import numpy as np

    from loadgen.core.stats.quantiles import Distribution, distribution_of

    values = [value for call in calls if (value := getattr(call, name)) is not None]
    return (
        distribution_of(np.rint(np.array(values) * 1e6).astype(np.int64))
        if values
        else Distribution()
    )
