"""Summarize speculative decoding: the fraction of accepted tokens and the tokens per step.

Pure. A step verifies one draft and produces the accepted tokens and one token of the model's own.
The steps of a request are therefore its output tokens without the accepted ones. The counters of
the servers' metrics pages cover all requests that they served during the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.core.metrics.sections import Speculation
from loadgen.core.server_metrics import series

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.server_metrics.series import MetricSample

_POSITION = re.compile(r'(?:^|,)position="([0-9]{1,3})"')


class _TokenCounts(NamedTuple):
    """Tokens of the requests whose responses report drafted tokens, at least one each.

    Attributes:
        requests: The number of these requests.
        drafted: Their drafted tokens.
        accepted: The drafted tokens that the model accepted.
        output: The output tokens of those requests whose steps are known.
        steps: The steps of the model for these output tokens.
    """

    requests: int
    drafted: int
    accepted: int
    output: int
    steps: int

    @property
    def accepted_fraction(self) -> float:
        """The fraction of the drafted tokens that were accepted, for at least one request."""
        return self.accepted / self.drafted

    @property
    def tokens_per_step(self) -> float | None:
        """The mean number of output tokens of a step, None if the steps are not known."""
        return self.output / self.steps if self.steps else None


class _ServerSpeculation(NamedTuple):
    """What the servers' metrics pages show. A value is None if no page shows it.

    Attributes:
        acceptance: The fraction of the drafted tokens that were accepted.
        tokens_per_step: The mean number of output tokens of a step.
        acceptance_by_position: The fraction of drafts whose token was accepted, by position in the
            draft. Empty if not known.
    """

    acceptance: float | None = None
    tokens_per_step: float | None = None
    acceptance_by_position: tuple[float, ...] = ()


def summarize_speculation(
    measured_stages: Sequence[Columns], samples: Sequence[MetricSample]
) -> Speculation | None:
    """Return what is known about speculative decoding, or None if nothing is known.

    In each step, the model accepts some of the tokens that a smaller model drafts. Responses may
    report these tokens, and so may the metrics pages of the servers.

    Args:
        measured_stages: The records of each measured stage.
        samples: The samples of the servers' metrics pages.
    """
    pages = _read_metrics_pages(samples)
    known_from_pages = Speculation(
        server_acceptance=pages.acceptance,
        server_length=pages.tokens_per_step,
        by_position=pages.acceptance_by_position,
    )

    tokens = _count_tokens(measured_stages)
    if tokens.requests:
        return _add_reported_tokens(known_from_pages, tokens)

    do_pages_show_anything = pages != _ServerSpeculation()
    return known_from_pages if do_pages_show_anything else None


def _add_reported_tokens(speculation: Speculation, tokens: _TokenCounts) -> Speculation:
    """Return a summary of speculative decoding with the tokens that responses report added.

    Args:
        speculation: The summary, which has only what the servers' metrics pages show.
        tokens: The tokens of at least one response that reports them.
    """
    return msgspec.structs.replace(
        speculation,
        requests=tokens.requests,
        drafted=tokens.drafted,
        accepted=tokens.accepted,
        acceptance=tokens.accepted_fraction,
        length=tokens.tokens_per_step,  # called the mean accepted length
    )


def _count_tokens(measured_stages: Sequence[Columns]) -> _TokenCounts:
    """Count the drafted and accepted tokens that responses report, and the steps of the model."""
    counts_of_stages = [_count_tokens_of_stage(columns) for columns in measured_stages]
    return _TokenCounts(
        requests=sum(counts.requests for counts in counts_of_stages),
        drafted=sum(counts.drafted for counts in counts_of_stages),
        accepted=sum(counts.accepted for counts in counts_of_stages),
        output=sum(counts.output for counts in counts_of_stages),
        steps=sum(counts.steps for counts in counts_of_stages),
    )


def _count_tokens_of_stage(columns: Columns) -> _TokenCounts:
    """Count the drafted and accepted tokens of a stage, and the steps of the model.

    A step yields the accepted tokens of a draft, and one more token of the model's own. So 60
    output tokens, 35 of which were accepted from drafts, took 60 - 35 = 25 steps. A response whose
    output tokens are not more than the accepted ones has wrong counts. Its steps are not counted.
    """
    drafted_tokens = columns["draft_tokens"]
    accepted_tokens = columns["accepted_tokens"]
    output_tokens = columns["output_tokens"]

    # A number of tokens is negative if the response does not report it.
    reports_tokens = columns.is_ok & (drafted_tokens > 0) & (accepted_tokens >= 0)
    has_known_steps = reports_tokens & (output_tokens > accepted_tokens)

    output_of_known_steps = _sum_selected(output_tokens, has_known_steps)
    accepted_of_known_steps = _sum_selected(accepted_tokens, has_known_steps)

    return _TokenCounts(
        requests=int(reports_tokens.sum()),
        drafted=_sum_selected(drafted_tokens, reports_tokens),
        accepted=_sum_selected(accepted_tokens, reports_tokens),
        output=output_of_known_steps,
        steps=output_of_known_steps - accepted_of_known_steps,
    )


def _sum_selected(token_counts: NDArray[np.int64], is_selected: NDArray[np.bool_]) -> int:
    """Return the sum of the token counts of the selected requests."""
    return int(token_counts[is_selected].sum(dtype=np.int64))


def _read_metrics_pages(samples: Sequence[MetricSample]) -> _ServerSpeculation:
    """Return what the servers' metrics pages show about speculative decoding during the run."""
    # Counters cover all steps, and gauges only the latest ones.
    return _read_token_counters(samples) or _read_gauges(samples)


