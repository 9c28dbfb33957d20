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


def check_possible_values(
    result: ForeignResult, document: Mapping[str, object], definitions: ToolDefinitions
) -> None:
    """Check that a measurement can have the numbers in the result file of another tool.

    Args:
        result: The metrics that were read from the file.
        document: The JSON object in the file.
        definitions: The definitions of the tool that wrote the file.

    Raises:
        UserError: A number is NaN, infinite, negative or absurdly large.
    """
    file_numbers = list(_list_numbers(document))
    _check_finite(result.file, file_numbers, definitions)

    for metric, value in result.metrics.items():
        latency_name, _, _ = metric.rpartition(".")  # "ttft_ms" for "ttft_ms.p99"
        may_be_negative = latency_name in definitions.signed_latencies
        smallest_value = -MAX_VALUE if may_be_negative else 0.0
        is_possible = smallest_value <= value <= MAX_VALUE
        if not is_possible:
            number = _find_number_of_metric(file_numbers, metric, value)
            raise _damaged_value_error(result.file, number)


def _check_finite(file: str, numbers: list[FileNumber], definitions: ToolDefinitions) -> None:
    """Check that no number of a file is infinite or NaN, except for the requested rate.

    The requested rate is infinite if a tool sends requests without pauses.

    Raises:
        UserError: Another number is infinite or NaN.
    """
    for number in numbers:
        is_requested_rate = number.path == definitions.facts.rate_per_s
        if not math.isfinite(number.value) and not is_requested_rate:
            raise _damaged_value_error(file, number)


def _list_numbers(value: object, path: str = "") -> Iterator[FileNumber]:
    """Yield all numbers of a JSON value with their paths, such as "stats.ttft.p99" or "lens.0"."""
    if is_number(value):
        yield FileNumber(path, to_float(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            item_path = f"{path}.{key}" if path else str(key)
            yield from _list_numbers(item, item_path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _list_numbers(item, f"{path}.{index}")


def _find_number_of_metric(file_numbers: list[FileNumber], metric: str, value: float) -> FileNumber:
    """Return the number in a file that became a metric, so that an error can name its field.

    The number 0.25 at "stats.ttft.mean", in seconds, became the metric "ttft_ms.mean" of 250. A
    metric that was computed from several numbers has no field: it is returned by its own name.

    Args:
        file_numbers: All numbers of the file, each in an unknown unit of time.
        metric: The name of the metric.
        value: The value of the metric, which is a number of the file times a factor of UNITS_MS.
    """
    for number in file_numbers:
        possible_values = [number.value * unit_ms for unit_ms in UNITS_MS]
        if value in possible_values:
            return number
    return FileNumber(metric, value)


def _damaged_value_error(file: str, number: FileNumber) -> UserError:
    """Return the error about a number of a file that cannot be a measurement."""
    value = f"{number.value:g}"
    return UserError(
        "damaged_file",
        f"{number.path} is {value}, which cannot be measured",
        file,
        "repeat the measurement with the other tool, or correct the file if it was edited",
        key=number.path,
        values={"value": value},
    )
