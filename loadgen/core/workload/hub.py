"""Find repositories of Hugging Face in the caches of this host, or download them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from loadgen.core.errors import UserError

RepositoryKind = Literal["dataset", "model"]


def cache_home() -> Path:
    """Return the directory of all caches of Hugging Face."""
    # Path.expanduser would raise an error for a user without a home directory, as in a container.
    return Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))


def find_cached_snapshot(repository: str, kind: RepositoryKind) -> Path | None:
    """Return the cached snapshot of a repository, in a directory named by its commit.

    This is the snapshot of the branch `main` if it is cached, else the newest one. Return None if
    there is none.
    """
    cache = Path(os.environ.get("HF_HUB_CACHE") or cache_home() / "hub")
    repository_dir = cache / f"{kind}s--{repository.replace('/', '--')}"

    main_reference = repository_dir / "refs" / "main"
    if main_reference.is_file():
        snapshot = repository_dir / "snapshots" / main_reference.read_text("utf-8").strip()
        if snapshot.is_dir():
            return snapshot

    snapshots = (repository_dir / "snapshots").glob("*")
    return max(snapshots, key=lambda snapshot: snapshot.stat().st_mtime, default=None)


def download_snapshot(
    repository: str, kind: RepositoryKind, patterns: Sequence[str], where: str
) -> Path:
    """Download the files of a repository that match patterns, and return their directory.

    `where` names the option or file in error messages. Raises UserError if the package of the hub
    is not installed or the download fails.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise _missing_package_error(repository, kind, where) from None
    try:
        return Path(snapshot_download(repository, repo_type=kind, allow_patterns=list(patterns)))
    # Errors of the network, the hub and its client are of many types without a common base.
    except Exception as error:
        problem = f"cannot be downloaded: {_first_line_of(error)}"
        hint = "check the name, the connection to the hub, and HF_TOKEN for private data"
        raise UserError("not_downloaded", problem, where, hint) from None


def _missing_package_error(repository: str, kind: RepositoryKind, where: str) -> UserError:
    """Return the error of a download without the package of the hub, with two ways out."""
    type_option = "--repo-type dataset " if kind == "dataset" else ""
    command = f"hf download {type_option}{repository}"
    problem = f"this {kind} is not in the Hugging Face cache of this host"
    hint = f"pip install 'loadgen[hub]' to download it, or download it on another host: {command}"
    return UserError("not_downloaded", problem, where, hint)


def _first_line_of(error: Exception) -> str:
    """Return the first line of the message of an error, or its type if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def snapshot_commit(file: Path) -> str:
    """Return the commit of the snapshot that a file is in, or "" if it is in none."""
    directories = file.parts[:-1]
    if "snapshots" not in directories:
        return ""
    return file.parts[directories.index("snapshots") + 1]
