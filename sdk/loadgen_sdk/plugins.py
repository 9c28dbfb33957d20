"""Tables that grow by rows: our own, and those of other packages by entry points of a group of the table's name.

A leaf: a row names its functions as text, `module:function`, and a module is imported when its function is called.
Packages are looked through for names that are not ours only, and for a help from a cache. The switch is one for the
generator and this client: LOADGEN_PLUGINS=0 loads none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cached_property, wraps
from importlib import import_module
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from . import installed
from .errors import ClientError, WrongUse
from .installed import version_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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
Check = Callable[..., None]


def gives(*kinds: type) -> Check:
    """A check that a function of a plug-in gives one of these."""

    def check(found: Any, *_: Any) -> None:
        if not isinstance(found, kinds):
            raise TypeError(
                f"it gave {type(found).__name__}, not {' or '.join(kind.__name__ for kind in kinds)}"
            )

    return check


def resolve(reference: str) -> Any:
    """What `module:name` or `module:Class.method` names. Raises ImportError or AttributeError."""
    module, _, name = reference.partition(":")
    return attrgetter(name)(import_module(module))


class Plugin(Generic[R]):
    """A row of another package. `row` is None where it could not be had: `fault` says why."""

    def __init__(
        self, name: str, package: str, version: str, row: R | None = None, fault: str = ""
    ) -> None:
        self.name, self.package, self.version, self.row, self.fault = (
            name,
            package,
            version,
            row,
            fault,
        )

    def __str__(self) -> str:
        return f"{self.name} of {self.package} {self.version}"


class UsedPlugin(NamedTuple):
    """A row of another package that this process has used. `table`: the group of its entry point."""

    table: str
    name: str
    package: str
    version: str


_USED: dict[UsedPlugin, None] = {}


def used() -> tuple[UsedPlugin, ...]:
    """The rows of other packages that this process has used so far, in the order of their tables and names."""
    return tuple(sorted(_USED))


def differing(wanted: Sequence[UsedPlugin]) -> list[str]:
    """The packages of these rows that are here in another version or not at all, in words."""
    here = {one: version_of(one.package) for one in wanted}
    words = (
        f"{one.package} {found} here, {one.version} there"
        for one, found in here.items()
        if found != one.version
    )
    return list(dict.fromkeys(words))


class OpenTable(Generic[R]):
    """A table: our rows in their order, and behind them those of plug-ins, which are looked for when they are needed.

    `group`: of the entry points `NAME = module:ROW`, and the name of the table. `kind`: the type of a row.
    """

    faults: tuple[type[Exception], ...] = (
        ClientError,
    )  # that a function of a row may raise as its own

    def __init__(self, group: str, kind: type[R], own: Sequence[R]) -> None:
        self.group, self.kind, self.own = group, kind, tuple(own)

    def failed(self, plugin: Plugin[Any], fault: str) -> Exception:
        """The fault of a plug-in that failed."""
        hint = f"update or remove {plugin.package}, or set {SWITCH}=0"
        return WrongUse("plugin_failed", f"plug-in {plugin} failed: {fault}", hint)

    def find(self, name: str, *, foreign: bool = True) -> R | None:
        """The row of a name; plug-ins are looked at where it is not ours. Raises `failed` for one that failed."""
        mine = next((row for row in self.own if row.name == name), None)
        if mine is not None or not foreign:
            return mine
        plugin = next((one for one in self.plugins if one.name == name), None)
        if plugin is None:
            return None
        if plugin.row is None:
            raise self.failed(plugin, plugin.fault)
        self._note(plugin)
        return plugin.row

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

    def function(self, row: R, reference: str, check: Check | None = None) -> Callable[..., Any]:
        """The function that a row names. What a plug-in raises, beside our own faults, becomes `failed`.

        `check`: raises for what a plug-in gives and should not (`gives`); it is given that, and the arguments.
        """
        plugin = (
            None if row in self.own else next((one for one in self.plugins if one.row is row), None)
        )
        if plugin is None:
            ours: Callable[..., Any] = resolve(reference)
            return ours
        self._note(plugin)
        return _Watch(plugin, self).function(reference, check)

    def told(self, *fields: str) -> tuple[tuple[str, ...], ...]:
        """These fields, which are texts, of the rows of plug-ins: for a help, from a cache. Imports nothing if it can.

        The cache is thrown away when a package comes or goes.
        """
        if not self._wanted:
            return ()
        import json

        file, key = _cache_file(), f"{self.group} {' '.join(fields)}"
        try:
            with open(file, encoding="utf-8") as cache:
                stored: Any = json.load(cache)
        except (OSError, ValueError):
            stored = {}
        stored = stored if isinstance(stored, dict) else {}
        kept = stored.get(key)
        if isinstance(kept, dict) and kept.get("state") == list(installed.state()):
            return tuple(tuple(row) for row in kept["rows"])
        rows = [[str(getattr(row, field)) for field in fields] for row in self.others()]
        told = {"state": installed.state(), "rows": rows}  # anew: an import may leave a __pycache__
        with suppress(OSError):
            os.makedirs(os.path.dirname(file), exist_ok=True)
            with open(beside := f"{file}.{os.getpid()}", "w", encoding="utf-8") as cache:
                json.dump({**stored, key: told}, cache)
            os.replace(beside, file)
        return tuple(tuple(row) for row in rows)

    @property
    def plugins(self) -> tuple[Plugin[R], ...]:
        """The rows of other packages, with those that failed; none where none are wanted."""
        return self._plugins if self._wanted else ()

    @property
    def _wanted(self) -> bool:
        return _WANTED.get() and os.environ.get(SWITCH) != "0"

    def _note(self, plugin: Plugin[Any]) -> None:
        _USED[UsedPlugin(self.group, plugin.name, plugin.package, plugin.version)] = None

    @cached_property
    def _plugins(self) -> tuple[Plugin[R], ...]:
        """Looked for once; each fault is told on stderr then."""
        found: list[Plugin[R]] = []
        for point in sorted(
            installed.entry_points(self.group), key=lambda point: (_package(point), point.name)
        ):
            taken = {*self.names(foreign=False), *(plugin.name for plugin in found)}
            plugin = self._loaded(point, taken)
            if plugin.fault:
                print(
                    f"plug-in {plugin} is left out: {plugin.fault} ({SWITCH}=0 loads none)",
                    file=sys.stderr,
                )
            found.append(plugin)
        return tuple(found)

    def _loaded(self, point: EntryPoint, taken: set[str]) -> Plugin[R]:
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
        elif row is not None:
            fault = _unfit(row, self.kind)
        return Plugin(point.name, _package(point), _version(point), None if fault else row, fault)


def _unfit(row: Any, kind: type) -> str:
    """What is wrong with the fields of a row: types are not checked when it is made, and a text for a tuple of texts
    would stand for its letters.
    """
    import msgspec

    if isinstance(row, (tuple, msgspec.Struct)):
        try:
            msgspec.convert(
                tuple(row) if isinstance(row, tuple) else msgspec.structs.asdict(row), kind
            )
        except msgspec.ValidationError as error:
            return str(error)
    return ""


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else ""


def _version(point: EntryPoint) -> str:
    return point.dist.version if point.dist is not None else ""


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _cache_file() -> str:
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(caches, "loadgen", "plugins.json")


class _Watch:
    """What a function of a plug-in raises, at once or later, while its value is used, told as its fault."""

    def __init__(self, plugin: Plugin[Any], table: OpenTable[Any]) -> None:
        self._plugin, self._table = plugin, table

    def function(self, reference: str, check: Check | None) -> Callable[..., Any]:
        with self:
            function: Callable[..., Any] = resolve(reference)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                found = function(*args, **kwargs)
                if check is not None:
                    check(found, *args)
                return self._watched(found)

        return call

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, self._table.faults):
            raise self._table.failed(self._plugin, _words(error)) from error

    def _watched(self, value: Any) -> Any:
        """A value that goes on working: a context manager, an iterator."""
        if hasattr(value, "__enter__"):
            return self._context(value)
        return self._items(value) if isinstance(value, Iterator) else value

    @contextmanager
    def _context(self, value: Any) -> Iterator[Any]:
        with self:
            entered = value.__enter__()
        try:
            yield entered
        except BaseException as error:  # of those who use it: theirs
            with self:
                swallowed = value.__exit__(type(error), error, error.__traceback__)
            if not swallowed:
                raise
        else:
            with self:
                value.__exit__(None, None, None)

    def _items(self, value: Iterator[Any]) -> Iterator[Any]:
        with self:
            yield from value
