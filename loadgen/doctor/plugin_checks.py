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
            if plugin.error:
                meaning = f"not loaded into {table.group}"
            else:
                meaning = f"loaded into {table.group}"

            error = plugin.error or _find_import_error(plugin)
            if error:
                advice = f"update or remove {plugin.package}, or set {SWITCH}=0"
                yield Finding(
                    check="plug-in",
                    state=WARNING,
                    observed=f"{plugin}: {error}",
                    meaning=meaning,
                    advice=advice,
                )
            else:
                yield Finding("plug-in", OK, str(plugin), meaning)


def _find_import_error(plugin: Plugin[Any]) -> str:
    """Import the functions of a plug-in, and return the error of the import, or "" without one.

    A row of a table imports its functions only when they are needed. The method that does so is
    `load` in some tables and `load_functions` in others, and some tables have none. Code of another
    package can raise anything, so every exception counts as its error.
    """
    for method_name in ("load", "load_functions"):
        import_functions = getattr(plugin.row, method_name, None)
        if import_functions is None:
            continue
        try:
            import_functions()
        except Exception as error:
            return f"{method_name}: {type(error).__name__}: {error}"
    return ""
