"""What the checks of features stand on: commands of this process, runs in virtual time, one simulated endpoint."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from servers import shared

import loadgen
from loadgen.cli import app

ROOT = Path(__file__).parent.parent.parent
PLAIN = "requests: {input_tokens: 50, output_tokens: 5}"


class Feature(NamedTuple):
    """One row of the page.

    check: says whether the feature is there, or of each of its parts, by their names, whether it is. why: why it is not
    to be.
    """

    name: str
    check: Callable[[Bench], bool | Mapping[str, bool]]
    why: str = ""


class Missing(LookupError):
    """A result lacks what a check asks of it: the feature is not there."""


class Ran(NamedTuple):
    """A command that ended: its exit code, what it printed, what it said beside, and the folder of its result."""

    code: int
    out: str
    said: str
    folder: Path

    def __getitem__(self, path: str) -> Any:  # type: ignore[override]
        """A field of the JSON that was printed, by its path: `ttft_ms.p50`. Raises Missing."""
        try:
            found: Any = json.loads(self.out)
            for name in path.split("."):
                found = found[name]
        except (ValueError, KeyError, TypeError):
            raise Missing(path) from None
        if found is None:
            raise Missing(path)
        return found


class Bench:
    """Carries out commands in a folder of its own; the same command is carried out once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: dict[str, Ran] = {}

    def file(self, name: str, *lines: Any) -> Path:
        """A file with these lines; what is no text, as JSON."""
        text = "".join(
            (line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines
        )
        (self.folder / name).write_text(text, "utf-8")
        return self.folder / name

    def do(self, words: str, folder: Path | None = None) -> Ran:
        """A command as it is typed."""
        if words not in self._done:
            out, said = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in "os")
            code: Any = 0
            with (
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(said),
                contextlib.chdir(self.folder),
            ):
                try:
                    app.main(shlex.split(words))
                except SystemExit as left:
                    code = left.code
            texts = [str(stream.buffer.getvalue(), "utf-8") for stream in (out, said)]  # type: ignore[attr-defined]
            self._done[words] = Ran(int(code or 0), *texts, folder or self.folder)
        return self._done[words]

    def run(
        self, flags: str = "-c 4 -n 24", workload: str = PLAIN, *, url: str = "sim:gb300-vm"
    ) -> Ran:
        """`loadgen run` of a workload's text, in virtual time where no URL is given; its summary by path."""
        key = f"{len(self._done)}"
        known = f"run {flags} {workload} {url}"
        if known not in self._done:
            name = self.file(f"w{key}.yaml", "name: w", workload).name
            typed = f"run {name} --url {url} --seed 1 --json -o run{key} {flags}"
            self._done[known] = self.do(typed, self.folder / f"run{key}")
        return self._done[known]

    def http(self, flags: str = "-c 2 -n 6 --warmup 0", workload: str = PLAIN) -> Ran:
        """The same over HTTP, at a simulated endpoint of this machine."""
        flags += " --server-metrics off --energy off"
        return self.run(flags, workload, url=shared().url)

    def rows(self, ran: Ran, name: str) -> NDArray[Any]:
        """One column of the records of a run. Raises Missing where the run was refused."""
        if ran.code == 2:
            raise Missing(name)
        return np.asarray(loadgen.load(ran.folder).rows.column(name))

    def report(self, ran: Ran) -> str:
        """What is printed of its result."""
        return self.do(f"report {ran.folder} --no-html").out

    def help(self, command: str) -> str:
        """All that the help of a command says."""
        return self.do(f"{command} --help-all").out


def verdict(feature: Feature, bench: Bench) -> tuple[str, str]:
    """`yes`, `partly` or `no`, and the names of the parts that are not there."""
    try:
        found = feature.check(bench)
    except Missing:
        return "no", ""
    if not isinstance(found, Mapping):
        return ("yes" if found else "no"), ""
    absent = [name for name, there in found.items() if not there]
    return ("yes" if not absent else "no" if len(absent) == len(found) else "partly"), ", ".join(
        absent
    )


@cache
def stored(name: str) -> Any:
    """What another tool has left in results/rivals: JSON, of several lines the last."""
    text = (ROOT / "results/rivals" / name).read_text("utf-8")
    return json.loads(text if name.endswith(".json") else text.splitlines()[-1])
