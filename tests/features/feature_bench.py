"""Run commands for the checks of features: in this process, in virtual time or over HTTP."""

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

    `check` returns whether the feature exists, or a mapping from the names of its parts to that.
    `exclusion_reason` is the reason for a feature that is left out on purpose.
    """

    name: str
    check: Callable[[Bench], bool | Mapping[str, bool]]
    exclusion_reason: str = ""


class MissingFieldError(LookupError):
    """A result lacks a field that a check reads, so the feature does not exist."""


class CommandResult(NamedTuple):
    """A command that ended: exit code, stdout, stderr and the folder of its result."""

    code: int
    out: str
    stderr: str
    folder: Path

    def __getitem__(self, path: str) -> Any:
        """Return a field of the printed JSON by its path, such as `ttft_ms.p50`.

        Raises MissingFieldError if it does not exist or is null.
        """
        try:
            value: Any = json.loads(self.out)
            for name in path.split("."):
                value = value[name]
        except (ValueError, KeyError, TypeError):
            raise MissingFieldError(path) from None
        if value is None:
            raise MissingFieldError(path)
        return value


class Bench:
    """Runs commands in a folder of its own; the same command runs once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done: dict[str, CommandResult] = {}

    def file(self, name: str, *lines: Any) -> Path:
        """Write a file with these lines; lines that are not text are written as JSON."""
        text = "".join(
            (line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines
        )
        (self.folder / name).write_text(text, "utf-8")
        return self.folder / name

    def do(self, command_line: str, folder: Path | None = None) -> CommandResult:
        """Run a command line of loadgen."""
        if command_line not in self._done:
            out, errors = (
                io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in "os"
            )
            code: Any = 0
            with (
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(errors),
                contextlib.chdir(self.folder),
            ):
                try:
                    app.main(shlex.split(command_line))
                except SystemExit as exit_request:
                    code = exit_request.code
            texts = [str(stream.buffer.getvalue(), "utf-8") for stream in (out, errors)]  # type: ignore[attr-defined]
            self._done[command_line] = CommandResult(int(code or 0), *texts, folder or self.folder)
        return self._done[command_line]

    def run(
        self, flags: str = "-c 4 -n 24", workload: str = PLAIN, *, url: str = "sim:gb300-vm"
    ) -> CommandResult:
        """Run a workload, in virtual time unless a URL is given; the result gives its summary."""
        key = f"{len(self._done)}"
        known = f"run {flags} {workload} {url}"
        if known not in self._done:
            name = self.file(f"w{key}.yaml", "name: w", workload).name
            typed = f"run {name} --url {url} --seed 1 --json -o run{key} {flags}"
            self._done[known] = self.do(typed, self.folder / f"run{key}")
        return self._done[known]

    def http(self, flags: str = "-c 2 -n 6 --warmup 0", workload: str = PLAIN) -> CommandResult:
        """Run a workload over HTTP, at a simulated endpoint of this machine."""
        flags += " --server-metrics off --energy off"
        return self.run(flags, workload, url=shared().url)

    def rows(self, ran: CommandResult, name: str) -> NDArray[Any]:
        """Return one column of the records of a run.

        Raises MissingFieldError if the run was refused.
        """
        if ran.code == 2:
            raise MissingFieldError(name)
        return np.asarray(loadgen.load(ran.folder).rows.column(name))

    def report(self, ran: CommandResult) -> str:
        """Return the full printed report of a run."""
        return self.do(f"report {ran.folder} --no-html --full").out

    def help(self, command: str) -> str:
        """Return the complete help of a command."""
        return self.do(f"{command} --help-all").out


def verdict(feature: Feature, bench: Bench) -> tuple[str, str]:
    """Return `yes`, `partly` or `no`, and the names of the missing parts."""
    try:
        result = feature.check(bench)
    except MissingFieldError:
        return "no", ""
    if not isinstance(result, Mapping):
        return ("yes" if result else "no"), ""
    absent = [name for name, exists in result.items() if not exists]
    return ("yes" if not absent else "no" if len(absent) == len(result) else "partly"), ", ".join(
        absent
    )


@cache
def stored(name: str) -> Any:
    """Return a result of another tool from results/rivals; of several JSON lines, the last."""
    text = (ROOT / "results/rivals" / name).read_text("utf-8")
    return json.loads(text if name.endswith(".json") else text.splitlines()[-1])
