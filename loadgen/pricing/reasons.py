"""The sentence of each note beside a cost, by its code. Pure.

Programs read the code and the values of a note, users its sentence. docs/reference/costs.md lists the codes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from loadgen.core.limits import CACHED_SHARE
from loadgen.core.metrics import reasons
from loadgen.core.results.manifest import ReasonCode

SENTENCES = {
    # of every figure that rests on the evidence
    "reserved": "VALID with a reservation: {caveats:all}",
    "other_work": "the run behind this warns: {warnings:all}",
    "simulated": "SIMULATED: no real server was measured; the model is wrong by {error}, which no interval here holds",
    "invalid": "INVALID measurement: {reasons:all}; an invalid run has no good requests",
    "repeats_left_out": "INVALID repeats of {runs:run|runs} are left out: {names:list}",
    "slo_missed": "the SLO was missed at this load",
    "slo_missed_at_capacity": "the run behind the capacity missed its SLO",
    "lower_bound": "a lower bound: {why}. The capacity is at least this; a cost and a number of machines that follow from it are "
    "at most what stands here",
    "slo_undecided": "the SLO is undecided at this load: its figures are withheld, or too many requests unfinished (--grace)",
    "at_an_end": "the rate is the {ends:both} end of its interval: the rate is the load that held at full length, the interval "
    "is where the highest such load lies by all trials together",
    "horizon": "the interval of the capacity holds for {within}",
    "not_sustained": "it is not known whether this load can be sustained: {why}",
    "overloaded": "the server did not sustain this load: {why}",
    "unconfirmed": "the search ended before a confirmation: a trial at full length is the evidence, and a longer "
    "run may not hold it",
    "at_once": "Offline: everything was due at once, without a limit on latency, so the rates are "
    "those of the measurement window. Under a limit "
    "the same machines carry less",
    "no_slo": "no SLO: nothing says which requests were good",
    # of a cost
    "steps_apart": "{steps:list}: at endpoints of their own, and not in these costs: see those of the steps",
    "own_load": "priced at the load it was given, not at its capacity: more load may cost less per request",
    "other_gpu": "ANOTHER MACHINE: measured on {measured:both} ({where}), priced as {priced}; nobody sells this speed "
    "at this price",
    "other_shape": "ANOTHER MACHINE: measured on {measured}, priced as {provider}'s {priced}; nobody sells this speed at this "
    "price",
    "machine_unknown": "the price does not say how many GPUs a machine has: paid by the GPU; whole machines may cost more",
    "whole_machines": "{used:GPU was|GPUs were} used, {paid} are paid: machines are rented whole",
    "part_of_machines": "pays {used} of the {bought:GPU that was|GPUs that were} bought",
    "short_run": "no warm-up, and a run short beside its answers: the steady rate holds its ramp and reads low",
    "began_empty": "its run showed {output_tokens_per_s:,.0f} output tokens/s, {missing:.1%} less than {requests_per_s:.4g}/s of "
    "{output_tokens:,.0f} tokens: it began with an empty server. Tokens are priced by what it showed",
    "off_capacity": "what a request is was measured at {offered_per_s:.3g}/s, away from the capacity",
    "offered_less": "by the chance of its arrivals the run at {asked_per_s:.4g}/s was in fact offered {offered_per_s:.4g}/s",
    "power_understated": "the accelerators alone drew {measured:,.0f} W with PUE, and the price file declares {declared:,.0f} W for "
    "whole machines: what energy costs here is too little",
    "all_written": "every prompt token that did not come from the cache is taken as written to it: answers do not say "
    "how many were; a provider bills those of short prompts and of ends of blocks as plain input",
    "cached_above_input": "cached prompt tokens cost more ({cached} per million) than uncached "
    "ones ({input}): check the price file",
    "cached_unknown": "the server does not say what came from its cache: all prompt tokens are priced as fresh",
    "failed_paid": "{failed:failed request|failed requests}: {tokens:token of theirs is|tokens of theirs are} known and in the "
    "price",
    "resent": "{requests:request was|requests were} sent again after a reset; what the first sending cost is not known",
    "price_undated": "the price has no date",
    "price_unsourced": "the price has no source: nobody says where it is from",
    "egress_unpriced": "no price of egress (egress_per_gb): what leaves the provider{request_kb:counted} is not in the cost",
    "egress_uncounted": "no bytes were counted (virtual time): egress is not in the cost",
    # of a number of machines
    "one_load": "a lower bound: {why}. Machines that follow from it are at most what stands here",
    "model_error": "the model is wrong by {error}: were each machine {slower_percent:g} % slower, {machines:machine|machines} "
    "would be needed",
    # why two offers are not compared
    "recipe_differs": "recipe ({a}, {b})",
    "slo_differs": "SLO ({a}; {b})",
    "answers_differ": "work: the answers have {a:share} and {b:share} of the output tokens asked for",
    "count_differs": "{tokens} tokens counted by ({a}, {b})",
    "cache_differs": "cache ({a:warmth}, {b:warmth})",
    "one_simulated": "one is simulated",
    "one_at_capacity": "one at its capacity, one at a load of its own",
    "one_at_once": "one Offline, without a limit on latency",
    "one_lower_bound": "only a lower bound of the capacity is known ({offers:list})",
    "confidence_differs": "confidence of the intervals ({a:g}, {b:g})",
    "no_cost": "no cost in this unit",
    # of two offers that are compared
    "offer_invalid": "{offer} is not a valid measurement",
    "seed_differs": "different seeds",
    "model_differs": "different models ({a}, {b})",
    "region_differs": "different regions ({a:given}, {b:given})",
    "connect_differs": "connect time {a_ms:.1f} and {b_ms:.1f} ms is inside TTFT",
}


def note(code: str, **values: Any) -> ReasonCode:
    """Return the note with this code, and the values that its sentence needs."""
    return ReasonCode(code=code, values=values)


def texts(notes: Iterable[ReasonCode]) -> tuple[str, ...]:
    """Return the notes as sentences."""
    return tuple(reasons.format_reason(note, SENTENCES, _FORMATS) for note in notes)


def _warmth(share: float | None) -> str:
    """Return a cached fraction of the prompt tokens as text, such as "warm, 42.0 %"."""
    if share is None:
        return "not said"
    return f"{'cold' if share <= CACHED_SHARE else 'warm'}, {share * 100:.1f} %"


_FORMATS = reasons.FORMATS | {
    "all": "; ".join,
    "both": " and ".join,
    "counted": lambda kb: "" if kb is None else f", {kb:,.3g} kB a request,",
    "given": lambda region: region or "not given",
    "warmth": _warmth,
}
