"""What other packages have added: each of their rows, with its table, or why it could not be loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from loadgen.plugins import SWITCH, TABLES, OpenTable, resolve
from loadgen.preflight.target_checks import OK, WARNING, Finding


def findings() -> Iterator[Finding]:
    """A finding for each row of another package; none where there are none, or none are wanted."""
    for reference in TABLES:
        table: OpenTable[Any] = resolve(reference)
        for plugin in table.plugins:
            if plugin.fault:
                advice = f"update or remove {plugin.package}, or set {SWITCH}=0"
                yield Finding("plug-in", WARNING, f"{plugin}: {plugin.fault}", f"not loaded into {table.group}", advice)
            else:
                yield Finding("plug-in", OK, str(plugin), f"loaded into {table.group}")
