"""The highest load at which an SLO holds: which load to try next.

Sans-IO. `LoadSearch` names the next trial and is told its result. Nothing here runs a load or reads a clock, so a
search is resumed by telling it the same results again.

The search estimates the load at which a full-length run from an empty server passes with probability one half
(`belief.py`). A trial at the median of that estimate amounts to bisection where outcomes are clear, and stays
calibrated where they are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from loadgen.core.errors import INTERRUPTED, OK, SLO_MISSED, UNSOUND
from loadgen.core.stats.intervals import Interval, recurrence
from loadgen.repeated.capacity import State
from loadgen.search.belief import Belief
from loadgen.search.failures import REFUSED
from loadgen.search.watch import Outcome

Kind = Literal["bracket", "probe", "confirm", "sustain", "level"]
"""sustain: as confirm, and it must not grow either; level: a load of a grid that the user gave."""

PRECISION = 0.02
SURE = (
    0.90  # probability that the answer lies within the precision, required before it is confirmed
)
LEVEL = 0.95  # confidence level of the reported interval
MOST_PROBES = 40
STEP = 2.0  # factor between loads while no bracket is known
NEAR = 1.2  # the same where the first load is an estimate: the answer is most often between the first two
CONFIRM_AT = 0.80  # a confirmation runs at the load that passes with this probability
ENOUGH = (
    24  # trials: what is known then is confirmed, also where its interval is wider than asked for
)
CONFIRMATIONS = 4  # failed ones, after which the search gives up
LAPSE = 0.01  # probability that the outcome of a full-length trial says nothing about the load
LAPSE_EARLY = 0.05  # the same for a trial that ended early as under
SIGMA_OF_NOISE = 1.5  # expected sigma, in units of 1 / sqrt(n): lengths and their order add to the noise of arrivals
SUSTAINS = 10  # trials, at most, for the highest load that is sustained
MOST_LENGTHS = 8.0  # the longest trial, in full lengths, that a search extends itself to


class NextTrial(msgspec.Struct, frozen=True, kw_only=True):
    """The next trial: its load, and whether it may end early as under. `number` counts from 0.

    `lengths`: its duration, in full lengths of a trial.
    """

    number: int
    load: float
    kind: Kind
    early_under: bool
    lengths: float = 1.0


class TrialResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a trial. `spent_s` includes the drain; `why` is the reason in words, `code` the same for programs.

    `offered`: the load that the schedule of the trial really offered until it was decided (arrivals / time). The
    requested load is only a mean, and the real one differs by chance, so the outcome is judged at `offered`. `noise`: 1
    / sqrt(n) for n requests of a full-length run, the scale of the remaining chance (lengths and their order).
    """

    ask: NextTrial
    outcome: Outcome
    early: bool
    spent_s: float
    offered: float
    noise: float
    why: str = ""
    code: str = ""  # of `why`: misses, steady, full_length, not_sustained, failures, refused, ...
    folder: str = ""
    figures: dict[str, float | None] = {}
    sustained: bool | None = None  # null: not known, as of every trial that ended early
    sustained_why: str = ""
    needed_s: float | None = None  # length of the load that would show whether it is sustained


class SearchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a search. `load` None: nothing is known yet, or even the lowest load does not hold (`reason`
    "none").

    reason: "" not finished; "found" precise and confirmed; "coarse" confirmed, and not precise after `ENOUGH` trials;
    "none" as above; "highest" the highest load allowed holds; "unconfirmed" the confirmations
    failed; "undecided" loads met the SLO, and their trials could not show whether they are
    sustained; "probes", "time", "invalid", "refused" (a quota or rate limit), "gone" (no endpoint any more), "nodes" (no load machine
    any more), "interrupted": the search stopped with what it knew then.
    """

    load: float | None
    interval: Interval | None
    confirmed: float | None  # highest load whose confirmation passed: a full-length run from empty
    held: float | None  # highest load of a trial with the outcome under
    missed: float | None  # lowest load of a trial with the outcome over
    reason: str
    probes: int
    spent_s: float
    confirming_s: float  # part of spent_s: the confirmations
    sustained: bool | None = (
        None  # whether `steady` was confirmed over `lengths`; null: not known, "rules only"
    )
    sustained_why: str = ""
    steady: float | None = None  # the steady knee: the highest load that held and did not grow
    not_steady: float | None = (
        None  # the lowest load that held by the rules and grew, or missed them when it went on
    )
    lengths: float = 1.0  # duration of the trials behind `steady`, in full lengths
    steady_s: float | None = None  # the load of the trial behind `steady`: nothing grew within it
    needed_s: float | None = None  # length of a trial that would decide an "undecided" search
    horizon_s: float | None = (
        None  # `interval` is of changes that come back within this time; null: of no change
    )
    run_spread: float | None = None  # variation from run to run in `interval`, as a share
    run_spread_from: Literal["", "told", "learned", "simulated"] = ""

    @property
    def only_allowed(self) -> bool:
        """Return whether the answer is the highest load that was allowed, so a lower bound."""
        return self.reason == "highest" and self.missed is None

    @property
    def rules_only(self) -> bool:
        """Whether a load was confirmed by the rules, and it is not shown that it can go on for ever."""
        return self.confirmed is not None and self.sustained is not True


FOUND = ("found", "coarse")  # reasons of searches that confirmed a load
ENDED = (*FOUND, "highest", "none", "unconfirmed", "undecided")  # searches that came to their end
CONFIRMING = ("confirm", "sustain")


def lowest_growing(results: Iterable[TrialResult]) -> float:
    """Return the lowest load that a valid trial found not to be sustained, or infinity."""
    return min(
        (
            result.ask.load
            for result in results
            if result.sustained is False and result.outcome != "invalid"
        ),
        default=math.inf,
    )


def lowest_failed_longer(results: Iterable[TrialResult]) -> float:
    """Return the lowest load that failed in a trial longer than the ordinary ones, or infinity."""
    return min(
        (
            result.ask.load
            for result in results
            if result.ask.kind == "sustain" and result.outcome == "over"
        ),
        default=math.inf,
    )


def _is_evidence(result: TrialResult, growing: float, failed_longer: float) -> bool:
    """Return whether a trial passed to its end, and nothing longer contradicts it.

    `growing` is the lowest load that was found to grow, `failed_longer` the lowest that failed in
    a longer trial.
    """
    limit = growing if result.ask.kind == "sustain" else min(growing, failed_longer)
    return result.outcome == "under" and not result.early and result.ask.load < limit


def evidence(results: Sequence[TrialResult]) -> TrialResult | None:
    """Return the trial that shows the capacity, or None.

    It passed to its end, no load up to its own was found to grow, and none failed in a longer
    trial, unless it is a longer trial itself. A trial that showed that
    nothing grows comes before one that could not tell, a longer trial before a confirmation, a
    confirmation before another trial, and a high load before a low one.
    """
    ranks = {"sustain": 2, "confirm": 1}
    growing = lowest_growing(results)
    failed_longer = lowest_failed_longer(results)
    return max(
        (result for result in results if _is_evidence(result, growing, failed_longer)),
        key=lambda result: (
            result.ask.kind in CONFIRMING and result.sustained is True,
            ranks.get(result.ask.kind, 0),
            result.ask.load,
        ),
        default=None,
    )


def shown_trial(answer: SearchAnswer, results: Sequence[TrialResult]) -> TrialResult | None:
    """Return the trial that shows the capacity of a search, or the bound of one that was stopped.

    A trial that was too short to show whether its load is sustained bounds nothing: at a load that
    grows slowly, a short trial passes. A finished search has tried its load for long enough, or
    says that it could not.
    """
    best = evidence(results)
    if best is None or answer.reason in ENDED or not _was_too_short(best):
        return best
    growing = lowest_growing(results)
    failed_longer = lowest_failed_longer(results)
    return max(
        (
            result
            for result in results
            if _is_evidence(result, growing, failed_longer) and not _was_too_short(result)
        ),
        key=lambda result: result.ask.load,
        default=None,
    )


def _was_too_short(result: TrialResult) -> bool:
    """Return whether only a longer trial could show that the load is sustained."""
    return result.sustained is None and result.needed_s is not None


def state_of(answer: SearchAnswer, confirmed: bool | None, sustained: bool | None) -> State:
    """Return how far the way to the capacity was gone.

    `confirmed` and `sustained` are those of the trial that shows it, None if there is none. "held":
    the search ended, and no confirmation could show that its load is sustained. "stopped": the
    search has to confirm a load, or to show in a longer trial that a confirmed one is sustained.
    """
    has_ended = answer.reason in ENDED
    wants_longer_trial = answer.lengths > 1 or answer.needed_s is not None
    if not has_ended and wants_longer_trial and not sustained:
        return "stopped"
    if answer.reason == "undecided" and confirmed is not None:
        return "held"
    if confirmed or (confirmed is not None and answer.reason == "highest"):
        return "sustained" if sustained else "confirmed"
    if not has_ended:
        return "stopped"
    return "held" if confirmed is not None and answer.reason in FOUND else "none"


def capacity_of(answer: SearchAnswer, told: Sequence[TrialResult]) -> tuple[float | None, State]:
    """The load that answers a search, and its state: what `capacity.json`, text and page say."""
    best = shown_trial(answer, told)
    if best is None or answer.load is None or answer.reason == "unconfirmed":
        return None, state_of(answer, None, None)
    sustained = answer.sustained if best.ask.kind == "sustain" else None
    return best.ask.load, state_of(answer, best.ask.kind in CONFIRMING, sustained)


def exit_code(answer: SearchAnswer) -> int:
    """The exit code of a search."""
    ok = dict.fromkeys((*FOUND, "highest"), OK)
    unsound = dict.fromkeys(("invalid", "refused", "gone", "nodes", "probes", "time"), UNSOUND)
    return (ok | unsound | {"interrupted": INTERRUPTED}).get(answer.reason, SLO_MISSED)


class SearchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a `LoadSearch` without its results, as `search.json` stores them. `most_s` null: no limit."""

    low: float
    high: float
    start: float | None
    precision: float
    most_probes: int
    most_s: float | None
    whole: bool
    longer: float
    run_spread: float | None
    stopped: str
    trial_s: float | None
    step: float
    requires_steady: bool
    may_extend: bool
    load_s: float | None


