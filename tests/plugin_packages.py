"""A package of somebody else, as a folder: modules, and entry points in the metadata that pip would have installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(folder: Path, name: str, modules: Mapping[str, str], groups: Mapping[str, Mapping[str, str]]) -> None:
    """Write package `name` 1.0 into a folder of `sys.path`: the text of each module, entry points by group."""
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text, "utf-8")
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", "utf-8")
    lines = [
        line for group, points in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n", "utf-8")
