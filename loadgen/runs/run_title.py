"""How a run is named: its workload, its target, its load and how long the load lasted. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.repeated.capacity import Unit, rate_unit

if TYPE_CHECKING:
    from loadgen.core.metrics.part_summaries import StageSummary, TargetSummary
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.metrics.windows import Window
    from loadgen.core.results.manifest import TargetFacts

SIMULATED_PREFIX = "simulated: "
"""How the name of a simulated target begins. Titles say in another place that it is simulated."""

_RATE_UNITS: dict[Unit, str] = {
    "requests": "req/s",
    "conversations": "sessions/s",
    "starts": "starts/s",
}
"""The unit of a rate, by what it counts. A start is that of a request or of a session."""

_CLOSED_LOOP = re.compile(r"^(\d+) in flight\b")
_RATE = re.compile(r"([\d.])/s\b")
"""The end of a rate such as 30/s: its last digit and the unit."""


def run_title(summary: Summary) -> str:
    """Return what was measured.

    Example: `rag on gb300-vm (llama-2-70b, 4 GPUs), Poisson 30 req/s for 5 min`.
    """
    return f"{workload_name(summary)} on {_describe_system(summary)}, {describe_load(summary)}"


def workload_name(summary: Summary) -> str:
    """Return the name of the workload, or of the run if the workload has no name."""
    return summary.run.workload or summary.run.name or summary.run.id


def _describe_system(summary: Summary) -> str:
    """Return the target with its server, model and number of GPUs."""
    target = summary.target
    details = []
    if target.server and not target.simulated:
        details.append(target.server)

    if target.model:
        details.append(target.model)

    if target.gpus is not None:
        details.append(format.counted(target.gpus, "GPU"))

    if len(summary.targets) > 1:
        details.append(f"{len(summary.targets)} targets")

    name = short_target_name(target)
    return f"{name} ({', '.join(details)})" if details else name


def short_target_name(target: TargetFacts) -> str:
    """Return the name of a target, or its URL without a trailing slash."""
    name = target.name.removeprefix(SIMULATED_PREFIX) or target.url.rstrip("/")
    return name or "unknown target"


def describe_target(target: TargetFacts) -> str:
    """Return a target with its URL and its server: `rack-3 at http://10.0.0.3:8000 (vllm)`."""
    server = f" ({target.server})" if target.server else ""
    if target.name and target.url and target.name != target.url:
        return f"{target.name} at {target.url}{server}"
    return f"{target.name or target.url or 'unknown target'}{server}"


def target_name_with_region(part: TargetSummary) -> str:
    """Return the name of one of several targets, with its region if it has one."""
    name = part.target.name or part.target.url
    return f"{name} ({part.target.region})" if part.target.region else name


def describe_load(summary: Summary) -> str:
    """Return the measured load with its duration: `Poisson 30 req/s for 5 min`."""
    stages = _measured_stages(summary)
    if len(stages) == 1:
        load = describe_arrival(stages[0].arrival, rate_unit(summary))
    elif stages:
        load = format.counted(len(stages), "stage")
    else:
        load = describe_arrival(summary.load.arrival)

    duration_s = load_duration_s(summary)
    if duration_s is None:
        return load or "no load"

    return f"{load} for {format_duration(duration_s)}"


def _measured_stages(summary: Summary) -> list[StageSummary]:
    """Return the stages of a load whose requests are measured, so without the warm-up."""
    return [stage for stage in summary.stages if stage.measured]


def describe_arrival(arrival: str, unit: Unit = "requests") -> str:
    """Return how the requests of a load arrive, as text for a report.

    For example, "poisson 30/s" becomes "Poisson 30 req/s", and "8 in flight" becomes
    "concurrency 8".

    Args:
        arrival: The arrival process as the summary of a run stores it.
        unit: What a rate counts. The arrivals of a workload with sessions start sessions.
    """
    closed_loop = _CLOSED_LOOP.match(arrival)
    if closed_loop:
        concurrency = int(closed_loop[1])
        return f"concurrency {concurrency:,}"
    # For example, "/s" after a digit becomes " req/s". The digit is the group 1 of the pattern.
    text = _RATE.sub(rf"\1 {_RATE_UNITS[unit]}", arrival)
    return f"{text[:1].upper()}{text[1:]}"


def short_arrival(arrival: str) -> str:
    """Return an arrival process for a table: "16 in flight (closed loop)" is "16 in flight"."""
    return arrival.replace(" (closed loop)", "").replace(" (closed loop, ", " (")


def load_duration_s(summary: Summary) -> float | None:
    """Return how long the measured load lasted, without the drain where that is known.

    The drain is the time after the last request was sent, in which responses are still awaited. In
    an open loop the time until the last request follows from the offered rate: n requests at r per
    second have n - 1 intervals of 1 / r. In other loads the measurement window is used, which
    includes the drain: in a closed loop, with sessions, or with several stages.

    A run that ended early has requests of its schedule that were never due. Its load lasted until
    the last request that was due.
    """
    stages = _measured_stages(summary)
    offered_rps = summary.load.offered_rps
    request_count = summary.requests.scheduled
    is_one_open_loop = len(stages) == 1 and summary.sessions is None
    if is_one_open_loop and summary.run.state != "finished":
        return _time_until_last_due_s(summary.window)
    if is_one_open_loop and offered_rps and request_count > 1:
        return (request_count - 1) / offered_rps
    return summary.window.duration_s


def _time_until_last_due_s(window: Window) -> float | None:
    """Return the time from the first to the last measured due time, or the window if not known.

    Both times are those of an open loop, in which the steady state ends at the last due time.
    """
    if window.start_s is None or window.steady.end_s is None:
        return window.duration_s
    return window.steady.end_s - window.start_s


def format_duration(seconds: float) -> str:
    """Return a duration without parts that are zero: `5 min`, not `5 min 00 s`, and `3 s`."""
    text = format.duration(seconds).removesuffix(" 00 s").removesuffix(" 00 min")
    return text.replace(".0 s", " s")
