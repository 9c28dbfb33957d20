"""Tables that plug-ins extend: our rows first, theirs on demand, and errors that stop nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from plugin_packages import forgetting, install

from loadgen import plugins
from loadgen.core.errors import UserError
from loadgen.plugins import OpenTable, check_type

GROUP = "loadgen.test_rows"


class Dish(Struct, frozen=True):
    name: str
    cook: Callable[[str], str] | None = None
    taste: str = "good"
    parts: tuple[str, ...] = ()
    amounts: dict[str, int] = {}


OURS = Dish("soup"), Dish("bread")


def table() -> OpenTable[Dish]:
    return OpenTable(GROUP, Dish, lambda: OURS)


@pytest.fixture
def packages(
    tmp_path: Path, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Provide a directory that is searched for plug-ins like site-packages."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("LOADGEN_PLUGINS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    with forgetting(None, "kitchen_a", "kitchen_b", "kitchen_c"):
        yield tmp_path


MODULE = """
from contextlib import contextmanager
from test_plugins import Dish
def pots():
    yield 1
    yield 1 / 0
@contextmanager
def kitchen(failing):
    if failing == "start":
        1 / 0
    yield
    if failing == "end":
        1 / 0
def stew(what):
    return f"{what} stew" if what else 1 / 0
ROW = Dish("stew", stew, "hot")
OTHER = Dish("soup")
MISNAMED = Dish("pie")
NO_ROW = "stew"
NO_FUNCTION = Dish("stew", "kitchen_a:stew")
NO_TEXT = Dish("stew", taste=4)
NO_TUPLE = Dish("stew", parts="pea")
NO_DICT = Dish("stew", amounts=())
"""


def test_the_rows_of_an_open_table_are_loaded_on_first_use() -> None:
    calls = []

    def load_rows() -> tuple[Dish, ...]:
        calls.append("loaded")
        return OURS

    dishes = OpenTable(GROUP, Dish, load_rows)
    assert calls == []
    assert dishes.builtin_rows == OURS == dishes.builtin_rows
    assert calls == ["loaded"]


def test_a_function_of_a_built_in_row_is_not_wrapped() -> None:
    cook = str.upper
    row = Dish("soup", cook)
    assert OpenTable(GROUP, Dish, lambda: (row,)).guard(row, cook) is cook


def test_rows_of_plugins_follow_built_in_rows(packages: Path) -> None:
    install(packages, "kitchen-a", {"kitchen_a": MODULE}, {GROUP: {"stew": "kitchen_a:ROW"}})
    dishes = table()

    assert dishes.find("soup") is OURS[0]
    assert "kitchen_a" not in sys.modules, "a name of ours looks for no plug-in"
    assert dishes.names() == ("soup", "bread", "stew")
    assert (
        dishes.names(include_plugins=False) == ("soup", "bread")
        and dishes.find("stew", include_plugins=False) is None
    )
    stew = dishes.find("stew")
    assert stew is not None and stew.cook is not None
    assert dishes.guard(stew, stew.cook)("fish") == "fish stew"
    assert [str(plugin) for plugin in dishes.plugins] == ["stew of kitchen-a 1.0"]
    assert dishes.find("cake") is None


def test_the_environment_variable_disables_plugins(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(packages, "kitchen-a", {"kitchen_a": MODULE}, {GROUP: {"stew": "kitchen_a:ROW"}})
    monkeypatch.setenv("LOADGEN_PLUGINS", "0")
    assert table().names() == ("soup", "bread")
    monkeypatch.delenv("LOADGEN_PLUGINS")
    with plugins.without_plugins():
        assert table().names() == ("soup", "bread")
    assert table().names() == ("soup", "bread", "stew")


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("stew", "kitchen_b:GONE", "AttributeError: "),
        ("stew", "no_such_module:ROW", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("stew", "kitchen_b:NO_ROW", "kitchen_b:NO_ROW is not a Dish"),
        ("stew", "kitchen_b:MISNAMED", "the row is named 'pie'"),
        ("stew", "kitchen_b:NO_FUNCTION", "the field cook is not a function, but str"),
        ("stew", "kitchen_b:NO_TEXT", "the field taste is not a str, but int"),
        ("stew", "kitchen_b:NO_TUPLE", "the field parts is not a tuple, but str"),
        ("stew", "kitchen_b:NO_DICT", "the field amounts is not a dict, but tuple"),
        ("soup", "kitchen_b:OTHER", f"{GROUP} has a row of this name already"),
    ],
)
def test_a_failing_plugin_is_named_and_does_not_stop_the_command(
    packages: Path, capsys: pytest.CaptureFixture[str], name: str, value: str, fault: str
) -> None:
    install(packages, "kitchen-b", {"kitchen_b": MODULE}, {GROUP: {name: value}})
    install(packages, "kitchen-c", {"kitchen_a": MODULE}, {GROUP: {"tart": "kitchen_c:ROW"}})
    dishes = table()

    assert dishes.names() == ("soup", "bread") == dishes.names()
    stderr_lines = capsys.readouterr().err.splitlines()
    assert len(stderr_lines) == 2 and stderr_lines[0].startswith(
        f"plug-in {name} of kitchen-b 1.0 is not used: {fault}"
    )
    if name != "soup":
        with pytest.raises(UserError) as exc_info:
            dishes.find(name)
        assert exc_info.value.code == "plugin_failed" and exc_info.value.key == "kitchen-b"
        assert fault in exc_info.value.message


def test_an_exception_of_a_plugin_is_reported_as_its_error(packages: Path) -> None:
    install(packages, "kitchen-a", {"kitchen_a": MODULE}, {GROUP: {"stew": "kitchen_a:ROW"}})
    dishes = table()
    stew = dishes.find("stew")

    assert stew is not None
    assert stew.cook is not None
    with pytest.raises(UserError) as exc_info:
        dishes.guard(stew, stew.cook)("")
    assert (
        "stew of kitchen-a 1.0" in exc_info.value.message
        and "ZeroDivisionError" in exc_info.value.message
    )
    assert dishes.guard(stew, stew.cook, check_type(str))("pea") == "pea stew"
    with pytest.raises(
        UserError,
        match=r"stew of kitchen-a 1.0 failed: TypeError: it returned str, not bytes or int",
    ):
        dishes.guard(stew, stew.cook, check_type(bytes, int))("pea")


def test_a_later_exception_is_attributed_to_the_plugin_and_not_to_its_caller(
    packages: Path,
) -> None:
    install(packages, "kitchen-a", {"kitchen_a": MODULE}, {GROUP: {"stew": "kitchen_a:ROW"}})
    dishes = table()
    stew = dishes.find("stew")

    assert stew is not None
    package = sys.modules["kitchen_a"]
    for failing in ("start", "end"):
        with (
            pytest.raises(UserError, match="failed"),
            dishes.guard(stew, package.kitchen)(failing),
        ):
            pass
    with pytest.raises(KeyError), dishes.guard(stew, package.kitchen)(""):
        raise KeyError
    pots = dishes.guard(stew, package.pots)()
    assert next(pots) == 1
    with pytest.raises(UserError):
        next(pots)


def test_used_plugins_are_recorded_with_their_version(packages: Path) -> None:
    install(packages, "kitchen-a", {"kitchen_a": MODULE}, {GROUP: {"stew": "kitchen_a:ROW"}})
    dishes = table()

    assert dishes.names() == ("soup", "bread", "stew") and plugins.used_plugins() == ()

    dishes.find("stew")
    (used_plugin,) = plugins.used_plugins()
    assert (
        used_plugin == (GROUP, "stew", "kitchen-a", "1.0")
        and plugins.version_differences([used_plugin]) == []
    )
    other_packages = [
        used_plugin._replace(version="2.0"),
        used_plugin._replace(package="kitchen-z"),
    ]
    assert plugins.version_differences(other_packages) == [
        "kitchen-a 1.0 here, 2.0 there",
        "kitchen-z none here, 1.0 there",
    ]


def test_help_uses_a_cache_until_packages_change(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(packages, "kitchen-a", {"kitchen_a": MODULE}, {GROUP: {"stew": "kitchen_a:ROW"}})

    assert table().cached_fields("name", "taste") == (("stew", "hot"),)
    sys.modules.pop("kitchen_a")
    assert (
        table().cached_fields("name", "taste") == (("stew", "hot"),)
        and "kitchen_a" not in sys.modules
    )
    assert table().cached_fields("name") == (("stew",),), "other fields are asked anew"
    monkeypatch.setenv("LOADGEN_PLUGINS", "0")
    assert table().cached_fields("name") == ()

    monkeypatch.delenv("LOADGEN_PLUGINS")
    install(packages, "kitchen-b", {"kitchen_b": MODULE}, {GROUP: {"pie": "kitchen_b:MISNAMED"}})
    assert table().cached_fields("name") == (("stew",), ("pie",))
