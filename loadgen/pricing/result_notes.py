"""The notes beside the costs of a result: what qualifies them and what they leave out. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal

from loadgen_sdk.price_file import UNDATED, PerToken

from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import ReasonCode
from loadgen.pricing.cost_basis import CostBasis
from loadgen.pricing.energy import MeasuredEnergy, Power, lowest_measured_watts
from loadgen.pricing.evidence import Evidence, evidence_notes
from loadgen.pricing.machine_cost import machines_paid
from loadgen.pricing.prices import NO_SOURCE, Owned, Price, Rented
from loadgen.pricing.reasons import note
from loadgen.pricing.units import KILO, MILLION, OUTPUT, REQUEST
from loadgen.repeated.capacity import Capacity

LOAD_DIFFERENCE = 0.1
"""Relative distance from the capacity at which requests may have another size and mix."""
ARRIVAL_DEFICIT = 0.01
"""Fraction by which chance may lower the arrival rate of a run without a note."""
RAMP_UP_DEFICIT = Decimal("0.01")
"""Fraction of the tokens/s that a run from an empty server may lack without a note."""
SHORT_WINDOW_RESPONSES = 20
"""A steady-state window of fewer median response times still has the ramp-up in its rates."""

_GPU_NAME = re.compile(r"(?<![A-Z0-9])(?:GB|GH|B|H|A|L|MI|RTX)[0-9]{2,4}X?(?![0-9])")


def result_notes(
    evidence: Evidence,
    basis: CostBasis,
    price: Price,
    gpus: int | None,
    power: Power | None,
    measured: MeasuredEnergy | None,
) -> Iterator[ReasonCode]:
    """Yield the notes to show beside the costs of a result."""
    yield from evidence_notes(evidence)
    separate_steps = [step.name for step in evidence.summary.steps if step.targets]
    if separate_steps:
        yield note("steps_apart", steps=separate_steps)
    if isinstance(price, PerToken):
        yield from _token_price_notes(evidence, basis, price)
    elif gpus is not None:
        yield from _machine_notes(evidence, basis, price, gpus)
        yield from _power_notes(price, power, measured)
    resent = sum(summary.requests.resent for summary in evidence.summaries)
    if resent:
        yield note("resent", requests=resent)
    if price.as_of == UNDATED:
        yield note("price_undated")
    if price.source == NO_SOURCE:
        yield note("price_unsourced")
    yield from _egress_notes(basis, price)


def note_other_machine(summary: Summary, price: Rented | Owned) -> ReasonCode | None:
    """Return a note if the price is for another machine than the one measured.

    The machines are compared by the GPU that the shape or name of the target contains, else by the
    shape. Returns None if they are equal or not known.
    """
    target = summary.target
    measured_gpus = set(_GPU_NAME.findall(f"{target.shape} {target.name}".upper()))
    priced_gpus = set(_GPU_NAME.findall(price.gpu.upper()))
    if measured_gpus and priced_gpus and measured_gpus.isdisjoint(priced_gpus):
        return note(
            "other_gpu",
            measured=sorted(measured_gpus),
            where=target.shape or target.name,
            priced=price.gpu,
        )
    if target.shape and price.shape and target.shape.lower() != price.shape.lower():
        return note(
            "other_shape", measured=target.shape, provider=price.provider, priced=price.shape
        )
    return None


def _token_price_notes(
    evidence: Evidence, basis: CostBasis, price: PerToken
) -> Iterator[ReasonCode]:
    if price.per_million_cache_write is not None and basis.written_tokens is None:
        yield note("all_written")
    if (price.per_million_cached or 0) > price.per_million_input:
        yield note(
            "cached_above_input",
            cached=str(price.per_million_cached),
            input=str(price.per_million_input),
        )
    if not basis.cached_known and price.per_million_cached is not None:
        yield note("cached_unknown")
    summaries = evidence.summaries
    failed = sum(summary.requests.failed + summary.requests.lost for summary in summaries)
    if failed:
        failed_tokens = sum(
            summary.tokens.failed_input + summary.tokens.failed_output for summary in summaries
        )
        yield note("failed_paid", failed=failed, tokens=failed_tokens)


def _machine_notes(
    evidence: Evidence, basis: CostBasis, price: Rented | Owned, gpus: int
) -> Iterator[ReasonCode]:
    """Yield the notes on a price by the hour: whether load, machine and number of GPUs match it."""
    # The load of a run is neither the capacity of its machine nor the highest possible load.
    is_at_chosen_load = not basis.is_capacity and not evidence.at_once
    if is_at_chosen_load:
        yield note("own_load")
    other_machine_note = note_other_machine(evidence.summary, price)
    if other_machine_note is not None:
        yield other_machine_note
    if isinstance(price, Rented):
        yield from _rented_gpu_notes(price, gpus)
    elif gpus != price.gpus:
        yield note("part_of_machines", used=gpus, bought=price.gpus)
    if is_at_chosen_load and _is_short_without_warmup(evidence.summary):
        yield note("short_run")
    if evidence.capacity is not None:
        yield from _ramp_up_notes(basis, evidence.capacity)
        yield from _arrival_rate_notes(evidence.summary, evidence.capacity)


def _rented_gpu_notes(price: Rented, gpus: int) -> Iterator[ReasonCode]:
    if price.gpus is None:
        yield note("machine_unknown")
        return
    gpus_paid = int(machines_paid(price, gpus)) * price.gpus
    if gpus_paid != gpus:
        yield note("whole_machines", used=gpus, paid=gpus_paid)


def _is_short_without_warmup(summary: Summary) -> bool:
    steady_s = summary.window.steady.duration_s
    response_ms = summary.e2e_ms.p50
    if steady_s is None or response_ms is None or summary.warmup.scheduled:
        return False
    return response_ms / 1e3 * SHORT_WINDOW_RESPONSES > steady_s


def _ramp_up_notes(basis: CostBasis, capacity: Capacity) -> Iterator[ReasonCode]:
    """Yield a note if the run showed fewer tokens/s than its request rate times its mean length."""
    requests_per_s = basis.rates[REQUEST]
    request_count = basis.counts[REQUEST]
    measured_rate = basis.rates[OUTPUT]
    millions = basis.counts[OUTPUT]
    if capacity.output_tokens_per_s is None:
        return
    if not (requests_per_s and request_count and measured_rate and millions):
        return
    nominal_rate = requests_per_s * millions / request_count
    if measured_rate < nominal_rate * (1 - RAMP_UP_DEFICIT):
        yield note(
            "began_empty",
            output_tokens_per_s=float(measured_rate * MILLION),
            missing=float(1 - measured_rate / nominal_rate),
            requests_per_s=float(requests_per_s),
            output_tokens=float(millions * MILLION / request_count),
        )


def _arrival_rate_notes(summary: Summary, capacity: Capacity) -> Iterator[ReasonCode]:
    """Yield a note if the arrival rate of the confirming run differs from the capacity."""
    offered_rps = summary.load.offered_rps
    if capacity.unit != "requests" or offered_rps is None:
        return
    difference = offered_rps / capacity.rate_per_s - 1
    if abs(difference) > LOAD_DIFFERENCE:
        yield note("off_capacity", offered_per_s=offered_rps)
    elif difference < -ARRIVAL_DEFICIT:
        yield note("offered_less", asked_per_s=capacity.rate_per_s, offered_per_s=offered_rps)


def _power_notes(
    price: Rented | Owned, power: Power | None, measured: MeasuredEnergy | None
) -> Iterator[ReasonCode]:
    """Yield a note if the accelerators alone used more power than the price file declares."""
    if measured is None or power is None or price.energy is None:
        return
    measured_watts = lowest_measured_watts(measured, price.energy)
    if measured_watts > power.watts:
        yield note("power_understated", measured=measured_watts, declared=power.watts)


def _egress_notes(basis: CostBasis, price: Price) -> Iterator[ReasonCode]:
    request_count = basis.counts[REQUEST]
    kb_per_request = None
    if basis.bytes_out and request_count:
        kb_per_request = float(basis.bytes_out / request_count / KILO)
    if price.egress_per_gb is None:
        yield note("egress_unpriced", request_kb=kb_per_request)
    elif kb_per_request is None:
        yield note("egress_uncounted")
