"""The folder of a sweep: one run per level, what was asked for beside them, so that the same command goes on where it
stopped. IO.

    sweep.json      what was asked (Plan)
    c8/, r2.5/      a run each, as `loadgen run` leaves it
    unfinished/     runs of levels that did not come to their end, kept aside
"""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec

from loadgen import store
from loadgen.errors import UserError
from loadgen.header import refuse_newer
from loadgen.levels import Kind

SCHEMA = 1
FILE = "sweep.json"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What makes two sweeps the same one; levels may be added to it."""

    schema: int = SCHEMA
    kind: Kind
    workload: str
    source_text: str
    target: str
    flags: dict[str, str]  # other flags that change the load, as given
    levels: tuple[str, ...]


def begin(folder: Path, plan: Plan) -> frozenset[str]:
    """Make the folder of a sweep, or take up the one that is there; the levels that are done already.

    Raises UserError when the folder holds something else, or another sweep.
    """
    path = folder / FILE
    done: frozenset[str] = frozenset()
    if path.is_file():
        before = _read(path)
        differs = [
            field
            for field in Plan.__struct_fields__
            if field not in ("schema", "levels") and getattr(before, field) != getattr(plan, field)
        ]
        if differs:
            words = ", ".join(_WORDS[field] for field in differs)
            raise UserError(f"another sweep was begun here, with other {words}", str(folder), "give another --out")
        done = frozenset(level for level in before.levels if _finished(folder / level))
        plan = msgspec.structs.replace(plan, levels=tuple(dict.fromkeys((*before.levels, *plan.levels))))
    elif folder.exists() and any(folder.iterdir()):
        raise UserError("the folder is not empty, and holds no sweep", str(folder), "give another --out")
    folder.mkdir(parents=True, exist_ok=True)
    store.replace(path, msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")
    return done


_WORDS = {"kind": "levels", "workload": "workload", "source_text": "workload", "target": "target", "flags": "flags"}


def level(folder: Path, name: str) -> Path:
    """An unused folder for a level: what an earlier attempt left is moved to `unfinished/`."""
    path = folder / name
    if path.exists():
        aside = folder / "unfinished"
        aside.mkdir(exist_ok=True)
        path.rename(aside / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}")
    return path


def _finished(folder: Path) -> bool:
    """Whether a run came to its end; its summary is written last."""
    from loadgen import header as heads

    try:
        state = heads.decode((folder / "run.json").read_bytes()).state
    except (OSError, UserError):
        return False
    return state == "finished" and (folder / "summary.json").is_file()


def _read(path: Path) -> Plan:
    data = path.read_bytes()
    refuse_newer(data, SCHEMA, str(path))
    try:
        return msgspec.json.decode(data, type=Plan)
    except msgspec.DecodeError as error:
        raise UserError(f"not the plan of a sweep: {error}", str(path), "the file was changed or damaged") from None
