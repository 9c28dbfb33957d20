"""The capacity that a search or a sweep found, as `capacity.json` stores it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec

from loadgen.core import format
from loadgen.core.errors import UNSOUND, LoadgenError, UserError
from loadgen.core.results.json_files import decode_json

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.slo import Slo
    from loadgen.core.workload import Workload

SCHEMA = 1
CAPACITY_FILE = "capacity.json"
CONFIDENCE = 0.95
HIGHEST_LOAD_PASSED = "the highest tested load still met the SLO"
"""Why a capacity is a lower bound, unless another reason is given."""
HORIZON_S = 12 * 60.0
"""The usual recurrence horizon (see `contracts.schema.HORIZON_NS`).

Servers have slow spells, for example while memory is collected. A load of limited length meets
those that recur, on average, within its recurrence horizon.
"""
OWN_DIRECTORY = "."
"""The directory of the run at a capacity, if it is the one that contains `capacity.json`."""

DEFAULT_TRIAL_NS = 600 * 10**9
TASK_LIMITS_PER_TRIAL = 10
"""The length of a trial of tasks, as a multiple of the longest time that a task may take.

In a shorter trial most tasks start on an empty server, so that the capacity is overestimated. In
trials of 600 s a search found 0.849/s for `coding-agent`, whose tasks may take 180 s, where runs of
four hours meet the SLO at 0.80/s and miss it at 0.83/s.
"""

Unit = Literal["requests", "conversations", "starts"]
"""What a rate counts.

- requests: requests.
- conversations: conversations or tasks.
- starts: what a mix of conversations and single requests starts, both together.
"""

State = Literal["sustained", "confirmed", "held", "stopped", "none"]
"""How far a capacity was shown.

- sustained: a longer run showed that nothing grows at it.
- confirmed: a run at full length met every term, and nothing grew in it.
- held: a load point of a sweep met every term, or a trial of a search of which no trial could show
  that nothing grows.
- stopped: the search was stopped before its confirmation. The rate is the highest load that passed
  to its end until then.
