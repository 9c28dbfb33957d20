"""Name, create, move and lock the folders of runs. Nothing is written into a folder here."""

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

_MAX_NAME_LENGTH = 60
_RANDOM_BYTES = 2
_UNFINISHED_DIR = "unfinished"


def run_id(name: str, now: datetime.datetime) -> str:
    """Return the folder name of a run, which is readable, sorted by time, and unique."""
    safe_name = "".join(char if char.isalnum() or char in "-_" else "-" for char in name)
    suffix = os.urandom(_RANDOM_BYTES).hex()
    return f"{safe_name[:_MAX_NAME_LENGTH]}-{now:%Y%m%d-%H%M%S}-{suffix}"


def dated_folders(folder: Path, now: datetime.datetime) -> Iterator[Path]:
    """Yield folders with the time in their names besides `folder`, in the order to try them."""
    first = folder.with_name(f"{folder.name}-{now:%Y%m%d-%H%M%S}")
    yield first
    for number in itertools.count(2):
        yield first.with_name(f"{first.name}-{number}")


def check_no_results(folder: Path) -> None:
    """Raise UserError if a folder has the results of an earlier command, such as a run or a sweep.

    Each kind of result is recognised by the name of one of its files.
    """
    marker_files = (
        file for pattern in result_kinds.marker_patterns() for file in folder.glob(pattern)
    )
    has_results = any(file.is_file() for file in marker_files)
    if has_results:
        raise UserError(
            "file_exists",
            message="the folder already holds results",
            where=f"--out {folder}",
            hint="use another --out, or --force to keep those results under a name with a date",
        )


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Create the folder of several runs, and lock it within the context.

    A command that fails before its first run leaves everything as it was: what it has written into
    an empty folder is removed, and then the folder itself, if it was created here.

    Raises:
        UserError: Another command uses the folder, or it has links that lead out of it.
    """
    existed_before = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)

    if existed_before:
        refuse_links(folder)

    with _try_lock(folder) as is_locked:
        if not is_locked:
            raise UserError(
                "folder_in_use",
                message="another command is using this folder",
                where=str(folder),
                hint="wait until it ends, or use another --out",
            )
        try:
            with store.remove_on_failure(folder):
                yield
        except (LoadgenError, CombinedError, KeyboardInterrupt):
            if not existed_before:
                _remove_if_empty(folder)
            raise


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder unless it contains something or does not exist any more."""
    with contextlib.suppress(OSError):
        folder.rmdir()


@contextlib.contextmanager
def new_run_folder(out: Path | None, name: str, now: datetime.datetime) -> Iterator[Path]:
    """Create a folder that holds no run, lock it within the context, and yield it.

    The folder is `out`, or it is in `results/` and named after the workload. If that folder is used
    already, other names are tried: the same name with the date and time, and then also with a
    number from 2 on. If the context fails before the run has begun, what was created is removed.

    Args:
        out: The folder that the user wants, or None for one in `results/`.
        name: The name of the workload, for a name in `results/`.
        now: The time, for names with a date.
    """
    for folder in _candidate_folders(out, name, now):
        with _locked_if_unused(folder) as is_usable:
            if is_usable:
                yield folder
                return


@contextlib.contextmanager
def _locked_if_unused(folder: Path) -> Iterator[bool]:
    """Create and lock a folder, and yield whether this run may use it.

    It may not if another process has the lock, or if the folder holds a run.
    """
    with store.remove_on_failure(folder):
        folder.mkdir(parents=True, exist_ok=True)
        refuse_links(folder, deep=False)
        with _try_lock(folder) as is_locked:
            yield is_locked and not (folder / "run.json").exists()


def _candidate_folders(out: Path | None, name: str, now: datetime.datetime) -> Iterator[Path]:
    """Yield the folders to try for a run: `out` or a name in `results/`, then dated names."""
    folder = out if out is not None else Path("results") / run_id(name, now)
    yield folder
    yield from dated_folders(folder, now)


@contextlib.contextmanager
def _try_lock(folder: Path) -> Iterator[bool]:
    """Lock a folder within the context, and yield whether this process has the lock.

    It has no lock if another process has locked the folder. It also has none if the folder was
    removed and created again after it was opened here, because the lock then belongs to the removed
    folder. The lock ends with the process.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield _lock_descriptor(descriptor) and _is_same_folder(descriptor, folder)
    finally:
        os.close(descriptor)


def _lock_descriptor(descriptor: int) -> bool:
    """Lock an open folder for this process. Return False if another process has locked it.

    If the file system has no locks, the result is True, as if this process had the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_same_folder(descriptor: int, folder: Path) -> bool:
    """Return True if an open folder still exists at its path."""
    return folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())


def move_to_unfinished(run_dir: Path) -> None:
    """Move an earlier attempt of a run, if there is one, to `unfinished/` beside it.

    It gets the time in its name, because there may be more than one.
    """
    if not run_dir.exists():
        return
    unfinished_dir = run_dir.parent / _UNFINISHED_DIR
    unfinished_dir.mkdir(exist_ok=True)
    timestamp = f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    run_dir.rename(unfinished_dir / f"{run_dir.name}-{timestamp}")
