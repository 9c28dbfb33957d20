"""The energy of a run per token and per request, and the declared power of the system. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from loadgen.core.format import SYSTEM
from loadgen.core.server_metrics import energy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.core.metrics.summary import Summary
    from loadgen.core.server_metrics.energy import EnergyUse
    from loadgen.core.server_metrics.series import MetricSample


def summarize_energy(samples: Sequence[MetricSample], summary: Summary) -> EnergyUse | None:
    """Return the energy that the accelerators used in the steady state, per token and per request.

    Args:
        samples: The metrics that the servers published, over time.
        summary: The summary of the run.
    """
    steady = summary.window.steady
    energy_use = energy.measure_energy(samples, steady.start_s, steady.end_s)
    if energy_use is None:
        return None

    watts = energy_use.watts
    tokens_per_s = summary.tokens.steady_output_per_s
    requests_per_s = summary.load.steady_completed_rps

    return msgspec.structs.replace(
        energy_use,
        declared_watts=_declared_watts(summary),
        joules_per_output_token=_joules_per(watts, tokens_per_s),
        joules_per_request=_joules_per(watts, requests_per_s),
        output_tokens_per_s_per_watt=_rate_per_watt(tokens_per_s, watts),
    )


def _rate_per_watt(rate_per_s: float | None, watts: float | None) -> float | None:
    """Return a rate divided by the power, or None if either is 0 or not known."""
    return rate_per_s / watts if rate_per_s and watts else None


def _joules_per(watts: float | None, rate_per_s: float | None) -> float | None:
    """Return the energy per unit of a rate, or None if the power or the rate is not known."""
    return watts / rate_per_s if watts is not None and rate_per_s else None


def _declared_watts(summary: Summary) -> float | None:
    """Return the declared power limit of all accelerators together, None if it is not known."""
    metadata = summary.run.metadata
    limit_w = metadata.get(f"{SYSTEM}accelerator.power_limit_w", "")
    accelerators = summary.target.gpus or _declared_gpus(metadata)
    if not limit_w.isdigit() or not accelerators:
        return None

    return float(limit_w) * accelerators


def _declared_gpus(metadata: dict[str, str]) -> int | None:
    """Return nodes times accelerators per node as declared, None if either is not known."""
    nodes = metadata.get(f"{SYSTEM}nodes", "1")
    per_node = metadata.get(f"{SYSTEM}accelerator.per_node", "")
    if not nodes.isdigit() or not per_node.isdigit():
        return None
    return int(nodes) * int(per_node)
