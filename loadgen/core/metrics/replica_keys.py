"""Numbers for the targets and replicas that requests went to, and names for them.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns, JoinedColumns
    from loadgen.core.results.manifest import RunManifest

REPLICAS_PER_TARGET = 1 << 16

MAX_KEY_RANGE = 256 * REPLICAS_PER_TARGET
"""If keys differ by more, they are sorted instead of being looked up in a table."""

MAX_KEYS_WITHOUT_SORT = 256
"""So few groups are found with one comparison per group, which needs less memory than a sort."""


def replica_keys(requests: Columns | JoinedColumns) -> NDArray[np.int32]:
    """Return a number for the target and the replica of each request.

    Requests whose replica is not known get the number of their target alone.
    """
    targets = requests["target"].astype(np.int32)
    return targets * REPLICAS_PER_TARGET + requests["replica"].astype(np.int32) + 1


def replica_name(key: int, manifest: RunManifest) -> str:
    """Return the name of a replica or target for readers, or "" for the only target of a run."""
    target_index, replica_number = divmod(key, REPLICAS_PER_TARGET)
    if replica_number:
        return f"replica {replica_number - 1}"
    if len(manifest.targets) < 2:
        return ""
    target = manifest.targets[target_index]
    return f"target {target.name or target.url or target_index}"


class NumberedKeys(NamedTuple):
    """The different keys in ascending order, and for each request the index of its key."""

    keys: NDArray[np.int64]
    key_index: NDArray[np.int64]


def number_keys(keys: NDArray[Any]) -> NumberedKeys:
    """Return the different keys, and for each request the index of its key among them.

    It is what `numpy.unique` returns with `return_inverse`. That function sorts all keys, which
    takes long for millions of requests. There are few replicas, so a table with an entry for each
    possible key is faster, unless the keys are far apart.
    """
    lowest = int(keys.min(initial=0))
    if not len(keys) or int(keys.max()) - lowest > MAX_KEY_RANGE:
        return NumberedKeys(*np.unique(keys, return_inverse=True))
    offsets = keys - lowest
    is_used = np.zeros(int(offsets.max()) + 1, bool)
    is_used[offsets] = True
    used_offsets = np.flatnonzero(is_used)
    index_of_offset = np.zeros(len(is_used), np.min_scalar_type(len(used_offsets)))
    index_of_offset[used_offsets] = np.arange(len(used_offsets))
    return NumberedKeys(used_offsets + lowest, index_of_offset[offsets])


def group_by_key(keys: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each key in ascending order with the indices of its requests, in their order.

    Few keys are looked for one by one, which needs less memory than to sort all requests by key.
    """
    numbered = number_keys(keys)
    if len(numbered.keys) <= MAX_KEYS_WITHOUT_SORT:
        for index, key in enumerate(numbered.keys.tolist()):
            yield key, np.flatnonzero(numbered.key_index == index)
        return
    order = np.argsort(numbered.key_index, kind="stable")
    ends = np.cumsum(np.bincount(numbered.key_index))
    yield from zip(numbered.keys.tolist(), np.split(order, ends[:-1]), strict=True)
