"""The versions and entry points of installed packages."""

from __future__ import annotations

import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from loadgen_sdk import installed


def test_versions_of_packages_equal_those_of_importlib() -> None:
    names = {distribution.name for distribution in metadata.distributions()}
    assert len(names) > 10
    assert {name: installed.version_of(name) for name in names} == {
        name: metadata.version(name) for name in names
    }
    assert installed.version_of("Typing.Extensions") == metadata.version("typing-extensions")
    assert installed.version_of("no-such-package") == "none"


def test_entry_points_are_selected_by_group() -> None:
    every = metadata.entry_points()
    for group in (*every.groups, "loadgen.nobody"):
        assert set(installed.entry_points(group)) == set(every.select(group=group))


def test_a_package_installed_later_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert not installed.entry_points("loadgen.nobody")
    make_package(tmp_path / "some_thing-1.5.dist-info")
    assert [point.value for point in installed.entry_points("loadgen.nobody")] == ["some:ROW"]
    assert installed.version_of("some.thing") == "1.5"


def test_a_package_in_a_zip_archive_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_package(tmp_path / "some_thing-1.5.dist-info")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for file in tmp_path.rglob("*.*"):
            if file.parent.suffix == ".dist-info":
                archive.write(file, file.relative_to(tmp_path))
        archive.write(
            tmp_path / "some_thing-1.5.dist-info" / "METADATA", "some_thing-1.5.dist-info/METADATA"
        )
    monkeypatch.syspath_prepend(tmp_path / "all.zip")

    assert [point.name for point in installed.entry_points("loadgen.nobody")] == ["x"]
    assert installed.version_of("some-thing") == "1.5"


def make_package(folder: Path) -> None:
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: some-thing\nVersion: 1.5\n")
    (folder / "entry_points.txt").write_text("[loadgen.nobody]\nx = some:ROW\n")
