"""How many users, VMs and racks a measured rate carries, and what is left when a fault domain is lost.

Pure: numbers in, values out. Nothing here is money, and nothing is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from loadgen.cost.evidence import Evidence
from loadgen.errors import UserError
from loadgen.results.capacity import RateInterval, replications

GPUS_PER_VM = 4  # ND GB300 v6; one fault domain
VMS_PER_RACK = 18  # of an NVL72: 72 GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What N-1 VMs carry when one fault domain (one VM) is lost; of the demand, and for how many users that is enough.
    The last two are None without users."""

    vms: int  # N, before the loss
    gpus: int  # of the fault domain
    carried_per_s: float
    share: float | None
    users: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """How many machines `users` need. VMs are whole; `vms_low` and `vms_high` come from the ends of the rate. All but
    the rates and `rack_lost` is None without users."""

    gpus_per_vm: int
    vms_per_rack: int
    per_vm: RateInterval  # interactions per second within the SLO
    per_rack: RateInterval
    rack_lost: Loss  # with a full rack
    users: int | None = None
    think_s: float | None = None
    response_s: float | None = None  # mean time from due to the last output; of a task, its whole duration
    demand_per_s: float | None = None
    vms: int | None = None
    vms_low: int | None = None
    vms_high: int | None = None
    racks: int | None = None
    rack_users: int | None = None  # that one rack carries
    lost: Loss | None = None  # with `vms` VMs


def scaled(rate: RateInterval, by: float) -> RateInterval:
    ends = (rate.low, rate.high)
    low, high = (None if end is None else end * by for end in ends)
    return RateInterval(mid=rate.mid * by, low=low, high=high)


def demand(users: int, think_s: float, response_s: float) -> float:
    """Interactions per second of `users` who each wait for the answer and then think: N / (R + Z), the interactive
    response time law."""
    return users / (think_s + response_s)


def fleet(
    rate: RateInterval, gpus: int, *, gpus_per_vm: int = GPUS_PER_VM, vms_per_rack: int = VMS_PER_RACK
) -> CapacityPlan:
    """VMs and racks by a rate that `gpus` GPUs carried within the SLO. Rates are scaled by GPUs: VMs are taken as
    independent replicas, and what a router in front of them costs is not in it."""
    per_vm = scaled(rate, gpus_per_vm / gpus)
    return CapacityPlan(
        gpus_per_vm=gpus_per_vm,
        vms_per_rack=vms_per_rack,
        per_vm=per_vm,
        per_rack=scaled(per_vm, vms_per_rack),
        rack_lost=_loss(vms_per_rack, per_vm, gpus_per_vm),
    )


def plan(by: CapacityPlan, users: int, think_s: float, response_s: float) -> CapacityPlan:
    """Machines of a `fleet` for `users`."""
    wanted = demand(users, think_s, response_s)
    cycle_s = think_s + response_s

    def needed(carried: float | None) -> int | None:
        return None if carried is None else max(math.ceil(wanted / carried - ROUNDING), 1)

    vms = needed(by.per_vm.mid) or 1
    return replace(
        by,
        users=users,
        think_s=think_s,
        response_s=response_s,
        demand_per_s=wanted,
        vms=vms,
        vms_low=needed(by.per_vm.high),
        vms_high=needed(by.per_vm.low),
        racks=math.ceil(vms / by.vms_per_rack),
        rack_users=math.floor(by.per_rack.mid * cycle_s + ROUNDING),
        lost=_loss(vms, by.per_vm, by.gpus_per_vm, wanted, cycle_s),
        rack_lost=_loss(by.vms_per_rack, by.per_vm, by.gpus_per_vm, None, cycle_s),
    )


ROUNDING = 1e-9  # a demand of exactly three VMs needs three, whatever binary floats make of it


def _loss(vms: int, per_vm: RateInterval, gpus: int, wanted: float | None = None, cycle_s: float | None = None) -> Loss:
    left = (vms - 1) * per_vm.mid
    return Loss(
        vms=vms,
        gpus=gpus,
        carried_per_s=left,
        share=None if wanted is None else left / wanted,
        users=None if cycle_s is None else math.floor(left * cycle_s + ROUNDING),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRate:
    """What a plan rests on. `rate`: interactions per second within the SLO, by all `gpus` together."""

    name: str
    folder: str
    basis: str  # "capacity by search", "at this load"
    lower_bound: bool = False  # a capacity whose end was not found
    rate: RateInterval
    noun: str  # what an interaction is: "good requests", "requests", "conversations", "successful tasks"
    gpus: int
    response_s: float
    workload: str


def measured(evidence: Evidence, gpus: int) -> MeasuredRate:
    """The rate within the SLO: a capacity's; else the steady rate of successful tasks where there are conversations, of
    good requests, or without an SLO of requests.

    Raises UserError where nothing came within the SLO.
    """
    summary, found = evidence.summary, evidence.capacity
    if found is not None:
        basis, noun = f"capacity by {found.method}", str(found.unit)
        rate = RateInterval(mid=found.rate_per_s, low=found.low_per_s, high=found.high_per_s)
        if found.unit == "requests" and summary.sessions is not None:
            offered = summary.requests.scheduled - summary.requests.cancelled
            rate, noun = scaled(rate, summary.sessions.count / offered), "conversations"
    else:
        n = len(evidence.summaries)
        basis = "at this load" if n == 1 else f"at this load, {n} repeats"
        noun, each = _steady(evidence)
        if not each or min(each) <= 0:
            what = f"no {noun} ended while load was offered"
            raise UserError(what, evidence.folder, "a longer run, or one at a load that the endpoint can carry")
        rate = replications(each)
    answer_ms = summary.e2e_ms.mean if summary.sessions is None else summary.sessions.duration_ms.mean
    return MeasuredRate(
        name=evidence.name,
        folder=evidence.folder,
        basis=basis,
        rate=rate,
        noun=noun,
        gpus=gpus,
        response_s=(answer_ms or 0.0) / 1e3,
        lower_bound=found is not None and found.lower_bound,
        workload=summary.run.workload,
    )


def _steady(evidence: Evidence) -> tuple[str, list[float]]:
    """What is counted, and its steady rate in each run."""
    summaries = evidence.summaries
    if summaries[0].sessions is not None:
        noun, each = "successful tasks", [s.sessions.steady_ok_per_s if s.sessions else None for s in summaries]
    elif evidence.valid and summaries[0].goodput.met is not None:
        noun, each = "good requests", [s.goodput.steady_rps for s in summaries]
    else:
        noun, each = "requests", [s.load.steady_completed_rps for s in summaries]
    return noun, [rate for rate in each if rate is not None]
