"""A load that finds its own limit: it grows while the SLO holds, backs off where it does not, and is then sustained.

Pure. `Adaptive` decides the steps of one run while it goes. Which load comes next, and what the outcomes say of the
limit, is a `LoadSearch`, as of `loadgen search`; its trials are the steps. A step is judged by the requests that are
due in its window, which begins when the steps before it have left the server. After a step that missed the SLO nothing
is sent until the server is empty. The steps are stages of the run, so that `replayed` makes the same decisions again
of its records.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.core.errors import OK, SLO_MISSED, UNSOUND
from loadgen.core.limits import ValidityLimits
from loadgen.core.metrics import columns as metrics
from loadgen.core.metrics import outcomes, sustainable
from loadgen.core.metrics.columns import Columns
from loadgen.core.results.manifest import AdaptivePlan, StagePlan
from loadgen.core.results.record import ROW, joined, picked
from loadgen.core.schedule.dispatcher import Start
from loadgen.core.schedule.steered import End, LoadStep, Move, Rest
from loadgen.core.stats import quantiles
from loadgen.search.load_search import (
    ENDED,
    SIGMA_OF_NOISE,
    LoadSearch,
    NextTrial,
    SearchAnswer,
    TrialResult,
)
from loadgen.search.watch import BROKEN, Goal, Outcome

if TYPE_CHECKING:
    from numpy.typing import NDArray

S = 1_000_000_000
SETTLE, SUSTAIN = "settle", "sustain"
STAY = 0.95  # quantile of E2E: so long after its start, a step has filled the server
LOWEST = 1 / 16  # of the first load: where not even this holds, the run ends
_NO_ROWS = np.zeros(0, ROW)


class AdaptiveStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step as it was judged. `stage`: its index in the run. Times are from the start of the run."""

    stage: int
    start_s: float
    judged_from_s: float  # the requests that were due from here on count
    end_s: float
    trial: TrialResult


