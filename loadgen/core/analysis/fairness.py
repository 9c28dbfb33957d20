"""Compare what the tenants of a load received, by Jain's index of fairness.

Pure. The request classes with the same `tenant` belong to one tenant, and a class without one is a
tenant of its own. See R. Jain, D. Chiu, W. Hawe, "A Quantitative Measure of Fairness and
Discrimination", DEC-TR-301 (1984).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from loadgen.core.metrics.sections import Fairness, TenantShare

if TYPE_CHECKING:
    from loadgen.core.metrics.part_summaries import ClassSummary


def jain_index(values: Sequence[float]) -> float | None:
    """Return Jain's fairness index of values: (sum x)^2 / (n * sum x^2).

    The index is 1 if all values are equal, 1/n if all values but one are 0, and None if all values
    are 0.
    """
    sum_of_squares = sum(value * value for value in values)
    if not sum_of_squares:
        return None

    return sum(values) ** 2 / (len(values) * sum_of_squares)


def group_by_tenant(tenant_of_class: Mapping[str, str | None]) -> dict[str, tuple[str, ...]]:
    """Return the names of the classes of each tenant, or an empty dictionary for a single tenant.

    A class without a tenant is a tenant by itself.

    Args:
        tenant_of_class: The tenant of each class, or None.
    """
    classes_by_tenant: dict[str, list[str]] = {}
    for class_name, tenant in tenant_of_class.items():
        tenant_name = tenant or class_name
        classes_by_tenant.setdefault(tenant_name, []).append(class_name)

    if len(classes_by_tenant) < 2:
        return {}
    return {tenant: tuple(class_names) for tenant, class_names in classes_by_tenant.items()}


def measure_fairness(classes: Sequence[ClassSummary]) -> Fairness | None:
    """Return how equally the tenants of a run were served, or None for a single tenant.

    Two fractions of requests are compared by Jain's fairness index: the requests that succeeded,
    and the requests that met the SLO.

    Args:
        classes: The summary of each class of requests. A tenant may have several classes.
    """
    tenants = _summarize_tenants(classes)
    if len(tenants) < 2:
        return None

    ok_shares = _known_values([tenant.ok_share for tenant in tenants])
    good_shares = _known_values([tenant.good_share for tenant in tenants])

    # Fractions that met the SLO are preferred, but they are only known if all tenants have one.
    shares_to_compare = good_shares or ok_shares
    return Fairness(
        tenants=tenants,
        ok_index=None if ok_shares is None else jain_index(ok_shares),
        good_index=None if good_shares is None else jain_index(good_shares),
        worst=_worst_tenant(tenants, shares_to_compare),
    )


def _summarize_tenants(classes: Sequence[ClassSummary]) -> tuple[TenantShare, ...]:
    """Return what each tenant received.

    A class of requests without a tenant is a tenant by itself.
    """
    classes_by_tenant: dict[str, list[ClassSummary]] = {}
    for request_class in classes:
        tenant = request_class.tenant or request_class.name
        classes_by_tenant.setdefault(tenant, []).append(request_class)

    return tuple(
        _summarize_tenant(tenant, classes_of_tenant)
        for tenant, classes_of_tenant in classes_by_tenant.items()
    )


def _known_values(values: Sequence[float | None]) -> list[float] | None:
    """Return the values, or None if a value is None, which means not known."""
    known = [value for value in values if value is not None]
    are_all_known = len(known) == len(values)
    return known if are_all_known else None


def _worst_tenant(tenants: Sequence[TenantShare], shares: Sequence[float] | None) -> str:
    """Return the name of the tenant with the smallest share, or "" if all are equal or unknown."""
    if shares is None or len(set(shares)) == 1:
        return ""

    worst_index = shares.index(min(shares))
    return tenants[worst_index].name


def _summarize_tenant(name: str, classes: Sequence[ClassSummary]) -> TenantShare:
    """Return what a tenant received, added up over the request classes of the tenant."""
    decided = sum(request_class.requests.decided for request_class in classes)
    ok = sum(request_class.requests.ok for request_class in classes)

    return TenantShare(
        name=name,
        classes=tuple(request_class.name for request_class in classes),
        decided=decided,
        ok_share=ok / decided if decided else None,
        good_share=_good_share(classes),
        output_per_s=_total_output_per_s(classes),
    )


def _good_share(classes: Sequence[ClassSummary]) -> float | None:
    """Return the share of the requests of all classes that meet their SLO, None if not known."""
    good_counts = _known_values([request_class.goodput.good for request_class in classes])
    counted = sum(request_class.goodput.counted or 0 for request_class in classes)
    if good_counts is None or not counted:
        return None

    return sum(good_counts) / counted


def _total_output_per_s(classes: Sequence[ClassSummary]) -> float | None:
    """Return the output tokens per second of all classes together, or None if not known."""
    rates_per_s = _known_values([_output_per_s(request_class) for request_class in classes])
    return None if rates_per_s is None else sum(rates_per_s)


def _output_per_s(request_class: ClassSummary) -> float | None:
    """Return the output tokens per second in the steady-state window.

    A class without such a window has the rate of its measurement window.
    """
    tokens = request_class.tokens
    if request_class.load.steady_completed_rps is None:
        return tokens.output_per_s
    return tokens.steady_output_per_s
