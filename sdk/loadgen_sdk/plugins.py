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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
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
            raise TypeError(f"it returned {type(result).__name__}, not {expected}")

    return check


class Plugin(Generic[RowT]):
    """A row of a table that another package defines by an entry point.

    Attributes:
        name: The name of the row.
        package: The name of the package.
        version: Its version.
        row: The row, or None if it could not be loaded.
        error: Why it could not be loaded, or "".
    """

    def __init__(
        self, name: str, package: str, version: str, row: RowT | None = None, error: str = ""
    ) -> None:
        """Create a plug-in with its row, or with an error."""
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
        return self._plugins if self._is_enabled else ()

    def find(self, name: str, *, include_plugins: bool = True) -> RowT | None:
        """Return the row with this name, or None.

        Built-in rows come first, so that plug-ins are loaded only if none of these has the name.
        The use of a plug-in is recorded, because it is stored with the results of a run.

        Args:
            name: The name of the row.
            include_plugins: Rows of plug-ins are found as well.

        Raises:
            Exception: The name is that of a plug-in that could not be loaded (`plugin_error`).
        """
        for row in self.builtin_rows:
            if row.name == name:
                return row

        if not include_plugins:
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

    def names(self, *, include_plugins: bool = True) -> tuple[str, ...]:
        """Return the names of the rows, by default with those of plug-ins."""
        rows = self.rows() if include_plugins else self.builtin_rows
        return tuple(row.name for row in rows)

    def guard(
        self, row: RowT, function: Callable[P, ResultT], check: Check | None = None
    ) -> Callable[P, ResultT]:
        """Wrap a function that belongs to a row of this table, to blame the plug-in if it fails.

        A row is an entry of the table, built in or from a plug-in (a package of somebody else). If
        a function of a plug-in raises an exception, the wrapper raises `plugin_error` instead,
        which names the plug-in. Exceptions of the types `own_errors`, which a plug-in may raise for
        the user, pass unchanged. A function of a built-in row is returned as it is.

        Args:
            row: The row.
            function: A function in one of its fields.
            check: A check of the result of the function, or None. What it raises is converted, too.
        """
        is_builtin = any(row is builtin_row for builtin_row in self.builtin_rows)
        if is_builtin:
            return function

        plugin = next((plugin for plugin in self.plugins if plugin.row is row), None)
        if plugin is None:
            return function

        self._record_use(plugin)
        return _PluginGuard(plugin, self).wrap(function, check)

    def cached_fields(self, *fields: str) -> tuple[tuple[str, ...], ...]:
        """Return the values of these text fields for each row that a plug-in adds to the table.

        For example, `cached_fields("name")` returns `(("acme",), ("other",))` for plug-ins that add
        the rows "acme" and "other". Importing the plug-ins would make `--help` slow. So the values
        are stored in a cache file, and read from it until a package is installed or removed.
        """
        if not self._is_enabled:
            return ()

        cache = _read_cache()
        cache_key = f"{self.group} {' '.join(fields)}"
        entry = cache.get(cache_key)
        if isinstance(entry, dict) and entry.get("state") == _installation_state():
            return tuple(tuple(values) for values in entry["rows"])

        values_by_row = [
            tuple(str(getattr(row, field)) for field in fields) for row in self.plugin_rows()
        ]

        # The import of a plug-in may create a __pycache__, which changes the installation state. So
        # the state is read only now.
        cache[cache_key] = {"state": _installation_state(), "rows": values_by_row}
        _write_cache(cache)
        return tuple(values_by_row)

    @property
    def _is_enabled(self) -> bool:
        """Whether plug-ins may be loaded: neither the caller nor the environment forbids it."""
        return _ENABLED.get() and os.environ.get(SWITCH) != "0"

    def _record_use(self, plugin: Plugin[Any]) -> None:
        _USED.add(UsedPlugin(self.group, plugin.name, plugin.package, plugin.version))

    @cached_property
    def _plugins(self) -> tuple[Plugin[RowT], ...]:
        """Load the plug-ins of all entry points of the table, in the order of their packages.

        This is done once per process. A plug-in that cannot be loaded has an `error`, which is also
        printed to stderr, because the user may miss its row in the table.
        """
        entry_points = installed.entry_points(self.group)
        used_names = set(self.names(include_plugins=False))

        plugins: list[Plugin[RowT]] = []
        for entry_point in sorted(entry_points, key=lambda point: (_package(point), point.name)):
            plugin = self._load_plugin(entry_point, used_names)
            if plugin.error:
                _print_load_error(plugin)
            used_names.add(plugin.name)
            plugins.append(plugin)

        return tuple(plugins)

    def _load_plugin(self, entry_point: EntryPoint, used_names: set[str]) -> Plugin[RowT]:
        """Import the row that a package registers by an entry point.

        Args:
            entry_point: The entry point, which names the row and the object to import.
            used_names: The names of the rows that were loaded before. No other row may have one of
                them.

        Returns:
            The plug-in with its row. If the import fails or the row has a mistake, the plug-in has
            no row, and `error` says why.
        """
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

        error = self._find_row_error(row, entry_point)
        if error:
            return Plugin(name, package, version, error=error)

        return Plugin(name, package, version, row)

    def _find_row_error(self, row: object, entry_point: EntryPoint) -> str:
        """Return what is wrong with the row of a plug-in, or an empty string."""
        if not isinstance(row, self.row_type):
            return f"{entry_point.value} is not a {self.row_type.__name__}"
        if row.name != entry_point.name:
            return f"the row is named {row.name!r}"
        return _find_field_of_wrong_type(cast(msgspec.Struct, row))