def _read_token_counters(samples: Sequence[MetricSample]) -> _ServerSpeculation | None:
    """Return what the servers' counters of tokens show, or None if no token was counted.

    A draft is several tokens, one draft for each step of the model. The step yields the accepted
    tokens of the draft, and one more token. With 100 drafts of 3 tokens, of which 180 are accepted,
    a step yields 1 + 180 / 100 = 2.8 tokens. Some servers do not count the drafts, and then only
    the acceptance of tokens is known.
    """
    # By how much each counter grew during the run, None if no server has it.
    drafted_tokens = series.measure_growth(samples, series.DRAFTED)
    accepted_tokens = series.measure_growth(samples, series.ACCEPTED)
    step_count = series.measure_growth(samples, series.DRAFTS)

    if not drafted_tokens or accepted_tokens is None:  # nothing was drafted, or nothing is known
        return None
    acceptance = accepted_tokens / drafted_tokens

    if not step_count:  # no step was counted, or the number is not known
        return _ServerSpeculation(acceptance=acceptance)

    return _ServerSpeculation(
        acceptance=acceptance,
        tokens_per_step=1 + accepted_tokens / step_count,
        acceptance_by_position=_acceptance_by_position(samples, step_count),
    )


def _read_gauges(samples: Sequence[MetricSample]) -> _ServerSpeculation:
    """Return the means of the gauges of acceptance and of tokens per step."""
    curves = series.compute_curves(samples)
    return _ServerSpeculation(
        acceptance=_mean_of_gauge(curves.get(series.ACCEPT_SHARE)),
        tokens_per_step=_mean_of_gauge(curves.get(series.ACCEPT_LENGTH)),
    )


def _mean_of_gauge(curve: series.MetricCurve | None) -> float | None:
    """Return the mean of the positive values of a gauge since the start of the run, or None."""
    if curve is None:
        return None

    # A gauge is 0 while nothing is decoded.
    values = [
        value
        for time_s, value in zip(curve.t_s, curve.values, strict=True)
        if time_s >= 0 and value > 0
    ]
    return sum(values) / len(values) if values else None


def _acceptance_by_position(samples: Sequence[MetricSample], drafts: float) -> tuple[float, ...]:
    """Return the fraction of drafts whose token was accepted, by position in the draft.

    If the first token of 80 of 100 drafts was accepted, and the second token of 50 drafts, the
    result is (0.8, 0.5). The result is empty if a position is missing.

    Args:
        samples: The samples of the servers' metrics pages.
        drafts: The number of drafts.
    """
    samples_by_position = _group_by_position(samples)
    positions = sorted(samples_by_position)
    are_consecutive = positions == list(range(len(positions)))
    if not are_consecutive:
        return ()

    accepted_by_position = [
        series.measure_growth(samples_by_position[position], series.ACCEPTED_AT) or 0.0
        for position in positions
    ]
    return tuple(accepted / drafts for accepted in accepted_by_position)


def _group_by_position(samples: Sequence[MetricSample]) -> dict[int, list[MetricSample]]:
    """Return the samples of each counter of accepted tokens, by the position in the draft.

    Each read of a metrics page adds the sample `series.UP`, which says whether it succeeded. Each
    group has these samples too, because the growth of a counter is measured from read to read.
    """
    position_of_sample = [_draft_position(sample) for sample in samples]
    positions = {position for position in position_of_sample if position is not None}
    groups: dict[int, list[MetricSample]] = {position: [] for position in positions}

    for sample, position in zip(samples, position_of_sample, strict=True):
        if position is not None:
            groups[position].append(sample)
        elif sample.name == series.UP:
            _append_to_all(groups.values(), sample)

    return groups


def _append_to_all(groups: Iterable[list[MetricSample]], sample: MetricSample) -> None:
    """Append a sample to each group."""
    for group in groups:
        group.append(sample)


def _draft_position(sample: MetricSample) -> int | None:
    """Return the position in the draft that a counter of accepted tokens counts, or None.

    The labels have the position, for example `engine="0",position="2"`.
    """
    if series.QUANTITY_OF.get(sample.name) != series.ACCEPTED_AT:
        return None
    match = _POSITION.search(sample.labels)
    return None if match is None else int(match[1])
