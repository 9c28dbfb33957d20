"""The capacity that a search or sweep found (`capacity.json`).

Pure: bytes and numbers in, values out. `search/` finds a capacity; `cost/` plans machines and cost
from it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec

from loadgen.core import format
from loadgen.core.errors import UNSOUND, LoadgenError, UserError
from loadgen.core.results.manifest import decoded

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.workload import Workload

SCHEMA = 1
CAPACITY_FILE = "capacity.json"
CONFIDENCE = 0.95
HIGHEST_LOAD_PASSED = "the highest load that was tried still kept the SLO"  # why a rate is a lower bound, unless a reason is given


def default_trial_ns(workload: Workload) -> int:
    """How long a trial of a search lasts where nobody says: ten minutes, of tasks ten times as long as one may take.

    The tasks that find an empty server are quick, and one in ten that may miss is few: of 600 s a
    search found 0.849 of coding-agent, whose tasks may take 180 s, where runs of four hours keep
    0.80 and miss at 0.83.
    """
    own = [one.slo for one in getattr(workload.requests, "classes", {}).values()]
    tasks = [slo.task for slo in (workload.slo, *own) if slo is not None and slo.task is not None]
    return max(600 * 10**9, *(10 * (task.within_ns or 0) for task in tasks), 0)


HORIZON_S = 12 * 60.0
"""The usual horizon: what comes back within this time was looked for (`contracts.schema.HORIZON_NS` says why)."""


def describe_horizon(horizon_s: float) -> str:
    """What an interval or a verdict holds for, in words; and below the usual horizon what was not looked for."""
    words = f"what comes back within {format.duration(horizon_s)}"
    if horizon_s >= HORIZON_S:
        return words
    usual = f"(usual: {format.duration(HORIZON_S)})"
    return f"{words} {usual}; slow spells of minutes that come back less often were not looked for"


def describe_sustained_period(state: str | None, sustained_s: float | None) -> str:
    """Return the time that "sustained" covers, as it stands behind the word; "" if not known.

    A server that leaks and restarts each hour looks sustained within 20 minutes.
    """
    if state != "sustained" or sustained_s is None:
        return ""
    return f" (no trend within {format.duration(sustained_s)})"


Unit = Literal["requests", "conversations", "starts"]
"""What a rate counts: requests; conversations, tasks too; what a mix of conversations and single requests starts, the
ones and the others."""


def rate_unit(summary: Summary) -> Unit:
    """What a rate of what a run started counts."""
    if summary.sessions is None:
        return "requests"
    return "starts" if any(part.sessions is None for part in summary.classes) else "conversations"


State = Literal["sustained", "confirmed", "held", "stopped", "none"]
"""How far a capacity was shown.

- sustained: a longer run showed that nothing grows at it.
- confirmed: a run at full length from empty met every term, and nothing grew in it.
- held: a level of a sweep met every term, or a trial of a search of which no trial could show that
  nothing grows.
- stopped: the search was stopped before its confirmation. The rate is the highest load that passed
  to its end until then.
