"""Write `tests/data/oracle/folders/`: one result of each kind, without data of this machine.

Run it when the format of a result changes, and run `make_oracle.py` afterwards.
"""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path
from unittest import mock

from make_oracle import FOLDERS, MLPERF, READ, SEARCH, SIM, SWEEP, inputs
from public_names import run_in_directory

from loadgen.core.errors import BUG, USAGE
from loadgen.core.execution import host_facts
from loadgen.core.results.manifest import Host

FIXED_HOST = Host(
    name="load-1",
    kernel="Linux 6.8.0",
    python="3.12.4",
    cpu="EPYC",
    cpus=16,
    clock="tsc",
    memory_bytes=64 << 30,
    versions={"numpy": "2.0.0"},
    hot_path="compiled",
)
"""The machine that the results name instead of the one that the script runs on."""

COMMANDS = (
    ["run", "open.yaml", *SIM, "-n", "60", "--out", "raw"],
    SWEEP,
    SEARCH,
    ["validate", "carried.yaml", *SIM, "--out", "contract"],
    ["mlperf", "server", *MLPERF, "--out", "mlperf"],
)


def write_folders(scratch: Path) -> None:
    """Run the commands in an empty folder and pack their results."""
    inputs(scratch)
    for command in COMMANDS:
        with mock.patch.object(host_facts, "read_host_facts", return_value=FIXED_HOST):
            ending, _ = run_in_directory(scratch, *command)
        assert ending["exit"] not in (USAGE, BUG), ending
    for name in READ:
        with tarfile.open(FOLDERS / f"{name}.tar.xz", "w:xz", preset=9) as packed:
            packed.add(scratch / name, name, filter=without_owner)


def without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        write_folders(Path(directory))
