"""Does the SDK count correctly next to other packages that an application uses?

    python benchmarks/beside.py [--venvs FOLDER] [--install] [--only NAME]

Each program of `beside_programs.py` runs in its own process against the embedded endpoint, for some
seconds. With --venvs, it runs in the environment FOLDER/NAME; --install creates it with the newest
versions of its packages (needs the network and some minutes). Without --venvs, this interpreter
runs it, and a package that is not installed is listed as such.

The table compares the SDK with the endpoint's log: the number of requests, the prompt tokens of
every completed call, the output tokens of every call that was read to its end, and whether refused
calls reached the application as exceptions. Exit code 1 if a count differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import rig
from beside_programs import PROGRAMS

from loadgen.sim.server.send_log import LoggedRequest, parse_log

SDK = rig.BENCHMARKS_DIR.parent / "sdk"
LEFT_EARLY_STATUSES = ("abandoned", "cancelled")  # statuses of a stream that nobody read to its end
SDK_REQUIREMENTS = ("msgspec", "asyncio-throttle")  # by the SDK
MODULES = {
    "opentelemetry-instrumentation-openai": "opentelemetry.instrumentation.openai",
    "openai-agents": "agents",
}


def find_python(name: str, venvs: Path | None, install: bool) -> str | None:
    """Return the interpreter that has a program's packages, or None if there is none.

    With `install`, create its virtual environment if it does not exist yet.
    """
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
            [str(python), "-m", "pip", "install", "-q", *PROGRAMS[name][1], *SDK_REQUIREMENTS],
            check=True,
        )

    return str(python) if python.exists() else None


def read_served_requests(url: str) -> list[LoggedRequest]:
    """Return the requests that the endpoint served, without those for its list of models."""
    requests = parse_log(rig.read_url(url + "/_log")).requests
    return [
        request
        for request in requests
        if request.path.startswith("/v1/") and request.path != "/v1/models"
    ]


def compare_counts(
    measurements: list[list[Any]], served: list[LoggedRequest], refused: list[LoggedRequest]
) -> dict[str, Any]:
    """Compare what the SDK measured with what the two endpoints logged.

    `wrong` lists the differences as sentences.
    """
    failed = [row for row in measurements if row[0] == "failed"]
    answered = [row for row in measurements if row[0] != "failed"]
    counted = [row for row in answered if row[0] == "ok" and row[4] == "server"]

    wrong = []
    if len(answered) != len(served):
        wrong.append(f"{len(answered)} calls answered, {len(served)} served")

    if len(failed) != len(refused):
        wrong.append(f"{len(failed)} calls failed, {len(refused)} refused")

    if sum(row[0] in LEFT_EARLY_STATUSES for row in measurements) != 1:
        wrong.append("not exactly one stream was left early")

    # Of a call whose usage the server sent, both counts have to be those of a request in its log.
    unmatched = sorted((row.input_tokens, row.output_tokens) for row in served)
    for counts in sorted((row[2], row[3]) for row in counted):
        if counts in unmatched:
            unmatched.remove(counts)
        else:
            wrong.append(f"{counts[0]} + {counts[1]} tokens, of which the server knows nothing")

    return {
        "calls": len(measurements),
        "early": sum(row[0] in LEFT_EARLY_STATUSES for row in measurements),
        "failed": len(failed),
        "tokens": sum(row[2] + row[3] for row in counted),
        "wrong": wrong,
    }


COLUMNS = ("package", "version", "calls", "left early", "failed", "tokens", "raised", "counts")


class ProgramResult(NamedTuple):
    """The row of a program in the table, and whether all its counts are equal."""

    row: tuple[str, ...]
    is_equal: bool


def result_without_counts(name: str, remark: str, *, is_equal: bool) -> ProgramResult:
    """Return the row of a program that gave no counts: its name, empty cells and a remark."""
    empty_cells = [""] * (len(COLUMNS) - 2)
    return ProgramResult((name, *empty_cells, remark), is_equal)


def run_program(
    name: str, python: str, url: str, refusing_url: str
) -> subprocess.CompletedProcess[str]:
    """Run a program of beside_programs.py with this interpreter, against two endpoints."""
    script = str(rig.BENCHMARKS_DIR / "beside_programs.py")
    return subprocess.run(
        [python, script, name, f"{url}/v1", f"{refusing_url}/v1"],
        env={**os.environ, "PYTHONPATH": str(SDK)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def run_and_compare(name: str, python: str) -> ProgramResult:
    """Run a program, and compare what the SDK measured with the log of the endpoints.

    One endpoint answers the program's calls, the other refuses them.
    """
    with (
        rig.serve_endpoint(ttft="3ms", itl="1ms", log_events="ends") as server,
        rig.serve_endpoint(faults="http_429@1s", log_events="ends") as refusing,
    ):
        completed = run_program(name, python, server.url, refusing.url)
        if completed.returncode != 0:
            print(f"{name}: {completed.stderr[-3000:]}")
            return result_without_counts(name, "the program failed", is_equal=False)

        output = json.loads(completed.stdout.splitlines()[-1])
        comparison = compare_counts(
            output["told"], read_served_requests(server.url), read_served_requests(refusing.url)
        )

    differences = comparison["wrong"]
    if not output["raised"]:
        differences = [*differences, "a refusal did not reach the application"]

    package_version, *_ = output["versions"].values()
    row = (
        name,
        package_version,
        str(comparison["calls"]),
        str(comparison["early"]),
        str(comparison["failed"]),
        str(comparison["tokens"]),
        ", ".join(output["raised"]),
        "; ".join(differences) or "equal",
    )
    return ProgramResult(row, not differences)


def main() -> int:
    """Run the programs and return 1 if a count of any of them differs from the endpoint's log."""
    parser = rig.create_parser(__doc__)
    parser.add_argument(
        "--venvs", type=Path, metavar="FOLDER", help="a virtual environment for each, by its name"
    )
    parser.add_argument("--install", action="store_true", help="make those that are not there")
    parser.add_argument("--only", choices=sorted(PROGRAMS), help="one program")
    args = rig.parse_arguments(parser, only="openai")

    results = []
    for name in [args.only] if args.only else PROGRAMS:
        python = find_python(name, args.venvs, args.install)
        if python is None:
            result = result_without_counts(name, "not installed", is_equal=True)
        else:
            result = run_and_compare(name, python)
        results.append(result)
        print("  ".join(result.row), flush=True)

    print("\n" + rig.format_table(COLUMNS, [result.row for result in results]))
    return 0 if all(result.is_equal for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
