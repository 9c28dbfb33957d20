"""Tables of the generator that other packages can extend: see `loadgen_sdk.plugins`.

A defect of a plug-in is reported as a `UserError` that names its package.
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
    check_type,
    used_plugins,
    version_differences,
    without_plugins,
)

from loadgen.core.errors import CombinedError, LoadgenError, UserError

__all__ = [
    "SWITCH",
    "Check",
    "OpenTable",
    "Plugin",
    "UsedPlugin",
    "check_type",
    "used_plugins",
    "version_differences",
    "version_of",
    "without_plugins",
]

RowT = TypeVar("RowT", bound=Row)


class OpenTable(plugins.OpenTable[RowT]):
    """A table whose plug-ins may raise the errors of the generator."""

    own_errors = (LoadgenError, CombinedError)

    def plugin_error(self, plugin: Plugin[Any], message: str) -> Exception:
        """Return the exception for a plug-in that failed."""
        hint = f"update or remove {plugin.package}, or set {SWITCH}=0"
        return UserError(
            "plugin_failed", f"plug-in {plugin} failed: {message}", hint=hint, key=plugin.package
        )
