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
from loadgen.core.workload.cache_fill import CacheFillStage

FIRST_ROUND = "first round"
"""The name of the stage that contains the first request of each virtual user."""

# The stage of the first requests needs a duration even if all users start at the same time.
_SHORTEST_FIRST_ROUND_NS = 1_000_000
_UNLIMITED_NS = 1 << 62
_NS_PER_MS = 1e6

RampSource = Literal["", "asked", "probe", "preset", "stage"]
"""Where a ramp, the time over which the virtual users of a stage start, comes from.

"asked": the workload. "probe" or "preset": the response time that the probe measured, or that of a
preset of the simulation. "stage": there is none, because the virtual users replace those of the
previous stage one by one. "": an open loop.
"""


_RAMP_SOURCE_NOTES = {
    "probe": " (one response time, measured by the preflight request)",
    "preset": " (one response time, computed from the preset)",
}


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


_CONTINUES_PREVIOUS_USERS = UserStart(ramp_ns=0, source="stage")
"""The start of virtual users who were already sending in the previous stage, so without a ramp."""


class StartedWorkload(NamedTuple):
    """A workload in which the start of every virtual user is decided."""

    workload: Workload
    starts: tuple[UserStart, ...]
    """How the virtual users of each stage start."""


def estimate_from_probe(first_token_ms: float | None, token_ms: float | None) -> ResponseTime:
    """Return an estimate of response times from the timing of the probe.

    The probe is a single request that is sent before the load. The estimate is the time to its
    first token plus its time per output token for each output token. It depends neither on the
    concurrency nor on the length of the prompt.

    Args:
        first_token_ms: The time to the first token. None, if it was not measured, counts as 0.
        token_ms: The time between two output tokens. None, if it was not measured, counts as 0.
    """
    first_token_ns = (first_token_ms or 0.0) * _NS_PER_MS
    token_ns = (token_ms or 0.0) * _NS_PER_MS

    def estimate_ns(_concurrency: int, _input_tokens: float, output_tokens: float) -> float:
        return first_token_ns + token_ns * output_tokens

    return ResponseTime(estimate_ns, "probe")


def decide_starts(
    workload: Workload,
    prompts: Prompts,
    response_time: ResponseTime,
    *,
    leave_out_first_round: bool = False,
) -> StartedWorkload:
    """Decide how the virtual users of each closed loop of a workload start.

    A closed loop has a fixed number of virtual users, each of which sends its next request when its
    last one has ended. The users start evenly spread over a time, the ramp, which is one response
    time unless the workload sets it. Some stages must not contain the first request of each user,
    for example because it would distort the measurement. Then an unmeasured stage with these
    requests, a "first round", is added before the stage.

    Args:
        workload: The workload.
        prompts: Its requests, whose mean size decides how long a response takes.
        response_time: How long a response takes.
        leave_out_first_round: Whether every measured stage needs a first round, as in a sweep over
            several loads. A measured stage with a duration then also lasts one response time
            longer, because the server is under full load only from then on.

    Returns:
        The workload with the added stages, and how the virtual users of each stage start. An open
        loop has no virtual users and an empty `UserStart`.
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

    The text is empty in an open loop, which has no virtual users, and for a single user. It is also
    empty if the users of the previous stage continue in this one, each with its next request.

    Args:
        ramp_s: The time over which the users start, or None for an open loop.
        source: Where the ramp comes from, one of RampSource. "stage" stands for users that continue
            from the previous stage, and "" for an open loop.
        concurrency: The number of virtual users, or None for an open loop.
    """
    if ramp_s is None or concurrency is None:  # an open loop
        return ""

    has_ramp = source not in ("", "stage")
    has_several_users = concurrency > 1
    if not has_ramp or not has_several_users:
        return ""
    if ramp_s == 0:
        return "all start at once"

    return f"starts staggered over {ramp_s:.3g} s{_RAMP_SOURCE_NOTES.get(source, '')}"


