"""Interactivity: the output speed that one user sees, by each definition that is in use.

Published results call different figures "tokens/s per user". Their values differ for the same run,
so each of them has a name here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.stats.quantiles import Distribution

MS_PER_S = 1000

InteractivityName = Literal["tpot50", "endpoints", "agentx"]
"""The names of the definitions, in `summary.json` and for `--interactivity`."""


class Interactivity(msgspec.Struct, frozen=True, kw_only=True):
    """The output tokens per second that one user sees, by three definitions.

    A value is None if its latency is not known or was withheld.

    Attributes:
        tpot50: 1 / TPOT p50, the speed of a typical request after its first token.
        endpoints: 1 / TPOT p90, as MLPerf Endpoints defines it. Nine of ten requests are faster.
        agentx: 1 / p90 of E2E latency per output token, as the agent benchmark of InferenceX
            defines it. It includes the wait for the first token.
    """

    tpot50: float | None = None
    endpoints: float | None = None
    agentx: float | None = None


class InteractivityDefinition(NamedTuple):
    """One definition of interactivity.

    Attributes:
        name: Its name in `Interactivity` and for `--interactivity`.
        formula: The formula, for axes and notes.
        label: A short name that says whose definition it is.
    """

    name: InteractivityName
    formula: str
    label: str


DEFINITIONS = (
    InteractivityDefinition("tpot50", "1 / TPOT p50", "1 / TPOT p50"),
    InteractivityDefinition("endpoints", "1 / TPOT p90", "MLPerf Endpoints"),
    InteractivityDefinition("agentx", "1 / p90 of E2E per output token", "AgentX"),
)
DEFINITION_BY_NAME: dict[str, InteractivityDefinition] = {
    definition.name: definition for definition in DEFINITIONS
}
DEFAULT_DEFINITION: InteractivityName = "tpot50"


def compute_interactivity(summary: Summary) -> Interactivity:
    """Return the interactivity of a run by each definition, from its latencies."""
    e2e_per_token = summary.other_metrics.get("e2e_per_token_ms")
    return Interactivity(
        tpot50=_tokens_per_s(summary.tpot_ms, "p50"),
        endpoints=_tokens_per_s(summary.tpot_ms, "p90"),
        agentx=_tokens_per_s(e2e_per_token, "p90"),
    )


def _tokens_per_s(ms_per_token: Distribution | None, quantile: str) -> float | None:
    """Return the speed at a quantile of the time per token, or None if it is not known."""
    if ms_per_token is None:
        return None
    value_ms: float | None = getattr(ms_per_token, quantile)
    return MS_PER_S / value_ms if value_ms else None
