"""The speed that one user sees, as text for reports. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.core.metrics.interactivity import DEFINITIONS

if TYPE_CHECKING:
    from loadgen.core.metrics.interactivity import Interactivity


def describe_interactivity(interactivity: Interactivity) -> str:
    """Return the speed per user by each definition: `49.4 tok/s (1 / TPOT p50), ...`.

    Definitions whose latency is not known are left out.
    """
    phrases: list[str] = []
    for definition in DEFINITIONS:
        tokens_per_s = getattr(interactivity, definition.name)
        if tokens_per_s is not None:
            unit = "" if phrases else " tok/s"
            phrases.append(f"{format.quantity(tokens_per_s)}{unit} ({definition.label})")

    return ", ".join(phrases)
