"""Write the generated files of the repository again: pages, schemas, examples and the oracle.

    python tests/renew.py          takes one to two minutes
    python tests/renew.py --slow   also runs the commands of the guides, which takes minutes

Tests check that these files are current. Run this after a change of a command, an option, a table
or a key, and read the difference in git before you commit it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from loadgen.render import glossary

TESTS = Path(__file__).parent
ROOT = TESTS.parent

QUICK = (
    "make_cli_reference.py",
    "make_codes.py",
    "make_keys.py",
    "make_summary_reference.py",
    "make_figures.py",
    "make_servers.py",
    "make_packages.py",
    "make_published.py",
    "make_examples.py",
    "make_attacks.py",
    "make_features.py",
    "make_oracle.py",
)
SLOW = ("make_guide_outputs.py",)
BY_HAND = ("make_mutations.py", "make_oracle_folders.py")
"""Scripts that are run for a reason of their own: half an hour of tests, and stored results."""


def main(arguments: list[str]) -> None:
    """Run the scripts one after the other. A script that fails ends the program."""
    (ROOT / "docs/reference/glossary.md").write_text(glossary.render_markdown(), "utf-8")
    write_workload_schema()

    scripts = QUICK + SLOW if "--slow" in arguments else QUICK
    for script in scripts:
        print(script, flush=True)
        subprocess.run([sys.executable, str(TESTS / script)], cwd=ROOT, check=True)


def write_workload_schema() -> None:
    """Write the JSON Schema of workload files, as the command prints it."""
    command = [sys.executable, "-m", "loadgen", "export", "--schema", "workload"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (ROOT / "workloads/schema.json").write_bytes(printed.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