def _print_load_error(plugin: Plugin[Any]) -> None:
    """Print to stderr why a plug-in cannot be loaded, and how to turn all plug-ins off."""
    switch_hint = f"({SWITCH}=0 turns all plug-ins off)"
    print(f"plug-in {plugin} is not used: {plugin.error} {switch_hint}", file=sys.stderr)


def _find_field_of_wrong_type(row: msgspec.Struct) -> str:
    """Return an error message about the first field of a row that has a wrong type, or "".

    A msgspec Struct does not check types when a plug-in creates it. A field without a default must
    be a text or a function here, and any other one must have the type of its default. The declared
    types (`msgspec.structs.fields`) are not used, because resolving them imports further modules.
    """
    names = row.__struct_fields__
    defaults = row.__struct_defaults__

    # Fields without a default come first, so the defaults belong to the last fields.
    required_count = len(names) - len(defaults)
    required_names = names[:required_count]
    optional_names = names[required_count:]

    for name in required_names:
        value = getattr(row, name)
        is_valid = isinstance(value, str) or callable(value)
        if not is_valid:
            return f"the field {name} is neither a text nor a function"

    for name, default in zip(optional_names, defaults, strict=True):
        mismatch = _describe_type_mismatch(getattr(row, name), default)
        if mismatch:
            return f"the field {name} is {mismatch}"

    return ""


def _describe_type_mismatch(value: object, default: object) -> str:
    """Return why a value cannot replace the default of a field, such as "not a str, but int".

    Return "" if it can. It must have the type of the default. A default of None stands for an
    optional function.

    Args:
        value: The value of the field.
        default: Its default in `__struct_defaults__`. For a list or another mutable default, that
            is a msgspec factory, whose `factory` is the type.
    """
    actual_name = type(value).__name__
    if default is None:
        is_valid = value is None or callable(value)
        return "" if is_valid else f"not a function, but {actual_name}"

    expected_type: type = getattr(default, "factory", type(default))
    if isinstance(value, expected_type):
        return ""

    return f"not a {expected_type.__name__}, but {actual_name}"


def _installation_state() -> list[str]:
    """Return what changes when a package is installed or removed, as a list of JSON."""
    return list(installed.installation_fingerprint())


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


def _write_cache(cache: Mapping[str, object]) -> None:
    """Replace the cache in one step. A cache that cannot be written is no error."""
    path = _cache_path()
    temporary_path = f"{path}.{os.getpid()}"
    with suppress(OSError):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(temporary_path, "w", encoding="utf-8") as file:
            json.dump(cache, file)
        os.replace(temporary_path, path)


class _PluginGuard:
    """Converts exceptions of the code of a plug-in to the error of its table.

    It is a context manager for such code, and wraps functions, also those whose result runs code of
    the plug-in later.
    """

    def __init__(self, plugin: Plugin[Any], table: OpenTable[Any]) -> None:
        self._plugin = plugin
        self._table = table

    def wrap(self, function: Callable[P, ResultT], check: Check | None) -> Callable[P, ResultT]:
        """Return a function that does the same as one of the plug-in, but raises another error.

        An exception in the code of the plug-in is raised as the error of the table, which names the
        plug-in. If the function returns a context manager or an iterator, this applies to their
        code, too.

        Args:
            function: A function of the plug-in.
            check: A check of its result, or None. It is called with the result and the positional
                arguments of the call. Its exceptions are converted, because they mean that the
                plug-in has returned something wrong.
        """

        @wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> ResultT:
            with self:  # `__exit__` converts the exceptions.
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
            return self._guard_context(cast("AbstractContextManager[Any]", result))
        if isinstance(result, Iterator):
            return self._guard_iterator(result)
        return result

    @contextmanager
    def _guard_context(self, context: AbstractContextManager[object]) -> Iterator[Any]:
        """Enter and leave a context manager of a plug-in, whose exceptions are converted.

        An exception of the code inside the `with` block is not one of the plug-in, and passes
        unchanged unless the context manager suppresses it.
        """
        with self:
            value = context.__enter__()
        try:
            yield value
        except BaseException as error:
            with self:
                is_suppressed = context.__exit__(type(error), error, error.__traceback__)
            if not is_suppressed:
                raise
        else:
            with self:
                context.__exit__(None, None, None)

    def _guard_iterator(self, iterator: Iterator[object]) -> Iterator[Any]:
        """Yield the items of an iterator of a plug-in, whose exceptions are converted."""
        with self:
            yield from iterator
