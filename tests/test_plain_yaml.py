"""Plain YAML is read as PyYAML reads it, positions included, or not at all."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadgen.plain_yaml import composed

FOLDER = Path(__file__).parents[1]
PACKAGED = sorted((FOLDER / "workloads").glob("*.yaml"))
TEXTS = [path.read_text("utf-8") for path in PACKAGED]
PIECES = [
    "a: 1\n", "b:\n", "  c: x y\n", "- ", "- d\n", "  - {e: 1, f: [g, h]}\n", "i: >-\n", "  text: of one\n", "\n",
    "    more\n", "# said\n", " # said\n", "j: [k, l]  # said\n", "m: {n: o}\n", "p: ~\n", "q: -1.5\n", "r: 1e3\n",
    "s: 10/s\n", "t: 'u'\n", "v: |\n", "<<: w\n", "x: y: z\n", "k:v\n", "---\n", "a b: c\n", "d: - e\n", "f: [a,b]\n",
    "g: {h: }\n", "i: [j,]\n", "k: a, b\n", "l: m#n\n", "o:  p  \n", "{a: 1}\n", "[b]\n", "?", ":", " ", "  ", "-", "#",
]  # fmt: skip


def flat(node: Any) -> Any:
    place = node.id, node.start_mark.line, node.start_mark.column
    if node.id == "scalar":
        return *place, node.value, node.style or ""
    if node.id == "sequence":
        return *place, [flat(one) for one in node.value]
    merges = [key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value]
    return *place, [(flat(key), flat(value)) for key, value in node.value], any(merges)


def held(text: str) -> bool:
    """Whether a text is read plainly; then as PyYAML does."""
    found = composed(text)
    if found is not None:
        try:
            known = flat(yaml.compose(text, Loader=yaml.CSafeLoader))
        except yaml.YAMLError as error:
            known = str(error)
        assert flat(found) == known, text
    return found is not None


def changed(source: random.Random) -> str:
    """A packaged workload with a few wounds, or pieces of YAML in any order."""
    if source.random() < 0.5:
        return "".join(source.choices(PIECES, k=source.randint(1, 8)))
    text = source.choice(TEXTS)
    for _ in range(source.randint(1, 3)):
        at = source.randrange(len(text))
        end = at + source.choice((0, 0, 1, 2, 20))
        text = text[:at] + source.choice([*PIECES, "", "", "\n", "\n\n", '"', ", ", ": "]) + text[end:]
    return text


@pytest.mark.parametrize("path", PACKAGED, ids=lambda path: path.stem)
def test_every_packaged_workload_is_read_plainly(path: Path) -> None:
    assert held(path.read_text("utf-8"))


def test_what_is_read_plainly_is_what_yaml_says() -> None:
    source = random.Random(1)
    read = sum(held(changed(source)) for _ in range(3000))
    assert 150 < read < 1000


@pytest.mark.parametrize(
    "text",
    ["", "a: é\n", "# said\n", "a: &b c\n", "a: *b\n", "a: !!str 1\n", "a: b\n...\n", "a: ${B}\n", "a:\tb\n",
     "\ufeffa: b\n", "a: b\r\nc: d\n", "a: " + "[" * 60 + "]" * 60 + "\n", "a" * 2000 + ": b\n", "a:\n  b: c\n d: e\n"],
)  # fmt: skip
def test_the_rest_is_left_to_yaml(text: str) -> None:
    assert composed(text) is None
