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
    """Return what `numpy.unique` returns with `return_inverse`, without a sort of all keys."""
    lowest = int(keys.min(initial=0))
    if not len(keys) or int(keys.max()) - lowest > MAX_KEY_RANGE:
        return NumberedKeys(*np.unique(keys, return_inverse=True))
    is_used = np.zeros(int(keys.max()) - lowest + 1, bool)
    is_used[keys - lowest] = True
    used_keys = np.flatnonzero(is_used)
    index_of_key = np.zeros(len(is_used), np.min_scalar_type(len(used_keys)))
    index_of_key[used_keys] = np.arange(len(used_keys))
    return NumberedKeys(used_keys + lowest, index_of_key[keys - lowest])


def group_by_key(keys: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each key in ascending order with the indices of its requests, in their order."""
    numbered = number_keys(keys)
    if len(numbered.keys) <= MAX_KEYS_WITHOUT_SORT:
        for index, key in enumerate(numbered.keys.tolist()):
            yield key, np.flatnonzero(numbered.key_index == index)
        return
    order = np.argsort(numbered.key_index, kind="stable")
    ends = np.cumsum(np.bincount(numbered.key_index))
    yield from zip(numbered.keys.tolist(), np.split(order, ends[:-1]), strict=True)
