"""Tables that grow by rows: our own, and those of other packages by entry points of a group of the table's name.

A leaf: a row names its functions as text, `module:function`, and a module is imported when its function is called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, wraps
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from loadgen.core.errors import Fault, Faults, UserError

SWITCH = "LOADGEN_PLUGINS"  # 0: none is looked for
_WANTED: ContextVar[bool] = ContextVar("wanted", default=True)


@contextmanager
def none() -> Iterator[None]:
    """Look for no plug-in while inside: for what is done with files of somebody else."""
    before = _WANTED.set(False)
    try:
        yield
    finally:
        _WANTED.reset(before)


class Row(Protocol):
    """What every row has."""

    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=Row)


def resolve(reference: str) -> Any:
    """What `module:name` or `module:Class.method` names. Raises ImportError or AttributeError."""
    module, _, name = reference.partition(":")
    return attrgetter(name)(import_module(module))


@dataclass(frozen=True)
class Plugin(Generic[R]):
    """A row of another package. `row` is None where it could not be had: `fault` says why."""

    name: str
    package: str
    version: str
    row: R | None = None
    fault: str = ""

    def __str__(self) -> str:
        return f"{self.name} of {self.package} {self.version}"


class OpenTable(Generic[R]):
    """A table: our rows in their order, and behind them those of plug-ins, which are looked for when they are needed.

    `group`: of the entry points `NAME = module:ROW`, and the name of the table. `kind`: the type of a row.
    """

    def __init__(self, group: str, kind: type[R], own: Sequence[R]) -> None:
        self.group, self.kind, self.own = group, kind, tuple(own)

    def find(self, name: str, *, foreign: bool = True) -> R | None:
        """The row of a name; plug-ins are looked at where it is not ours. Raises UserError for one that failed."""
        mine = next((row for row in self.own if row.name == name), None)
        if mine is not None or not foreign:
            return mine
        plugin = next((one for one in self.plugins if one.name == name), None)
        if plugin is not None and plugin.row is None:
            raise _failed(plugin, plugin.fault)
        return None if plugin is None else plugin.row

    def rows(self, *, foreign: bool = True) -> Iterator[R]:
        """Our rows, then those of plug-ins; those that could not be had are in `plugins` only."""
        yield from self.own
        if foreign:
            yield from self.others()

    def others(self) -> Iterator[R]:
        """The rows of plug-ins, without ours."""
        yield from (plugin.row for plugin in self.plugins if plugin.row is not None)

    def names(self, *, foreign: bool = True) -> tuple[str, ...]:
        return tuple(row.name for row in self.rows(foreign=foreign))

    def function(self, row: R, reference: str) -> Callable[..., Any]:
        """The function that a row names. What a plug-in raises, beside our own faults, is a UserError that names it."""
        plugin = None if row in self.own else next((one for one in self.plugins if one.row is row), None)
        return resolve(reference) if plugin is None else _guarded(plugin, reference)

    @property
    def plugins(self) -> tuple[Plugin[R], ...]:
        """The rows of other packages, with those that failed; none where none are wanted."""
        return self._plugins if _WANTED.get() and os.environ.get(SWITCH) != "0" else ()

    @cached_property
    def _plugins(self) -> tuple[Plugin[R], ...]:
        """Looked for once; each fault is told on stderr then."""
        found: list[Plugin[R]] = []
        for point in sorted(entry_points(group=self.group), key=lambda point: (_package(point), point.name)):
            taken = {*self.names(foreign=False), *(plugin.name for plugin in found)}
            plugin = self._loaded(point, taken)
            if plugin.fault:
                print(f"plug-in {plugin} is left out: {plugin.fault} ({SWITCH}=0 loads none)", file=sys.stderr)
            found.append(plugin)
        return tuple(found)

    def _loaded(self, point: EntryPoint, taken: set[str]) -> Plugin[R]:
        version = point.dist.version if point.dist is not None else ""
        fault, row = "", None
        if point.name in taken:
            fault = f"{self.group} has a row of this name already"
        else:
            try:
                row = point.load()
            except Exception as error:
                fault = _words(error)
        if row is not None and not isinstance(row, self.kind):
            fault = f"{point.value} is no {self.kind.__name__}"
        elif row is not None and row.name != point.name:
            fault = f"the row is named {row.name!r}"
        return Plugin(point.name, _package(point), version, None if fault else row, fault)


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else ""


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _failed(plugin: Plugin[Any], fault: str) -> UserError:
    hint = f"update or remove {plugin.package}, or set {SWITCH}=0"
    return UserError("plugin_failed", f"plug-in {plugin} failed: {fault}", hint=hint, key=plugin.package)


def _guarded(plugin: Plugin[Any], reference: str) -> Callable[..., Any]:
    try:
        function = resolve(reference)
    except Exception as error:
        raise _failed(plugin, _words(error)) from error

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (Fault, Faults):
            raise
        except Exception as error:
            raise _failed(plugin, _words(error)) from error

    return call
