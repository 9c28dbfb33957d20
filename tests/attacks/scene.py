"""Start a command as a terminal does, wait for the moment of an attack, and check what is left."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import processes

from loadgen.core import run_folder

WAIT_S = 120.0
SCENERY = {"said", "address", "was-address", "ca.pem"}
LENIENT = (
    "--set limit=send_lag_share:100% --set limit=stamp_error_share:100% --set limit=cpu_share:100%"
)
WORKLOAD = "name: w\nrequests: {input_tokens: 20, output_tokens: 30}\n"
STARTED = """
import json, os, resource, signal, sys
# The process that runs the tests may ignore these signals; a terminal does not.
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
for what, most in json.loads(sys.argv[1]):
    resource.setrlimit(what, (most, most))
os.execv(sys.argv[2], sys.argv[2:])
"""


class Row(NamedTuple):
    """One attack.

    `name` is what `pytest -m attacks -k` takes. `codes` are the allowed exit codes.
    `expected_output` is a part of the output. `left` is what is on disk afterwards, a key of LEFT.
    `always` marks attacks that are cheap enough for every run of the tests.
    """

    name: str
    attack: str
    command: str
    phase: str
    codes: tuple[int, ...]
    expected_output: str
    left: str
    do: Callable[[Scene], object]
    always: bool = False


class Scene:
    """One command in a folder of its own.

    `url` is a simulated server, and `{url}` in a command stands for it. `slow` is a server whose
    responses take a while.
    """

    def __init__(self, folder: Path, url: str, slow: str = "") -> None:
        self.folder, self.url, self.slow, self.out = folder, url, slow, folder / "out"
        (folder / "w.yaml").write_text(WORKLOAD)
        self.before: set[Path] = set()
        self.process: subprocess.Popen[bytes] | None = None

    def go(
        self,
        command: str,
        env: Mapping[str, str] | None = None,
        limits: Mapping[int, int] | None = None,
    ) -> None:
        """Start a command as the leader of a process group, as a shell with a terminal does."""
        self.before = set(self.folder.rglob("*"))
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OPENAI_", "AZURE_"))
        }

        with open(self.folder / "said", "wb") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-S",
                    "-c",
                    STARTED,
                    json.dumps(list((limits or {}).items())),
                    sys.executable,
                    "-P",
                    "-m",
                    "loadgen",
                    *command.format(url=self.url).split(),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=clean | dict(env or {}),
                process_group=0,
            )

    def strike(self, *numbers: int) -> None:
        """Send signals to the whole group, as Ctrl-C in a terminal does."""
        assert self.process is not None
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            select.select([], [], [], 0.05)

    def read_output(self) -> str:
        """Return what the command has printed."""
        return (self.folder / "said").read_text("utf-8", "replace")

    def until(self, there: Callable[[], object]) -> None:
        """Wait for an instant, or for the end of the command."""
        assert self.process is not None
        last = monotonic() + WAIT_S
        while not there() and self.process.poll() is None:
            assert monotonic() < last, f"the command did not get so far: {self.read_output()}"
            select.select([], [], [], 0.003)

    def heard(self) -> None:
        """Wait until the command has installed its handler of SIGHUP."""
        self.until(lambda: self._status("SigCgt:") >> (signal.SIGHUP - 1) & 1)

    def computing(self) -> None:
        """Wait until the command has imported numpy."""
        self.until(lambda: "_multiarray_umath" in self._proc("maps"))

    def loading(self, least: int = 1) -> None:
        """Wait until requests have records."""
        self.until(
            lambda: sum(file.stat().st_size for file in self.out.rglob("spool/w*.rows")) >= least
        )

    def _status(self, name: str) -> int:
        return int(
            next(
                (line.split()[1] for line in self._proc("status").splitlines() if name in line), "0"
            ),
            16,
        )

    def _proc(self, name: str) -> str:
        assert self.process is not None
        try:
            return Path(f"/proc/{self.process.pid}/{name}").read_text()
        except OSError:
            return ""

    def ended(self) -> int:
        """Wait for the end of the command and return its exit code."""
        assert self.process is not None
        try:
            return self.process.wait(WAIT_S)
        finally:
            self.strike(signal.SIGKILL)

    def group(self) -> list[int]:
        """Return the processes of the group that still run."""
        assert self.process is not None
        return [
            pid
            for pid, (state, _, group, *_) in processes.running().items()
            if int(group) == self.process.pid and state != "Z"
        ]

    def family(self) -> list[int]:
        """Return the command and its children, which may have a group of their own."""
        assert self.process is not None
        return [self.process.pid, *processes.children(self.process.pid)]

    def new(self) -> set[Path]:
        """Return the files that the command has created."""
        return {path for path in self.folder.rglob("*") if path.name not in SCENERY} - self.before


def _check_records(scene: Scene) -> None:
    run_dirs = [path.parent for path in scene.out.rglob("run.json")]
    assert run_dirs, scene.read_output()
    for run in run_dirs:
        requests = run_folder.open_run(run).summary.requests
        parts = ("ok", "failed", "dropped", "cancelled", "unfinished", "lost")
        assert sum(getattr(requests, part) for part in parts) == requests.scheduled


def _check_nothing(scene: Scene) -> None:
    assert not (new := scene.new()), sorted(new)


def _check_full_result(scene: Scene) -> None:
    _check_records(scene)
    assert (scene.out / "SHA256SUMS").exists()


def _check_unharmed(scene: Scene) -> None:
    _check_full_result(scene)
    requests = run_folder.open_run(scene.out).summary.requests
    assert requests.ok == requests.scheduled, requests


def unhurried(do: Callable[[Scene], object]) -> Callable[[Scene], object]:
    """Repeat an attack on the slow server.

    Compared with its latency the delays of a busy host are small (LENIENT), so that they do not
    make the run invalid, which would change the exit code to 3.
    """

    def slowly(scene: Scene) -> None:
        scene.url = scene.slow
        do(scene)

    return slowly


NOTHING, RECORDED, FULL_RESULT, UNHARMED = (
    "nothing",
    "what was recorded",
    "a whole result",
    "a whole result, all requests ok",
)
LEFT: dict[str, Callable[[Scene], None]] = {
    NOTHING: _check_nothing,
    RECORDED: _check_records,
    FULL_RESULT: _check_full_result,
    UNHARMED: _check_unharmed,
}


def check(row: Row, scene: Scene) -> None:
    """Run an attack and compare the outcome with its row."""
    row.do(scene)
    code, output = scene.ended(), scene.read_output()
    assert code in row.codes and row.expected_output in output, f"exit {code}: {output}"
    assert "Traceback" not in output and "internal error in loadgen" not in output, output
    last = monotonic() + 15
    while scene.group():
        assert monotonic() < last, f"processes are left: {scene.group()}"
        select.select([], [], [], 0.02)
    LEFT[row.left](scene)


def format_exit_codes(codes: tuple[int, ...]) -> str:
    return " or ".join(map(str, codes))


def short(command: str) -> str:
    """Return a command without the flags that all of its kind have."""
    flags = [flag for flag in ("--workers 2", "--dataset", "--trace") if flag in command]
    return " ".join([command.split(maxsplit=1)[0], *flags])


def table(rows: list[Row]) -> str:
    """Return the rows as they stand in benchmarks/attacks.md, one line for those that end alike."""
    commands_by_attack: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        remark = f" (`{row.expected_output}`)" if row.expected_output else ""
        end = (row.phase, format_exit_codes(row.codes), row.left)
        commands_by_attack.setdefault((row.attack, remark, *end), []).append(
            f"`{short(row.command)}`"
        )
    lines: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for (attack, remark, *end), commands in commands_by_attack.items():
        kind, colon, detail = attack.rpartition(": ")
        lines.setdefault((" ".join(commands), *end), {}).setdefault(kind + colon, []).append(
            detail + remark
        )
    table_lines = [
        "| attack (what is said) | command | when | exit | left on disk |",
        "|---|---|---|---|---|",
    ]
    for rest, kinds in lines.items():
        attacks = "; ".join(kind + "; ".join(same) for kind, same in kinds.items())
        table_lines.append(f"| {attacks} | {' | '.join(rest)} |")
    return "\n".join(table_lines)
