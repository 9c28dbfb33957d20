"""How the lanes of a closed loop begin: spread over the length of an answer, unless the workload says otherwise.

Lanes that all begin in one instant stay in step: the first round is a burst that the server never sees again, and it
decides a p99. So the lanes begin evenly spread over one answer, and where time or a sweep bounds the load, the first
request of each lane is not measured: it belongs to an unmeasured stage of its own. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any, Literal

from msgspec import Struct

from loadgen.core.workload import Closed, Stage, Workload

FIRST_ROUND = "first round"  # name of the stage of the lanes' first requests
SHORTEST_NS = 1_000_000  # of that stage: with all lanes begun at once it has only to be there
SAMPLE = 100  # requests whose asked lengths are averaged
UNKNOWN_TOKENS = 256  # of an answer whose length nobody asked for

From = Literal["", "asked", "probe", "preset", "stage"]


class AnswerTime(Struct, frozen=True):
    """How long an answer takes: `ns(lanes, input tokens, output tokens)`, and where that is known from."""

    ns: Callable[[int, float, float], float]
    source: From


class Begin(Struct, frozen=True):
    """How the lanes of one stage begin: over `ramp_ns`, and where that is from. None and "" in an open loop."""

    ramp_ns: int | None = None
    source: From = ""


def by_probe(first_ms: float | None, token_ms: float | None) -> AnswerTime:
    """The time that the probe's answers took: the first token, and each one after it, without load."""
    first_ns, token_ns = (first_ms or 0.0) * 1e6, (token_ms or 0.0) * 1e6
    return AnswerTime(
        lambda lanes, input_tokens, output_tokens: first_ns + token_ns * output_tokens, "probe"
    )


def resolve(
    workload: Workload, requests: Any, answer: AnswerTime, *, leave_out: bool = False
) -> tuple[Workload, tuple[Begin, ...]]:
    """The workload with the start of every lane decided, and for each of its stages how its lanes begin.

    A closed loop without a ramp of its own gets one of the length of an answer. A measured closed loop that is bounded
    by time alone, or with `leave_out` any, gets an unmeasured stage before it, in which the lanes that it does not take
    over from the stage before send their first request; so does a warm-up that is shorter than the ramp. With
    `leave_out` (the levels of a sweep) a stage bounded by time lasts an answer longer: until the first requests of all
    lanes have ended, it is not in full load.
    """
    if not any(isinstance(stage.arrival, Closed) for stage in workload.stages):
        return workload, (Begin(),) * len(workload.stages)
    lengths = mean_tokens(requests)
    stages: list[Stage] = []
    begins: list[Begin] = []
    lanes_before = 0
    for stage in workload.stages:
        law = stage.arrival
        if not isinstance(law, Closed):
            stages.append(stage)
            begins.append(Begin())
            lanes_before = 0
            continue
        lanes = law.concurrency
        answer_ns = round(answer.ns(lanes, *lengths))
        if lanes <= lanes_before:
            begin = Begin(0, "stage")
        elif law.ramp_ns is not None:
            begin = Begin(law.ramp_ns, "asked")
        else:
            begin = Begin(min(answer_ns, _longest_ns(stage, leave_out)), answer.source)
        if lanes > lanes_before and _has_own_start(stage, begin, leave_out):
            first = Closed.model_construct(concurrency=lanes, ramp_ns=begin.ramp_ns)
            length_ns = max(begin.ramp_ns or 0, SHORTEST_NS)
            stages.append(
                Stage.model_construct(
                    name=FIRST_ROUND, arrival=first, duration_ns=length_ns, measured=False
                )
            )
            begins.append(begin)
            begin = Begin(0, "stage")
        changes: dict[str, Any] = {
            "arrival": Closed.model_construct(concurrency=lanes, ramp_ns=begin.ramp_ns)
        }
        if leave_out and stage.measured and stage.duration_ns is not None:
            changes["duration_ns"] = stage.duration_ns + answer_ns
        stages.append(stage.model_copy(update=changes))
        begins.append(begin)
        lanes_before = min(lanes, stage.count or lanes)
    return workload.model_copy(update={"stages": tuple(stages)}), tuple(begins)


def _longest_ns(stage: Stage, leave_out: bool) -> int:
    """The longest ramp by default: where the ramp is a part of a measured stage, half of that; else as long as that."""
    if stage.duration_ns is None or not stage.measured:
        return 1 << 62
    return stage.duration_ns if leave_out or stage.count is None else stage.duration_ns // 2


def _has_own_start(stage: Stage, begin: Begin, leave_out: bool) -> bool:
    """Whether the lanes of a stage begin in an unmeasured stage of their own, before it."""
    if not stage.measured:
        return (
            begin.source != "asked"
            and stage.duration_ns is not None
            and (begin.ramp_ns or 0) > stage.duration_ns // 2
        )
    return leave_out or (stage.duration_ns is not None and stage.count is None)


def mean_tokens(requests: Any) -> tuple[float, float]:
    """Mean prompt and asked output tokens of the first requests."""
    numbers = list(requests.numbers(SAMPLE))
    output_tokens = (requests.requested_output_tokens(number) for number in numbers)
    return (
        fmean(requests.requested_input_tokens(number) or 0 for number in numbers),
        fmean(UNKNOWN_TOKENS if tokens is None else tokens for tokens in output_tokens),
    )


def words(ramp_s: float | None, source: str, lanes: int | None) -> str:
    """Return how the virtual users of a stage start; "" if they take over from another stage."""
    if ramp_s is None or source in ("", "stage") or (lanes or 0) <= 1:
        return ""
    if not ramp_s:
        return "all start at once"
    reason = {
        "probe": " (one response time, by the probe)",
        "preset": " (one response time, by the preset)",
    }
    return f"starts staggered over {ramp_s:.3g} s{reason.get(source, '')}"
