"""Summarize speculative decoding: the fraction of accepted tokens and the tokens per step.

Pure. A step verifies one draft and produces the accepted tokens and one token of the model's own.
The steps of a request are therefore its output tokens without the accepted ones. The counters of
the servers' metrics pages cover all requests that they served during the run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.core.metrics.columns import OK
from loadgen.core.metrics.sections import Speculation
from loadgen.core.server_metrics import series

if TYPE_CHECKING:
    from loadgen.core.metrics.columns import Columns
    from loadgen.core.server_metrics.series import MetricSample

_POSITION = re.compile(r'(?:^|,)position="([0-9]{1,3})"')


def summarize_speculation(
    measured: Sequence[Columns], samples: Sequence[MetricSample]
) -> Speculation | None:
    """Return what is known about speculative decoding, or None if nothing was drafted."""
    speculation = Speculation(**_from_requests(measured), **_from_counters(samples))
    return None if speculation == Speculation() else speculation


def _from_requests(measured: Sequence[Columns]) -> dict[str, Any]:
    """Return the fields of `Speculation` that follow from the token counts of the requests.

    They are counts, the fraction of drafted tokens that were accepted, and the output tokens per
    step. A request has one step for each output token that was not accepted from a draft. Returns
    an empty dictionary if no response reports drafted tokens.
    """
    requests = 0
    drafted = 0
    accepted = 0
    output_tokens = 0
    steps = 0
    for columns in measured:
        draft_tokens = columns["draft_tokens"]
        accepted_tokens = columns["accepted_tokens"]
        is_reported = columns.where(OK) & (draft_tokens > 0) & (accepted_tokens >= 0)
        requests += int(is_reported.sum())
        drafted += int(draft_tokens[is_reported].sum(dtype=np.int64))
        accepted += int(accepted_tokens[is_reported].sum(dtype=np.int64))
        has_steps = is_reported & (columns["output_tokens"] > accepted_tokens)
        output = columns["output_tokens"][has_steps]
        output_tokens += int(output.sum(dtype=np.int64))
        steps += int((output - accepted_tokens[has_steps]).sum(dtype=np.int64))
    if not requests:
        return {}
    return {
        "requests": requests,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": accepted / drafted,
        "length": output_tokens / steps if steps else None,
    }


def _from_counters(samples: Sequence[MetricSample]) -> dict[str, Any]:
    """Return the fields of `Speculation` that follow from the servers' metrics pages.

    Counters of tokens are preferred. Some servers only have gauges, which show the latest steps,
    and whose mean is used.
    """
    drafts = series.measure_growth(samples, series.DRAFTS)
    drafted = series.measure_growth(samples, series.DRAFTED)
    accepted = series.measure_growth(samples, series.ACCEPTED)
    if drafted and accepted is not None:
        return {
            "server_acceptance": accepted / drafted,
            # Each step yields the accepted tokens of a draft and one token of its own.
            "server_length": 1 + accepted / drafts if drafts else None,
            "by_position": _acceptance_by_position(samples, drafts or 0.0),
        }
    curves = series.compute_curves(samples)
    accepted_fraction = _mean_of_gauge(curves.get(series.ACCEPT_SHARE))
    length = _mean_of_gauge(curves.get(series.ACCEPT_LENGTH))
    if accepted_fraction is None and length is None:
        return {}
    return {"server_acceptance": accepted_fraction, "server_length": length}


def _mean_of_gauge(curve: series.MetricCurve | None) -> float | None:
    """Return the mean of the positive values of a gauge since the start of the run, or None."""
    if curve is None:
        return None
    values = [
        value
        for time_s, value in zip(curve.t_s, curve.values, strict=True)
        if time_s >= 0 and value > 0
    ]
    return sum(values) / len(values) if values else None


def _acceptance_by_position(samples: Sequence[MetricSample], drafts: float) -> tuple[float, ...]:
    """Return the fraction of drafts whose token was accepted, by position in the draft.

    Servers count accepted tokens with the label `position`, from 0. Returns an empty tuple if the
    number of drafts or a position is not known.

    Args:
        samples: The samples of the servers' metrics pages.
        drafts: The number of drafts, 0 if it is not known.
    """
    samples_by_position = _group_by_position(samples)
    positions = sorted(samples_by_position)
    are_consecutive = positions == list(range(len(positions)))
    if not drafts or not are_consecutive:
        return ()
    accepted_by_position = [
        series.measure_growth(samples_by_position[position], series.ACCEPTED_AT) or 0.0
        for position in positions
    ]
    return tuple(accepted / drafts for accepted in accepted_by_position)


def _group_by_position(samples: Sequence[MetricSample]) -> dict[int, list[MetricSample]]:
    """Return the counters of accepted tokens for each position of a draft.

    Samples that tell whether a page responded (`series.UP`) are added to all positions before them,
    because the growth of a counter is computed with them.
    """
    samples_by_position: dict[int, list[MetricSample]] = {}
    for sample in samples:
        is_counter = series.QUANTITY_OF.get(sample.name) == series.ACCEPTED_AT
        match = _POSITION.search(sample.labels) if is_counter else None
        if match is not None:
            samples_by_position.setdefault(int(match[1]), []).append(sample)
        elif sample.name == series.UP:
            for position_samples in samples_by_position.values():
                position_samples.append(sample)
    return samples_by_position
