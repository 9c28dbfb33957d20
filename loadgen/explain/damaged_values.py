"""Refuses the result of another tool with a number that no measurement can have. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from loadgen.core.errors import UserError
from loadgen.formats import ForeignResult
from loadgen.interop.result_values import (
    MAX_VALUE,
    NANOSECONDS_MS,
    SECONDS_MS,
    is_number,
    to_float,
)
from loadgen.interop.tool_definitions import ToolDefinitions

UNITS_MS = (1.0, SECONDS_MS, NANOSECONDS_MS)
"""The units in which a file may have a number, in our unit."""


class FileNumber(NamedTuple):
    """A number in a JSON document, and the dotted path of its field."""

    path: str
    value: float


def refuse_damaged_values(
    result: ForeignResult, document: Mapping[str, object], definitions: ToolDefinitions
) -> None:
    """Raise UserError for a number that is no number, infinite, negative or absurdly large.

    Args:
        result: The metrics that were read from the file.
        document: The JSON object in the file.
        definitions: Those of the tool. They say which latencies it may report as negative, and
            where the file has its request rate, which may be infinite in a closed loop.
    """
    numbers = list(_list_numbers(document))
    for number in numbers:
        if not math.isfinite(number.value) and number.path != definitions.facts.rate_per_s:
            raise _damaged_value_error(result.file, number)

    for metric, value in result.metrics.items():
        latency, _, _statistic = metric.rpartition(".")
        smallest_value = -MAX_VALUE if latency in definitions.signed_latencies else 0.0
        if not smallest_value <= value <= MAX_VALUE:
            raise _damaged_value_error(result.file, _find_field(numbers, metric, value))


def _list_numbers(value: object, path: str = "") -> Iterator[FileNumber]:
    """Yield all numbers of a JSON value with their paths, such as "stats.ttft.p99" or "lens.0"."""
    if is_number(value):
        yield FileNumber(path, to_float(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _list_numbers(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _list_numbers(item, f"{path}.{index}")


def _find_field(numbers: list[FileNumber], metric: str, value: float) -> FileNumber:
    """Return the number in the file from which a metric was read.

    The file may have it in another unit. A metric that was computed from several numbers has no
    field, and is returned by the name of the metric.
    """
    for number in numbers:
        if any(number.value * unit == value for unit in UNITS_MS):
            return number
    return FileNumber(metric, value)


def _damaged_value_error(file: str, number: FileNumber) -> UserError:
    """Return the error about a number in a file."""
    value = f"{number.value:g}"
    return UserError(
        "damaged_file",
        f"{number.path} is {value}, which cannot be measured",
        file,
        "repeat the measurement with the other tool, or correct the file if it was edited",
        key=number.path,
        values={"value": value},
    )
