"""Create a third-party package as a directory, as pip would have installed it.

The directory has modules, and entry points in its metadata. `forgetting` is a context in which a
table searches for plug-ins again; afterwards it has forgotten the ones that it found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loadgen_sdk import plugins


def install(
    folder: Path, name: str, modules: Mapping[str, str], groups: Mapping[str, Mapping[str, str]]
) -> None:
    """Write version 1.0 of the package `name` into a directory of `sys.path`.

    `modules` maps names to source code, and entry points are given by group.
    """
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text, "utf-8")
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "utf-8"
    )
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n", "utf-8")


@contextmanager
def forgetting(table: Any, *modules: str) -> Iterator[None]:
    """`modules`: those of the packages, which are imported anew next time."""

    def forget() -> None:
        if table is not None:
            for attribute in ("_plugins", "_has_no_plugins"):
                vars(table).pop(attribute, None)
        plugins._USED.clear()
        for module in modules:
            sys.modules.pop(module, None)

    forget()
    try:
        yield
    finally:
        forget()
