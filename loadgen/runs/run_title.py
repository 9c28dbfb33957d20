"""How a run is named: its workload, its target, its load and how long the load lasted. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.repeated.capacity import Unit, rate_unit

if TYPE_CHECKING:
    from loadgen.core.metrics.part_summaries import StageSummary, TargetSummary
    from loadgen.core.metrics.summary import Summary
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
    stages = [stage for stage in summary.stages if stage.measured]
    if len(stages) == 1:
        load = describe_arrival(stages[0].arrival, rate_unit(summary))
    elif stages:
        load = format.counted(len(stages), "stage")
    else:
        load = describe_arrival(summary.load.arrival)
    duration_s = _load_duration_s(summary, stages)
    if duration_s is None:
        return load or "no load"
    return f"{load} for {format_duration(duration_s)}"


def describe_arrival(arrival: str, unit: Unit = "requests") -> str:
    """Return an arrival process for readers: "poisson 30/s" is "Poisson 30 req/s".

    `unit` is what the rate counts: the arrivals of a workload with sessions start sessions.
    """
    closed_loop = _CLOSED_LOOP.match(arrival)
    if closed_loop:
        return f"concurrency {int(closed_loop[1]):,}"
    text = re.sub(r"(?<=[\d.])/s\b", f" {_RATE_UNITS[unit]}", arrival)
    return f"{text[:1].upper()}{text[1:]}"


def short_arrival(arrival: str) -> str:
    """Return an arrival process for a table: "16 in flight (closed loop)" is "16 in flight"."""
    return arrival.replace(" (closed loop)", "").replace(" (closed loop, ", " (")


def _load_duration_s(summary: Summary, stages: list[StageSummary]) -> float | None:
    """Return how long the measured load lasted, without the drain where that is known.

    The offered rate of n requests is (n - 1) / (last - first scheduled time), so it gives the time
    in which an open loop started its requests. A closed loop, and a load of sessions, has no such
    rate, and its measurement window is used.
    """
    load = summary.load
    requests = summary.requests.scheduled
    if len(stages) == 1 and load.offered_rps and summary.sessions is None and requests > 1:
        return (requests - 1) / load.offered_rps
    return summary.window.duration_s


def format_duration(seconds: float) -> str:
    """Return a duration without parts that are zero: `5 min`, not `5 min 00 s`, and `3 s`."""
    text = format.duration(seconds).removesuffix(" 00 s").removesuffix(" 00 min")
    return text.replace(".0 s", " s")
