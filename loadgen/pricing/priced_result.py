"""Prices a result: what its units, its classes and its energy cost under one price. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import NamedTuple

import msgspec
from loadgen_sdk.price_file import PerToken
from msgspec.structs import replace

from loadgen.core.errors import UserError
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import ReasonCode
from loadgen.pricing.cost_basis import CostBasis, compute_cost_basis, sum_counts
from loadgen.pricing.energy import (
    DeclaredPower,
    MeasuredEnergy,
    average_measured_energy,
    compute_declared_power,
)
from loadgen.pricing.evidence import Evidence
from loadgen.pricing.machine_cost import compute_hourly_cost_parts, count_paid_machines
from loadgen.pricing.prices import Price
from loadgen.pricing.prompt_lengths import count_long_prompts
from loadgen.pricing.reasons import render_notes
from loadgen.pricing.result_notes import list_result_notes
from loadgen.pricing.unit_cost import UnitCost, compute_unit_cost
from loadgen.pricing.units import REQUEST, TOTAL, UNITS


class ClassCost(msgspec.Struct, frozen=True, kw_only=True):
    """What the units of one request class cost.

    Attributes:
        tokens_share: The fraction of all prompt and output tokens that are of this class, which is
            the fraction of the machines that it pays for. A price per token needs no fraction.
        costs: The cost of each unit, by unit. None if no unit was measured.
    """

    tokens_share: Decimal
    costs: Mapping[str, UnitCost | None]


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a step adds to the cost of a task that succeeded.

    Attributes:
        price: The price of the endpoint that serves the step, or None if none was found.
        per_task: The amount per task, or None if it cannot be computed.
        reason: What is missing if there is no amount.
        code: The code of the error behind `reason`.
    """

    price: Price | None
    per_task: Decimal | None
    reason: str = ""
    code: str = ""