- none: the search came to its end and no load passed or was confirmed.
"""


class NoCapacityError(LoadgenError):
    """A search that was stopped, or found nothing, where one of its runs has to stand for it: exit code 3."""

    exit_code = UNSOUND


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
    """The highest rate at which every term of the SLO was seen to hold; documented in docs/cost.md.

    `rate_per_s` is the offered rate of what `unit` says, by everything behind the endpoint
    together, that the run named as `evidence` held at full length: never one that no run was
    offered. `confirmed`: a search ran it as its confirmation. `output_tokens_per_s` and
    `total_tokens_per_s` (with the prompts) are the steady ones of that run. `low_per_s` and
    `high_per_s` are the interval of the highest rate, widened to the seen one and below a load that
    was not sustained, at `confidence`; null when there is none. `horizon_s`: they hold for what
    comes back within this time; null: of a server that does not change, or not known. `evidence` is
    a folder, relative to this file. `recipe` is the fingerprint of what was asked, without the
    rate: equal for two searches for the same thing. `lower_bound`: the capacity is at least this,
    for the reason in `lower_bound_reason`: no load that was tried was too high, or the next one that was
    tried is a step away. `sustained`: whether a longer run showed that nothing grows at this rate,
    with the reason; false: something grows; null: not known, "rules only". `state`: see `State`. Of
    a search that was stopped, or found nothing, `rate_per_s` may be 0: no load held to its end.
    `resume_command`: the command that goes on with a stopped search.
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
    evidence: str = "."
    confirmed: bool | None = None
    output_tokens_per_s: float | None = None
    total_tokens_per_s: float | None = None
    sustained: bool | None = None
    sustained_reason: str = ""
    state: State | None = None
    resume_command: str = ""
    sustained_s: float | None = None  # the load of its run, within which nothing grew
    warnings: tuple[str, ...] = ()  # of its run: repeated prompts, a cache, other lengths, replicas
    simulated: bool = False  # a performance model answered, and no real server was measured

    @property
    def words(self) -> str:
        """The capacity and its state in a few words: `29.82 requests/s, sustained`."""
        rate = f"{self.rate_per_s:.4g} {self.unit}/s"
        if self.state == "none":
            return "no load held"
        if self.state == "stopped":
            if not self.rate_per_s:
                return "stopped, no load was shown to hold"
            return f"stopped, at least {rate}"
        words = ", ".join(
            filter(None, (("at least " if self.lower_bound else "") + rate, self.state or ""))
        )
        return words + describe_sustained_period(self.state, self.sustained_s)

    @property
    def unfinished(self) -> bool:
        """Whether no machine may be counted by it: its search was stopped early, or showed no load that holds."""
        return self.state in ("stopped", "none")

    @property
    def resume_hint(self) -> str:
        """Return how to resume a search that was stopped, or "" if nothing is left to do."""
        return f"go on with: {self.resume_command}" if self.resume_command else ""

    @property
    def comparison_note(self) -> str:
        """Which run of its search is compared, and how much of its load was shown."""
        how = (
            "sustained"
            if self.sustained
            else "confirmed"
            if self.confirmed
            else "the highest that held"
        )
        run = "" if self.evidence == "." else f": {self.evidence}"
        interval = (
            "" if self.low_per_s is None else f" ({self.low_per_s:.4g} to {self.high_per_s:.4g})"
        )
        return f"the run of the search at its capacity, {self.rate_per_s:.4g} {self.unit}/s{interval}, {how}{run}"


def dump_capacity(capacity: Capacity) -> bytes:
    return format.document(capacity)


def load_capacity(data: bytes, where: str = CAPACITY_FILE) -> Capacity:
    """The inverse of `dump_capacity`. Raises UserError if damaged, of a newer schema, or not low <= rate <= high."""
    hint = "the search or sweep that wrote it can write it again: the same command, or loadgen search --resume"
    capacity = decoded(data, Capacity, where, "a capacity", hint, schema=SCHEMA)
    low, rate, high = capacity.low_per_s, capacity.rate_per_s, capacity.high_per_s
    if not (math.isfinite(rate) and (rate > 0 or (rate == 0 and capacity.unfinished))):
        raise UserError(
            "out_of_range",
            f"a capacity of {rate:g} per second",
            f"{where} (rate_per_s)",
            "it is a rate above zero",
        )
    if (low is None) != (high is None):
        raise UserError(
            "missing_key",
            "half an interval",
            f"{where} (low_per_s, high_per_s)",
            "give both ends, or neither",
        )
    if low is not None and high is not None and not 0 < low <= rate <= high < math.inf:
        what = f"the interval {low:g} to {high:g} does not hold the rate {rate:g}"
        raise UserError(
            "out_of_range",
            what,
            f"{where} (low_per_s, high_per_s)",
            "0 < low_per_s <= rate_per_s <= high_per_s",
        )
    for name in ("output_tokens_per_s", "total_tokens_per_s"):
        tokens = getattr(capacity, name)
        if tokens is not None and not 0 <= tokens < math.inf:
            hint = "a rate, or null where none is known"
            raise UserError(
                "out_of_range", f"{tokens:g} tokens per second", f"{where} ({name})", hint
            )
    if not 0 < capacity.confidence < 1:
        raise UserError(
            "out_of_range",
            f"a confidence of {capacity.confidence:g}",
            f"{where} (confidence)",
            "a share, like 0.95",
        )
    return capacity
