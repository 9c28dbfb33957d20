"""Write the tables of packages in `loadgen/README.md` from the docstrings of the packages.

Run `python tests/make_packages.py` to write them; `test_architecture.py` checks that they are
current. The packages are in the order of the layers in `pyproject.toml`, from top to bottom.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "loadgen" / "README.md"
FOLDERS = {"loadgen": ROOT / "loadgen", "loadgen_sdk": ROOT / "sdk" / "loadgen_sdk"}
BEGIN = "<!-- packages: written by tests/make_packages.py -->"
END = "<!-- end of packages -->"


def layers(package: str) -> list[list[str]]:
    """Return the names in each layer of a package, from the top down, as in `pyproject.toml`."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layer_contract,) = (
        contract for contract in contracts if contract.get("containers") == [package]
    )
    return [
        [name.strip() for name in re.split("[|:]", layer)] for layer in layer_contract["layers"]
    ]


def packages(package: str) -> list[Path]:
    """Return the sub-packages of a package, in the order of the layers."""
    names = [name for line in layers(package) for name in line]
    if package == "loadgen":
        names += [f"core/{name}" for line in layers("loadgen.core") for name in line]
    place = {name: number for number, name in enumerate(names)}
    folder = FOLDERS[package]
    package_dirs = (
        file.parent.relative_to(folder)
        for file in folder.rglob("__init__.py")
        if file.parent != folder
    )
    return sorted(
        package_dirs,
        key=lambda path: (place.get("/".join(path.parts[:2]), place.get(path.parts[0], -1)), path),
    )


def docstring(folder: Path) -> tuple[str, str]:
    """Return the first paragraph of a package's docstring, and the rest of it."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))) or ""
    first, _, rest = text.partition("\n\n")
    return " ".join(first.split()), " ".join(rest.split())


def tables() -> str:
    lines = [BEGIN]
    for package, folder in FOLDERS.items():
        lines += [
            "",
            f"| `{folder.relative_to(ROOT)}/` | what it does | details |",
            "|---|---|---|",
        ]
        for path in packages(package):
            purpose, rules = docstring(folder / path)
            lines.append(f"| `{path}/` | {purpose} | {rules} |")
    return "\n".join([*lines, "", END])


def readme() -> str:
    """Return the README with the tables as they should be."""
    before, _, rest = README.read_text("utf-8").partition(BEGIN)
    return before + tables() + rest.partition(END)[2]


if __name__ == "__main__":
    README.write_text(readme(), "utf-8")