class PricedResult(msgspec.Struct, frozen=True, kw_only=True):
    """A result under a price.

    Attributes:
        name: How reports call the result.
        evidence: The measurements.
        price: The price.
        basis: The measured quantities behind the costs.
        gpus: The number of GPUs that the run used, or None if it is not known.
        gpus_paid: The number of GPUs that are paid for, or None for a price per token.
        utilization: The fraction of the paid time in which the machines serve the load.
        hourly_cost_parts: The parts of the hourly cost of all machines that are paid for. Empty for
            a price per token.
        costs: The cost of each unit, by unit. None if no unit was measured.
        declared_power: Power that the price file declares, or None if it declares none.
        measured_energy: Energy that the runs measured, or None without a measurement.
        note_codes: The notes to show beside the costs.
        class_costs: The costs of each request class. Empty if all requests are of one class.
        step_costs: The costs of each step of a task, which `step_cost.with_step_costs` adds.
    """

    name: str
    evidence: Evidence
    price: Price
    basis: CostBasis
    gpus: int | None
    gpus_paid: Decimal | None
    utilization: Decimal
    hourly_cost_parts: Mapping[str, Decimal]
    costs: Mapping[str, UnitCost | None]
    declared_power: DeclaredPower | None
    measured_energy: MeasuredEnergy | None
    note_codes: tuple[ReasonCode, ...]
    class_costs: Mapping[str, ClassCost]
    step_costs: Mapping[str, StepCost] = msgspec.field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes as sentences."""
        return render_notes(self.note_codes)


def price_result(
    evidence: Evidence,
    price: Price,
    name: str,
    price_location: str,
    *,
    gpus: int | None,
    utilization: Decimal,
) -> PricedResult:
    """Return a result with the costs of its units under a price.

    Args:
        evidence: The measurements.
        price: The price.
        name: How reports call the result.
        price_location: Where the price stands in its file, for error messages.
        gpus: The number of GPUs that the run used, or None if it is not known.
        utilization: The fraction of the paid time in which the machines serve the load.

    Raises:
        UserError: The number of GPUs is not known, cached tokens have no price, the run has no
            steady rate, or a utilization was given without a capacity.
    """
    basis = compute_basis_for_price(evidence, price)
    if isinstance(price, PerToken):
        _check_cached_price(basis, price, price_location)
        energy_price = None
        # Tokens are not paid for idle time.
        utilization = Decimal(1)
    else:
        _check_machine_inputs(evidence, basis, gpus, utilization)
        energy_price = price.energy

    machine_hour = _compute_machine_hour(price, gpus)
    declared_power = compute_declared_power(basis, price, gpus)
    measured_energy = average_measured_energy(evidence.summaries, energy_price)
    notes = list_result_notes(
        evidence,
        basis,
        price,
        gpus=gpus,
        declared_power=declared_power,
        measured_energy=measured_energy,
    )

    return PricedResult(
        name=name,
        evidence=evidence,
        price=price,
        basis=basis,
        gpus=gpus,
        gpus_paid=machine_hour.gpus_paid,
        utilization=utilization,
        hourly_cost_parts=machine_hour.cost_parts,
        costs={unit: compute_unit_cost(basis, price, gpus, unit, utilization) for unit in UNITS},
        declared_power=declared_power,
        measured_energy=measured_energy,
        note_codes=tuple(notes),
        class_costs=_compute_class_costs(evidence, basis, price, gpus, utilization),
    )


class _MachineHour(NamedTuple):
    """What is paid for an hour of all machines.

    Attributes:
        gpus_paid: The number of GPUs that are paid for, or None for a price per token.
        cost_parts: The parts of the hourly cost, such as "rent". Empty for a price per token.
    """

    gpus_paid: Decimal | None
    cost_parts: dict[str, Decimal]


def _compute_machine_hour(price: Price, gpus: int | None) -> _MachineHour:
    """Return the GPUs that are paid and the cost of an hour. A price per token has neither."""
    if isinstance(price, PerToken) or gpus is None:
        return _MachineHour(gpus_paid=None, cost_parts={})

    machines = count_paid_machines(price, gpus)

    # Without the number of GPUs of a machine, each GPU counts as a machine.
    gpus_per_machine = price.gpus or 1
    return _MachineHour(
        gpus_paid=machines * gpus_per_machine,
        cost_parts={
            part: cost * machines for part, cost in compute_hourly_cost_parts(price).items()
        },
    )


def compute_basis_for_price(evidence: Evidence, price: Price) -> CostBasis:
    """Return the measured quantities that a price applies to.

    A price per token may change for prompts above a length. The tokens of such prompts are then
    counted separately, for which the records of all requests are read.

    Raises:
        UserError: The records that tell the lengths of the prompts are missing.
    """
    basis = compute_cost_basis(evidence)
    if not isinstance(price, PerToken) or price.above_prompt_tokens is None:
        return basis
    return replace(
        basis, long_prompt_tokens=count_long_prompts(evidence, price.above_prompt_tokens)
    )


def _check_cached_price(basis: CostBasis, price: PerToken, price_location: str) -> None:
    """Raise UserError if tokens came from a cache and the price file has no price for them."""
    if basis.cached_tokens and price.per_million_cached is None:
        raise UserError(
            "no_price",
            f"{basis.cached_tokens:,} prompt tokens came from the cache, and {price.name} has no "
            "price for them",
            price_location,
            "add per_million_cached (equal to per_million_input without a discount)",
        )


def _check_machine_inputs(
    evidence: Evidence, basis: CostBasis, gpus: int | None, utilization: Decimal
) -> None:
    """Check that everything is known that a price by the hour needs.

    A utilization needs a capacity. The rate of a run that used its machine to 40 % already contains
    the idle time, which would count twice.

    Raises:
        UserError: The number of GPUs or the steady rate is not known, or a utilization was given
            for a result that is not a capacity.
    """
    if gpus is None:
        raise UserError(
            "missing_option",
            "the number of GPUs of the run is not known",
            evidence.folder,
            f"--gpus {evidence.name}=4, or `loadgen run --gpus` next time",
        )

    if utilization != 1 and not basis.is_capacity:
        raise UserError(
            "no_effect",
            f"--utilization needs a capacity, and {evidence.name} was measured at a chosen load",
            evidence.folder,
            "use the result of loadgen search, or remove --utilization",
        )

    if not basis.rates[REQUEST]:
        raise UserError(
            "no_figure",
            "the run has no steady-state window, so it has no rate to price",
            evidence.folder,
            "use a longer run (--duration, --num-requests)",
        )


def _compute_class_costs(
    evidence: Evidence, basis: CostBasis, price: Price, gpus: int | None, utilization: Decimal
) -> dict[str, ClassCost]:
    """Return what a request, a million tokens and the other units cost in each request class.

    The keys are the names of the classes. Machines serve all classes together, so their cost is
    divided among the classes in proportion to their tokens. A price per token is paid for the
    tokens of the class itself.

    Classes whose tokens were not counted are left out. All classes are left out if the price per
    token changes above a prompt length, because the tokens of long prompts are only known for all
    classes together.

    Args:
        evidence: The measurements of all classes.
        basis: The measured quantities of all classes together.
        price: The price of the machines or of the tokens.
        gpus: The number of GPUs that the run used, or None if it is not known.
        utilization: The fraction of the paid time in which the machines serve the load.
    """
    depends_on_prompt_length = isinstance(price, PerToken) and price.long_prompt_price is not None
    if depends_on_prompt_length:
        return {}

    class_costs: dict[str, ClassCost] = {}
    for request_class in evidence.summary.classes:
        class_basis = _compute_class_basis(evidence, basis, request_class.name)
        if class_basis is None:
            continue

        tokens_share = _compute_tokens_share(class_basis, basis)
        cost_by_unit: dict[str, UnitCost | None] = {}
        for unit in UNITS:
            cost_by_unit[unit] = compute_unit_cost(
                class_basis,
                price,
                gpus,
                unit,
                utilization=utilization,
                machine_share=tokens_share,
            )

        class_costs[request_class.name] = ClassCost(tokens_share=tokens_share, costs=cost_by_unit)

    return class_costs


def _compute_tokens_share(class_basis: CostBasis, basis: CostBasis) -> Decimal:
    """Return the tokens of a class as a fraction of all tokens, or 0 if they are not known."""
    class_tokens = class_basis.counts[TOTAL]
    all_tokens = basis.counts[TOTAL]
    if class_tokens is None or not all_tokens:
        return Decimal(0)
    return class_tokens / all_tokens


def _compute_class_basis(evidence: Evidence, basis: CostBasis, class_name: str) -> CostBasis | None:
    """Return the counts and rates of one request class, or None if they are not known.

    Only the request rate of all classes together was measured. The rates of a class are derived
    from it in proportion to the counts: with 30 good requests of the class among 100 requests in
    all, its rate of good requests is 0.3 times the measured rate. The interval is that of the
    measured rate.

    Args:
        evidence: The measurements of all classes.
        basis: The measured quantities of all classes together.
        class_name: The name of the class.
    """
    class_summaries: list[Summary] = []
    for summary in evidence.summaries:
        class_summary = _replace_totals_by_class(summary, class_name)
        if class_summary is None:
            return None
        class_summaries.append(class_summary)

    requests_of_all_classes = basis.counts[REQUEST]
    if not requests_of_all_classes:
        return None

    class_totals = sum_counts(class_summaries)
    requests_per_s = basis.rates[REQUEST]

    class_rates: dict[str, Decimal | None] = {}
    for unit, unit_count in class_totals.counts.items():
        if requests_per_s is None or unit_count is None:
            class_rates[unit] = None
        else:
            class_rates[unit] = requests_per_s * unit_count / requests_of_all_classes

    return replace(
        class_totals,
        rates=class_rates,
        relative_low=basis.relative_low,
        relative_high=basis.relative_high,
        confidence=basis.confidence,
    )


def _replace_totals_by_class(summary: Summary, class_name: str) -> Summary | None:
    """Return a copy of a run's summary whose totals are those of one request class.

    With it, functions that take the summary of a run also work for a class. Returns None if there
    is no such class or its tokens are not known.
    """
    classes_by_name = {request_class.name: request_class for request_class in summary.classes}
    request_class = classes_by_name.get(class_name)
    if request_class is None:
        return None
    if request_class.tokens.input is None or request_class.tokens.output is None:
        return None

    return replace(
        summary,
        requests=request_class.requests,
        tokens=request_class.tokens,
        goodput=request_class.goodput,
        sessions=request_class.sessions,
        bytes=request_class.bytes,
        classes=(),
    )
