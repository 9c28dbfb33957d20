"""One result of a folder as the list and the chart show it, and which results did the same kind of work. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadgen.core import format
from loadgen.result_kinds import RateInterval
from loadgen.runs.load_point_results import LoadPointResult
from loadgen.runs.sweep_analysis import best_load_point
from loadgen.runs.sweep_curve import SweepCurve

ALIKE = 1.1  # lengths of requests within this factor are drawn on one chart


class StoredResult(msgspec.Struct, frozen=True, kw_only=True):
    """One result of a folder. `curve`: its runs by load, one of a single run; None where nothing was summarized.

    load_points: one for each load of `curve`; repeats of a load are averaged.
    word: the outcome of a search or validation, or why the result cannot be read. answer: the run that it stands on.
    interval: tokens/s of a user, and the ends of the tokens/s in all of a capacity or of repeats there. usd: name of a
    load point -> its cost per million output tokens, where it has a price. page: its own page
    beside this one, "" where there is none. input_tokens, output_tokens: of a mean request that was answered. hardware: the machine type, else the
    name or address of the target. software: what the server says of itself.
    """

    name: str  # its folder, relative to the one that is listed
    kind: str
    word: str = ""
    answer: str = ""
    curve: SweepCurve | None = None
    load_points: tuple[LoadPointResult, ...] = ()
    tpot_limit_ms: float | None = None  # of its SLO
    interval: RateInterval | None = None
    usd: dict[str, float] = {}
    page: str = ""
    going_on: bool = False
    about: str = ""  # workload and model, where there is no curve; as are the next three
    target: str = ""
    simulated: bool = False
    made: str = ""
    input_tokens: float | None = None
    output_tokens: float | None = None
    hardware: str = ""
    software: str = ""

    @property
    def started(self) -> str:
        return (
            self.curve.started if self.curve is not None else ("~" if self.going_on else self.made)
        )

    @property
    def levels(self) -> tuple[LoadPointResult, ...]:
        """Every run as a load point of its own, repeats too."""
        return self.curve.load_points if self.curve is not None else ()

    @property
    def shown(self) -> LoadPointResult | None:
        """The load point that stands for the result.

        That is the run that the result is based on, else the best load within the SLO, else the
        one with the most output tokens/s.
        """
        answer = next((level for level in self.levels if level.name == self.answer), None)
        if answer is not None:
            return answer
        has_slo = self.curve is not None and bool(self.curve.slo)
        best_point = best_load_point(self.load_points) if has_slo else None
        if best_point is not None:
            return best_point
        return max(self.load_points, key=lambda level: level.output_per_s or 0.0, default=None)

    @property
    def outcome(self) -> str:
        """Its word; of runs that have none, whether they are valid and met the SLO."""
        if self.going_on:
            return "going on"
        if self.curve is None:
            return self.word
        invalid = sum(not level.valid for level in self.levels)
        if len(self.levels) == 1 and invalid and not self.word:
            return "INVALID"
        if invalid:
            return ", ".join(filter(None, (self.word, f"{invalid} of {len(self.levels)} INVALID")))
        if self.word:
            return self.word
        if self.kind == "sweep":
            return "a load within the SLO" if self.curve.best else ""
        met = {level.slo_met for level in self.levels}
        words = ["VALID"]
        if met == {True}:
            words.append("SLO met")
        if False in met:
            words.append("SLO missed")
        if any(level.sustained is False for level in self.levels):
            words.append("NOT SUSTAINED")
        return ", ".join(words)

    @property
    def work(self) -> str:
        """What was asked of the server: "rag: about 1,320 tokens in, 1,200 out"."""
        if self.curve is None:
            return ""
        if self.input_tokens is None or self.output_tokens is None:
            return self.curve.workload
        lengths = [format.quantity(tokens) for tokens in (self.input_tokens, self.output_tokens)]
        return f"{self.curve.workload}: about {lengths[0]} tokens in, {lengths[1]} out"


def of_one_work(a: StoredResult, b: StoredResult) -> bool:
    """Whether two results asked for the same: one workload, and requests whose mean lengths are `ALIKE`.

    Coarser than the fingerprints of `compare`: loads, seeds and limits may differ.
    """
    if a.curve is None or b.curve is None or a.curve.workload != b.curve.workload:
        return False
    lengths = ((a.input_tokens, b.input_tokens), (a.output_tokens, b.output_tokens))
    return all(x is None or y is None or max(x, y) <= ALIKE * min(x, y) for x, y in lengths)


def works(results: Sequence[StoredResult]) -> list[StoredResult]:
    """One result for each kind of work among those with figures, in the order of `results`."""
    found: list[StoredResult] = []
    for result in results:
        if result.curve is not None and not any(of_one_work(result, known) for known in found):
            found.append(result)
    return found
