"""The flags of `loadgen run --adaptive`: what they ask for, and the exit code of what was found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadgen.core import units
from loadgen.core.errors import Fault, Faults, UserError, collecting
from loadgen.core.execution.options import COMMAND_OPTIONS, typed
from loadgen.shell.options import Given

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.workload import Workload
    from loadgen.search.adaptive_run import AdaptiveSteering

PANEL = "Adaptive"
WINDOW, SUSTAINED = "60s", "20m"
NOT_WITH = (
    "num_requests", "warmup", "num_warmups", "burstiness", "schedule_seed", "trace_speed", "trace_loop", "repeat",
    "repeat_most", "repeat_within", "repeat_pause",
)  # fmt: skip
"""Options that say how long a load lasts, or how it arrives, where the run itself decides that."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveOptions:
    """The flags of an adaptive run."""

    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive",
            help="Let the load find its limit: from --request-rate or --concurrency (or 1) it grows while the SLO "
            "holds, backs off where it does not, and what was found is sustained for --duration.",
            rich_help_panel=PANEL,
        ),
    ] = False
    window: Annotated[
        str | None,
        typer.Option(
            "--window", metavar="TIME", help="With --adaptive: a step is judged by the requests of so long a time.",
            show_default=WINDOW, rich_help_panel=PANEL,
        ),
    ] = None  # fmt: skip
    high: Annotated[
        float | None,
        typer.Option("--high", min=0, help="With --adaptive: not above this load.", rich_help_panel=PANEL),
    ] = None
    max_time: Annotated[
        str | None,
        typer.Option(
            "--max-time", metavar="TIME", help="With --adaptive: begin no step after so long a time: 2h, 90m.",
            rich_help_panel=PANEL,
        ),
    ] = None  # fmt: skip

    @property
    def asked(self) -> bool:
        """Whether any of them was given."""
        return self.adaptive or (self.window, self.high, self.max_time) != (None,) * 3


def prepared(
    given: Given, asked: AdaptiveOptions, name: str | None, settings: Settings
) -> tuple[Workload, AdaptiveSteering]:  # fmt: skip
    """The workload of an adaptive run, and what steers it. Raises Faults."""
    from loadgen.core.results.manifest import AdaptivePlan
    from loadgen.core.workload import Closed
    from loadgen.search import adaptive_run
    from loadgen.search.load_search import PRECISION

    found: list[Fault] = []
    if not asked.adaptive:
        found.append(
            UserError("no_effect", "it is of an adaptive run", "--window, --high, --max-time", "add --adaptive")
        )

    def seconds(flag: str, text: str) -> float:
        with collecting(found):
            return typed(flag, text, units.seconds) or 0.0
        return 0.0

    found += [
        UserError("conflict", "the run decides that itself", _flag(option), f"leave out --adaptive or {_flag(option)}")
        for option in NOT_WITH
        if given[option] is not None
    ]
    if "," in str(given["concurrency"] or ""):
        where = f"--concurrency {given['concurrency']}"
        found.append(
            UserError("conflict", "several levels, and a load that finds its own", where, "give the first one alone")
        )
    window_s = seconds("--window", asked.window or WINDOW)
    sustain_s = seconds("--duration", given["duration"] or SUSTAINED)
    longest_s = None if asked.max_time is None else seconds("--max-time", asked.max_time)
    if not found and sustain_s < window_s:
        where, hint = f"--duration {sustain_s:g}s", f"at least --window, {window_s:g}s"
        found.append(UserError("out_of_range", "a load cannot be sustained for less than a step", where, hint))
    workload = None
    with collecting(found):
        changed: dict[str, Any] = {"warmup": 0, "duration": f"{sustain_s or 1:g}s"}
        if given["concurrency"] is None and given["request_rate"] is None:
            changed |= _of_own_kind(given, name)
        workload = given.workload(name, **changed)
        found += adaptive_run.faults(workload, settings)
    plan = None
    if workload is not None:
        law = next(stage.arrival for stage in workload.stages if stage.measured)
        closed = isinstance(law, Closed)
        start = float(law.concurrency) if isinstance(law, Closed) else float(getattr(law, "rate", 1.0))
        high = asked.high or (float(1 << 20) if closed else 1e6)
        if not start < high:
            hint = "a first load below it: --request-rate, or --concurrency"
            found.append(
                UserError(
                    "out_of_range", f"the first load, {start:g}, is not below the highest", f"--high {high:g}", hint
                )
            )
        plan = AdaptivePlan(
            over="concurrency" if closed else "rate",
            start=start,
            high=high,
            window_s=window_s,
            sustain_s=sustain_s,
            precision=PRECISION,
            longest_s=longest_s,
            run_spread=0.0 if settings.virtual else None,
        )
    if found or workload is None or plan is None:
        raise Faults(found)
    return adaptive_run.prepared(workload, plan)


def _of_own_kind(given: Given, name: str | None) -> dict[str, Any]:
    """The first load of a workload without a flag for it: one lane where its load is a closed loop, else 1/s."""
    from loadgen.core.workload import Closed

    laws = [stage.arrival for stage in given.workload(name).stages]
    return {"concurrency": 1} if any(isinstance(law, Closed) for law in laws) else {"request_rate": 1}


def _flag(name: str) -> str:
    return COMMAND_OPTIONS[name].names[0]
