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

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import rig
from beside_programs import PROGRAMS, EndpointUrls, MeasuredCall, ProgramOutput

from loadgen.sim.server.send_log import LoggedRequest, parse_log

SDK_DIR = rig.BENCHMARKS_DIR.parent / "sdk"
SDK_REQUIREMENTS = ("msgspec", "asyncio-throttle")  # packages that the SDK imports
MODULE_NAMES = {  # of packages whose module has another name
    "opentelemetry-instrumentation-openai": "opentelemetry.instrumentation.openai",
    "openai-agents": "agents",
}
PROGRAM_TIMEOUT_S = 240
LEFT_EARLY_STATUSES = ("abandoned", "cancelled")  # of a stream that was not read to its end


def find_python(name: str, venvs_dir: Path | None, *, installs: bool) -> Path | None:
    """Return a Python interpreter that has a program's packages, or None if there is none.

    It is this interpreter, or with `venvs_dir` that of the virtual environment NAME in this folder.
    With `installs`, a missing virtual environment is created.
    """
    if venvs_dir is None:
        return Path(sys.executable) if is_installed(name) else None

    python = venvs_dir / name / "bin" / "python"
    if installs and not python.exists():
        create_venv(venvs_dir / name, [*PROGRAMS[name].packages, *SDK_REQUIREMENTS])
    return python if python.exists() else None


def is_installed(package: str) -> bool:
    """Return whether this interpreter can import a package."""
    module = MODULE_NAMES.get(package, package.replace("-", "_"))
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent of the module is missing
        return False


def create_venv(venv_dir: Path, packages: Sequence[str]) -> None:
    """Create a virtual environment with the newest versions of these packages."""
    subprocess.run([sys.executable, "-m", "venv", str(venv_dir)], check=True)
    pip_install = [str(venv_dir / "bin" / "python"), "-m", "pip", "install", "-q"]
    subprocess.run([*pip_install, *packages], check=True)


class ServedRequests(NamedTuple):
    """The requests that the two endpoints logged: answered by one, and refused by the other."""

    answered: list[LoggedRequest]
    refused: list[LoggedRequest]


def read_served_requests(url: str) -> list[LoggedRequest]:
    """Return the requests in the log of an endpoint, without those for its list of models."""
    requests = parse_log(rig.read_url(url + "/_log")).requests
    return [
        request
        for request in requests
        if request.path.startswith("/v1/") and request.path != "/v1/models"
    ]


@dataclass(frozen=True)
class CallCounts:
    """Counts of the calls of a program, as the SDK measured them."""

    calls: list[MeasuredCall]

    @property
    def failed(self) -> int:
        """Return the number of calls that failed."""
        return sum(call.status == "failed" for call in self.calls)

    @property
    def answered(self) -> int:
        """Return the number of calls that did not fail, with those that were left early."""
        return len(self.calls) - self.failed

    @property
    def left_early(self) -> int:
        """Return the number of streams that were not read to their end."""
        return sum(call.status in LEFT_EARLY_STATUSES for call in self.calls)

    @property
    def calls_with_usage(self) -> list[MeasuredCall]:
        """Return the complete calls whose token counts are those of the server."""
        return [
            call for call in self.calls if call.status == "ok" and call.token_source == "server"
        ]

    @property
    def total_tokens(self) -> int:
        """Return the prompt and output tokens of all calls with usage."""
        return sum(
            (call.input_tokens or 0) + (call.output_tokens or 0) for call in self.calls_with_usage
        )


def find_differences(counts: CallCounts, served: ServedRequests) -> Iterator[str]:
    """Yield what differs between the counts of the SDK and the logs of the endpoints."""
    if counts.answered != len(served.answered):
        yield f"{counts.answered} calls answered, {len(served.answered)} in the log"

    if counts.failed != len(served.refused):
        yield f"{counts.failed} calls failed, {len(served.refused)} refused in the log"

    if counts.left_early != 1:
        yield f"{counts.left_early} streams left early instead of 1"

    yield from find_unlogged_tokens(counts.calls_with_usage, served.answered)


