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
    servers get equally many output tokens.

    Args:
        requests: The requests as the workload describes them.
        prompts: The requests as they are built.
        server_count: The number of servers that requests are distributed to.
        kind: What a server is called: replica or target.
        planned_requests: The number of requests of the run, or None if it is not known.
    """
    sample_count = _data_set_size(requests, prompts)
    if server_count < 2 or sample_count is None:
        return None

    repeats_data_set = planned_requests is None or planned_requests > sample_count
    common_factor = math.gcd(sample_count, server_count)
    if not repeats_data_set or common_factor == 1:
        return None

    excess_load = _excess_of_largest_group(requests, sample_count, common_factor)
    if _is_likely_harmless(common_factor, excess_load):
        return None

    samples_per_server = sample_count // common_factor

    # The keys are the names of the placeholders in the text of the warning.
    return {
        "samples": sample_count,
        "servers": server_count,
        "kind": kind,
        "factor": common_factor,
        "each": samples_per_server,
        "heaviest": excess_load or 0.0,
    }


def _is_likely_harmless(common_factor: int, excess_load: float | None) -> bool:
    """Return True if the servers have similar loads although each always gets the same samples.

    With a known load, it is harmless if the load of the busiest server is less than UNEQUAL_SHARE
    above the mean. If the load is not known, the number of samples of a server decides: a small
    factor means that each server gets many samples, whose means differ little.

    Args:
        common_factor: With a factor of 3, each server gets every third sample.
        excess_load: By which fraction the load of the busiest server is above the mean, or None if
            it is not known.
    """
    if excess_load is None:
        return common_factor <= SMALL_FACTOR
    return excess_load < UNEQUAL_SHARE


def _data_set_size(requests: Requests, prompts: Prompts) -> int | None:
    """Return the number of samples after which a data set begins again, or None if it never does.

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


def _excess_of_largest_group(
    requests: Requests, sample_count: int, common_factor: int
) -> float | None:
    """Return how many more output tokens the largest group of samples has than the mean group.

    A sample is a row of the data set. The samples are divided into `common_factor` groups, and a
    server always gets the same group: with the factor 2, some servers get the samples 0, 2, 4, ...
    and the others 1, 3, 5, ...

    For example, 4 samples have 300, 100, 300 and 100 output tokens. The samples of one group have
    300 tokens on average, those of the other 100, and all samples 200. 300 is 50 % more than 200,
    so the result is 0.5.

    Args:
        requests: The requests as the workload describes them.
        sample_count: The number of samples.
        common_factor: The number of groups, which all have equally many samples. It is a divisor of
            `sample_count`.

    Returns:
        The excess as a fraction, or None if the output tokens of the samples are not known.
    """
    output_tokens = _listed_values(requests, "output_tokens")
    if output_tokens is None:
        return None
    repetitions, remaining_samples = divmod(sample_count, len(output_tokens))
    if remaining_samples:
        # The length of a sample would differ from pass to pass.
        return None

    # The list of lengths is repeated until each sample has a length.
    tokens_by_sample = np.tile(output_tokens, repetitions)

    mean_tokens_by_group = [
        tokens_by_sample[first_sample::common_factor].mean()
        for first_sample in range(common_factor)
    ]
    return float(max(mean_tokens_by_group) / tokens_by_sample.mean() - 1)


def _listed_values(requests: Requests, field: str) -> NDArray[np.int64] | None:
    """Return the lengths that a workload lists one by one, or None if it draws them."""
    length: Any = getattr(requests, field, None)
    if getattr(length, "tag", "") != "listed":
        return None
    return np.array(length.values, np.int64)
