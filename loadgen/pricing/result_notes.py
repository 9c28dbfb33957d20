"""The notes beside the costs of a result: what qualifies them and what they leave out. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal

from loadgen_sdk.price_file import UNDATED, PerToken

from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import ReasonCode
from loadgen.pricing.cost_basis import CostBasis
from loadgen.pricing.energy import DeclaredPower, MeasuredEnergy, compute_lowest_measured_watts
from loadgen.pricing.evidence import Evidence, list_evidence_notes
from loadgen.pricing.machine_cost import count_paid_machines
from loadgen.pricing.prices import NO_SOURCE, Owned, Price, Rented
from loadgen.pricing.reasons import make_note
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

# A series of GPUs and a number, such as H100, GB300 or MI300X, not as part of a longer word.
_GPU_NAME = re.compile(r"(?<![A-Z0-9])(?:GB|GH|B|H|A|L|MI|RTX)[0-9]{2,4}X?(?![0-9])")


def list_result_notes(
    evidence: Evidence,
    basis: CostBasis,
    price: Price,
    *,
    gpus: int | None,
    declared_power: DeclaredPower | None,
    measured_energy: MeasuredEnergy | None,
) -> Iterator[ReasonCode]:
    """Yield the notes to show beside the costs of a result: what they assume and leave out.

    Args:
        evidence: The measurements.
        basis: The quantities that the costs were computed from.
        price: The price of the machines or of the tokens.
        gpus: The number of GPUs that the run used, or None if it is not known.
        declared_power: Power that the price file declares, or None if it declares none.
        measured_energy: Energy that the runs measured, or None without a measurement.
    """
    yield from list_evidence_notes(evidence)
    separate_steps = [step.name for step in evidence.summary.steps if step.targets]
    if separate_steps:
        yield make_note("steps_apart", steps=separate_steps)

    if isinstance(price, PerToken):
        yield from _list_token_price_notes(evidence, basis, price)
    elif gpus is not None:
        yield from _list_machine_notes(evidence, basis, price, gpus)
        yield from _list_power_notes(price, declared_power, measured_energy)

    resent_requests = sum(summary.requests.resent for summary in evidence.summaries)
    if resent_requests:
        yield make_note("resent", requests=resent_requests)

    if price.as_of == UNDATED:
        yield make_note("price_undated")

    if price.source == NO_SOURCE:
        yield make_note("price_unsourced")

    yield from _list_egress_notes(basis, price)


def find_other_machine_note(summary: Summary, price: Rented | Owned) -> ReasonCode | None:
    """Return a note if the price is for another machine than the one measured.

    The machines are compared by the GPU names, such as "GB300", in the shape and name of the target
    and in the price. If one side names no known GPU, the instance types are compared. Returns None
    if the machines are equal or not known.
    """
    target = summary.target
    measured_gpus = set(_GPU_NAME.findall(f"{target.shape} {target.name}".upper()))

    priced_gpus = set(_GPU_NAME.findall(price.gpu.upper()))
    if measured_gpus and priced_gpus and measured_gpus.isdisjoint(priced_gpus):
        return make_note(
            "other_gpu",
            measured=sorted(measured_gpus),
            where=target.shape or target.name,
            priced=price.gpu,
        )

    if target.shape and price.shape and target.shape.lower() != price.shape.lower():
        return make_note(
            "other_shape", measured=target.shape, provider=price.provider, priced=price.shape
        )

    return None


def _list_token_price_notes(
    evidence: Evidence, basis: CostBasis, price: PerToken
) -> Iterator[ReasonCode]:
    """Yield the notes on a price per token: what the server's token counts leave open.

    Servers may report neither the tokens that came from a cache nor those written to one, so the
    cost assumes the more expensive case and says so. Failed requests are paid as far as their
    tokens are known.
    """
    if price.per_million_cache_write is not None and basis.cache_written_tokens is None:
        yield make_note("all_written")

    cached_price = price.per_million_cached
    if cached_price is not None and cached_price > price.per_million_input:
        # A cache discount is normal and a surcharge is not, so the two keys may be swapped.
        yield make_note(
            "cached_above_input",
            cached=str(cached_price),
            input=str(price.per_million_input),
        )

    if not basis.is_cached_known and cached_price is not None:
        yield make_note("cached_unknown")

    summaries = evidence.summaries
    failed_requests = sum(summary.requests.failed + summary.requests.lost for summary in summaries)
    if failed_requests:
        failed_tokens = sum(
            summary.tokens.failed_input + summary.tokens.failed_output for summary in summaries
        )
        yield make_note("failed_paid", failed=failed_requests, tokens=failed_tokens)


def _list_machine_notes(
    evidence: Evidence, basis: CostBasis, price: Rented | Owned, gpus: int
) -> Iterator[ReasonCode]:
    """Yield the notes on a price by the hour.

    Such a cost is right only if the machine ran at its capacity, if it is the machine that the
    price is for, and if all GPUs that are paid were used. There is a note for each condition that
    is not met.
    """
    is_at_chosen_load = _is_at_chosen_load(evidence, basis)
    if is_at_chosen_load:
        yield make_note("own_load")

    other_machine_note = find_other_machine_note(evidence.summary, price)
    if other_machine_note is not None:
        yield other_machine_note

    yield from _list_unused_gpu_notes(price, gpus)
    if is_at_chosen_load and _is_short_without_warmup(evidence.summary):
        yield make_note("short_run")

    if evidence.capacity is not None:
        yield from _list_ramp_up_notes(basis, evidence.capacity)
        yield from _list_arrival_rate_notes(evidence.summary, evidence.capacity)


def _is_at_chosen_load(evidence: Evidence, basis: CostBasis) -> bool:
    """Return True if the user chose the load of the run, so that the machine may serve more.

    A capacity was searched for, and an Offline run drives the machine as hard as it can.
    """
    return not basis.is_capacity and not evidence.is_offline


def _list_unused_gpu_notes(price: Rented | Owned, gpus: int) -> Iterator[ReasonCode]:
    """Yield a note if the GPUs that are paid are not, or may not be, the GPUs that were used.

    Rented machines are paid whole, so a run on 6 GPUs pays for 8 if a machine has 8. Of machines
    that were bought, a run pays for the GPUs that it used.
    """
    if isinstance(price, Owned):
        if gpus != price.gpus:
            yield make_note("part_of_machines", used=gpus, bought=price.gpus)
        return

    if price.gpus is None:
        yield make_note("machine_unknown")
        return

    gpus_paid = int(count_paid_machines(price, gpus)) * price.gpus
    if gpus_paid != gpus:
        yield make_note("whole_machines", used=gpus, paid=gpus_paid)


def _is_short_without_warmup(summary: Summary) -> bool:
    """Return True if the ramp-up of a run is a noticeable part of its steady-state window.

    A run that starts on an idle server completes little at first. Without a warm-up, the window
    must last for many median response times to make that negligible.
    """
    steady_s = summary.window.steady.duration_s
    response_ms = summary.e2e_ms.p50
    has_warmup = bool(summary.warmup.scheduled)
    if steady_s is None or response_ms is None or has_warmup:
        return False
    return response_ms / 1e3 * SHORT_WINDOW_RESPONSES > steady_s


def _list_ramp_up_notes(basis: CostBasis, capacity: Capacity) -> Iterator[ReasonCode]:
    """Yield a note if the token rate at a capacity is below request rate times response length.

    In the steady state both are equal. A run that starts on an empty server has a lower token rate,
    because its first responses are still being generated. Costs per token use that lower rate, so
    the note says how much is missing. A capacity without a measured token rate has no such note.
    """
    requests_per_s = basis.rates[REQUEST]
    request_count = basis.counts[REQUEST]

    # The unit OUTPUT is a million tokens, so its rate and count are in millions.
    measured_millions_per_s = basis.rates[OUTPUT]
    output_millions = basis.counts[OUTPUT]
    if capacity.output_tokens_per_s is None:
        return
    if not (requests_per_s and request_count and measured_millions_per_s and output_millions):
        return

    steady_millions_per_s = requests_per_s * output_millions / request_count
    lowest_expected_rate = steady_millions_per_s * (1 - RAMP_UP_DEFICIT)
    if measured_millions_per_s < lowest_expected_rate:
        yield make_note(
            "began_empty",
            output_tokens_per_s=float(measured_millions_per_s * MILLION),
            missing=float(1 - measured_millions_per_s / steady_millions_per_s),
            requests_per_s=float(requests_per_s),
            output_tokens=float(output_millions * MILLION / request_count),
        )


def _list_arrival_rate_notes(summary: Summary, capacity: Capacity) -> Iterator[ReasonCode]:
    """Yield a note if the arrival rate of the confirming run differs from the capacity.

    Arrivals are random, so a run may offer slightly less than was requested, which makes it easier
    to pass. If the rates differ much, the run is not one at the capacity, and its requests may
    have other sizes.
    """
    offered_rps = summary.load.offered_rps
    if capacity.unit != "requests" or offered_rps is None:
        return

    relative_difference = offered_rps / capacity.rate_per_s - 1
    if abs(relative_difference) > LOAD_DIFFERENCE:
        yield make_note("off_capacity", offered_per_s=offered_rps)
    elif relative_difference < -ARRIVAL_DEFICIT:
        yield make_note("offered_less", asked_per_s=capacity.rate_per_s, offered_per_s=offered_rps)


def _list_power_notes(
    price: Rented | Owned,
    declared_power: DeclaredPower | None,
    measured_energy: MeasuredEnergy | None,
) -> Iterator[ReasonCode]:
    """Yield a note if the accelerators alone used more power than the price file declares.

    The declared power is that of whole machines, so it must be higher than the measured power of
    their accelerators. The lower end of the measured power is compared, to allow for its error.
    """
    if measured_energy is None or declared_power is None or price.energy is None:
        return
    measured_watts = compute_lowest_measured_watts(measured_energy, price.energy)
    if measured_watts > declared_power.watts:
        yield make_note("power_understated", measured=measured_watts, declared=declared_power.watts)


def _list_egress_notes(basis: CostBasis, price: Price) -> Iterator[ReasonCode]:
    """Yield a note if the cost leaves out egress, the traffic that leaves the provider.

    Either the price file has no price for it, or no bytes were counted, as in virtual time.
    """
    request_count = basis.counts[REQUEST]
    kb_per_request = None
    if basis.bytes_out and request_count:
        kb_per_request = float(basis.bytes_out / request_count / KILO)

    if price.egress_per_gb is None:
        yield make_note("egress_unpriced", request_kb=kb_per_request)
    elif kb_per_request is None:
        yield make_note("egress_uncounted")
