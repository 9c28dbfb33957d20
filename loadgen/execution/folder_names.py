"""What the folder of a new run is called, and the folder made. Nothing is written into it here."""

from __future__ import annotations

import datetime
import os
from pathlib import Path


def run_id(name: str, now: datetime.datetime) -> str:
    """The folder name of a run: readable, sorted by time, unique."""
    plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:60]
    return f"{plain}-{now:%Y%m%d-%H%M%S}-{os.urandom(2).hex()}"


def unused(out: Path | None, name: str, now: datetime.datetime) -> Path:
    """`out` itself when given and without a run, else another name beside it or under `results/`. Makes nothing."""
    folder = out if out is not None else Path("results") / run_id(name, now)
    if (folder / "run.json").exists():
        folder = folder.with_name(f"{folder.name}-{now:%Y%m%d-%H%M%S}")
    return folder


def new_folder(out: Path | None, name: str, now: datetime.datetime) -> Path:
    """The same, made."""
    folder = unused(out, name, now)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
