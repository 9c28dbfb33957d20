"""The tables of the generator: rows of ours, and those of other packages (`loadgen_sdk.plugins` says how).

A leaf: its rows name functions as text. What a plug-in raises is a `UserError` that names it.
"""

from __future__ import annotations

from typing import Any, TypeVar

from loadgen_sdk import plugins
from loadgen_sdk.installed import version_of
from loadgen_sdk.plugins import (
    SWITCH,
    Check,
    Plugin,
    Row,
    UsedPlugin,
    differing,
    gives,
    none,
    resolve,
    used,
)

from loadgen.core.errors import Fault, Faults, UserError

__all__ = [
    "SWITCH",
    "TABLES",
    "Check",
    "OpenTable",
    "Plugin",
    "UsedPlugin",
    "differing",
    "gives",
    "none",
    "resolve",
    "used",
    "version_of",
]

R = TypeVar("R", bound=Row)

TABLES = (
    "loadgen.commands:COMMANDS",
    "loadgen.result_kinds:KINDS",
    "loadgen.formats:FORMATS",
    "loadgen.prices:PRICES",
    "loadgen.backends:BACKENDS",
    "loadgen.figures:FIGURES",
    "loadgen_sdk.dialects.quirks:SERVERS",
)
"""All tables that take rows of other packages."""


class OpenTable(plugins.OpenTable[R]):
    """A table whose functions raise our faults."""

    faults = (Fault, Faults)

    def failed(self, plugin: Plugin[Any], fault: str) -> Exception:
        hint = f"update or remove {plugin.package}, or set {SWITCH}=0"
        return UserError(
            "plugin_failed", f"plug-in {plugin} failed: {fault}", hint=hint, key=plugin.package
        )
