"""Forecast how many requests and tokens a run will send, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from loadgen.core import format
from loadgen.core.schedule.schedule import Schedule, ScheduledStage

NS_PER_S = 1e9


class Forecast(NamedTuple):
    """The expected size of a load. A value is None if it is not known.

    The number of requests of a closed loop is estimated from the responses to the probe, which had
    the server to themselves. Under load responses take longer, so there will be fewer.
    """

    requests: float | None  # of all stages
    seconds: float | None  # without the drain after the last request
    input_tokens: float  # mean of one request
    output_tokens: float

    @property
    def words(self) -> str:
        """Return the forecast as text."""
        count = 1 if self.requests is None else self.requests
        input_tokens = self.input_tokens * count
        output_tokens = self.output_tokens * count
        tokens = f"{input_tokens:,.0f} prompt and {output_tokens:,.0f} output tokens"
        if self.requests is None:
            parts = [f"{tokens} per request"]
        else:
            parts = [f"{self.requests:,.0f} requests", tokens]
        if self.seconds is not None:
            parts.append(format.duration(self.seconds))
        return ", ".join(parts)


def total(loads: Sequence[Forecast]) -> Forecast:
    """Return the forecast of several loads that are sent one after the other."""
    counts = [load.requests for load in loads if load.requests is not None]
    lengths_s = [load.seconds for load in loads if load.seconds is not None]
    is_count_known = len(counts) == len(loads) and sum(counts) > 0
    weights = counts if is_count_known else [1.0] * len(loads)
    return Forecast(
        requests=sum(counts) if is_count_known else None,
        seconds=sum(lengths_s) if len(lengths_s) == len(loads) else None,
        input_tokens=_weighted_mean([load.input_tokens for load in loads], weights),
        output_tokens=_weighted_mean([load.output_tokens for load in loads], weights),
    )


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    weighted = sum(value * weight for value, weight in zip(values, weights, strict=True))
    return weighted / sum(weights)


def forecast(schedule: Schedule, tokens: tuple[float, float], response_s: float = 0.0) -> Forecast:
    """Return the forecast of a schedule.

    `tokens` are the mean prompt and output tokens of a request. `response_s` is how long one
    response takes, or 0 if that is not known.
    """
    requests: float | None = 0.0
    seconds: float | None = 0.0
    for span in schedule.stages:
        count, length_s = _forecast_stage(schedule, span, response_s)
        requests = None if requests is None or count is None else requests + count
        seconds = None if seconds is None or length_s is None else seconds + length_s
    return Forecast(requests, seconds, *tokens)


def _forecast_stage(
    schedule: Schedule, span: ScheduledStage, response_s: float
) -> tuple[float | None, float | None]:
    """Return the number of requests and the length in s of a stage; None if unknown."""
    users = len(schedule.virtual_users_of(span))
    length_s = None if span.length_ns is None else span.length_ns / NS_PER_S
    count: float | None = schedule.slot_count_of(span)
    if not response_s:
        return count, length_s
    if count is None and length_s:
        count = users * length_s / response_s
    if length_s is None and count is not None:
        length_s = count / max(users, 1) * response_s
    return count, length_s
