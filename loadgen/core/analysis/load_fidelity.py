"""Whether the load that was delivered is the load that was asked for: one check for each property of it.

Pure. A run that does not deliver what was asked for is no measurement of it, however good its clocks are. Each check
has the value asked for, the one seen, and whether they agree within what chance allows; `report/stimulus.py` has words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.core.limits import (
    CACHED_SHARE,
    COUNT_DISAGREEMENT,
    GAP_VARIATION,
    LENGTH_MISMATCH,
    SHORTENED,
)
from loadgen.core.metrics.columns import Columns, as_selection, join_arrays
from loadgen.core.metrics.sections import StimulusCheck
from loadgen.core.stats.quantiles import ks_distance

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.core.metrics.run_evidence import VerdictInputs
    from loadgen.core.results.manifest import RunManifest

CHANCE = 0.001  # probability with which chance alone fails a check of a sound run
_SIGMAS = 3.29  # the two-sided normal quantile of it
LEAST = 30  # gaps, below which their law cannot be told
CLOSE = 0.01  # a rate within so much of the one asked for is that rate, whatever chance allows


def checks(
    manifest: RunManifest, summary: Any, signs: VerdictInputs, columns: Sequence[Columns]
) -> tuple[StimulusCheck, ...]:
    """Return the checks that apply to this load. `columns`: the measured records of each stage."""
    if not signs.sends:
        return ()
    return (
        *_arrivals(manifest, summary, columns),
        *_mix(manifest, summary),
        *_tokens(manifest, summary, signs),
    )


def _arrivals(
    manifest: RunManifest, summary: Any, columns: Sequence[Columns]
) -> Iterator[StimulusCheck]:
    measured = [stage for stage in manifest.stages if stage.measured]
    load, sent = summary.load, summary.requests.scheduled - summary.requests.dropped
    gaps = join_arrays([_gaps(part, manifest) for part in columns])
    if len(gaps) >= LEAST:
        farthest, p = _from_exponential(gaps)
        yield StimulusCheck(code="arrivals", seen=farthest, ok=p >= CHANCE, n=len(gaps), p=p)
    variation, planned = load.gap_variation, load.gap_variation_planned
    if variation is not None and planned is not None:
        close = abs(variation - planned) <= GAP_VARIATION
        yield StimulusCheck(code="spacing", asked=planned, seen=variation, ok=close, n=sent)
    if len(measured) != 1 or summary.sessions is not None:
        return
    (stage,) = measured
    lanes, most = stage.concurrency, load.in_flight_max
    if stage.closed and lanes and most is not None:
        yield StimulusCheck(
            code="lanes", asked=float(lanes), seen=float(most), ok=most >= lanes, n=sent
        )
    elif not stage.closed and stage.rate and load.achieved_rps is not None and sent > 0:
        by_chance = _SIGMAS * (planned if planned is not None else 1.0) / math.sqrt(sent)
        close = abs(load.achieved_rps / stage.rate - 1) <= max(CLOSE, by_chance)
        yield StimulusCheck(code="rate", asked=stage.rate, seen=load.achieved_rps, ok=close, n=sent)


def _gaps(columns: Columns, manifest: RunManifest) -> NDArray[np.float64]:
    """The gaps between sends of Poisson stages, in mean gaps of their rate. Later turns wait, so they do not count."""
    parts = []
    for number, stage in enumerate(manifest.stages):
        if stage.rate and stage.arrival.startswith("poisson"):
            own = (columns["stage"] == number) & (columns["turn"] == 0) & (columns["sent_ns"] >= 0)
            parts.append(np.diff(np.sort(columns["sent_ns"][as_selection(own)])) * stage.rate / 1e9)
    return join_arrays(parts)


def _from_exponential(gaps: NDArray[np.float64]) -> tuple[float, float]:
    """The Kolmogorov-Smirnov distance of gaps from the exponential law of mean 1, and its probability (asymptotic)."""
    n = len(gaps)
    gaps.sort()
    farthest = ks_distance(gaps, _exponential, _exponential)
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * farthest
    series = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return farthest, 1.0 if scaled < 0.2 else min(max(series, 0.0), 1.0)


def _exponential(gaps: NDArray[np.float64]) -> NDArray[np.float64]:
    law: NDArray[np.float64] = -np.expm1(-gaps)
    return law


def _mix(manifest: RunManifest, summary: Any) -> Iterator[StimulusCheck]:
    """The class whose share is farthest from the one asked for."""
    everyone = sum(part.starts for part in summary.classes)
    if not everyone:
        return
    parts = [(part.share, part.starts / everyone) for part in summary.classes]
    asked, seen = max(parts, key=lambda pair: abs(pair[1] - pair[0]))
    by_chance = _SIGMAS * math.sqrt(asked * (1 - asked) / everyone) + 1 / everyone
    yield StimulusCheck(
        code="classes", asked=asked, seen=seen, ok=abs(seen - asked) <= by_chance, n=everyone
    )


def _tokens(manifest: RunManifest, summary: Any, signs: VerdictInputs) -> Iterator[StimulusCheck]:
    tokens, ok = summary.tokens, summary.requests.ok
    asked, got = float(signs.requested_tokens), float(signs.received_tokens)
    if asked:
        as_long = got >= asked * (1 - SHORTENED)
        same = (
            tokens.length_mismatch_share is None or tokens.length_mismatch_share <= LENGTH_MISMATCH
        )
        yield StimulusCheck(code="outputs", asked=asked, seen=got, ok=as_long and same, n=ok)
    if signs.prompt_count_difference is not None:
        agree = abs(signs.prompt_count_difference) <= COUNT_DISAGREEMENT
        yield StimulusCheck(
            code="prompts", asked=0.0, seen=signs.prompt_count_difference, ok=agree, n=ok
        )
    if manifest.requested_cache_share is not None:
        share = tokens.cached_share
        close = (
            None if share is None else abs(share - manifest.requested_cache_share) <= CACHED_SHARE
        )
        yield StimulusCheck(
            code="cache", asked=manifest.requested_cache_share, seen=share, ok=close, n=ok
        )
        return
    if manifest.shares_prompts:
        yield StimulusCheck(code="cache", seen=tokens.cached_share, ok=None, n=ok)
        return
    yield StimulusCheck(
        code="repeats",
        asked=0.0,
        seen=float(signs.repeated_prompts),
        ok=not signs.repeated_prompts,
        n=signs.sends,
    )
    cold = None if tokens.cached_share is None else tokens.cached_share <= CACHED_SHARE
    yield StimulusCheck(code="cache", asked=0.0, seen=tokens.cached_share, ok=cold, n=ok)
