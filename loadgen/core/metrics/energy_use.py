"""What the energy of a run bought: joules for each token and request, beside what the system was said to draw. Pure."""

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


def of_run(samples: Sequence[MetricSample], summary: Summary) -> EnergyUse | None:
    """The energy of the steady window with its tokens and requests; None where no page of hardware was read."""
    steady = summary.window.steady
    used = energy.measured(samples, steady.start_s, steady.end_s)
    if used is None:
        return None
    watts, tokens, requests = (
        used.watts,
        summary.tokens.steady_output_per_s,
        summary.load.steady_completed_rps,
    )
    return msgspec.structs.replace(
        used,
        declared_watts=_declared(summary),
        joules_per_output_token=watts / tokens if watts is not None and tokens else None,
        joules_per_request=watts / requests if watts is not None and requests else None,
        output_tokens_per_s_per_watt=tokens / watts if watts and tokens else None,
    )


def _declared(summary: Summary) -> float | None:
    """The power limit of one accelerator, as `--system` says it, times their number."""
    said = summary.run.metadata
    limit = said.get(f"{SYSTEM}accelerator.power_limit_w", "")
    nodes, each = said.get(f"{SYSTEM}nodes", "1"), said.get(f"{SYSTEM}accelerator.per_node", "")
    gpus = summary.target.gpus or (
        int(nodes) * int(each) if nodes.isdigit() and each.isdigit() else None
    )
    return float(limit) * gpus if limit.isdigit() and gpus else None
