"""Tables of rows that other packages can extend by entry points.

The rows of a table are the built-in ones, followed by those of plug-ins: objects of installed
packages that are registered as entry points in the group of the table's name. A row refers to its
functions directly.

Where importing early would be slow or circular, there is one way to import late: a function
without arguments that imports something and returns it. `OpenTable` gets its built-in rows from
such a function, and rows that every command reads (commands, result kinds, backends) have one in
their field `load`.

Plug-ins are looked for only when a name is not built in. Help texts take their names from a cache.
The environment variable LOADGEN_PLUGINS=0 disables plug-ins, for the generator too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cached_property, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, cast

import msgspec

from . import installed
from .errors import ClientError, WrongUse
from .installed import version_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

SWITCH = "LOADGEN_PLUGINS"
"""The environment variable that disables all plug-ins if it is 0."""

_ENABLED: ContextVar[bool] = ContextVar("enabled", default=True)


@contextmanager
def without_plugins() -> Iterator[None]:
    """Disable plug-ins inside the context, for example while files of another host are read."""
    token = _ENABLED.set(False)
    try:
        yield
    finally:
        _ENABLED.reset(token)


class Row(Protocol):
    """What every row has."""

    @property
    def name(self) -> str:
        """The name of the row."""


RowT = TypeVar("RowT", bound=Row)
P = ParamSpec("P")
ResultT = TypeVar("ResultT")

Check = Callable[..., None]
"""A check of what a function of a plug-in returned: called with the result and the arguments,
raises TypeError.
"""


def check_type(*types: type) -> Check:
    """Return a check that a result is an instance of one of these types."""

    def check(result: object, *_: object) -> None:
        if not isinstance(result, types):
            expected = " or ".join(expected_type.__name__ for expected_type in types)
            raise TypeError(f"it gave {type(result).__name__}, not {expected}")

    return check


class Plugin(Generic[RowT]):
    """An entry point of another package.

    If it could not be loaded, `row` is None and `error` says why.
    """

    def __init__(
        self, name: str, package: str, version: str, row: RowT | None = None, error: str = ""
    ) -> None:
        """Keep the fields."""
        self.name = name
        self.package = package
        self.version = version
        self.row = row
        self.error = error

    def __str__(self) -> str:
        """Return the name, the package and its version."""
        return f"{self.name} of {self.package} {self.version}"


class UsedPlugin(NamedTuple):
    """A row of another package that this process has used.

    `table` is the group of its entry point.
    """

    table: str
    name: str
    package: str
    version: str


_USED: set[UsedPlugin] = set()


def used_plugins() -> tuple[UsedPlugin, ...]:
    """Return the rows of other packages that this process has used, sorted by table and name."""
    return tuple(sorted(_USED))


def version_differences(expected: Sequence[UsedPlugin]) -> list[str]:
    """Return a text for each package that is installed here in another version, or not at all."""
    differences: dict[str, None] = {}
    for plugin in expected:
        version = version_of(plugin.package)
        if version != plugin.version:
            differences[f"{plugin.package} {version} here, {plugin.version} there"] = None
    return list(differences)


class OpenTable(Generic[RowT]):
    """A table of built-in rows, and of rows of plug-ins, which are loaded when they are needed.

    Attributes:
        group: The name of the table, and the group of the entry points `NAME = module:ROW`.
        row_type: The type of a row, a msgspec.Struct.
    """

    own_errors: tuple[type[Exception], ...] = (ClientError,)
    """Errors that a function of a plug-in may raise. Everything else is a defect of the plug-in."""

    def __init__(
        self, group: str, row_type: type[RowT], load_rows: Callable[[], Sequence[RowT]]
    ) -> None:
        """Define a table. `load_rows` returns the built-in rows; it is called on first use."""
        self.group = group
        self.row_type = row_type
        self._load_rows = load_rows

    def plugin_error(self, plugin: Plugin[Any], message: str) -> Exception:
        """Return the exception for a plug-in that failed."""
        hint = f"update or remove {plugin.package}, or set {SWITCH}=0"
        return WrongUse("plugin_failed", f"plug-in {plugin} failed: {message}", hint)

    @cached_property
    def builtin_rows(self) -> tuple[RowT, ...]:
        """The built-in rows."""
        return tuple(self._load_rows())

    @property
    def plugins(self) -> tuple[Plugin[RowT], ...]:
        """All entry points of the table, with those that failed. Empty if plug-ins are disabled."""
        return self._plugins if self._enabled else ()

    def find(self, name: str, *, foreign: bool = True) -> RowT | None:
        """Return the row with this name, or None.

        Plug-ins are loaded only if no built-in row has the name. If the name is that of a plug-in
        that could not be loaded, this raises `plugin_error`.
        """
        for row in self.builtin_rows:
            if row.name == name:
                return row
        if not foreign:
            return None
        for plugin in self.plugins:
            if plugin.name != name:
                continue
            if plugin.row is None:
                raise self.plugin_error(plugin, plugin.error)
            self._record_use(plugin)
            return plugin.row
        return None

    def rows(self) -> Iterator[RowT]:
        """Yield the built-in rows, then those of plug-ins."""
        yield from self.builtin_rows
        yield from self.plugin_rows()

    def plugin_rows(self) -> Iterator[RowT]:
        """Yield the rows of plug-ins."""
        for plugin in self.plugins:
            if plugin.row is not None:
                yield plugin.row

    def names(self, *, foreign: bool = True) -> tuple[str, ...]:
        """Return the names of the rows, by default with those of plug-ins."""
        rows = self.rows() if foreign else self.builtin_rows
        return tuple(row.name for row in rows)

    def guard(
        self, row: RowT, function: Callable[P, ResultT], check: Check | None = None
    ) -> Callable[P, ResultT]:
        """Return the function of a row so that errors of a plug-in are reported as such.

        Functions of built-in rows are returned unchanged. What a function of a plug-in raises,
        except `own_errors`, is raised as `plugin_error`; so is what `check` raises for its result.
        """
        if any(row is built_in for built_in in self.builtin_rows):
            return function
        plugin = next((plugin for plugin in self.plugins if plugin.row is row), None)
        if plugin is None:
            return function
        self._record_use(plugin)
        return _PluginGuard(plugin, self).wrap(function, check)

    def cached_fields(self, *fields: str) -> tuple[tuple[str, ...], ...]:
        """Return these text fields of the rows of plug-ins, from a cache if possible.

        The cache is valid as long as no package was installed or removed. With it, no plug-in is
        imported.
        """
        if not self._enabled:
            return ()
        key = f"{self.group} {' '.join(fields)}"
        cache = _read_cache()
        entry = cache.get(key)
        if isinstance(entry, dict) and entry.get("state") == list(installed.installation_state()):
            return tuple(tuple(row) for row in entry["rows"])
        rows = [[str(getattr(row, field)) for field in fields] for row in self.plugin_rows()]
        # The state is taken after the import, which may have created a __pycache__.
        cache[key] = {"state": installed.installation_state(), "rows": rows}
        _write_cache(cache)
        return tuple(tuple(row) for row in rows)

    @property
    def _enabled(self) -> bool:
        return _ENABLED.get() and os.environ.get(SWITCH) != "0"

    def _record_use(self, plugin: Plugin[Any]) -> None:
        _USED.add(UsedPlugin(self.group, plugin.name, plugin.package, plugin.version))

    @cached_property
    def _plugins(self) -> tuple[Plugin[RowT], ...]:
        """Load all entry points of the table once, and report those that fail on stderr."""
        entry_points = installed.entry_points(self.group)
        used_names = set(self.names(foreign=False))
        plugins: list[Plugin[RowT]] = []
        for entry_point in sorted(entry_points, key=lambda point: (_package(point), point.name)):
            plugin = self._load_plugin(entry_point, used_names)
            if plugin.error:
                message = f"plug-in {plugin} is left out: {plugin.error} ({SWITCH}=0 loads none)"
                print(message, file=sys.stderr)
            used_names.add(plugin.name)
            plugins.append(plugin)
        return tuple(plugins)

    def _load_plugin(self, entry_point: EntryPoint, used_names: set[str]) -> Plugin[RowT]:
        name = entry_point.name
        package = _package(entry_point)
        version = _version(entry_point)
        if name in used_names:
            error = f"{self.group} has a row of this name already"
            return Plugin(name, package, version, error=error)
        try:
            row = entry_point.load()
        except Exception as exception:
            return Plugin(name, package, version, error=_describe(exception))
        error = self._find_defect(row, entry_point)
        if error:
            return Plugin(name, package, version, error=error)
        return Plugin(name, package, version, row)

    def _find_defect(self, row: object, entry_point: EntryPoint) -> str:
        """Return what is wrong with a loaded row, or an empty string."""
        if not isinstance(row, self.row_type):
            return f"{entry_point.value} is no {self.row_type.__name__}"
        if row.name != entry_point.name:
            return f"the row is named {row.name!r}"
        return _find_field_of_wrong_type(cast(msgspec.Struct, row))


def _find_field_of_wrong_type(row: msgspec.Struct) -> str:
    """Return a text about the first field of a row that has a wrong type, or an empty string.

    A Struct does not check types when it is created. A field has to be of the type of its default;
    without a default, it is a text or a function. A field whose default is None is an optional
    function.
    """
    names = row.__struct_fields__
    defaults = row.__struct_defaults__
    required = names[: len(names) - len(defaults)]
    for name in required:
        if not isinstance(getattr(row, name), str) and not callable(getattr(row, name)):
            return f"the field {name} is neither a text nor a function"
    for name, default in zip(names[len(required) :], defaults, strict=True):
        value = getattr(row, name)
        if default is None:
            if value is not None and not callable(value):
                return f"the field {name} is no function, but {type(value).__name__}"
            continue
        # The default of a mutable field is a msgspec Factory.
        expected = getattr(default, "factory", type(default))
        if not isinstance(value, expected):
            return f"the field {name} is no {expected.__name__}, but {type(value).__name__}"
    return ""


def _package(entry_point: EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist is not None else ""


def _version(entry_point: EntryPoint) -> str:
    return entry_point.dist.version if entry_point.dist is not None else ""


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _cache_path() -> str:
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(caches, "loadgen", "plugins.json")


def _read_cache() -> dict[str, Any]:
    """Return the content of the cache; empty if there is none or it is damaged."""
    try:
        with open(_cache_path(), encoding="utf-8") as file:
            cache = json.load(file)
    except (OSError, ValueError):
        return {}
    return cache if isinstance(cache, dict) else {}


def _write_cache(cache: dict[str, Any]) -> None:
    """Replace the cache in one step. A cache that cannot be written is no error."""
    path = _cache_path()
    temporary_path = f"{path}.{os.getpid()}"
    with suppress(OSError):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(temporary_path, "w", encoding="utf-8") as file:
            json.dump(cache, file)
        os.replace(temporary_path, path)


class _PluginGuard:
    """Converts what code of a plug-in raises, at once or later while its result is used."""

    def __init__(self, plugin: Plugin[Any], table: OpenTable[Any]) -> None:
        self._plugin = plugin
        self._table = table

    def wrap(self, function: Callable[P, ResultT], check: Check | None) -> Callable[P, ResultT]:
        """Return the function with its errors, and those of `check`, converted."""

        @wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> ResultT:
            with self:
                result = function(*args, **kwargs)
                if check is not None:
                    check(result, *args)
                return cast(ResultT, self._guard_result(result))

        return guarded

    def __enter__(self) -> None:
        """Start to convert errors."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Raise the error of the table for an error of the plug-in."""
        if isinstance(error, Exception) and not isinstance(error, self._table.own_errors):
            raise self._table.plugin_error(self._plugin, _describe(error)) from error

    def _guard_result(self, result: object) -> object:
        """Guard a result whose code runs later: a context manager or an iterator."""
        if hasattr(result, "__enter__"):
            return self._guard_context(result)
        if isinstance(result, Iterator):
            return self._guard_iterator(result)
        return result

    @contextmanager
    def _guard_context(self, context: Any) -> Iterator[Any]:
        with self:
            entered = context.__enter__()
        try:
            yield entered
        except BaseException as error:
            # An error of the code inside the context is not an error of the plug-in.
            with self:
                is_suppressed = context.__exit__(type(error), error, error.__traceback__)
            if not is_suppressed:
                raise
        else:
            with self:
                context.__exit__(None, None, None)

    def _guard_iterator(self, iterator: Iterator[Any]) -> Iterator[Any]:
        with self:
            yield from iterator
