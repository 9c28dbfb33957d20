"""Reads the calls of an application and groups them by label.

The SDK writes them to a file with one `Measurement` as JSON in each line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from loadgen.core.errors import UserError
from loadgen.core.stats.quantiles import Distribution, distribution_of

MAX_VALUES = 20
"""How many values of a label have a group of their own: those with the most calls."""

ALL_CALLS = "all calls"
REMAINING_VALUES = "(others)"
NO_VALUE = "(none)"

MAX_FIRST_LINE_BYTES = 1 << 20
"""A first line longer than this is not one of the SDK."""

NS_PER_MS = 1e6

# Larger numbers are not those of a call.
_Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)] | None
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] | None


class _Call(msgspec.Struct, frozen=True):
    """What is read of a line. `Measurement.to_json` of the SDK writes it."""

    status: str
    labels: dict[str, str]
    ttft_ms: _Milliseconds
    tpot_ms: _Milliseconds
    e2e_ms: _Milliseconds
    input_tokens: _Count
    output_tokens: _Count
    cost: float | None


class Calls(msgspec.Struct, frozen=True, kw_only=True):
    """Calls with the same value of a label.

    Attributes:
        label: The name of the label; "" for all calls together.
        value: The value of the label.
        calls: The number of calls.
        ok: How many of them succeeded.
        ttft_ms: The TTFT of successful calls.
        tpot_ms: Their TPOT.
        e2e_ms: Their end-to-end latency.
        input_tokens: The input tokens of all calls.
        output_tokens: The output tokens of all calls.
        cost: The cost of all calls; None if no call has one.
    """

    label: str
    value: str
    calls: int
    ok: int
    ttft_ms: Distribution
    tpot_ms: Distribution
    e2e_ms: Distribution
    input_tokens: int
    output_tokens: int
    cost: float | None = None


def is_calls(path: Path) -> bool:
    """Return True if the first line of a file is a measurement of the SDK."""
    with path.open("rb") as file:
        try:
            first = msgspec.json.decode(file.readline(MAX_FIRST_LINE_BYTES))
        except (ValueError, RecursionError):
            return False
    keys = {"api", "status", "started_unix_ns", "labels"}
    return isinstance(first, dict) and keys <= first.keys()


def read_calls(path: Path) -> list[Calls]:
    """Read the calls of an application, and return their statistics by group.

    The first group has all calls. Then there is a group for each value of each label, in the order
    of the names of the labels.

    Raises:
        UserError: A line is no call.
    """
    calls: list[_Call] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            calls.append(msgspec.json.decode(line, type=_Call))
        except (ValueError, RecursionError) as error:
            raise UserError(
                "wrong_format",
                f"not a call recorded by loadgen_sdk: {error}",
                f"{path}:{number}",
                "write each line as a Measurement of loadgen_sdk (to_json)",
            ) from None

    labels = sorted({label for call in calls for label in call.labels})
    groups = [_create_group("", ALL_CALLS, calls)]
    for label in labels:
        groups += _group_by_value(label, calls)

    return groups


def _group_by_value(label: str, calls: Sequence[_Call]) -> list[Calls]:
    """Return a group for each frequent value of a label, and one for all other values."""
    calls_by_value: defaultdict[str, list[_Call]] = defaultdict(list)
    for call in calls:
        calls_by_value[call.labels.get(label, NO_VALUE)].append(call)

    def most_calls_first(item: tuple[str, list[_Call]]) -> tuple[int, str]:
        value, value_calls = item
        return -len(value_calls), value

    ranked = sorted(calls_by_value.items(), key=most_calls_first)
    groups = [
        _create_group(label, value, value_calls) for value, value_calls in ranked[:MAX_VALUES]
    ]

    remaining = [call for _, value_calls in ranked[MAX_VALUES:] for call in value_calls]
    if remaining:
        groups.append(_create_group(label, REMAINING_VALUES, remaining))

    return groups


def _create_group(label: str, value: str, calls: Sequence[_Call]) -> Calls:
    """Return the statistics of calls with one value of a label.

    Latencies are those of successful calls. Tokens and cost are those of all calls, because a
    failed call may cost something, too.
    """
    successful = [call for call in calls if call.status == "ok"]
    costs = [call.cost for call in calls if call.cost is not None]
    return Calls(
        label=label,
        value=value,
        calls=len(calls),
        ok=len(successful),
        ttft_ms=_summarize_latency([call.ttft_ms for call in successful]),
        tpot_ms=_summarize_latency([call.tpot_ms for call in successful]),
        e2e_ms=_summarize_latency([call.e2e_ms for call in successful]),
        input_tokens=sum(call.input_tokens or 0 for call in calls),
        output_tokens=sum(call.output_tokens or 0 for call in calls),
        cost=sum(costs) if costs else None,
    )


def _summarize_latency(values_ms: Sequence[float | None]) -> Distribution:
    """Return the distribution of the latencies that are not None. It is empty if all are."""
    known_ms = np.array([value_ms for value_ms in values_ms if value_ms is not None], float)
    if len(known_ms) == 0:
        return Distribution()
    whole_ns = np.rint(known_ms * NS_PER_MS).astype(np.int64)
    return distribution_of(whole_ns)
