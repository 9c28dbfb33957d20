"""Repeats of one load: the seed of each, the pause before it, and the loop over them. IO: it waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.core import format, seeds

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import NamedSummary
    from loadgen.core.workload import Workload
    from loadgen.repeated.repeats import RepeatSummary, Repetition


def seeded(workload: Workload, number: int, of: str = "repeat") -> Workload:
    """The workload of repeat `number` (from 1): the first has the seed given, each other one its own.

    `of`: the name of what is repeated, where several things are.
    """
    if number == 1 or workload.seed is None:
        return workload
    return workload.model_copy(update={"seed": seeds.own(workload.seed, of, number)})


def repeat(
    how: Repetition,
    enough: Callable[[], bool],
    one: Callable[[int], bool],
    *,
    virtual: bool,
    say: Callable[[str], None],
    wait: Callable[[float], None] = time.sleep,
) -> bool:
    """`one(number)` for 1, 2, ... until there are `enough`; it returns False when it was interrupted, which ends the
    loop. False when the user broke it off, in a run or in a pause.
    """
    number = 0
    while not enough():
        number += 1
        name = f"r{number}"
        if number > 1 and not pause(how, name, virtual=virtual, say=say, wait=wait):
            return False
        say(f"run {name} of {how.description}")
        if not one(number):
            return False
    return True


def pause(
    how: Repetition,
    name: str,
    *,
    virtual: bool,
    say: Callable[[str], None],
    wait: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait before the run called `name`, as long as was asked for. False when the user broke it off."""
    if how.pause_ns and virtual:
        say("no pause: in virtual time there is nothing to wait for")
    elif how.pause_ns:
        say(
            f"pause of {format.duration(how.pause_ns / 1e9)} before {name}; Ctrl-C ends here, with the runs so far"
        )
        try:
            wait(how.pause_ns / 1e9)
        except KeyboardInterrupt:
            return False
    return True


def finish(parent: Path, how: Repetition, named: Sequence[NamedSummary]) -> RepeatSummary:
    """Store the summary over the repeats in their folder."""
    from loadgen.core.results import checksums, store
    from loadgen.repeated import repeats

    checksums.begin(parent)
    made = repeats.summarize_repeats(named, within=how.within if how.count is None else None)
    store.replace(parent / repeats.FILE, format.document(made))
    checksums.write(parent)
    return made
