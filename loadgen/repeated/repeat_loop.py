"""Runs a load several times: the seed of each repeat, the pauses, and the loop over them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.core import format, seeds

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import NamedSummary
    from loadgen.core.workload import Workload
    from loadgen.repeated.repeats import RepeatSummary, Repetition

NS_PER_S = 1e9


def with_repeat_seed(workload: Workload, number: int, load_name: str = "repeat") -> Workload:
    """Return the workload of repeat `number`, from 1.

    The first repeat has the seed of the workload, and each later one a seed derived from it.
    `load_name` makes the derived seeds of several repeated loads differ.
    """
    if number == 1 or workload.seed is None:
        return workload
    return workload.model_copy(update={"seed": seeds.run_seed(workload.seed, load_name, number)})


def run_repeats(
    repetition: Repetition,
    has_enough_repeats: Callable[[], bool],
    run_repeat: Callable[[int], bool],
    *,
    virtual: bool,
    print_line: Callable[[str], None],
    wait: Callable[[float], None] = time.sleep,
) -> bool:
    """Run repeats r1, r2, ... until there are enough, with a pause before each but the first.

    Args:
        repetition: The pause between repeats, and their number as text for the lines of progress.
        has_enough_repeats: Returns whether no further repeat is needed.
        run_repeat: Runs the repeat with this number. Returns False if the user interrupted it.
        virtual: Whether the runs take place in virtual time, which needs no pause.
        print_line: Prints a line of progress.
        wait: Waits for this number of seconds.

    Returns:
        True once there are enough repeats, and False if the user interrupted a run or a pause.
    """
    for number in itertools.count(1):
        if has_enough_repeats():
            break

        name = f"r{number}"
        if number > 1:
            has_paused = pause_before(
                name, repetition, virtual=virtual, print_line=print_line, wait=wait
            )
            if not has_paused:
                return False

        print_line(f"Run {name} of {repetition.description}")
        if not run_repeat(number):
            return False
    return True


def pause_before(
    run_name: str,
    repetition: Repetition,
    *,
    virtual: bool,
    print_line: Callable[[str], None],
    wait: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait for the requested pause before a run. Return False if the user interrupted it."""
    pause_s = repetition.pause_ns / NS_PER_S
    if not pause_s:
        return True

    if virtual:
        print_line("No pause: runs in virtual time do not affect each other.")
        return True

    print_line(
        f"Pause of {format.duration(pause_s)} before {run_name}. Ctrl-C ends here and keeps the "
        "runs so far."
    )
    try:
        wait(pause_s)
    except KeyboardInterrupt:
        return False

    return True


def write_repeat_summary(
    output_dir: Path, repetition: Repetition, runs: Sequence[NamedSummary]
) -> RepeatSummary:
    """Write `repeats.json` and the checksums of all files into the directory of repeats.

    Returns the content of `repeats.json`: the mean and the interval of each metric. It includes the
    precision that the user requested only if the number of repeats was open, so that they went on
    until they reached it. A fixed number of repeats has no such target.
    """
    from loadgen.core.results import checksums, store
    from loadgen.repeated import repeats

    is_open_ended = repetition.count is None
    requested_precision = repetition.precision if is_open_ended else None
    summary = repeats.summarize_repeats(runs, requested_precision=requested_precision)

    # `begin` removes the old checksums, so that they never contradict the new summary, even if the
    # command is killed in between.
    checksums.begin(output_dir)
    store.replace(output_dir / repeats.FILE, format.document(summary))
    checksums.write(output_dir)

    return summary
