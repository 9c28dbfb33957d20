"""The sentence of each note on a cost, by its code. Pure.

Programs read the code and the values of a note, users its sentence. docs/reference/costs.md lists
the codes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from loadgen.core.limits import CACHED_SHARE
from loadgen.core.metrics import reasons
from loadgen.core.results.manifest import ReasonCode

SENTENCES = {
    # Notes on any result.
    "reserved": "VALID with a caveat: {caveats:all}",
    "other_work": "The run has warnings: {warnings:all}",
    "simulated": (
        "SIMULATED: results come from a performance model, whose error of {error} is not part of "
        "any interval"
    ),
    "invalid": "INVALID run: {reasons:all}. An INVALID run has no good requests",
    "repeats_left_out": "INVALID repeats are excluded: {names:list} of {runs:run|runs}",
    "slo_missed": "SLO missed at this load",
    "slo_missed_at_capacity": "the run behind the capacity missed its SLO",
    "lower_bound": (
        "lower bound: {why}. The capacity is at least this, so the cost and the number of machines "
        "are at most the printed ones"
    ),
    "slo_undecided": (
        "SLO inconclusive at this load: metrics are not reported, or too many requests were "
        "unfinished (--grace)"
    ),
    "at_an_end": (
        "the rate is the {ends:both} end of its interval, because the rate passed a full-length "
        "trial and the interval comes from all trials"
    ),
    "horizon": "the interval of the capacity covers {within}",
    "not_sustained": "not known whether the load can be sustained: {why}",
    "overloaded": "the load was not sustained: {why}",
    "unconfirmed": (
        "not confirmed: the search ended before a full-length trial from an idle server, and a "
        "longer run may not pass"
    ),
    "at_once": (
        "Offline run: all requests were scheduled at once without a latency limit, so rates are "
        "those of the measurement window and capacity under an SLO is lower"
    ),
    "no_slo": "no SLO, so no request can be called good",
    # Notes on a cost.
    "steps_apart": "{steps:list}: served by other endpoints, and priced with the steps of a task",
    "own_load": "priced at the load of the run, not at capacity; at a higher load a request may "
    "cost less",
    "other_gpu": (
        "OTHER INSTANCE TYPE: measured on {measured:both} ({where}), priced as {priced}; this "
        "speed is not sold at this price"
    ),
    "other_shape": (
        "OTHER INSTANCE TYPE: measured on {measured}, priced as {priced} of {provider}; this speed "
        "is not sold at this price"
    ),
    "machine_unknown": (
        "the price does not say how many GPUs a machine has, so GPUs are paid one by one; whole "
        "machines may cost more"
    ),
    "whole_machines": (
        "{used:GPU was|GPUs were} used and {paid} are paid, because machines are rented as a whole"
    ),
    "part_of_machines": (
        "only {used} of the {bought:purchased GPU is|purchased GPUs are} included in the cost, "
        "because the run used no more"
    ),
    "short_run": (
        "short run without warm-up: the steady-state rate includes the ramp-up and is too low"
    ),
    "began_empty": (
        "measured throughput ({output_tokens_per_s:,.0f} tok/s) is {missing:.1%} below nominal "
        "({requests_per_s:.4g} req/s of {output_tokens:,.0f} tokens) because of ramp-up; costs use "
        "the measured value"
    ),
    "off_capacity": (
        "token counts per request were measured at {offered_per_s:.3g} req/s, not at the capacity"
    ),
    "offered_less": (
        "random arrivals offered {offered_per_s:.4g} req/s, not the target of {asked_per_s:.4g}"
    ),
    "power_understated": (
        "the accelerators alone used {measured:,.0f} W with PUE, more than the {declared:,.0f} W "
        "in the price file for whole machines, so the energy cost is too low"
    ),
    "all_written": (
        "the server does not report cache writes, so all prompt tokens that were not cached are "
        "priced as cache writes; the provider may bill less"
    ),
    "cached_above_input": (
        "cached prompt tokens cost more ({cached} per million) than uncached ones ({input}); check "
        "the price file"
    ),
    "cached_unknown": (
        "the server does not report cached tokens, so all prompt tokens are priced as uncached"
    ),
    "failed_paid": (
        "{failed:failed request|failed requests} with {tokens:known token|known tokens} are "
        "included in the price"
    ),
    "resent": (
        "{requests:request was|requests were} sent again after a reset; the cost of the first "
        "attempt is not known"
    ),
    "price_undated": "the price has no date",
    "price_unsourced": "the price has no source",
    "egress_unpriced": (
        "egress{request_kb:counted} is not included, because the price has no egress_per_gb"
    ),
    "egress_uncounted": "egress is not included, because virtual time counts no bytes",
    # Notes on a number of machines.
    "one_load": "lower bound: {why}. The number of machines is at most the printed one",
    "model_error": (
        "model error {error}: if each machine is {slower_percent:g} % slower, "
        "{machines:machine is|machines are} needed"
    ),
    # Why two results are not compared.
    "recipe_differs": "different config fingerprints: {a}, {b}",
    "slo_differs": "different SLOs: {a}; {b}",
    "answers_differ": "responses have {a:share} and {b:share} of the requested output tokens",
    "count_differs": "{tokens} tokens counted by {a} and by {b}",
    "cache_differs": "different prefix cache hit rates: {a:warmth}; {b:warmth}",
    "one_simulated": "one is simulated",
    "one_at_capacity": "one is at capacity, one at a chosen load",
    "one_at_once": "one is an Offline run without a latency limit",
    "one_lower_bound": "only a lower bound of the capacity is known for {offers:list}",
    "confidence_differs": "different confidence of the intervals: {a:g}, {b:g}",
    "no_cost": "no cost in this unit",
    # Remarks on two results that are compared.
    "offer_invalid": "{offer} is INVALID",
    "seed_differs": "different seeds",
    "model_differs": "different models: {a}, {b}",
    "region_differs": "different regions: {a:given}, {b:given}",
    "connect_differs": "TTFT includes connect times of {a_ms:.1f} and {b_ms:.1f} ms",
}


def make_note(code: str, **values: Any) -> ReasonCode:
    """Return the note with this code, and the values that its sentence needs."""
    return ReasonCode(code=code, values=values)


def render_notes(notes: Iterable[ReasonCode]) -> tuple[str, ...]:
    """Return the notes as sentences."""
    return tuple(reasons.format_reason(note, SENTENCES, _FORMATS) for note in notes)


def _format_hit_rate(hit_rate: float | None) -> str:
    """Return a prefix cache hit rate as text, such as "warm, 42.0 %"."""
    if hit_rate is None:
        return "unknown"
    temperature = "cold" if hit_rate <= CACHED_SHARE else "warm"
    return f"{temperature}, {hit_rate * 100:.1f} %"


def _format_egress(kb: float | None) -> str:
    """Return the egress of a request as text in parentheses, or "" if it is not known."""
    return "" if kb is None else f" ({kb:,.3g} kB per request)"


def _format_region(region: str) -> str:
    """Return the name of a region, or "unknown"."""
    return region or "unknown"


_FORMATS = reasons.FORMATS | {
    "all": "; ".join,
    "both": " and ".join,
    "counted": _format_egress,
    "given": _format_region,
    "warmth": _format_hit_rate,
}
"""How a value is formatted, by the format after its name in `SENTENCES`."""
