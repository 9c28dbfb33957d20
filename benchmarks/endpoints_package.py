"""What does the submission checker of MLPerf Endpoints say about a rehearsed package?

    python -m venv checker && checker/bin/pip install endpoints-submission-cli
    python benchmarks/endpoints_package.py --checker-python checker/bin/python

loadgen rehearses a curve on a simulated server, unless `--curve` names one with its runs, and
writes its package. The checker of MLCommons reads it. The script prints how many checks passed, and
a row for each objection. The package of a rehearsal is never accepted: it has no accuracy runs, and
it leaves out what only a submitter knows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import rig

CURVE_OPTIONS = "-b llama3.1-8b --c-min 8 --c-max 256 --url sim:gb300-vm --power-kw 8"
LOADGEN = (sys.executable, "-P", "-m", "loadgen", "mlperf", "endpoints")
CHECKER_PROGRAM = """\
import json, sys
from pathlib import Path
from submission_checker.checker import SubmissionChecker
for finding in SubmissionChecker(Path(sys.argv[1])).run().results:
    print(json.dumps([finding.rule, finding.severity.value, finding.message]))
"""


class Finding(NamedTuple):
    """One result of the checker. A check that passed has the severity `info`."""

    rule: str
    severity: str
    message: str


def rehearse_curve(curve: Path) -> None:
    """Rehearse a curve in virtual time, which takes some minutes."""
    command = [*LOADGEN, "run", *CURVE_OPTIONS.split(), "--out", str(curve)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)


def write_package(curve: Path, package_dir: Path) -> Path:
    """Write the package of a curve with loadgen, and return the directory of its submission.

    Raises SystemExit if loadgen wrote none.
    """
    completed = subprocess.run(
        [*LOADGEN, "check", str(curve), "--package", str(package_dir)],
        capture_output=True,
        text=True,
        check=False,
    )
    submissions = [results.parent for results in package_dir.glob("*/*/results")]
    if not submissions:
        raise SystemExit(f"no package was written:\n{completed.stdout}{completed.stderr}")
    return submissions[0]


def check_package(python: str, submission: Path) -> list[Finding]:
    """Return what the checker says about a submission. Raises SystemExit if the checker fails."""
    completed = subprocess.run(
        [python, "-c", CHECKER_PROGRAM, str(submission)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if completed.returncode:
        raise SystemExit("the submission checker ended with an error, see above")
    return [Finding(*json.loads(line)) for line in completed.stdout.splitlines()]


def print_findings(findings: list[Finding]) -> None:
    """Print how many checks passed, and each rule that objects with one of its messages."""
    severities = Counter(finding.severity for finding in findings)
    print(", ".join(f"{count} {severity}" for severity, count in severities.most_common()))
    print("\n| rule | severity | findings | for example |\n|---|---|---:|---|")
    objections = [finding for finding in findings if finding.severity != "info"]
    examples = {(finding.severity, finding.rule): finding.message for finding in objections}
    counts = Counter((finding.severity, finding.rule) for finding in objections)
    for (severity, rule), count in sorted(counts.items()):
        print(f"| {rule} | {severity} | {count} | {examples[severity, rule]} |")


def main() -> None:
    """Write the package of the curve, check it, and print the objections."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--curve", type=Path, help="a folder with a curve and its runs")
    parser.add_argument(
        "--checker-python", help="a Python with the package endpoints-submission-cli"
    )
    args = rig.parse_arguments(parser)
    if args.checker_python is None:
        rig.skip_script("it needs --checker-python, with the package endpoints-submission-cli")

    with tempfile.TemporaryDirectory(prefix="loadgen-package-") as scratch:
        curve = args.curve or Path(scratch) / "curve"
        if args.curve is None:
            rehearse_curve(curve)
        submission = write_package(curve, Path(scratch) / "package")
        print_findings(check_package(args.checker_python, submission))


if __name__ == "__main__":
    main()