- none: the search came to its end and no load passed or was confirmed.
"""


class NoCapacityError(LoadgenError):
    """A search without a capacity was given where one of its runs has to stand for it."""

    exit_code = UNSOUND


STATE_LABELS: dict[State, str] = {
    "sustained": "sustained",
    "confirmed": "confirmed",
    "held": "passed but not confirmed",
    "stopped": "stopped",
    "none": "none",
}
"""How far a capacity was shown, as text."""


class Capacity(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "lower_bound_reason": "bound_why",
        "resume_command": "go_on",
        "sustained_reason": "sustained_why",
    },
):
    """The highest rate at which every objective of the SLO was met (docs/reference/costs.md).

    Attributes:
        schema: The version of the format.
        rate_per_s: The offered rate, of everything behind the endpoint together, that the run
            named by `evidence` passed. It is 0 if a search was stopped or found nothing and no
            load passed.
        low_per_s: The lower end of the interval of the highest rate, widened to include
            `rate_per_s`. Null if there is no interval.
        high_per_s: The upper end. It lies below any load that was not sustained.
        confidence: The confidence level of the interval.
        horizon_s: The interval covers changes of the server that recur within this time. Null if
            the server does not change, or if it is not known.
        lower_bound: Whether the capacity may be higher: no load that was tried was too high, or the
            next one that was tried is a step away.
        lower_bound_reason: Why it is a lower bound.
        unit: What the rate counts.
        method: How it was found.
        recipe: The fingerprint of what was requested without the rate. It is equal for two searches
            for the same capacity.
        evidence: The directory of the run that shows it, relative to this file.
        confirmed: Whether a search ran this rate as its confirmation.
        output_tokens_per_s: The steady rate of output tokens of that run.
        total_tokens_per_s: The same with the tokens of the prompts.
        sustained: Whether a longer run showed that nothing grows at this rate. Null if it is not
            known.
        sustained_reason: Why it is known to be sustained or not, or why it is not known.
        state: How far it was shown.
        resume_command: The command that resumes a stopped search.
        sustained_s: How long the load of its run lasted, in which nothing grew.
        warnings: The warnings of its run about other work or another server than requested.
        simulated: Whether a performance model responded instead of a real server.
    """

    schema: int = SCHEMA
    rate_per_s: float
    low_per_s: float | None = None
    high_per_s: float | None = None
    confidence: float = CONFIDENCE
    horizon_s: float | None = None
    lower_bound: bool = False
    lower_bound_reason: str = ""
    unit: Unit = "requests"
    method: Literal["search", "sweep", "repeats"]
    recipe: str = ""
    evidence: str = OWN_DIRECTORY
    confirmed: bool | None = None
    output_tokens_per_s: float | None = None
    total_tokens_per_s: float | None = None
    sustained: bool | None = None
    sustained_reason: str = ""
    state: State | None = None
    resume_command: str = ""
    sustained_s: float | None = None
    warnings: tuple[str, ...] = ()
    simulated: bool = False

    @property
    def description(self) -> str:
        """The capacity and its state in a few words, for example "29.82 requests/s, sustained"."""
        if self.is_unfinished:
            return self._unfinished_description

        rate = self._rate_with_unit
        if self.lower_bound:
            rate = f"at least {rate}"

        # The state is None if it is not known how far the capacity was shown.
        state = "" if self.state is None else f", {STATE_LABELS[self.state]}"
        return f"{rate}{state}{describe_sustained_period(self.state, self.sustained_s)}"

    @property
    def _unfinished_description(self) -> str:
        """The description of a search that was stopped, or that found no load that passes."""
        if self.state == "none":
            return "no load passed"
        if self.rate_per_s == 0:
            return "stopped before a load passed"
        return f"stopped, at least {self._rate_with_unit}"

    @property
    def _rate_with_unit(self) -> str:
        """The rate as text, for example "29.82 requests/s"."""
        return f"{self.rate_per_s:.4g} {self.unit}/s"

    @property
    def is_unfinished(self) -> bool:
        """Whether no machine may be sized by it: the search was stopped, or no load passed."""
        return self.state in ("stopped", "none")

    @property
    def resume_hint(self) -> str:
        """How to resume a search that was stopped, or "" if nothing is left to do."""
        return f"resume with: {self.resume_command}" if self.resume_command else ""

    @property
    def comparison_note(self) -> str:
        """A note that says which run stands for a search in a comparison of two results.

        A comparison needs a single run on each side. A search has many, so its run at the capacity
        is compared. The note names that run and the capacity with its interval and state: "the run
        of the search at its capacity, 30.4 requests/s (29.8 to 31.1), sustained: t5".
        """
        interval = ""
        if self.low_per_s is not None:
            interval = f" ({self.low_per_s:.4g} to {self.high_per_s:.4g})"

        is_run_in_subdirectory = self.evidence != OWN_DIRECTORY
        run_name = f": {self.evidence}" if is_run_in_subdirectory else ""
        return (
            f"the run of the search at its capacity, {self._rate_with_unit}{interval}, "
            f"{self._support_label}{run_name}"
        )

    @property
    def _support_label(self) -> str:
        """How far the capacity was shown: in a long run, at full length, or only in a trial."""
        if self.sustained:
            return "sustained"
        return "confirmed" if self.confirmed else "the highest load that passed"


def default_trial_ns(workload: Workload) -> int:
    """Return how long a trial of a search lasts by default, in ns.

    A trial is one load that the search tries. It lasts DEFAULT_TRIAL_NS. With an SLO on whole tasks
    it lasts at least TASK_LIMITS_PER_TRIAL times as long as a task may take.
    """
    task_objectives = [slo.task for slo in _list_slos(workload) if slo.task is not None]
    # An objective that limits only the waits of a task has no `within_ns`.
    task_limits_ns = [objective.within_ns or 0 for objective in task_objectives]
    longest_task_limit_ns = max(task_limits_ns, default=0)
    return max(DEFAULT_TRIAL_NS, TASK_LIMITS_PER_TRIAL * longest_task_limit_ns)


def _list_slos(workload: Workload) -> list[Slo]:
    """Return the SLO of a workload and those of its request classes, if it has any."""
    from loadgen.core.workload.request_classes import Mix

    slos = [workload.slo]
    if isinstance(workload.requests, Mix):
        slos += [request_class.slo for request_class in workload.requests.classes.values()]
    return [slo for slo in slos if slo is not None]


def describe_horizon(horizon_s: float) -> str:
    """Return a text about which slowdowns of a server a capacity takes into account.

    A server may slow down regularly, for example when it collects garbage. A load most likely
    includes each slowdown that happens at least once in `horizon_s`, the recurrence horizon of the
    result. If this time is shorter than by default, the text adds that rarer slowdowns may have
    been missed.
    """
    covered_slowdowns = f"slowdowns that recur at least every {format.duration(horizon_s)}"
    if horizon_s >= HORIZON_S:
        return covered_slowdowns
    return (
        f"{covered_slowdowns} (default {format.duration(HORIZON_S)}; rarer ones may have been "
        "missed)"
    )


def describe_sustained_period(state: str | None, sustained_s: float | None) -> str:
    """Return how long a load was observed, for example " (no trend in 20 min)".

    Return "" unless the load is known to be sustained. The time is stated because a server that
    leaks memory and restarts each hour looks sustained within 20 minutes.
    """
    if state != "sustained" or sustained_s is None:
        return ""
    return f" (no trend in {format.duration(sustained_s)})"


def rate_unit(summary: Summary) -> Unit:
    """Return what the rate of a load counts, for example "conversations".

    A load of "2 per second" starts two requests per second. If the workload has conversations, it
    starts two conversations per second, and each of them then sends its further requests by itself.
    A mix of conversations and single requests starts both, which are called "starts" together.
    """
    if summary.sessions is None:
        return "requests"
    has_single_requests = any(request_class.sessions is None for request_class in summary.classes)
    return "starts" if has_single_requests else "conversations"


def dump_capacity(capacity: Capacity) -> bytes:
    """Return the content of `capacity.json`."""
    return format.document(capacity)


def load_capacity(data: bytes, where: str = CAPACITY_FILE) -> Capacity:
    """Return the capacity in the content of `capacity.json`.

    Raises UserError if it is damaged, of a newer schema, or if its numbers are out of range.
    """
    hint = (
        "repeat the same command of the search or sweep to write it again, or use "
        "loadgen search --resume"
    )
    capacity = decode_json(data, Capacity, where, "a capacity", hint, schema=SCHEMA)
    _check_rate(capacity, where)
    _check_interval(capacity, where)
    _check_tokens(capacity.output_tokens_per_s, f"{where} (output_tokens_per_s)")
    _check_tokens(capacity.total_tokens_per_s, f"{where} (total_tokens_per_s)")
    _check_confidence(capacity, where)

    return capacity


def _check_confidence(capacity: Capacity, where: str) -> None:
    """Raise UserError unless the confidence level is between 0 and 1, both excluded."""
    if not 0 < capacity.confidence < 1:
        raise UserError(
            "out_of_range",
            f"the confidence is {capacity.confidence:g}",
            f"{where} (confidence)",
            "write a fraction, like 0.95",
        )


def _check_rate(capacity: Capacity, where: str) -> None:
    """Raise UserError unless the rate is above zero and finite, or zero for an unfinished search.

    `where` is the name of the file, for the error message.
    """
    rate = capacity.rate_per_s
    if math.isfinite(rate) and rate > 0:
        return
    if rate == 0 and capacity.is_unfinished:
        return

    raise UserError(
        "out_of_range",
        f"the capacity is {rate:g} per second",
        f"{where} (rate_per_s)",
        "write a rate above zero",
    )


def _check_interval(capacity: Capacity, where: str) -> None:
    """Raise UserError unless the interval has both ends, or none, and includes the rate."""
    place = f"{where} (low_per_s, high_per_s)"
    low = capacity.low_per_s
    high = capacity.high_per_s
    if low is None and high is None:
        return
    if low is None or high is None:
        raise UserError(
            "missing_key", "half an interval", place, "give both ends of the interval, or neither"
        )

    if not 0 < low <= capacity.rate_per_s <= high < math.inf:
        raise UserError(
            "out_of_range",
            f"the interval {low:g} to {high:g} does not contain the rate {capacity.rate_per_s:g}",
            place,
            "write 0 < low_per_s <= rate_per_s <= high_per_s",
        )


def _check_tokens(tokens_per_s: float | None, where: str) -> None:
    """Raise UserError unless the rate of tokens is not known, or is a finite number from zero."""
    if tokens_per_s is not None and not 0 <= tokens_per_s < math.inf:
        hint = "write a rate, or null if none is known"
        raise UserError("out_of_range", f"{tokens_per_s:g} tokens per second", where, hint)