class _StartPlanner:
    """Collects the stages of a workload, and how the virtual users of each of them start.

    Attributes:
        stages: The stages so far, including the added first rounds.
        starts: How the virtual users of each of these stages start.
    """

    def __init__(
        self, request_size: MeanTokens, response_time: ResponseTime, leave_out_first_round: bool
    ) -> None:
        """Create a planner to which the stages of a workload are then added in order.

        Args:
            request_size: The mean prompt and output tokens of a request.
            response_time: How long a response takes.
            leave_out_first_round: True if the first request of each virtual user must not be
                measured. Each measured stage then follows an added stage with these requests.
        """
        self.stages: list[Stage] = []
        self.starts: list[UserStart] = []
        self._request_size = request_size
        self._response_time = response_time
        self._leave_out_first_round = leave_out_first_round
        # The virtual users who are sending at the end of the last stage that was added.
        self._active_users = 0

    def add_open_loop(self, stage: Stage) -> None:
        """Add a stage without virtual users."""
        self._add(stage, UserStart())
        self._active_users = 0

    def add_closed_loop(self, stage: Stage, arrival: Closed) -> None:
        """Add a closed loop, and before it an unmeasured first round of its users if it needs one.

        If the previous stage has enough virtual users, they continue in this stage, each when its
        last request has ended. Otherwise new users start over a ramp.
        """
        concurrency = arrival.concurrency
        response_ns = self._response_ns(concurrency)
        follows_cache_fill = bool(self.stages) and isinstance(self.stages[-1], CacheFillStage)
        if follows_cache_fill:
            # The first sessions continue those that filled the cache, so all of them are measured.
            start = self._start_of_new_users(stage, arrival, response_ns)
        elif concurrency <= self._active_users:
            start = _CONTINUES_PREVIOUS_USERS
        else:
            start = self._add_first_round_if_needed(stage, arrival, response_ns)

        # The server is not under full load until the first responses have ended.
        extra_duration_ns = response_ns if self._leave_out_first_round else 0
        self._add(_with_start(stage, concurrency, start, extra_duration_ns), start)

        # With fewer requests than users, some users have nothing to send.
        self._active_users = concurrency if stage.count is None else min(concurrency, stage.count)

    def _add_first_round_if_needed(
        self, stage: Stage, arrival: Closed, response_ns: int
    ) -> UserStart:
        """Add the unmeasured stage in which new virtual users of a closed loop start, if needed.

        Returns:
            How the users start in the closed loop itself. Without a first round they start over
            their ramp. After a first round they are already sending, and continue.
        """
        start_over_ramp = self._start_of_new_users(stage, arrival, response_ns)
        if not _needs_first_round(stage, start_over_ramp, self._leave_out_first_round):
            return start_over_ramp
        self._add(_first_round(arrival.concurrency, start_over_ramp), start_over_ramp)
        return _CONTINUES_PREVIOUS_USERS

    def _add(self, stage: Stage, start: UserStart) -> None:
        """Add a stage and how its virtual users start."""
        self.stages.append(stage)
        self.starts.append(start)

    def _response_ns(self, concurrency: int) -> int:
        """Return how long a response takes at this concurrency, in ns."""
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
    """Return the longest time over which the virtual users of a stage may start, in ns.

    Users start over one response time. This limit keeps a slow server from making that longer than
    the load. Users that start in an unmeasured stage of their own may take as long as the measured
    stage that follows. Users that start in the measured stage may take half of its duration. A
    stage without a duration and an unmeasured stage, a warm-up, set no limit.
    """
    is_warm_up = not stage.measured
    if is_warm_up or stage.duration_ns is None:
        return _UNLIMITED_NS
    if _excludes_first_round(stage, leave_out_first_round):
        return stage.duration_ns
    return stage.duration_ns // 2


def _excludes_first_round(stage: Stage, leave_out_first_round: bool) -> bool:
    """Return True if a measured stage must not contain the first request of each virtual user.

    A stage with a number of requests may contain it, unless `leave_out_first_round` is set.
    """
    has_only_duration = stage.duration_ns is not None and stage.count is None
    return leave_out_first_round or has_only_duration


def _needs_first_round(stage: Stage, start: UserStart, leave_out_first_round: bool) -> bool:
    """Return True if the virtual users of a stage must start in an extra stage before it.

    Nothing is measured in this extra stage, the "first round".

    Args:
        stage: A measured stage, or an unmeasured one, which is a warm-up.
        start: The time over which its users start, the ramp, and where that comes from.
        leave_out_first_round: Whether every measured stage gets a first round.
    """
    if stage.measured:
        return _excludes_first_round(stage, leave_out_first_round)
    return _is_warmup_too_short(stage, start)


def _is_warmup_too_short(stage: Stage, start: UserStart) -> bool:
    """Return True if the virtual users of a warm-up start over more than half of its duration.

    The warm-up would then end before the load is steady. A ramp that the workload sets is taken as
    intended, and is never too long.
    """
    is_ramp_from_workload = start.source == "asked"
    if is_ramp_from_workload or stage.duration_ns is None or start.ramp_ns is None:
        return False
    half_duration_ns = stage.duration_ns // 2
    return start.ramp_ns > half_duration_ns


def _first_round(concurrency: int, start: UserStart) -> Stage:
    """Return the unmeasured stage in which the virtual users of the next stage start."""
    return Stage.model_construct(
        name=FIRST_ROUND,
        arrival=Closed.model_construct(concurrency=concurrency, ramp_ns=start.ramp_ns),
        duration_ns=max(start.ramp_ns or 0, _SHORTEST_FIRST_ROUND_NS),
        measured=False,
    )


def _with_start(stage: Stage, concurrency: int, start: UserStart, extra_duration_ns: int) -> Stage:
    """Return a copy of a stage whose virtual users start over the ramp of `start`.

    A measured stage with a duration also lasts `extra_duration_ns` longer than before.
    """
    # `model_construct` skips the validation: the values come from a workload that was checked.
    arrival = Closed.model_construct(concurrency=concurrency, ramp_ns=start.ramp_ns)
    stage_with_start = stage.model_copy(update={"arrival": arrival})
    if not stage.measured or stage.duration_ns is None:
        return stage_with_start
    duration_ns = stage.duration_ns + extra_duration_ns
    return stage_with_start.model_copy(update={"duration_ns": duration_ns})
