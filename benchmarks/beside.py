"""The SDK beside everything else that an application runs: its counts against the server's own.

    python benchmarks/beside.py [--venvs FOLDER] [--install] [--only NAME]

Each program of `beside_programs.py` runs in a process of its own against the embedded endpoint. With --venvs it is that
of FOLDER/NAME, in which --install puts the newest version of its packages (needs the network, and some minutes).
Without --venvs it is this interpreter, and what is not installed here is left out by name.

Held against the endpoint's log: the number of requests, the prompt tokens of every call that was answered, the output
tokens of each that was read to its end, and that what was refused reached the application as an exception.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import rig
from beside_programs import PROGRAMS

from loadgen.sim.server.send_log import LoggedRequest, parse_log

SDK = rig.HERE.parent / "sdk"
LEFT = ("abandoned", "cancelled")  # statuses of a stream that nobody read to its end
NEEDED = ("msgspec", "asyncio-throttle")  # by the SDK
MODULES = {
    "opentelemetry-instrumentation-openai": "opentelemetry.instrumentation.openai",
    "openai-agents": "agents",
}


def python_of(name: str, venvs: Path | None, install: bool) -> str | None:
    """The interpreter that has a program's packages; None: there is none."""
    if venvs is None:
        module = MODULES.get(name, name.replace("-", "_"))
        try:
            return sys.executable if find_spec(module) is not None else None
        except ModuleNotFoundError:
            return None
    python = venvs / name / "bin" / "python"
    if install and not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venvs / name)], check=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "-q", *PROGRAMS[name][1], *NEEDED], check=True
        )
    return str(python) if python.exists() else None


def drained(url: str) -> list[LoggedRequest]:
    logged = parse_log(rig.get(url + "/_log")).requests
    return [one for one in logged if one.path.startswith("/v1/") and one.path != "/v1/models"]


def compared(
    told: list[list[Any]], served: list[LoggedRequest], refused: list[LoggedRequest]
) -> dict[str, Any]:
    """What the SDK told beside what the two endpoints logged. `wrong`: what differs, in words."""
    failed = [one for one in told if one[0] == "failed"]
    answered = [one for one in told if one[0] != "failed"]
    whole = [one for one in answered if one[0] == "ok" and one[4] == "server"]
    wrong = []
    if len(answered) != len(served):
        wrong.append(f"{len(answered)} calls answered, {len(served)} served")
    if len(failed) != len(refused):
        wrong.append(f"{len(failed)} calls failed, {len(refused)} refused")
    if sum(one[0] in LEFT for one in told) != 1:
        wrong.append("not exactly one stream was left early")
    # Of a call whose usage the server sent, both counts have to be those of a request in its log.
    left = sorted((one.input_tokens, one.output_tokens) for one in served)
    for counts in sorted((one[2], one[3]) for one in whole):
        if counts in left:
            left.remove(counts)
        else:
            wrong.append(f"{counts[0]} + {counts[1]} tokens, of which the server knows nothing")
    return {
        "calls": len(told),
        "early": sum(one[0] in LEFT for one in told),
        "failed": len(failed),
        "tokens": sum(one[2] + one[3] for one in whole),
        "wrong": wrong,
    }


def walked(name: str, python: str) -> tuple[bool, tuple[str, ...]]:
    """Run a program. Returns whether all counts are equal, and its row of the table."""
    with (
        rig.endpoint(ttft="3ms", itl="1ms", log_events="ends") as server,
        rig.endpoint(faults="http_429@1s", log_events="ends") as refusing,
    ):
        command = [
            python,
            str(rig.HERE / "beside_programs.py"),
            name,
            f"{server.url}/v1",
            f"{refusing.url}/v1",
        ]
        around = {**os.environ, "PYTHONPATH": str(SDK)}
        ran = subprocess.run(
            command, env=around, capture_output=True, text=True, timeout=240, check=False
        )
        if ran.returncode != 0:
            print(f"{name}: {ran.stderr[-3000:]}")
            return False, (name, "", "", "", "", "", "", "the program failed")
        said = json.loads(ran.stdout.splitlines()[-1])
        found = compared(said["told"], drained(server.url), drained(refusing.url))
    wrong = (
        found["wrong"]
        if said["raised"]
        else [*found["wrong"], "a refusal did not reach the application"]
    )
    counts = (str(found[key]) for key in ("calls", "early", "failed", "tokens"))
    row = (
        name,
        next(iter(said["versions"].values())),
        *counts,
        ", ".join(said["raised"]),
        "; ".join(wrong) or "equal",
    )
    return not wrong, row


def main() -> None:
    options = rig.parser(__doc__)
    options.add_argument(
        "--venvs", type=Path, metavar="FOLDER", help="a virtual environment for each, by its name"
    )
    options.add_argument("--install", action="store_true", help="make those that are not there")
    options.add_argument("--only", choices=sorted(PROGRAMS), help="one program")
    given = rig.given(options, only="openai")
    all_equal, rows = True, list[tuple[str, ...]]()
    for name in [given.only] if given.only else PROGRAMS:
        python = python_of(name, given.venvs, given.install)
        equal, row = (
            (True, (name, *[""] * 6, "not installed")) if python is None else walked(name, python)
        )
        all_equal &= equal
        rows.append(row)
        print("  ".join(row), flush=True)
    columns = "package", "version", "calls", "left early", "failed", "tokens", "raised", "counts"
    print("\n" + rig.table(columns, rows))
    sys.exit(not all_equal)


if __name__ == "__main__":
    main()
