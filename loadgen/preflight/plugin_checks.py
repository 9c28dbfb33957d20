"""What other packages have added: each of their rows, with its table, or why it could not be loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from msgspec import structs

from loadgen.plugins import SWITCH, TABLES, OpenTable, resolve
from loadgen.preflight.target_checks import OK, WARNING, Finding

_REFERENCE = re.compile(r"[\w.]+:[\w.]+")


def findings() -> Iterator[Finding]:
    """A finding for each row of another package; none where there are none, or none are wanted."""
    for reference in TABLES:
        table: OpenTable[Any] = resolve(reference)
        for plugin in table.plugins:
            if fault := plugin.fault or _gone(plugin.row):
                advice = f"update or remove {plugin.package}, or set {SWITCH}=0"
                left = f"{'not ' if plugin.fault else ''}loaded into {table.group}"
                yield Finding("plug-in", WARNING, f"{plugin}: {fault}", left, advice)
            else:
                yield Finding("plug-in", OK, str(plugin), f"loaded into {table.group}")


def _gone(row: Any) -> str:
    """What is wrong with the first function that a row names and that is not there."""
    for value in row if isinstance(row, tuple) else structs.astuple(row):
        if isinstance(value, str) and _REFERENCE.fullmatch(value):
            try:
                resolve(value)
            except Exception as error:
                return f"{value}: {type(error).__name__}: {error}"
    return ""
