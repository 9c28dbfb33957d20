"""What does the submission checker of MLPerf Endpoints say about a rehearsed package?

    python -m venv checker && checker/bin/pip install endpoints-submission-cli
    python benchmarks/endpoints_package.py --checker-python checker/bin/python

loadgen rehearses a curve on a simulated server twice: without any facts about the system, and with
those of an example of a system file. `--curve` names a curve with its runs instead. loadgen writes
the package, and the checker of MLCommons reads it. The script prints how many checks passed, and a
row for each objection. The package of a rehearsal is never accepted: it has no accuracy runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import rig

LOADGEN_ENDPOINTS = (sys.executable, "-P", "-m", "loadgen", "mlperf", "endpoints")
CURVE_OPTIONS = (
    *("-b", "llama3.1-8b"),
    *("--c-min", "8"),
    *("--c-max", "256"),
    *("--url", "sim:gb300-vm"),
    *("--power-kw", "8"),
)
SYSTEM_FILE = rig.BENCHMARKS_DIR.parent / "docs" / "system.example.yaml"
SYSTEM_OPTIONS = (
    *("--system", str(SYSTEM_FILE)),
    *("--metadata", "dataset_link=https://example.org/data"),
    *("--metadata", "power_source=https://example.org/power"),
)
SYSTEM_OPTIONS_BY_TITLE: dict[str, tuple[str, ...]] = {
    "Nothing is stated about the system": (),
    "With a system file": SYSTEM_OPTIONS,
}

# This program runs in the Python of the checker, which need not have loadgen. It checks the
# submission whose directory is its argument, and prints each result as a JSON list.
CHECKER_PROGRAM = """\
import json, sys
from pathlib import Path
from submission_checker.checker import SubmissionChecker
for result in SubmissionChecker(Path(sys.argv[1])).run().results:
    print(json.dumps([result.rule, result.severity.value, result.message]))
"""
PASSED_SEVERITY = "info"  # of a check that passed
OBJECTION_COLUMNS = ("rule", "severity", "findings", "for example")


class CheckResult(NamedTuple):
    """A result of the submission checker, whose severity is "info" if the check passed."""

    rule: str
    severity: str
    message: str


def rehearse_curve(curve_dir: Path, system_options: Sequence[str]) -> None:
    """Rehearse a curve of MLPerf Endpoints in virtual time, which takes some minutes.

    `system_options` are the options that describe the system. Errors show later, when no package
    can be written.
    """
    command = [*LOADGEN_ENDPOINTS, "run", *CURVE_OPTIONS, *system_options, "--out", str(curve_dir)]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def write_package(curve_dir: Path, package_dir: Path) -> Path:
    """Write the package of a curve with loadgen, and return the directory of its submission.

    The exit code of loadgen also depends on the rules that a rehearsal cannot keep. So success
    shows in the directory `results` of the submission. Raises SystemExit if there is none.
    """
    completed = subprocess.run(
        [*LOADGEN_ENDPOINTS, "check", str(curve_dir), "--package", str(package_dir)],
        capture_output=True,
        text=True,
        check=False,
    )
    results_dirs = list(package_dir.glob("*/*/results"))
    if not results_dirs:
        raise SystemExit(f"no package was written:\n{completed.stdout}{completed.stderr}")
    return results_dirs[0].parent


def check_submission(submission_dir: Path, checker_python: str) -> list[CheckResult]:
    """Return the results of the submission checker. Raises SystemExit if the checker fails.

    `checker_python` is a Python with the package endpoints-submission-cli.
    """
    completed = subprocess.run(
        [checker_python, "-c", CHECKER_PROGRAM, str(submission_dir)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if completed.returncode:
        raise SystemExit("the submission checker ended with an error, see above")
    return [CheckResult(*json.loads(line)) for line in completed.stdout.splitlines()]


def format_report(results: Sequence[CheckResult]) -> str:
    """Return how many results have each severity, and a table of the rules that are violated."""
    severities = Counter(result.severity for result in results)
    summary = ", ".join(f"{count} {severity}" for severity, count in severities.most_common())
    return f"{summary}\n\n{format_objections(results)}"


def format_objections(results: Sequence[CheckResult]) -> str:
    """Return a table of the checks that failed, with one row and one message for each rule."""
    objections = [result for result in results if result.severity != PASSED_SEVERITY]
    counts = Counter((objection.severity, objection.rule) for objection in objections)
    messages = {(objection.severity, objection.rule): objection.message for objection in objections}
    rows = [
        [rule, severity, str(count), messages[severity, rule]]
        for (severity, rule), count in sorted(counts.items())
    ]
    return rig.format_table(OBJECTION_COLUMNS, rows)


def check_curve(curve_dir: Path, package_dir: Path, checker_python: str) -> None:
    """Write the package of a curve, check it, and print the results."""
    submission_dir = write_package(curve_dir, package_dir)
    print(format_report(check_submission(submission_dir, checker_python)))


def main() -> None:
    """Check the package of the curve in `--curve`, or of a curve that is rehearsed in two ways."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--curve", type=Path, help="a folder with a curve and its runs")
    parser.add_argument(
        "--checker-python", help="a Python with the package endpoints-submission-cli"
    )
    args = rig.parse_arguments(parser)
    if args.checker_python is None:
        rig.skip_script("it needs --checker-python, with the package endpoints-submission-cli")

    with tempfile.TemporaryDirectory(prefix="loadgen-package-") as scratch:
        scratch_dir = Path(scratch)
        if args.curve is not None:
            check_curve(args.curve, scratch_dir / "package", args.checker_python)
            return

        for number, (title, system_options) in enumerate(SYSTEM_OPTIONS_BY_TITLE.items()):
            curve_dir = scratch_dir / f"curve{number}"
            rehearse_curve(curve_dir, system_options)
            print(f"\n{title}:")
            check_curve(curve_dir, scratch_dir / f"package{number}", args.checker_python)


if __name__ == "__main__":
    main()
