"""Detect that round robin sends each server the same part of a repeated data set in every pass.

The server of a request is its number modulo the number of servers, and its sample is the number
modulo the number of samples. If both have a common factor, a server gets the same samples in every
pass. A server with a heavier share than the others then keeps it for the whole run.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.core.requests.file_prompts import FilePrompts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.core.requests.prompts import Prompts
    from loadgen.core.workload.request_classes import Requests

SMALL_FACTOR = 4
"""A common factor up to this one is reported only if the shares are known to differ."""
UNEQUAL_SHARE = 0.01
"""If the largest share is above the mean by less than this fraction, all shares count as equal."""


def find_resonance(
    requests: Requests,
    prompts: Prompts,
    server_count: int,
    kind: str,
    planned_requests: int | None,
) -> dict[str, Any] | None:
    """Return the values of the warning "resonance", or None if there is nothing to warn of.

    Resonance means that round robin sends each server the same samples in every pass over a data
    set, because the numbers of samples and servers have a common factor. It is harmless if all
    servers get equally many output tokens. If these are not known, a warning is given only for a
    large factor, with which a server gets few different samples.

    Args:
        requests: The requests as the workload describes them.
        prompts: The requests as they are built.
        server_count: The number of servers that requests are distributed to.
        kind: What a server is called: replica or target.
        planned_requests: The number of requests of the run, or None if it is not known.
    """
    sample_count = _sample_count(requests, prompts)
    if server_count < 2 or sample_count is None:
        return None
    repeats_data_set = planned_requests is None or planned_requests > sample_count
    # With a common factor, a server only gets every `factor`-th sample, the same ones in each pass.
    # Without one, each server gets every sample in turn.
    factor = math.gcd(sample_count, server_count)
    if not repeats_data_set or factor == 1:
        return None
    excess = _excess_of_largest_group(requests, sample_count, factor)
    if _is_likely_harmless(factor, excess):
        return None
    return {
        "samples": sample_count,
        "servers": server_count,
        "kind": kind,
        "factor": factor,
        "each": sample_count // factor,
        "heaviest": excess or 0.0,
    }


def _is_likely_harmless(factor: int, excess: float | None) -> bool:
    """Return True if the servers have similar loads although each always gets the same samples.

    Args:
        factor: The common factor of the numbers of samples and servers.
        excess: By which fraction the largest load is above the mean, or None if it is not known.
    """
    if excess is None:
        return factor <= SMALL_FACTOR
    return excess < UNEQUAL_SHARE


def _sample_count(requests: Requests, prompts: Prompts) -> int | None:
    """Return after how many requests the data set begins again, or None if it does not repeat.

    A file repeats after its rows. Lists of input and output lengths repeat after a common multiple
    of their sizes.
    """
    if isinstance(prompts, FilePrompts):
        return len(prompts.rows)
    input_tokens = _listed_values(requests, "input_tokens")
    output_tokens = _listed_values(requests, "output_tokens")
    if input_tokens is None or output_tokens is None:
        return None
    return math.lcm(len(input_tokens), len(output_tokens))


def _excess_of_largest_group(requests: Requests, sample_count: int, factor: int) -> float | None:
    """Return how much more output the largest group of samples has than the mean, as a fraction.

    A group is what a server gets in each pass: every `factor`-th sample. There are `factor` groups,
    and if there are more servers, several of them get the same group. With the output tokens 300,
    100, 300, 100 and the factor 2, the groups have 600 and 200 tokens, so the result is 0.5. Return
    None if the output tokens of the samples are not known.
    """
    output_tokens = _listed_values(requests, "output_tokens")
    if output_tokens is None or sample_count % len(output_tokens) != 0:
        return None
    # The listed lengths repeat until each sample has one.
    tokens_of_samples = np.resize(output_tokens, sample_count)
    tokens_of_groups = [tokens_of_samples[group::factor].mean() for group in range(factor)]
    return float(max(tokens_of_groups) / tokens_of_samples.mean() - 1)


def _listed_values(requests: Requests, field: str) -> NDArray[np.int64] | None:
    """Return the lengths that a workload lists one by one, or None if it draws them."""
    length: Any = getattr(requests, field, None)
    if getattr(length, "tag", "") != "listed":
        return None
    return np.array(length.values, np.int64)
