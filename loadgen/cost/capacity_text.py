"""Capacity planning: the plan based on a run, then the published capacity table recomputed and what it ignores.

Pure: takes values.
"""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.core import format
from loadgen.core.results.capacity import RateInterval
from loadgen.cost import published as reference
from loadgen.cost import published_text as published
from loadgen.cost.capacity_planning import CapacityPlan, Loss, MeasuredRate, one_load
from loadgen.cost.comparison import slo_words
from loadgen.present.section import Bullets, Report, Section, section
from loadgen.pricing.evidence import Evidence, notes
from loadgen.pricing.reasons import texts


def report(profile: str, evidence: Evidence | None, measured: MeasuredRate | None, plan: CapacityPlan | None) -> Report:
    """The whole answer. Without a run there is no plan, and the first sentence says so."""
    return Report(
        title=f"Capacity for {profile}",
        made_by="loadgen capacity",
        sections=[_measured(evidence, measured, plan), published.capacity(profile)],
    )


def _measured(evidence: Evidence | None, measured: MeasuredRate | None, plan: CapacityPlan | None) -> Section:
    if evidence is None or measured is None:
        return section("", "From a run under the SLO: none was given (--results DIR), so nothing below is a capacity.")
    mark = "SIMULATED, " if evidence.simulated else ""
    mark += "A LOWER BOUND of the capacity, " if measured.lower_bound else ""
    basis = (
        f"{measured.basis}: {'at least ' if measured.lower_bound else ''}{_rate(measured.rate)} {measured.noun}/s of "
        f"{measured.workload} on {format.counted(measured.gpus, 'GPU')}, SLO: {slo_words(evidence.summary)}; "
        f"{measured.answer} takes {measured.response_s:.3g} s on average; from {measured.folder}"
    )
    against = texts([*notes(evidence), *one_load(evidence, measured)])
    follows = [] if plan is None else [*_machines(plan), *_users(plan, measured)]
    head = f"From a run under the SLO: {mark}{measured.name}"
    return section(head, basis, Bullets(against, "warn"), Bullets(follows))


def _machines(plan: CapacityPlan) -> Iterator[str]:
    vm, rack = _rate(plan.per_vm), _rate(plan.per_rack)
    gpus, vms = format.counted(plan.gpus_per_vm, "GPU"), format.counted(plan.vms_per_rack, "independent VM")
    yield f"one VM of {gpus}: {vm}/s; one rack of {vms}: {rack}/s"
    yield _loss(plan.rack_lost, "of a full rack")


def _users(plan: CapacityPlan, measured: MeasuredRate) -> Iterator[str]:
    if plan.users is None or plan.vms is None or plan.lost is None or plan.response_s is None:
        yield "how many users that is: --users N --think 30s"
        return
    yield (
        f"{format.counted(plan.users, 'user')}, each waiting {plan.response_s:.3g} s for {measured.answer} and "
        f"thinking {plan.think_s:g} s: {format.quantity(plan.demand_per_s)} {measured.kind}/s"
    )
    has_range = plan.vms_low is not None and plan.vms_low != plan.vms_high
    vms_range = f" ({plan.vms_low:,} to {plan.vms_high:,} by the interval)" if has_range else ""
    most, least = ("at most ", "at least ") if measured.lower_bound else ("", "")
    machines = f"VMs: {most}{plan.vms:,}{vms_range}; racks: {most}{plan.racks:,}"
    yield f"{machines}; one full rack carries {least}{format.counted(plan.rack_users, 'such user')}"
    yield _loss(plan.lost, "of these")
    enough = plan.lost.share is not None and plan.lost.share >= 1
    yield (
        "so they carry all users with a VM lost"
        if enough
        else f"to carry all users with a VM lost: {plan.vms + 1:,} VMs"
    )


def _loss(loss: Loss, vms_of: str) -> str:
    share = f", {format.percent(loss.share)} of the demand" if loss.share is not None else ""
    users = f", {format.counted(loss.users, 'user')}" if loss.users is not None else ""
    return (
        f"with one fault domain of {format.counted(loss.gpus, 'GPU')} lost, {loss.vms - 1:,} of "
        f"{format.counted(loss.vms, 'VM')} {vms_of} carry "
        f"{format.quantity(loss.carried_per_s)}/s{share}{users}"
    )


def _rate(rate: RateInterval) -> str:
    return format.spanned(rate.mid, rate.low, rate.high)


def render_json(
    profile: str, evidence: Evidence | None, measured: MeasuredRate | None, plan: CapacityPlan | None
) -> str:
    """The same content as a JSON document, ending in a newline."""
    measured_notes = [] if evidence is None or measured is None else [*notes(evidence), *one_load(evidence, measured)]
    rack = reference.rack(reference.nodes().rows)
    rows = [row for row in reference.profiles().rows if row.profile == profile]
    document = {
        "schema": 1,
        "profile": profile,
        "published": [
            {
                "per_s": row.published_per_s,
                "as_published": again.as_published,
                "by_output": again.by_output,
                "single_clock": again.single_clock,
            }
            for row, again in ((row, reference.arithmetic(row, rack)) for row in rows)
        ],
        "ignored": list(reference.IGNORED),
        "notes": reference.notes_of(reference.profiles(), rows),
        "measured": measured,
        "measured_notes": texts(measured_notes),
        "measured_note_codes": measured_notes,
        "plan": plan,
    }
    return format.document(document).decode()
