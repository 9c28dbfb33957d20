"""`loadgen search --continuous`: one load that finds its own limit, from its flags to its exit code."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from loadgen.core import units
from loadgen.core.errors import INTERRUPTED, Fault, Faults, UserError, collecting
from loadgen.runs.builds import KeptByBuild
from loadgen.shell.given import Given
from loadgen.shell.output import print_report, say
from loadgen.shell.run_options import typed

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.workload import Workload
    from loadgen.search.adaptive_run import AdaptiveSteering

COMMAND = "loadgen search"
WINDOW, SUSTAINED = "60s", "20m"


class ContinuousLoad(NamedTuple):
    """What the flags of a search say to a load that finds its own limit. `terms`: of its SLO.

    kept: what a build keeps of it. dry_run: only its first lines are wanted.
    """

    closed: bool
    terms: tuple[str, ...]
    start: float
    high: float | None
    window: str | None
    max_time: str | None
    kept: KeptByBuild
    dry_run: bool


def perform(given: Given, asked: ContinuousLoad, name: str | None, *, as_json: bool) -> int:
    """Run it, print what was found, and return the exit code. Raises Faults."""
    from loadgen.core.execution.folder_names import check_empty
    from loadgen.core.execution.run import execute
    from loadgen.core.execution.steering import words
    from loadgen.core.metrics.summary import exit_code
    from loadgen.runs import kind
    from loadgen.runs.show import print_plans, shown
    from loadgen.search import adaptive, adaptive_kind, adaptive_run, adaptive_text

    faults: list[Fault] = []
    with collecting(faults):
        settings = given.settings()
        if settings.out is not None and not given["force"]:
            check_empty(settings.out)
    if faults:
        raise Faults(faults)
    workload, steering = prepared(given, asked, name, settings)
    if asked.dry_run:
        print(f"load: {words(steering.plan)}")
        return print_plans([(workload, settings)], given.budget())
    asked.kept.begin(COMMAND)
    show = shown(given)
    given.make_room(settings.out)
    summary, folder = execute(workload, settings, show.hearers, steering=steering)
    of_search = adaptive_run.read(folder)
    assert of_search is not None  # of the load that has just ended
    added = adaptive_kind.addition(folder, of_search)
    found = kind.StoredRun(folder, summary, None, (added,))
    if as_json:
        sys.stdout.buffer.write(kind.document(found))
    else:
        print_report(kind.report(found))
        say(f"results in {folder}")
    strict, called = asked.kept.strict, summary.run.workload
    more = [adaptive_text.case(of_search, f"loadgen.{called}", strict=strict)]
    asked.kept.write(
        COMMAND, [(called, summary)], whole=summary.run.state != "interrupted", more=more
    )
    codes = [exit_code(summary, strict=strict), adaptive.exit_code(of_search, strict=strict)]
    return max(codes) if summary.run.state != "interrupted" else max(*codes, INTERRUPTED)


def prepared(
    given: Given, asked: ContinuousLoad, name: str | None, settings: Settings
) -> tuple[Workload, AdaptiveSteering]:
    """The workload of such a load, and what steers it. Raises Faults."""
    from loadgen.core.results.manifest import AdaptivePlan
    from loadgen.search import adaptive_run
    from loadgen.search.load_search import PRECISION

    found: list[Fault] = []

    def seconds(flag: str, text: str) -> float:
        with collecting(found):
            return typed(flag, text, units.seconds) or 0.0
        return 0.0

    window_s = seconds("--window", asked.window or WINDOW)
    sustain_s = seconds("--duration", given["duration"] or SUSTAINED)
    longest_s = None if asked.max_time is None else seconds("--max-time", asked.max_time)
    if not found and sustain_s < window_s:
        where, hint = f"--duration {sustain_s:g}s", f"at least --window, {window_s:g}s"
        found.append(
            UserError(
                "out_of_range", "a load cannot be sustained for less than a step", where, hint
            )
        )
    high = asked.high or (float(1 << 20) if asked.closed else 1e6)
    if not asked.start < high:
        what = f"the first load, {asked.start:g}, is not below the highest"
        found.append(
            UserError("out_of_range", what, f"--high {high:g}", "a first load below it: --start")
        )
    workload = None
    with collecting(found):
        load: dict[str, Any] = (
            {"concurrency": max(1, round(asked.start))}
            if asked.closed
            else {"request_rate": asked.start}
        )
        workload = given.workload(
            name, slo=asked.terms, warmup=0, duration=f"{sustain_s or 1:g}s", **load
        )
        found += adaptive_run.faults(workload, settings)
    if found or workload is None:
        raise Faults(found)
    plan = AdaptivePlan(
        over="concurrency" if asked.closed else "rate",
        start=asked.start,
        high=high,
        window_s=window_s,
        sustain_s=sustain_s,
        precision=PRECISION,
        longest_s=longest_s,
        run_spread=0.0 if settings.virtual else None,
    )
    return adaptive_run.prepared(workload, plan)
