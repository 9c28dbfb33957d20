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
    """Return the fields that follow from the token counts of the requests."""
    requests = 0
    drafted = 0
    accepted = 0
    output_tokens = 0
    steps = 0
    for columns in measured:
        is_reported = (columns["draft_tokens"] > 0) & (columns["accepted_tokens"] >= 0)
        is_reported &= columns.where(OK)
        requests += int(is_reported.sum())
        drafted += int(columns["draft_tokens"][is_reported].sum(dtype=np.int64))
        accepted += int(columns["accepted_tokens"][is_reported].sum(dtype=np.int64))
        has_steps = is_reported & (columns["output_tokens"] > columns["accepted_tokens"])
        output = columns["output_tokens"][has_steps]
        output_tokens += int(output.sum(dtype=np.int64))
        steps += int((output - columns["accepted_tokens"][has_steps]).sum(dtype=np.int64))
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
    """Return the fields that follow from the servers' metrics pages.

    Counters of tokens are preferred to gauges, which only show the latest steps.
    """
    drafts = series.measure_growth(samples, series.DRAFTS)
    drafted = series.measure_growth(samples, series.DRAFTED)
    accepted = series.measure_growth(samples, series.ACCEPTED)
    if drafted and accepted is not None:
        return {
            "server_acceptance": accepted / drafted,
            "server_length": 1 + accepted / drafts if drafts else None,
            "by_position": _acceptance_by_position(samples, drafts or 0.0),
        }
    curves = series.compute_curves(samples)
    share = _mean_of_gauge(curves.get(series.ACCEPT_SHARE))
    length = _mean_of_gauge(curves.get(series.ACCEPT_LENGTH))
    if share is None and length is None:
        return {}
    return {"server_acceptance": share, "server_length": length}


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

    Returns an empty tuple if the number of drafts or a position is not known. Samples that tell
    whether the page responded (`series.UP`) belong to all positions.
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
    positions = sorted(samples_by_position)
    if not drafts or positions != list(range(len(positions))):
        return ()
    return tuple(
        (series.measure_growth(samples_by_position[position], series.ACCEPTED_AT) or 0.0) / drafts
        for position in positions
    )
