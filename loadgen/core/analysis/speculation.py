"""Speculative decoding: which share of the drafted tokens was accepted, and how many tokens a step made. Pure.

A step verifies one draft and yields the accepted tokens and one of the model's own. Of a request the steps are its
output tokens without the accepted ones. What the servers' pages count is of all that they served meanwhile.
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

_AT = r'(?:^|,)position="([0-9]{1,3})"'


def of_rows(
    measured: Sequence[Columns], server_samples: Sequence[MetricSample]
) -> Speculation | None:
    """The block `speculation`; None where nobody says that anything was drafted."""
    found = Speculation(**_of_requests(measured), **_of_pages(server_samples))
    return None if found == Speculation() else found


def _of_requests(measured: Sequence[Columns]) -> dict[str, Any]:
    drafted = accepted = requests = output = steps = 0
    for part in measured:
        told = part.where(OK) & (part["draft_tokens"] > 0) & (part["accepted_tokens"] >= 0)
        requests += int(told.sum())
        drafted += int(part["draft_tokens"][told].sum(dtype=np.int64))
        accepted += int(part["accepted_tokens"][told].sum(dtype=np.int64))
        counted = told & (part["output_tokens"] > part["accepted_tokens"])
        output += int(part["output_tokens"][counted].sum(dtype=np.int64))
        steps += int(
            (part["output_tokens"][counted] - part["accepted_tokens"][counted]).sum(dtype=np.int64)
        )
    if not requests:
        return {}
    return {
        "requests": requests,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": accepted / drafted,
        "length": output / steps if steps else None,
    }


def _of_pages(server_samples: Sequence[MetricSample]) -> dict[str, Any]:
    grown = {
        name: series.growth(server_samples, name)
        for name in (series.DRAFTS, series.DRAFTED, series.ACCEPTED)
    }
    drafts, drafted, accepted = grown.values()
    if drafted and accepted is not None:
        length = None if not drafts else 1 + accepted / drafts
        return {
            "server_acceptance": accepted / drafted,
            "server_length": length,
            "by_position": _by_position(server_samples, drafts or 0.0),
        }
    curves = series.curves(server_samples)

    def mean(quantity: str) -> float | None:
        """Of a gauge while there was something to say."""
        curve = curves.get(quantity) or series.MetricCurve((), ())
        values = [
            value for t, value in zip(curve.t_s, curve.values, strict=True) if t >= 0 and value > 0
        ]
        return sum(values) / len(values) if values else None

    share, length = mean(series.ACCEPT_SHARE), mean(series.ACCEPT_LENGTH)
    return (
        {}
        if share is None and length is None
        else {"server_acceptance": share, "server_length": length}
    )


def _by_position(server_samples: Sequence[MetricSample], drafts: float) -> tuple[float, ...]:
    of_place: dict[int, list[MetricSample]] = {}
    for sample in server_samples:
        if series.QUANTITY_OF.get(sample.name) == series.ACCEPTED_AT and (
            place := re.search(_AT, sample.labels)
        ):
            of_place.setdefault(int(place[1]), []).append(sample)
        elif sample.name == series.UP:
            for read in of_place.values():
                read.append(sample)
    shares = [
        (series.growth(of_place[place], series.ACCEPTED_AT) or 0.0) / drafts
        for place in sorted(of_place)
    ]
    return tuple(shares) if drafts and sorted(of_place) == list(range(len(of_place))) else ()
