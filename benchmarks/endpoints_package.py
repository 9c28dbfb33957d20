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
from pathlib import Path
from typing import NamedTuple

import rig

CURVE_OPTIONS = "-b llama3.1-8b --c-min 8 --c-max 256 --url sim:gb300-vm --power-kw 8"
SYSTEM_FILE = rig.BENCHMARKS_DIR.parent / "docs" / "system.example.yaml"
STATED_FACTS = (
    f"--system {SYSTEM_FILE} --metadata dataset_link=https://example.org/data "
    "--metadata power_source=https://example.org/power"
)
FACTS_BY_TITLE = {"Nothing is stated about the system": "", "With a system file": STATED_FACTS}
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


def rehearse_curve(curve: Path, facts: str) -> None:
    """Rehearse a curve in virtual time, which takes some minutes.

    `facts` are the options that state facts about the system.
    """
    command = [*LOADGEN, "run", *CURVE_OPTIONS.split(), *facts.split(), "--out", str(curve)]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


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


def check_curve(curve: Path, scratch: Path, checker_python: str) -> None:
    """Write the package of a curve into a directory, check it, and print the objections."""
    submission = write_package(curve, scratch / "package")
    print_findings(check_package(checker_python, submission))


def main() -> None:
    """Check the package of a curve, or of a curve that is rehearsed with and without facts."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--curve", type=Path, help="a folder with a curve and its runs")
    parser.add_argument(
        "--checker-python", help="a Python with the package endpoints-submission-cli"
    )
    args = rig.parse_arguments(parser)
    if args.checker_python is None:
        rig.skip_script("it needs --checker-python, with the package endpoints-submission-cli")

    with tempfile.TemporaryDirectory(prefix="loadgen-package-") as scratch_name:
        scratch = Path(scratch_name)
        if args.curve is not None:
            check_curve(args.curve, scratch, args.checker_python)
            return
        for number, (title, facts) in enumerate(FACTS_BY_TITLE.items()):
            curve = scratch / f"curve{number}"
            rehearse_curve(curve, facts)
            print(f"\n{title}:")
            check_curve(curve, scratch / f"{number}", args.checker_python)


if __name__ == "__main__":
    main()