def find_unlogged_tokens(
    calls: Sequence[MeasuredCall], requests: Sequence[LoggedRequest]
) -> Iterator[str]:
    """Yield the token counts of each call to which no request in the log is equal.

    Each request is used for one call only. Both of its counts must be equal.
    """
    unmatched = [(request.input_tokens, request.output_tokens) for request in requests]
    for call in calls:
        tokens = (call.input_tokens, call.output_tokens)
        if tokens in unmatched:
            unmatched.remove(tokens)
        else:
            yield f"{call.input_tokens} + {call.output_tokens} tokens are not in the log"


COLUMNS = ("package", "version", "calls", "left early", "failed", "tokens", "exceptions", "counts")


class ProgramResult(NamedTuple):
    """The row of a program in the table, and whether all its counts are equal."""

    row: tuple[str, ...]
    is_equal: bool


def create_result_without_counts(name: str, remark: str, *, is_equal: bool) -> ProgramResult:
    """Return the row of a program that gave no counts: its name, empty cells and a remark."""
    empty_cells = [""] * (len(COLUMNS) - 2)
    return ProgramResult((name, *empty_cells, remark), is_equal)


def run_and_compare(name: str, python: Path | None) -> ProgramResult:
    """Run a program, and compare what the SDK measured with the logs of the endpoints.

    One endpoint responds to the program's calls, the other refuses them with HTTP status 429.
    `python` is the interpreter, or None if no interpreter has the packages of the program.
    """
    if python is None:
        return create_result_without_counts(name, "not installed", is_equal=True)

    with (
        rig.serve_endpoint(ttft="3ms", itl="1ms", log_events="ends") as responding,
        rig.serve_endpoint(faults="http_429@1s", log_events="ends") as refusing,
    ):
        urls = EndpointUrls(f"{responding.url}/v1", f"{refusing.url}/v1")
        completed = run_program_process(name, python, urls)
        served = ServedRequests(
            answered=read_served_requests(responding.url),
            refused=read_served_requests(refusing.url),
        )

    if completed.returncode != 0:
        print(f"{name}: {completed.stderr[-3000:]}")
        return create_result_without_counts(name, "the program failed", is_equal=False)

    output = ProgramOutput.from_json(completed.stdout.splitlines()[-1])
    return compare_output(name, output, served)


def run_program_process(
    name: str, python: Path, urls: EndpointUrls
) -> subprocess.CompletedProcess[str]:
    """Run a program of beside_programs.py with this interpreter and the SDK of this checkout."""
    script = rig.BENCHMARKS_DIR / "beside_programs.py"
    return subprocess.run(
        [python, script, name, *urls],
        env={**os.environ, "PYTHONPATH": str(SDK_DIR)},
        capture_output=True,
        text=True,
        timeout=PROGRAM_TIMEOUT_S,
        check=False,
    )


def compare_output(name: str, output: ProgramOutput, served: ServedRequests) -> ProgramResult:
    """Return the row of a program that succeeded, with the differences or "equal" at its end."""
    counts = CallCounts(output.calls)
    differences = list(find_differences(counts, served))
    if not output.exception_names:
        differences.append("a refusal did not reach the application")

    main_package_version = next(iter(output.versions.values()))
    row = (
        name,
        main_package_version,
        str(len(counts.calls)),
        str(counts.left_early),
        str(counts.failed),
        str(counts.total_tokens),
        ", ".join(output.exception_names),
        "; ".join(differences) or "equal",
    )
    return ProgramResult(row, is_equal=not differences)


def main() -> int:
    """Run the programs and return 1 if a count of any of them differs from the endpoint's log."""
    args = parse_command_line()
    names = [args.only] if args.only else list(PROGRAMS)
    results = []
    for name in names:
        python = find_python(name, args.venvs, installs=args.install)
        result = run_and_compare(name, python)
        results.append(result)
        print("  ".join(result.row), flush=True)

    print("\n" + rig.format_table(COLUMNS, [result.row for result in results]))
    return 0 if all(result.is_equal for result in results) else 1


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__)
    parser.add_argument(
        "--venvs", type=Path, metavar="FOLDER", help="a virtual environment for each, by its name"
    )
    parser.add_argument("--install", action="store_true", help="make those that are not there")
    parser.add_argument("--only", choices=sorted(PROGRAMS), help="one program")
    return rig.parse_arguments(parser, only="openai")


if __name__ == "__main__":
    sys.exit(main())
