"""What a run will send and how long it will take, known before it starts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from loadgen.core import format
from loadgen.core.schedule.timetable import Schedule

NS_PER_S = 1e9


class Forecast(NamedTuple):
    """Requests of all stages, mean tokens of one, and the time without a drain; None where it is not known.

    How many requests a closed loop sends is an estimate from the probe's answers, which had the server for themselves:
    under load they take longer, and there are fewer.
    """

    requests: float | None
    seconds: float | None
    input_tokens: float
    output_tokens: float

    @property
    def words(self) -> str:
        """The forecast as text."""
        count = self.requests
        if count is None:
            parts = [
                f"{self.input_tokens:,.0f} prompt and {self.output_tokens:,.0f} output tokens a request"
            ]
        else:
            tokens = f"{count * self.input_tokens:,.0f} prompt and {count * self.output_tokens:,.0f} output tokens"
            parts = [f"{count:,.0f} requests", tokens]
        return ", ".join(
            [*parts, *([] if self.seconds is None else [format.duration(self.seconds)])]
        )


def total(loads: Sequence[Forecast]) -> Forecast:
    """Several loads, one after the other."""
    counts = [load.requests for load in loads if load.requests is not None]
    lengths = [load.seconds for load in loads if load.seconds is not None]
    known = len(counts) == len(loads) and sum(counts) > 0
    weights = counts if known else [1.0] * len(loads)
    means = (
        sum(weight * tokens for weight, tokens in zip(weights, each, strict=True)) / sum(weights)
        for each in zip(*(load[2:] for load in loads), strict=True)
    )
    seconds = sum(lengths) if len(lengths) == len(loads) else None
    return Forecast(sum(counts) if known else None, seconds, *means)


def forecast(timetable: Schedule, tokens: tuple[float, float], answer_s: float = 0.0) -> Forecast:
    """The forecast of a timetable. `tokens`: mean prompt and answer; `answer_s`: how long one takes, 0: not known."""
    requests: float | None = 0.0
    seconds: float | None = 0.0
    for span in timetable.stages:
        length_s = None if span.length_ns is None else span.length_ns / NS_PER_S
        lanes = len(timetable.own_lanes(span))
        count: float | None = timetable.own_slots(span)
        if count is None:
            count = lanes * length_s / answer_s if length_s and answer_s else None
        if length_s is None and count is not None and answer_s:
            length_s = count / max(lanes, 1) * answer_s
        requests = None if requests is None or count is None else requests + count
        seconds = None if seconds is None or length_s is None else seconds + length_s
    return Forecast(requests, seconds, *tokens)
