"""Repositories of Hugging Face: found in the caches of this host, else fetched. Reads folders; the network is last."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from loadgen.core.errors import UserError


def cache_home() -> Path:
    """The folder of all caches."""
    # expanduser: a user without a home folder, as in a container, is no fault
    return Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))


def find_cached_snapshot(repository: str, kind: str) -> Path | None:
    """The snapshot of a repository (`kind`: dataset, model) in the cache: its `main`, else the newest; None: not there.

    The folder is named by its commit.
    """
    folder = (
        Path(os.environ.get("HF_HUB_CACHE") or cache_home() / "hub")
        / f"{kind}s--{repository.replace('/', '--')}"
    )
    main = folder / "refs" / "main"
    if (
        main.is_file()
        and (named := folder / "snapshots" / main.read_text("utf-8").strip()).is_dir()
    ):
        return named
    snapshots = sorted((folder / "snapshots").glob("*"), key=lambda one: one.stat().st_mtime)
    return snapshots[-1] if snapshots else None


def download_snapshot(repository: str, kind: str, patterns: Sequence[str], where: str) -> Path:
    """The snapshot of a repository, fetched from the hub: the files of these patterns. Raises UserError."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        typed = f"hf download {'--repo-type dataset ' if kind == 'dataset' else ''}{repository}"
        hint = f"pip install 'loadgen[hub]' fetches it; or fetch it elsewhere: {typed}"
        raise UserError(
            "not_downloaded", f"this {kind} is not in the cache of this host", where, hint
        ) from None
    try:
        return Path(snapshot_download(repository, repo_type=kind, allow_patterns=list(patterns)))
    except Exception as error:  # of the network, the hub and its client, of many kinds
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        hint = "is the name right, the hub reachable, HF_TOKEN set where it is needed?"
        raise UserError("not_downloaded", f"cannot be fetched: {first_line}", where, hint) from None


def snapshot_commit(file: Path) -> str:
    """The commit of the snapshot that a file is in; "" where it is in none."""
    parts = file.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-1] else ""
