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
    """Return the energy of the steady window with its tokens and requests.

    Returns None if no metrics page of the hardware was read.
    """
    steady = summary.window.steady
    used = energy.measure_energy(samples, steady.start_s, steady.end_s)
    if used is None:
        return None
    tokens_per_s = summary.tokens.steady_output_per_s
    return msgspec.structs.replace(
        used,
        declared_watts=_declared_watts(summary),
        joules_per_output_token=_joules_per(used.watts, tokens_per_s),
        joules_per_request=_joules_per(used.watts, summary.load.steady_completed_rps),
        output_tokens_per_s_per_watt=tokens_per_s / used.watts
        if used.watts and tokens_per_s
        else None,
    )


def _joules_per(watts: float | None, rate_per_s: float | None) -> float | None:
    """Return the energy per unit of a rate, or None if the power or the rate is not known."""
    return watts / rate_per_s if watts is not None and rate_per_s else None


def _declared_watts(summary: Summary) -> float | None:
    """Return the power limit of all accelerators as `--system` declares it, None if it does not."""
    metadata = summary.run.metadata
    limit_w = metadata.get(f"{SYSTEM}accelerator.power_limit_w", "")
    gpus = summary.target.gpus or _declared_gpus(metadata)
    return float(limit_w) * gpus if limit_w.isdigit() and gpus else None


def _declared_gpus(metadata: dict[str, str]) -> int | None:
    """Return nodes times accelerators per node as declared, None if either is not known."""
    nodes = metadata.get(f"{SYSTEM}nodes", "1")
    per_node = metadata.get(f"{SYSTEM}accelerator.per_node", "")
    if not nodes.isdigit() or not per_node.isdigit():
        return None
    return int(nodes) * int(per_node)
