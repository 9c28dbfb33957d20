"""What the folder of a new run is called, and the folder made and taken. Nothing is written into it here."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from loadgen import result_kinds
from loadgen.core.errors import CombinedError, LoadgenError, UserError
from loadgen.core.results import store
from loadgen.core.results.files import refuse_links


def run_id(name: str, now: datetime.datetime) -> str:
    """The folder name of a run: readable, sorted by time, unique."""
    plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:60]
    return f"{plain}-{now:%Y%m%d-%H%M%S}-{os.urandom(2).hex()}"


def dated(folder: Path, now: datetime.datetime) -> Iterator[Path]:
    """Names beside this one that say when, in the order in which they are tried."""
    first = folder.with_name(f"{folder.name}-{now:%Y%m%d-%H%M%S}")
    yield first
    yield from (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))


def _names(out: Path | None, name: str, now: datetime.datetime) -> Iterator[Path]:
    """`out` itself when given, else a name under `results/`; then names beside it, for where a run is there already."""
    folder = out if out is not None else Path("results") / run_id(name, now)
    yield folder
    yield from dated(folder, now)


def check_empty(out: Path) -> None:
    """Raises UserError for a folder that holds results, or one with runs or experiments in it."""
    if any(file.is_file() for name in result_kinds.left_by_commands() for file in out.glob(name)):
        hint = "give another --out; or --force, which keeps them beside it under a dated name"
        raise UserError("file_exists", "the folder holds results", f"--out {out}", hint)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """The folder of several runs, made and locked while inside. Raises UserError while another command works in it.

    A Fault or a Ctrl-C before the first run has begun removes what was created.
    """
    existed = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if existed:
        refuse_links(folder)
    with locked(folder) as mine:
        if not mine:
            hint = "wait until it has ended, or give another --out"
            raise UserError(
                "folder_in_use", "another command is at work in this folder", str(folder), hint
            )
        try:
            with store.nothing_left(folder):
                yield
        except (LoadgenError, CombinedError, KeyboardInterrupt):
            if not existed:
                with contextlib.suppress(OSError):  # it holds something
                    folder.rmdir()
            raise


@contextlib.contextmanager
def taken(out: Path | None, name: str, now: datetime.datetime) -> Iterator[Path]:
    """The first of the names that holds no run, made and locked: of two runs with one `--out` at the same time, the
    second gets another name.

    A Fault or a Ctrl-C before the run has begun removes what was created.
    """
    for folder in _names(out, name, now):
        with store.nothing_left(folder):
            folder.mkdir(parents=True, exist_ok=True)
            refuse_links(folder, deep=False)
            with locked(folder) as mine:
                if mine and not (folder / "run.json").exists():
                    yield folder
                    return


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Whether this process has the folder for itself while inside. The lock is on the folder and goes with the process.

    On a file system without locks it always has.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass  # a file system without locks: nobody can be kept out
        # whoever had it may have removed it in between, and a third may have made it again
        yield folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())
    finally:
        os.close(descriptor)
