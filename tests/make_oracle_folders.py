"""Writes `tests/data/oracle/folders/` again: results of every kind, with nothing of this machine in them.

Those that are stored are of 0.1.0. Reading an older version's folders is what they are for, so leave them as they are
until a new format makes them worth writing.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from make_oracle import FOLDERS, MLPERF, READ, SEARCH, SIM, SWEEP, inputs
from named import told

from loadgen.core.errors import BUG, USAGE

HOST = {
    "name": "load-1",
    "kernel": "Linux 6.8.0",
    "python": "3.12.4",
    "cpu": "EPYC",
    "cpus": 16,
    "clock": "tsc",
}


def store(where: Path) -> None:
    """Write the folders, take the machine out of them, and pack them."""
    inputs(where)
    for call in (
        ["run", "open.yaml", *SIM, "-n", "60", "--out", "raw"],
        SWEEP,
        SEARCH,
        ["validate", "carried.yaml", *SIM, "--out", "contract"],
        ["mlperf", "server", *MLPERF, "--out", "mlperf"],
    ):
        ending, _ = told(where, *call)
        assert ending["exit"] not in (USAGE, BUG), ending
    FOLDERS.mkdir(exist_ok=True)
    for name in READ:
        scrub(where / name)
        with tarfile.open(FOLDERS / f"{name}.tar.xz", "w:xz", preset=9) as packed:
            packed.add(where / name, name, filter=nobody)


def nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def scrub(folder: Path) -> None:
    """No host and no command in any JSON; pages are left out; the manifest is made anew."""
    for file in sorted(folder.rglob("*")):
        if file.name in ("run.json", "summary.json"):
            file.write_text(
                json.dumps(unnamed(json.loads(file.read_bytes())), indent=1, ensure_ascii=False)
            )
        elif file.name == "report.html":
            file.unlink()
    manifest = folder / "manifest.sha256"
    if manifest.exists():
        files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file != manifest]
        manifest.write_text(
            "".join(
                f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.relative_to(folder).as_posix()}\n"
                for one in files
            )
        )


def unnamed(value: Any) -> Any:
    if isinstance(value, dict):
        clean = {"host": HOST, "command": ["loadgen", "run"]}
        return {key: clean[key] if key in clean else unnamed(one) for key, one in value.items()}
    return [unnamed(one) for one in value] if isinstance(value, list) else value


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        store(Path(scratch))
