"""Decide how the virtual users of a closed loop start.

Virtual users that all start at the same time stay synchronous: their first requests are a burst
that the server never sees again, and this burst decides the p99. Unless the workload says
otherwise, the users therefore start evenly spread over one response time. If only a duration limits
the load, or if the load is a load point of a sweep, the first request of each virtual user is not
measured: it belongs to an unmeasured stage of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from msgspec import Struct

from loadgen.core.requests.prompts import Prompts
from loadgen.core.schedule.forecast import MeanTokens, mean_tokens
from loadgen.core.workload import Closed, Stage, Workload

FIRST_ROUND = "first round"
"""The name of the stage that contains the first request of each virtual user."""

# The stage of the first requests needs a duration even if all users start at the same time.
_SHORTEST_FIRST_ROUND_NS = 1_000_000
_UNLIMITED_NS = 1 << 62

RampSource = Literal["", "asked", "probe", "preset", "stage"]
"""Where a ramp comes from: the workload ("asked"), the response time of the probe or of a preset of
the simulation, or the previous stage, whose virtual users are replaced one by one ("stage")."""


class ResponseTime(Struct, frozen=True):
    """How long a response takes, and where that is known from."""

    ns: Callable[[int, float, float], float]
    """Returns the time for a concurrency and the mean prompt and output tokens of a request."""
    source: RampSource


class UserStart(Struct, frozen=True):
    """How the virtual users of one stage start. An open loop has no ramp."""

    ramp_ns: int | None = None
    """The users start evenly spread over this time."""
    source: RampSource = ""


class StartedWorkload(NamedTuple):
    """A workload in which the start of every virtual user is decided."""

    workload: Workload
    starts: tuple[UserStart, ...]
    """How the virtual users of each stage start."""


def response_time_of_probe(first_token_ms: float | None, token_ms: float | None) -> ResponseTime:
    """Return the response time that the probe measured, without other load on the server.

    `first_token_ms` is the time to the first token, and `token_ms` the time of each further one.
    """
    first_token_ns = (first_token_ms or 0.0) * 1e6
    token_ns = (token_ms or 0.0) * 1e6

    def response_ns(_concurrency: int, _input_tokens: float, output_tokens: float) -> float:
        return first_token_ns + token_ns * output_tokens

    return ResponseTime(response_ns, "probe")


def decide_starts(
    workload: Workload,
    prompts: Prompts,
    response_time: ResponseTime,
    *,
    leave_out_first_round: bool = False,
) -> StartedWorkload:
    """Decide how the virtual users of each closed loop of a workload start.

    A closed loop without a ramp of its own gets a ramp of one response time. A measured closed loop
    that only a duration limits gets an unmeasured stage before it, in which its new virtual users
    send their first request. A warm-up that is shorter than the ramp gets one too.

    With `leave_out_first_round` (the load points of a sweep) every measured closed loop gets such a
    stage, and a stage with a duration lasts one response time longer: the server is not under full
    load until the first requests of all virtual users have ended.
    """
    if not any(isinstance(stage.arrival, Closed) for stage in workload.stages):
        return StartedWorkload(workload, (UserStart(),) * len(workload.stages))
    planner = _StartPlanner(mean_tokens(prompts), response_time, leave_out_first_round)
    for stage in workload.stages:
        if isinstance(stage.arrival, Closed):
            planner.add_closed_loop(stage, stage.arrival)
        else:
            planner.add_open_loop(stage)
    started_workload = workload.model_copy(update={"stages": tuple(planner.stages)})
    return StartedWorkload(started_workload, tuple(planner.starts))


def describe_start(ramp_s: float | None, source: str, concurrency: int | None) -> str:
    """Return how virtual users start as text, for example "starts staggered over 2.1 s".

    The text is empty for an open loop, for a single user, and for users that replace those of
    another stage.
    """
    if ramp_s is None or source in ("", "stage") or (concurrency or 0) <= 1:
        return ""
    if not ramp_s:
        return "all start at once"
    reason_by_source = {
        "probe": " (one response time, by the probe)",
        "preset": " (one response time, by the preset)",
    }
    return f"starts staggered over {ramp_s:.3g} s{reason_by_source.get(source, '')}"


class _StartPlanner:
    """Collects the stages of a workload, and how the virtual users of each of them start."""

    def __init__(
        self, request_size: MeanTokens, response_time: ResponseTime, leave_out_first_round: bool
    ) -> None:
        self.stages: list[Stage] = []
        self.starts: list[UserStart] = []
        self._request_size = request_size
        self._response_time = response_time
        self._leave_out_first_round = leave_out_first_round
        self._previous_users = 0

    def add_open_loop(self, stage: Stage) -> None:
        """Add a stage without virtual users."""
        self._add(stage, UserStart())
        self._previous_users = 0

    def add_closed_loop(self, stage: Stage, arrival: Closed) -> None:
        """Add a closed loop and, if it needs one, an unmeasured stage for its first requests."""
        concurrency = arrival.concurrency
        response_ns = self._response_ns(concurrency)
        # Users that replace those of the previous stage start when the requests of those users
        # have ended.
        start = UserStart(ramp_ns=0, source="stage")
        if concurrency > self._previous_users:
            start = self._start_of_new_users(stage, arrival, response_ns)
            if _needs_first_round(stage, start, self._leave_out_first_round):
                self._add(_first_round(concurrency, start), start)
                start = UserStart(ramp_ns=0, source="stage")
        # In a sweep, the first response time of a stage is not under full load.
        extra_ns = response_ns if self._leave_out_first_round else 0
        self._add(_with_start(stage, concurrency, start, extra_ns), start)
        # A stage with fewer requests than users does not use all of them.
        self._previous_users = min(concurrency, stage.count or concurrency)

    def _add(self, stage: Stage, start: UserStart) -> None:
        """Add a stage and how its virtual users start."""
        self.stages.append(stage)
        self.starts.append(start)

    def _response_ns(self, concurrency: int) -> int:
        """Return how long a response takes at this concurrency."""
        return round(
            self._response_time.ns(
                concurrency, self._request_size.input_tokens, self._request_size.output_tokens
            )
        )

    def _start_of_new_users(self, stage: Stage, arrival: Closed, response_ns: int) -> UserStart:
        """Return the ramp of the workload, or one response time if the workload sets none."""
        if arrival.ramp_ns is not None:
            return UserStart(arrival.ramp_ns, "asked")
        longest_ramp_ns = _longest_ramp_ns(stage, self._leave_out_first_round)
        return UserStart(min(response_ns, longest_ramp_ns), self._response_time.source)


def _longest_ramp_ns(stage: Stage, leave_out_first_round: bool) -> int:
    """Return the longest ramp that a stage gets by default.

    A ramp that is a part of a measured stage takes at most half of it. A ramp in an unmeasured
    stage of its own is at most as long as the measured stage.
    """
    if stage.duration_ns is None or not stage.measured:
        return _UNLIMITED_NS
    if leave_out_first_round or stage.count is None:
        return stage.duration_ns
    return stage.duration_ns // 2


def _needs_first_round(stage: Stage, start: UserStart, leave_out_first_round: bool) -> bool:
    """Return True if the users of a stage start in an unmeasured stage of their own before it.

    A measured stage that only a duration limits needs one, since it would otherwise contain the
    start. So does a warm-up whose default ramp takes more than half of it, since it would end
    before the load is steady.
    """
    if stage.measured:
        return leave_out_first_round or (stage.duration_ns is not None and stage.count is None)
    if start.source == "asked" or stage.duration_ns is None:
        return False
    return (start.ramp_ns or 0) > stage.duration_ns // 2


def _first_round(concurrency: int, start: UserStart) -> Stage:
    """Return the unmeasured stage in which the virtual users of the next stage start."""
    return Stage.model_construct(
        name=FIRST_ROUND,
        arrival=Closed.model_construct(concurrency=concurrency, ramp_ns=start.ramp_ns),
        duration_ns=max(start.ramp_ns or 0, _SHORTEST_FIRST_ROUND_NS),
        measured=False,
    )


def _with_start(stage: Stage, concurrency: int, start: UserStart, extra_ns: int) -> Stage:
    """Return a stage with its ramp. A measured stage with a duration lasts `extra_ns` longer."""
    arrival = Closed.model_construct(concurrency=concurrency, ramp_ns=start.ramp_ns)
    started_stage = stage.model_copy(update={"arrival": arrival})
    if stage.measured and stage.duration_ns is not None:
        return started_stage.model_copy(update={"duration_ns": stage.duration_ns + extra_ns})
    return started_stage
