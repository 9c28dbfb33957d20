"""Workloads in a few words, for the tests of the schedule and the dispatcher."""

from __future__ import annotations

from loadgen.core.workload import (
    Arrival,
    Closed,
    Constant,
    Delay,
    FixedDuration,
    FixedTokens,
    Gamma,
    Poisson,
    Ramp,
    Stage,
    Synthetic,
    Turns,
    Workload,
)

S = 1_000_000_000
MS = 1_000_000


def stage(
    arrival: Arrival,
    duration_ns: int | None = None,
    count: int | None = None,
    measured: bool = True,
) -> Stage:
    return Stage(arrival=arrival, duration_ns=duration_ns, count=count, measured=measured)


def constant(rate: float, **stop: int | None) -> Stage:
    return stage(Constant(rate=rate), **stop)


def poisson(rate: float, **stop: int | None) -> Stage:
    return stage(Poisson(rate=rate), **stop)


def gamma(rate: float, burstiness: float, **stop: int | None) -> Stage:
    return stage(Gamma(rate=rate, burstiness=burstiness), **stop)


def ramp(from_rate: float, to_rate: float, **stop: int | None) -> Stage:
    return stage(Ramp(from_rate=from_rate, to_rate=to_rate), **stop)


def closed(concurrency: int, ramp_ns: int = 0, **stop: int | None) -> Stage:
    return stage(Closed(concurrency=concurrency, ramp_ns=ramp_ns), **stop)


def workload(
    *stages: Stage,
    turns: int = 1,
    tool_ns: int = 0,
    tool_time: Delay | None = None,
    schedule_seed: int | None = None,
) -> Workload:
    spread = FixedDuration(value=tool_ns) if tool_time is None else tool_time
    talk = (
        Turns(count=turns, tool_result_tokens=FixedTokens(value=10), tool_time=spread)
        if turns > 1
        else None
    )
    requests = Synthetic(
        input_tokens=FixedTokens(value=10), output_tokens=FixedTokens(value=10), turns=talk
    )
    return Workload(name="test", requests=requests, stages=stages, schedule_seed=schedule_seed)
