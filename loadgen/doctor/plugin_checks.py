"""Checks whether the plug-ins of other packages can be loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from loadgen_sdk.plugins import OpenTable, Plugin
from loadgen_sdk.wire_formats.server_profiles import SERVERS

from loadgen.backends import BACKENDS
from loadgen.commands import COMMANDS
from loadgen.doctor.findings import OK, WARNING, Finding
from loadgen.figures import METRICS
from loadgen.formats import FORMATS
from loadgen.plugins import SWITCH
from loadgen.prices import PRICES
from loadgen.result_kinds import KINDS

TABLES: tuple[OpenTable[Any], ...] = (
    COMMANDS,
    KINDS,
    FORMATS,
    PRICES,
    BACKENDS,
    METRICS,
    SERVERS,
)
"""All tables that other packages can extend."""


def check_plugins() -> Iterator[Finding]:
    """Yield a finding for each plug-in. There are none if plug-ins are disabled.

    A plug-in adds a row to one of the tables, such as a command or a price list. Its functions are
    imported here, because an import error would otherwise show only when the row is used.
    """
    for table in TABLES:
        for plugin in table.plugins:
            is_loaded = not plugin.error
            meaning = f"{'' if is_loaded else 'not '}loaded into {table.group}"
            error = plugin.error or _find_import_error(plugin)
            if error:
                advice = f"update or remove {plugin.package}, or set {SWITCH}=0"
                yield Finding("plug-in", WARNING, f"{plugin}: {error}", meaning, advice)
            else:
                yield Finding("plug-in", OK, str(plugin), meaning)


def _find_import_error(plugin: Plugin[Any]) -> str:
    """Return what goes wrong when the functions of a row are imported, or an empty string.

    Rows import their functions late, in a method that depends on the table. Code of another package
    can raise anything, so every exception counts as its error.
    """
    for name in ("load", "load_functions"):
        load = getattr(plugin.row, name, None)
        if load is None:
            continue
        try:
            load()
        except Exception as error:
            return f"{name}: {type(error).__name__}: {error}"
    return ""
