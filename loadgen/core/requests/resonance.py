"""Round robin over a data set that repeats: whether each server is sent the same part of it in every pass. Pure.

The server of a request is its number modulo the servers, its sample the number modulo the samples. Where the two share
a factor, a server meets the same samples for ever, and one whose share is heavier than the others' stays so for ever.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

SMALL = 4  # a common factor up to here is named only where the shares are known to differ
UNEQUAL = (
    0.01  # difference of the heaviest share from the mean, from which shares are said to differ
)


def sample_count(requests: Any, prompts: Any) -> int | None:
    """After how many requests the data set begins again; None where it does not. `requests`: as in the workload."""
    if hasattr(requests, "path"):
        return len(prompts.rows)
    columns: list[Any] = [
        getattr(requests, name, None) for name in ("input_tokens", "output_tokens")
    ]
    lengths = [len(column.values) for column in columns if getattr(column, "tag", "") == "listed"]
    return math.lcm(*lengths) if len(lengths) == 2 else None


def sample_weights(requests: Any) -> NDArray[np.int64] | None:
    """The output tokens of each sample, where the workload lists them."""
    lengths: Any = getattr(requests, "output_tokens", None)
    return np.array(lengths.values, np.int64) if getattr(lengths, "tag", "") == "listed" else None


def find_resonance(
    requests: Any, prompts: Any, servers: int, kind: str, planned: int | None
) -> dict[str, Any] | None:
    """What round robin does to the shares of so many servers, as the values of the code "resonance"; None: nothing.

    `kind`: replica or target. `planned`: requests of the run, None where that is not known.
    """
    count = sample_count(requests, prompts)
    if servers < 2 or count is None or (planned is not None and planned <= count):
        return None
    factor = math.gcd(count, servers)
    if factor == 1:
        return None
    tokens = sample_weights(requests)
    heaviest = 0.0
    if tokens is not None and count % len(tokens) == 0:
        tokens = np.resize(tokens, count)
        heaviest = float(tokens.reshape(-1, factor).mean(axis=0).max() / tokens.mean() - 1)
        if heaviest < UNEQUAL:
            return None
    elif factor <= SMALL:
        return None
    return {
        "samples": count,
        "servers": servers,
        "kind": kind,
        "factor": factor,
        "each": count // factor,
        "heaviest": heaviest,
    }
