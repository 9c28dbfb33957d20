"""Forecast how many requests and tokens a run will send, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from loadgen.core import format
from loadgen.core.requests.prompts import Prompts
from loadgen.core.schedule.schedule import Schedule, ScheduledStage

NS_PER_S = 1e9

# The means of a request are those of the first requests of a run, because a run may have no end.
_SAMPLED_REQUESTS = 100
# The assumed length of a response for which the workload requests no number of tokens.
_DEFAULT_OUTPUT_TOKENS = 256


class MeanTokens(NamedTuple):
    """The mean size of a request in tokens."""

    input_tokens: float
    output_tokens: float


class Forecast(NamedTuple):
    """The expected size of a load. A value is None if it is not known.

    The number of requests of a closed loop is estimated from the responses to the probe, which had
    the server to themselves. Under load responses take longer, so there will be fewer.
    """

    requests: float | None
    seconds: float | None
    """Without the time that the last responses take."""
    input_tokens: float
    """Mean of one request."""
    output_tokens: float
    """Mean of one request."""

    @property
    def text(self) -> str:
        """Return the forecast as text.

        Examples are "600 requests, 60,000 prompt and 12,000 output tokens, 1 min" and, without a
        number of requests, "100 prompt and 20 output tokens per request, 1 min".
        """
        # Tokens are those of all requests, or of one if the number of requests is not known.
        request_count = 1 if self.requests is None else self.requests
        input_tokens = self.input_tokens * request_count
        output_tokens = self.output_tokens * request_count

        tokens = f"{input_tokens:,.0f} prompt and {output_tokens:,.0f} output tokens"
        if self.requests is None:
            phrases = [f"{tokens} per request"]
        else:
            phrases = [f"{self.requests:,.0f} requests", tokens]

        if self.seconds is not None:
            phrases.append(format.duration(self.seconds))

        return ", ".join(phrases)


def mean_tokens(prompts: Prompts) -> MeanTokens:
    """Return the mean prompt and output tokens that the workload requests.

    They are those of its first requests. A prompt without a requested length counts as empty, and a
    response without one has an assumed length.
    """
    input_tokens = []
    output_tokens = []
    for request_id in prompts.request_ids(_SAMPLED_REQUESTS):
        requested_input = prompts.requested_input_tokens(request_id)
        requested_output = prompts.requested_output_tokens(request_id)
        input_tokens.append(0 if requested_input is None else requested_input)
        output_tokens.append(
            _DEFAULT_OUTPUT_TOKENS if requested_output is None else requested_output
        )

    return MeanTokens(fmean(input_tokens), fmean(output_tokens))


def forecast_load(
    schedule: Schedule, request_size: MeanTokens, response_s: float = 0.0
) -> Forecast:
    """Return how many requests and tokens a schedule will send, and how long it takes.

    Args:
        schedule: The schedule, whose stages run one after the other.
        request_size: The mean tokens of a request.
        response_s: How long one response takes in seconds, or 0 if that is not known. Without it,
            the requests or the duration of a closed loop cannot be estimated.
    """
    stages = [_forecast_stage(schedule, stage, response_s) for stage in schedule.stages]
    return Forecast(
        requests=_sum_if_known([stage.requests for stage in stages]),
        seconds=_sum_if_known([stage.seconds for stage in stages]),
        input_tokens=request_size.input_tokens,
        output_tokens=request_size.output_tokens,
    )


def combine_forecasts(loads: Sequence[Forecast]) -> Forecast:
    """Return the forecast of several loads that are sent one after the other.

    The mean tokens are those of all requests together: a load with more requests counts more.
    """
    requests = _sum_if_known([load.requests for load in loads])

    # Without the number of requests, the loads have equal weight.
    weights = [1.0] * len(loads)
    if requests:
        weights = [load.requests or 0.0 for load in loads]

    return Forecast(
        requests=requests or None,
        seconds=_sum_if_known([load.seconds for load in loads]),
        input_tokens=_weighted_mean([load.input_tokens for load in loads], weights),
        output_tokens=_weighted_mean([load.output_tokens for load in loads], weights),
    )


class _StageForecast(NamedTuple):
    """The expected size of one stage. A value is None if it is not known."""

    requests: float | None
    seconds: float | None


def _forecast_stage(schedule: Schedule, stage: ScheduledStage, response_s: float) -> _StageForecast:
    """Return the expected number of requests and duration of a stage, None where not known.

    An open loop has both in its schedule. A closed loop may only have one of them, and the other
    one is estimated by Little's law: `users = requests / duration * response time`.

    `response_s` is the time of one response in seconds, or 0 if it is not known. Nothing is
    estimated then.
    """
    request_count = schedule.slot_count_of(stage)
    duration_s = None if stage.length_ns is None else stage.length_ns / NS_PER_S
    is_response_known = response_s > 0
    users = len(schedule.virtual_users_of(stage))

    if is_response_known and request_count is None and duration_s:
        estimated_requests = users * duration_s / response_s
        return _StageForecast(estimated_requests, duration_s)

    if is_response_known and duration_s is None and request_count is not None:
        # A shard without virtual users sends no requests; `max` avoids a division by 0.
        estimated_s = request_count * response_s / max(users, 1)
        return _StageForecast(request_count, estimated_s)

    return _StageForecast(request_count, duration_s)


def _sum_if_known(values: Sequence[float | None]) -> float | None:
    """Return the sum of values, or None if one of them is not known."""
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the mean of values, each with its weight."""
    weighted_sum = sum(value * weight for value, weight in zip(values, weights, strict=True))
    return weighted_sum / sum(weights)
