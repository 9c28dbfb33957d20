"""What the shell offers for a value that is half typed: names that there are, as far as they can be listed at once.

Reads names of files and folders, and imports nothing of a run. Each takes what was typed and gives what begins so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

SIGNS = {":", "="}  # at which bash takes words apart
PACKAGE = Path(__file__).parent.parent


def workloads(incomplete: str) -> list[str]:
    """Packaged workloads, and YAML files."""
    return [*_beginning(_packaged("workloads"), incomplete), *_paths(incomplete, ".yaml", ".yml")]


def contracts(incomplete: str) -> list[str]:
    """Packaged contracts, and YAML files."""
    return [*_beginning(_packaged("contracts"), incomplete), *_paths(incomplete, ".yaml", ".yml")]


def targets(incomplete: str) -> list[str]:
    """The simulated endpoints; nothing can be listed of others."""
    return _beginning(
        [*(f"sim:{preset}" for preset in presets()), "http://", "https://"], incomplete
    )


def presets() -> list[str]:
    """The simulated machines."""
    return sorted(path.stem for path in (PACKAGE / "sim" / "presets").glob("*.yaml"))


def servers(incomplete: str) -> list[str]:
    from loadgen_sdk.dialects.quirks import names

    return _beginning(names(), incomplete)


def terms(incomplete: str) -> list[str]:
    """The metrics that an SLO may limit."""
    from loadgen.core.slo import metrics

    return _beginning((f"{metric}:" for metric in (*metrics(), "goodput")), incomplete)


def results(incomplete: str) -> list[str]:
    """Folders, those in `results/` first where nothing is typed."""
    here = [str(path) for path in sorted(Path("results").glob("*/"))] if not incomplete else []
    return [*here, *_paths(incomplete)]


def capacities(incomplete: str) -> list[str]:
    """What carries a load: simulated endpoints, and folders of results."""
    return [
        *(name for name in targets(incomplete) if name.startswith("sim:")),
        *results(incomplete),
    ]


def kept(incomplete: str) -> list[str]:
    """Results that `compare --save` has kept, where they are kept unless `--in` says otherwise."""
    return _beginning(sorted(path.name for path in Path("baselines").glob("*/")), incomplete)


def among(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """What offers the names of a list, which is made when it is asked for."""

    def offered(incomplete: str) -> list[str]:
        return _beginning(names(), incomplete)

    return offered


@contextmanager
def whole_words() -> Iterator[None]:
    """The parser is asked for words as they were typed; what it offers is what bash puts behind its last sign."""
    line, at = os.environ.get("COMP_WORDS", ""), os.environ.get("COMP_CWORD", "")
    words, place, behind = as_typed(line, int(at) if at.isdigit() else 0)
    if words != line.split():
        os.environ.update(COMP_WORDS=" ".join(words), COMP_CWORD=str(place))
    if not behind:
        yield
        return
    with redirect_stdout(StringIO()) as offered:
        try:
            yield
        finally:  # the parser leaves by an exception
            print(
                "\n".join(word.removeprefix(behind) for word in offered.getvalue().split()),
                file=sys.__stdout__,
            )


def as_typed(line: str, at: int) -> tuple[list[str], int, str]:
    """The words of a line that bash has taken apart at `:` and `=`, whole again; `at` is the word with the cursor.

    Gives the words, which of them has the cursor, and what of it bash keeps: all up to its last such sign.
    """
    words, whole, place = line.split(), list[str](), None
    for i, word in enumerate(words):
        if whole and (word in SIGNS or words[i - 1] in SIGNS):
            whole[-1] += word
        else:
            whole.append(word)
        place = len(whole) - 1 if i == at else place
    if place is None:  # a word that is still empty
        return whole, len(whole), ""
    taken_apart = words[at] in SIGNS or words[at - 1] in SIGNS
    return (
        whole,
        place,
        whole[place][: max(map(whole[place].rfind, SIGNS)) + 1] if taken_apart else "",
    )


def _packaged(kind: str) -> list[str]:
    folder = PACKAGE / "data" / kind
    folder = folder if folder.is_dir() else PACKAGE.parent / kind
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _paths(incomplete: str, *suffixes: str) -> Iterator[str]:
    """Folders and files of these endings that begin as is typed; a folder ends with a slash."""
    folder, _, begun = incomplete.rpartition("/")
    inside = Path(folder or ("/" if incomplete.startswith("/") else "."))
    if not inside.is_dir():
        return
    for path in sorted(inside.iterdir()):
        if path.name.startswith(begun) and (begun or not path.name.startswith(".")):
            name = f"{folder}/{path.name}" if "/" in incomplete else path.name
            if path.is_dir():
                yield f"{name}/"
            elif path.suffix in suffixes:
                yield name


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
