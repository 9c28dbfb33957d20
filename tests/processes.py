"""The processes of this machine, as /proc says."""

from __future__ import annotations

from pathlib import Path


def running() -> dict[int, list[str]]:
    """By pid the fields of its `stat` after the name: state, parent, group, ..."""
    processes_by_pid = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            processes_by_pid[int(entry.parent.name)] = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
    return processes_by_pid


def children(pid: int) -> list[int]:
    return [child for child, (_, parent, *_) in running().items() if int(parent) == pid]