class StoredAdaptive(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `adaptive.json`. `sustained_s`: how long the load of `answer.steady` was sustained."""

    plan: AdaptivePlan
    goal: tuple[str, ...]
    answer: SearchAnswer
    steps: tuple[AdaptiveStep, ...]
    sustained_s: float | None = None
    simulated: bool = False
    seed: int | None = None

    @property
    def unit(self) -> str:
        return "/s" if self.plan.over == "rate" else " in flight"


def exit_code(stored: StoredAdaptive, *, strict: bool) -> int:
    """The exit code of what was found, beside that of the summary: 1 where no load was sustained, 3 where it was
    stopped before that was known.
    """
    answer = stored.answer
    if answer.reason != "invalid" and answer.steady is not None:
        return OK if answer.sustained or not strict else UNSOUND
    return SLO_MISSED if answer.reason in ENDED else UNSOUND


class _Judged(NamedTuple):
    outcome: Outcome
    code: str
    why: str
    early: bool
    requests: int
    offered: float
    sustained: bool | None = None
    sustained_why: str = ""


@dataclass(slots=True)
class Adaptive:
    """Decides one run. Call `look` with what has ended since the last call; the same calls give the same decisions.

    `drain_ns`: how long requests may go on after the sustained load.
    """

    goal: Goal
    plan: AdaptivePlan
    drain_ns: int
    search: LoadSearch = field(init=False)
    steps: list[AdaptiveStep] = field(default_factory=list)
    _ask: NextTrial = field(init=False)
    _step: LoadStep = field(init=False)
    _stage: int = 0
    _start_ns: int = 0
    _decided_ns: int = 0  # when the step before was decided
    _rests: bool = False  # nothing is sent until the server is empty
    _is_over: bool = False  # nor then
    _stay_ns: int = 0  # how long a request stayed in the server, in the steps so far
    _before: NDArray[np.void] = field(default_factory=lambda: _NO_ROWS)  # rows of the stage before
    _rows: NDArray[np.void] = field(default_factory=lambda: _NO_ROWS)  # rows of this stage

    def __post_init__(self) -> None:
        closed = self.plan.over == "concurrency"
        self.search = LoadSearch(
            low=1.0 if closed else self.plan.start * LOWEST,
            high=self.plan.high,
            start=self.plan.start,
            precision=self.plan.precision,
            most_s=self.plan.longest_s,
            whole=closed,
            longer=max(self.plan.sustain_s / self.plan.window_s, 1 + 1e-9),
            run_spread=self.plan.run_spread,
            trial_s=self.plan.window_s if self.plan.run_spread is None else None,
        )
        self._ask = self._asked()
        self._step = LoadStep(self._ask.kind, self._ask.load, self._longest_ns)

    @property
    def first(self) -> LoadStep:
        """The step with which the run begins."""
        return self._step

    def look(self, now_ns: int, rows: NDArray[np.void], in_flight: Sequence[Start]) -> Move | None:
        """What to do now; None: go on."""
        for_earlier = rows["stage"] < self._stage
        if for_earlier.any():  # else they would all be copied at each look
            self._before = joined((self._before, picked(rows, for_earlier)))
        self._rows = joined((self._rows, picked(rows, rows["stage"] == self._stage)))
        if self._rests:
            return None if in_flight else End() if self._is_over else self._begin(now_ns)
        from_ns = self._judged_from(now_ns, in_flight)
        if from_ns is None:
            return None
        if self._step.name == SETTLE:
            return self._begin(now_ns)
        judged = self._judge(from_ns, now_ns, in_flight)
        if judged is None:
            return None
        self._tell(judged, from_ns, now_ns)
        return self._next(now_ns)

    def _next(self, now_ns: int) -> Move:
        """What follows a step that was judged."""
        last = self.search.told[-1]
        held = last.outcome == "under" and last.sustained is not False
        if last.ask.kind == "sustain" and held:
            return End()
        if (ask := self.search.ask()) is not None:
            self._ask = ask
            if held:
                return self._begin(now_ns)
        self._rests, self._is_over = True, ask is None
        return Rest()

    def _begin(self, now_ns: int) -> LoadStep:
        """The step that was asked for. A load is sustained after one like it: else it has to settle first."""
        name: str = self._ask.kind
        if name == SUSTAIN and (self._rests or self._step.load != self._ask.load):
            name = SETTLE
        length_ns = round(self.plan.sustain_s * S) if name == SUSTAIN else self._longest_ns
        self._step = LoadStep(name, self._ask.load, length_ns)
        self._stage += 1
        self._start_ns, self._rests = now_ns, False
        self._before, self._rows = self._rows, _NO_ROWS
        return self._step

    def _asked(self) -> NextTrial:
        ask = self.search.ask()
        assert ask is not None
        return ask

    # -- when a step is judged -----------------------------------------------------------------------------------------

    @property
    def _window_ns(self) -> int:
        return max(round(self.plan.window_s * S), round(sustainable.STAYS * self._stay_ns))

    @property
    def _longest_ns(self) -> int:
        """The longest time that a step may take: settling, its window, and as long again for its requests to end."""
        return 3 * self._window_ns + 3 * self._stay_ns + 60 * S

    def _judged_from(self, now_ns: int, in_flight: Sequence[Start]) -> int | None:
        """When the requests of earlier steps had left the server, and this step had filled it; None: not yet.

        A load that is sustained begins in a server that is full of the same load.
        """
        if self._step.name == SUSTAIN:
            return self._start_ns
        if any(start.stage < self._stage for start in in_flight):
            return None
        from_ns = max(self._start_ns + self._stay_ns, int(self._before["done_ns"].max(initial=0)))
        return from_ns if from_ns <= now_ns else None

    def _judge(self, from_ns: int, now_ns: int, in_flight: Sequence[Start]) -> _Judged | None:
        """The outcome of this step; None: not known yet."""
        sustains = self._step.name == SUSTAIN
        length_ns = self._step.length_ns if sustains else self._window_ns
        until_ns = from_ns + length_ns
        due = self._rows["due_ns"]
        is_own = (due >= from_ns) & (due < until_ns) & (self._rows["status"] != metrics.CANCELLED)
        own = picked(self._rows, is_own)
        waiting = sum(
            start.stage == self._stage and from_ns <= start.due_ns < until_ns for start in in_flight
        )
        requests = len(own) + waiting
        seen_s = (min(now_ns, until_ns) - from_ns) / S
        offered = requests / seen_s if self.plan.over == "rate" and seen_s > 0 else self._step.load
        misses = self.goal.misses(own)
        if self.plan.over == "rate":
            expected = self._step.load * length_ns / S
            planned = math.ceil(
                expected + 4 * math.sqrt(expected)
            )  # the draw is hardly ever larger
            if why := self._over(misses.sum(axis=1), planned):
                return self._invalid(own, offered) or _Judged(
                    "over", "misses", why, True, requests, offered
                )
        grace_ns = self.drain_ns if sustains else length_ns
        if now_ns < until_ns or (waiting and now_ns < until_ns + grace_ns):
            return None
        if invalid := self._invalid(own, offered):
            return invalid
        if not requests:
            return _Judged("invalid", "too_few", "no request was due", False, 0, offered)
        unfinished = waiting + int((own["status"] == metrics.UNFINISHED).sum())
        if sustains and outcomes.is_undecided(unfinished, requests):
            why = f"{unfinished:,} of {requests:,} requests were unfinished when the drain ended (--grace)"
            return _Judged("invalid", "unfinished", why, False, requests, offered)
        late = 0 if sustains else waiting  # still there as long after the window as it lasted
        if why := self._over(misses.sum(axis=1) + late, requests):
            return _Judged("over", "misses", why, False, requests, offered)
        span = ((from_ns + until_ns) / 2 if sustains else from_ns, until_ns)
        others = joined((self._before, picked(self._rows, ~is_own)))
        grows = sustainable.of_span(Columns(own), Columns(others), *span)
        if grows.sustained is False and not sustains:
            return _Judged("over", "grows", grows.why, False, requests, offered)
        return _Judged(
            "under",
            "full_length",
            "every term held",
            False,
            requests,
            offered,
            grows.sustained,
            grows.why,
        )

    def _over(self, missed: NDArray[np.int64], requests: int) -> str:
        """Which terms are missed by more than so many requests allow; "" when none is."""
        return "; ".join(
            f"{count:,} of {requests:,} requests miss {name}, {max(most, 0):,} allowed"
            for name, count, most in zip(
                self.goal.names, missed.tolist(), self.goal.allowed(requests), strict=True
            )
            if count > max(most, 0)
        )

    def _invalid(self, own: NDArray[np.void], offered: float) -> _Judged | None:
        broken = int(np.isin(own["kind"], BROKEN).sum())
        if broken <= ValidityLimits().failure_share * max(len(own), 1):
            return None
        why = f"{broken:,} of {len(own):,} requests met a server that was gone or ill (connections, resets, 5xx)"
        return _Judged("invalid", "server_gone", why, True, len(own), offered)

    def _tell(self, judged: _Judged, from_ns: int, now_ns: int) -> None:
        until_ns = min(
            now_ns,
            from_ns + max(self._window_ns, self._step.length_ns * (self._step.name == SUSTAIN)),
        )
        due = self._rows["due_ns"]
        own = Columns(picked(self._rows, (due >= from_ns) & (due < until_ns)))
        trial = TrialResult(
            ask=self._ask,
            outcome=judged.outcome,
            early=judged.early,
            spent_s=(now_ns - self._decided_ns) / S,
            offered=judged.offered if judged.offered > 0 else self._step.load,
            noise=1 / math.sqrt(judged.requests) if judged.requests else 0.0,
            why=judged.why,
            code=judged.code,
            figures=_figures(own, self.goal, None if judged.early else (until_ns - from_ns) / S),
            sustained=judged.sustained if self._step.name == SUSTAIN else None,
            sustained_why=judged.sustained_why if self._step.name == SUSTAIN else "",
        )
        self.search.tell(trial)
        if (
            self._step.name != SUSTAIN
        ):  # without many steps, a limit is known no better than the luck of one allows
            self.search.precision = max(self.plan.precision, SIGMA_OF_NOISE * trial.noise)
        self.steps.append(
            AdaptiveStep(
                stage=self._stage,
                start_s=self._start_ns / S,
                judged_from_s=from_ns / S,
                end_s=now_ns / S,
                trial=trial,
            )
        )
        self._decided_ns = now_ns
        e2e = metrics.defined(own.measure("e2e")[own.where(metrics.OK)])
        if judged.outcome == "under" and len(e2e):
            self._stay_ns = int(quantiles.element(e2e, STAY))


def _figures(own: Columns, goal: Goal, seconds: float | None) -> dict[str, float | None]:
    """The figures of a step, by the names of `level_figures.FIGURES`: of the requests that were due in its window.

    `seconds`: its length; None where it was decided before all of them had ended, so that nothing is known per second.
    """
    ok = own.where(metrics.OK)
    figures: dict[str, float | None] = {}
    for name in ("ttft", "tpot"):
        values = quantiles.exact(metrics.defined(own.measure(name)[ok]))
        figures |= {f"{name}_p50_ms": values.p50, f"{name}_p99_ms": values.p99}
    if not seconds:
        return figures
    tokens = own["output_tokens"][ok]
    return figures | {
        "output_tokens_per_s": float(tokens[tokens > 0].sum()) / seconds,
        "goodput_rps": int(outcomes.meets(own, goal.slo).sum()) / seconds,
        "completed_rps": int(ok.sum()) / seconds,
    }


def replayed(
    controller: Adaptive, stages: Sequence[StagePlan], rows: NDArray[np.void], *, interrupted: bool
) -> Adaptive:
    """The controller after the same decisions, made again of the records of its run.

    It looks where it decided: at the end of each step, and of each time in which the server emptied.
    """
    rows = picked(rows, np.argsort(rows["done_ns"], kind="stable"))
    seen = 0
    for i, stage in enumerate(stages):
        if i and controller._rests:
            controller.look(stage.start_ns, _NO_ROWS, ())
        if (
            controller._stage < i
        ):  # what was seen at that instant is not in the records to the last row
            controller._begin(stage.start_ns)
        now_ns = stage.end_ns or 0
        is_whole = stage.name == SUSTAIN and now_ns - stage.start_ns >= round(
            controller.plan.sustain_s * S
        )
        if is_whole:  # it ended by itself, and was judged when its requests had ended
            now_ns = max(now_ns, int(rows["done_ns"][rows["stage"] <= i].max(initial=0)))
        elif interrupted and i + 1 == len(stages):
            break
        end = int(np.searchsorted(rows["done_ns"], now_ns, "right"))
        flying = rows[end:]
        was_sent = (flying["sent_ns"] >= 0) & (flying["sent_ns"] <= now_ns)
        flying = picked(flying, was_sent & (flying["stage"] <= i))
        controller.look(now_ns, rows[seen:end], list(_starts(flying)))
        seen = end
    return controller


def _starts(rows: NDArray[np.void]) -> Iterable[Start]:
    columns = (rows[name].tolist() for name in ("slot", "stage", "lane", "due_ns"))
    for slot, stage, lane, due_ns in zip(*columns, strict=True):
        yield Start(slot, stage, -1, 0, lane, due_ns)