@dataclass(slots=True)
class LoadSearch:
    """The search: call `ask`, run the trial, call `tell`, until `ask` returns None.

    Loads are rates per second, or numbers of lanes when `whole`.
    """

    low: float  # not below this
    high: float  # not above this
    start: float | None = None  # None: low and high are a bracket; begin at their geometric mean
    precision: float = PRECISION  # relative precision of the answer, to reach with probability SURE
    most_probes: int = MOST_PROBES
    most_s: float | None = None
    whole: bool = False
    longer: float = 1.0  # duration of the trials that confirm a sustained load, in full lengths; 1: no such trials
    run_spread: float | None = 0.0  # of the server, as a share; None: not told, to be learned
    step: float = (
        STEP  # factor between the first two loads; while no bracket is known the next grow to STEP
    )
    trial_s: float | None = (
        None  # full length of a trial; None: of a server that does not change while it is searched
    )
    # whether only a trial that showed that nothing grows confirms its load; False: the SLO alone,
    # as MLPerf's rules have it and as suffices for a closed loop, which cannot pile up
    requires_steady: bool = False
    may_extend: bool = True  # a confirmation that cannot tell is repeated as long as it has to be
    load_s: float | None = None  # full length of the load of a trial; None: not known
    told: list[TrialResult] = field(default_factory=list)
    stopped: str = ""
    _believed: tuple[object, Belief] | None = field(default=None, repr=False, compare=False)

    @property
    def settings(self) -> SearchSettings:
        """What the search was asked for, and why it was stopped: with the results, all that the answer hangs on."""
        return SearchSettings(
            **{name: getattr(self, name) for name in SearchSettings.__struct_fields__}
        )

    @property
    def _valid_results(self) -> list[TrialResult]:
        return [
            result
            for result in self.told
            if result.outcome != "invalid" and result.ask.kind != "sustain"
        ]

    def tell(self, told: TrialResult) -> None:
        """Record the result of a trial.

        An invalid one says nothing about its load, which is tried again; a second one in a row ends
        the search. A refusal for a quota or a rate limit ends it at once, because each further trial
        would meet it too. Where each load so far failed and the next sends too few requests to be
        judged, none passes: still lower ones would send fewer.
        """
        again = bool(self.told) and self.told[-1].outcome == "invalid"
        self.told.append(told)
        if told.code == REFUSED:
            self.stopped = "refused"
        elif told.outcome == "invalid" and again:
            nothing = self._held is None and self._missed is not None and told.code == "too_few"
            self.stopped = "none" if nothing else "invalid"

    def stop(self, reason: str) -> None:
        """End the search for a reason from outside: interrupted, out of time. The first reason stands."""
        self.stopped = self.stopped or reason

    def ask(self) -> NextTrial | None:
        """The next trial; None when the search has ended (see `answer`). The same trial until its result is told."""
        if reason := self._search_end():
            return self._longer_trial() if reason in (*FOUND, "highest") else None
        bounds = self._bracket()
        if not isinstance(bounds, tuple):
            return self._trial(bounds, "bracket")
        belief = self._belief(bounds)
        end = self._bracket_end(belief)
        if end is not None:
            return self._trial(end, "bracket")
        if self._precise(belief) or len(self.told) >= ENOUGH:
            return self._trial(self._confirmation_load(belief), "confirm")
        return self._trial(belief.quantile(0.5), "probe")

    def _bracket_end(self, belief: Belief) -> float | None:
        """The end of the bracket that all trials so far point to, to be tried itself; None when they do not.

        The answer may lie outside the bracket that the user gave.
        """
        middle = belief.quantile(0.5)
        near = max(self.precision * middle, 1.5 if self.whole else 0.0)
        if self._missed is None and middle + near >= self.high:
            return self.high
        if self._held is None and middle - near <= self.low:
            return self.low
        return None

    def _trial(self, load: float, kind: Kind, lengths: float = 1.0) -> NextTrial:
        load = min(max(load, self.low), self.high)
        if self.whole:
            load = float(round(load))
            if kind == "probe" and any(result.ask.load == load for result in self._valid_results):
                load += 1 if self._held == load else -1
        over = math.inf if self._missed is None else self._missed
        # within the precision of a load known to be over, only a full-length run can tell the outcome
        early = kind not in ("confirm", "sustain") and load * (1 + self.precision) <= over
        # not their count: a search that is resumed has none of those that were not valid
        number = max((result.ask.number for result in self.told), default=-1) + 1
        return NextTrial(number=number, load=load, kind=kind, early_under=early, lengths=lengths)

    # -- the highest load that is sustained --------------------------------------------------------

    @property
    def _steadiness_trials(self) -> list[TrialResult]:
        """The valid trials that say whether a load is sustained.

        These are the longer trials, and confirmations that did not show it.
        """
        return [
            result
            for result in self.told
            if result.outcome != "invalid"
            and (
                result.ask.kind == "sustain"
                or (
                    result.ask.kind == "confirm"
                    and result.outcome == "under"
                    and not self._is_steady(result)
                )
            )
        ]

    def _is_steady(self, result: TrialResult) -> bool:
        """Return whether a trial passed, and showed what it has to show of growth."""
        if self.requires_steady:
            return result.outcome == "under" and result.sustained is True
        return result.outcome == "under" and result.sustained is not False

    def _steady_bracket(self) -> tuple[TrialResult | None, TrialResult | None]:
        """Return the trial at the highest sustained load and the one at the lowest that is not.

        No load at or above one that was found growing is sustained, whatever another trial showed.
        """
        growing = lowest_growing(self.told)
        results = self._steadiness_trials
        steady = [
            result for result in results if self._is_steady(result) and result.ask.load < growing
        ]
        if self.requires_steady and self.longer == 1:
            steady += [
                result
                for result in self._valid_results
                if result.ask.kind == "confirm"
                and self._is_steady(result)
                and result.ask.load < growing
            ]
        unsteady = [
            result
            for result in results
            if not self._is_steady(result) and not self._is_too_short(result)
        ]
        return (
            max(steady, key=lambda result: result.ask.load, default=None),
            min(unsteady, key=lambda result: result.ask.load, default=None),
        )

    def _longer_trial(self) -> NextTrial | None:
        """Return the next trial that has to show that a load is sustained, or None to end."""
        return None if self._out_of_time() else self._wanted_longer_trial()

    def _wanted_longer_trial(self) -> NextTrial | None:
        """Return the next longer trial, also if there is no time left for it."""
        longer_trials = [result for result in self.told if result.ask.kind == "sustain"]
        most_trials = self.most_probes + SUSTAINS
        if len(longer_trials) >= SUSTAINS or len(self.told) >= most_trials:
            return None
        lengths = max((result.ask.lengths for result in longer_trials), default=self.longer)
        last = next(reversed(self._steadiness_trials), None)
        if last is not None and self._is_too_short(last):
            needed = self._lengths_needed(last)
            is_longest = last.ask.lengths >= MOST_LENGTHS
            if not self.may_extend or is_longest or needed > 2 * MOST_LENGTHS:
                return None  # the longest trial would most likely not decide either
            return self._trial(last.ask.load, "sustain", min(needed, MOST_LENGTHS))
        load = self._next_sustained_load()
        return None if load is None else self._trial(load, "sustain", lengths)

    def _is_too_short(self, result: TrialResult) -> bool:
        """Return whether only a longer trial at the same load could show that it is sustained."""
        return (
            self.requires_steady
            and result.outcome == "under"
            and result.sustained is None
            and result.needed_s is not None
        )

    def _lengths_needed(self, result: TrialResult) -> float:
        """Return how long a trial has to be to decide, in full lengths; at least twice as long."""
        longer = 2 * result.ask.lengths
        if self.load_s is None or result.needed_s is None:
            return longer
        return max(longer, float(math.ceil(1.1 * result.needed_s / self.load_s)))

    def _next_sustained_load(self) -> float | None:
        """Return the load of the next longer trial, or None when there is none to try."""
        steady, unsteady = self._steady_bracket()
        if steady is None and unsteady is None:
            return self._top if self.longer > 1 or self._top_is_untested else None
        if unsteady is None:
            return None  # the rules' own load is sustained
        if steady is None:
            failed = len({result.ask.load for result in self._steadiness_trials})
            load = self._top * (1 - min(self.precision * 2 ** (failed - 1), 0.5))
            return self._not_again(
                load if load < unsteady.ask.load else unsteady.ask.load * (1 - self.precision)
            )
        least_gap = 1.5 if self.whole else 0.0
        if unsteady.ask.load <= steady.ask.load * (1 + 1.1 * self.precision) + least_gap:
            return None
        return self._not_again(math.sqrt(steady.ask.load * unsteady.ask.load))

    @property
    def _top_is_untested(self) -> bool:
        """Return whether no trial at full length has shown that the highest load is sustained."""
        return self.requires_steady and not any(
            self._is_steady(result) and result.ask.load >= self._top
            for result in self._valid_results
        )

    def _not_again(self, load: float) -> float | None:
        load = float(round(load)) if self.whole else load
        tried = {result.ask.load for result in self._steadiness_trials}
        return None if load < self.low or load in tried else load

    def _out_of_time(self) -> bool:
        """Return whether the trials so far took as long as they may take together."""
        spent_s = sum(result.spent_s for result in self.told)
        return self.most_s is not None and spent_s >= self.most_s

    @property
    def _top(self) -> float:
        """The load that the SLO allows, below any that was found growing.

        It is the highest confirmed one, or the highest that passed.
        """
        allowed = self._confirmed or self._held or self.low
        return min(allowed, lowest_growing(self.told) * (1 - self.precision))

    def _loads(self, outcome: Outcome) -> list[float]:
        return [result.ask.load for result in self._valid_results if result.outcome == outcome]

    @property
    def _held(self) -> float | None:
        """The highest load with the outcome under."""
        return max(self._loads("under"), default=None)

    @property
    def _missed(self) -> float | None:
        """The lowest load with the outcome over."""
        return min(self._loads("over"), default=None)

    def _bracket(self) -> tuple[float, float] | float:
        """Bounds for theta, or the load to try while there are no bounds."""
        if self.start is None:
            return self.low, self.high
        held, missed = self._held, self._missed
        if held is None and missed is None:
            return self.start
        if missed is None:
            assert held is not None
            return min(held * self._next_step, self.high)
        if held is None:
            return max(missed / self._next_step, self.low)
        low, high = min(held, missed), max(held, missed)
        return max(low / 1.1, self.low), min(high * 1.1, self.high)

    @property
    def _next_step(self) -> float:
        """The factor to the next load where all so far held, or all missed: it grows with how many were."""
        return max(self.step, min(self.step ** len(self._valid_results), STEP))

    def _belief(self, bounds: tuple[float, float]) -> Belief:
        results = self._valid_results
        noise = [result.noise for result in results if result.noise > 0]
        sigma = SIGMA_OF_NOISE * noise[-1] if noise else 0.01
        state = (bounds, sigma, self.run_spread, results)
        if (
            self._believed is not None and self._believed[0] == state
        ):  # asked for several times between two trials
            return self._believed[1]
        belief = Belief(*bounds, sigma=sigma, run_spread=self.run_spread)
        self._believed = state, belief
        for result in results:
            lapse = LAPSE_EARLY if result.early and result.outcome == "under" else LAPSE
            belief.tell(result.offered, result.outcome == "under", lapse)
        return belief

    def _precise(self, belief: Belief) -> bool:
        interval = belief.interval(SURE)
        if self.whole and interval.high - interval.low < 1.5:
            return True
        return interval.half_width <= self.precision * interval.value

    def _confirmation_load(self, belief: Belief) -> float:
        load = max(belief.passing(CONFIRM_AT), belief.quantile((1 - LEVEL) / 2))
        load = min(load, lowest_growing(self.told) * (1 - self.precision))
        return math.floor(load) if self.whole else load

    @property
    def _confirmed(self) -> float | None:
        passed = [result.ask for result in self._valid_results if result.outcome == "under"]
        return max((ask.load for ask in passed if ask.kind == "confirm"), default=None)

    def _stop_reason(self) -> str:
        """Return why the search has ended, as `SearchAnswer.reason` says it; "" while it goes on."""
        reason = self._search_end()
        if reason not in (*FOUND, "highest"):
            return reason
        if self._wanted_longer_trial() is not None:
            return "time" if self._out_of_time() else ""
        if not self.requires_steady:
            return reason
        steady, unsteady = self._steady_bracket()
        if steady is not None or (unsteady is None and not self._top_is_untested):
            return reason
        trials = self._steadiness_trials
        undecided = any(one.outcome == "under" and one.sustained is None for one in trials)
        return "undecided" if undecided or not trials else "unconfirmed"

    def _search_end(self) -> str:
        """Return why no more trials of the ordinary length are needed; "" while some are."""
        if self.stopped:
            return self.stopped
        held, missed = self._held, self._missed
        confirmations = [result for result in self._valid_results if result.ask.kind == "confirm"]
        if missed is not None and missed <= self.low and held is None:
            return "none"
        if held is not None and held >= self.high and missed is None:
            return "highest"
        if self._confirmed is not None:
            bounds = self._bracket()
            if isinstance(bounds, tuple) and self._precise(self._belief(bounds)):
                return "found"
            if len(self.told) >= ENOUGH:
                return "coarse"
        if len(confirmations) >= CONFIRMATIONS and self._confirmed is None:
            return "unconfirmed"
        if len(self.told) >= self.most_probes:
            return "probes"
        if self._out_of_time():
            return "time"
        return ""

    @property
    def width(self) -> float | None:
        """Half the width of the interval of SURE, over the precision asked for; None while there is no bracket."""
        bounds = self._bracket()
        if not isinstance(bounds, tuple):
            return None
        interval = self._belief(bounds).interval(SURE)
        return interval.half_width / interval.value / self.precision

    @property
    def answer(self) -> SearchAnswer:
        """The best answer known now."""
        held, missed = self._held, self._missed
        reason = self._stop_reason()
        interval, spread = None, self.run_spread
        load = held
        bounds = self._bracket()
        if isinstance(bounds, tuple) and missed is not None and reason != "none":
            belief = self._belief(bounds)
            interval = belief.interval(LEVEL)
            load = interval.value
            spread = belief.spread if spread is None else spread
        steady, not_steady = self._steady_bracket()
        sustained, sustained_why = self._sustained(steady, not_steady)
        return SearchAnswer(
            load=None if reason == "none" else load,
            interval=interval,
            confirmed=self._confirmed,
            held=held,
            missed=missed,
            reason=reason,
            probes=len(self.told),
            spent_s=sum(result.spent_s for result in self.told),
            confirming_s=sum(
                result.spent_s for result in self.told if result.ask.kind in ("confirm", "sustain")
            ),
            sustained=sustained,
            sustained_why=sustained_why,
            needed_s=max((one.needed_s or 0.0 for one in self._steadiness_trials), default=0.0)
            or None,
            steady=None if steady is None else steady.ask.load,
            not_steady=None if not_steady is None else not_steady.ask.load,
            lengths=self.longer if steady is None else steady.ask.lengths,
            steady_s=None
            if steady is None or self.load_s is None
            else steady.ask.lengths * self.load_s,
            horizon_s=None
            if interval is None or self.trial_s is None
            else recurrence(self.trial_s, LEVEL),
            run_spread=spread,
            run_spread_from="learned"
            if self.run_spread is None
            else "told"
            if self.run_spread
            else "simulated",
        )

    def _sustained(
        self, steady: TrialResult | None, not_steady: TrialResult | None
    ) -> tuple[bool | None, str]:
        """Whether the load of `steady` is sustained, and why: only a longer trial can show that it is."""
        if steady is not None and steady.ask.lengths > 1:
            times = f"held over {steady.ask.lengths:g} times the length of a trial; "
            return steady.sustained, times + steady.sustained_why
        if not_steady is not None:
            has_passed = self.requires_steady and not_steady.outcome == "under"
            if has_passed and not_steady.sustained is None:
                return None, not_steady.sustained_why
            grew = not_steady.sustained is False
            return False, not_steady.sustained_why if grew else not_steady.why
        too_short = [result for result in self._steadiness_trials if self._is_too_short(result)]
        if steady is None and too_short:
            return None, too_short[-1].sustained_why
        if self._confirmed is None:
            return None, "no load was confirmed"
        return None, "no trial was longer than the rules ask for"


def resume(search: LoadSearch, told: Iterable[TrialResult]) -> LoadSearch:
    """The search in the state after these results."""
    for result in told:
        search.tell(result)
    return search
