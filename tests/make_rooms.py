"""Writes the tables of rooms in `loadgen/README.md` from the docstrings of the packages, and from nothing else.

`python tests/make_rooms.py` writes them again; `test_house.py` checks that they are what it would write. The rooms
stand in the order of the layers in `pyproject.toml`, the top first.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "loadgen" / "README.md"
FOLDERS = {"loadgen": ROOT / "loadgen", "loadgen_sdk": ROOT / "sdk" / "loadgen_sdk"}
BEGIN = "<!-- rooms: made by tests/make_rooms.py from the docstrings of the packages -->"
END = "<!-- end of the rooms -->"


def layers(package: str) -> list[list[str]]:
    """The names in each layer of a package, from the top down, as `pyproject.toml` lists them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (found,) = (contract for contract in contracts if contract.get("containers") == [package])
    return [[name.strip() for name in re.split("[|:]", layer)] for layer in found["layers"]]


def packages(package: str) -> list[Path]:
    """The folders of a package that are packages themselves, in the order of the layers, each before what is in it."""
    names = [name for line in layers(package) for name in line]
    if package == "loadgen":
        names += [f"core/{name}" for line in layers("loadgen.core") for name in line]
    place = {name: number for number, name in enumerate(names)}
    folder = FOLDERS[package]
    found = (
        file.parent.relative_to(folder)
        for file in folder.rglob("__init__.py")
        if file.parent != folder
    )
    return sorted(
        found,
        key=lambda path: (place.get("/".join(path.parts[:2]), place.get(path.parts[0], -1)), path),
    )


def docstring(folder: Path) -> tuple[str, str]:
    """What a package says that it is (its first paragraph), and what may not be done in it (the rest)."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))) or ""
    first, _, rest = text.partition("\n\n")
    return " ".join(first.split()), " ".join(rest.split())


def tables() -> str:
    lines = [BEGIN]
    for package, folder in FOLDERS.items():
        lines += [
            "",
            f"| `{folder.relative_to(ROOT)}/` | what it is | what it does and does not do |",
            "|---|---|---|",
        ]
        for path in packages(package):
            what, rules = docstring(folder / path)
            lines.append(f"| `{path}/` | {what} | {rules} |")
    return "\n".join([*lines, "", END])


def readme() -> str:
    """The README with the tables as they should be."""
    before, _, rest = README.read_text("utf-8").partition(BEGIN)
    return before + tables() + rest.partition(END)[2]


if __name__ == "__main__":
    README.write_text(readme(), "utf-8")
