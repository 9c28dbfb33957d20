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

    For the keys 9, 7, 9 the different keys are 7 and 9, and the indices are 1, 0, 1. This is what
    `numpy.unique` returns with `return_inverse`, but it sorts all keys, which takes long for
    millions of requests. A table with an entry for each possible key is faster. Keys that are so
    far apart that the table would be large are sorted.
    """
    if not len(keys):
        return NumberedKeys(*np.unique(keys, return_inverse=True))

    first_table_key = min(int(keys.min()), 0)
    if int(keys.max()) - first_table_key > MAX_KEY_RANGE:
        return NumberedKeys(*np.unique(keys, return_inverse=True))

    # The tables have an entry for each possible key, from `first_table_key` on.
    entries = keys - first_table_key
    is_key_present = np.zeros(int(entries.max()) + 1, bool)
    is_key_present[entries] = True
    present_entries = np.flatnonzero(is_key_present)

    # The smallest integer type that holds all indices saves memory.
    index_type = np.min_scalar_type(len(present_entries))
    index_of_entry = np.zeros(len(is_key_present), index_type)
    index_of_entry[present_entries] = np.arange(len(present_entries))

    return NumberedKeys(keys=present_entries + first_table_key, key_index=index_of_entry[entries])


def group_by_key(keys: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each different key, in ascending order, with the indices of the requests that have it.

    For the keys 9, 7, 9 it yields 7 with [1], and then 9 with [0, 2].
    """
    numbered = number_keys(keys)
    if len(numbered.keys) <= MAX_KEYS_WITHOUT_SORT:
        # One search per key needs less memory than a sort of all requests.
        for key_index, key in enumerate(numbered.keys.tolist()):
            yield key, np.flatnonzero(numbered.key_index == key_index)
        return

    requests_by_key = np.argsort(numbered.key_index, kind="stable")
    first = 0

    counts = np.bincount(numbered.key_index).tolist()
    for key, count in zip(numbered.keys.tolist(), counts, strict=True):
        yield key, requests_by_key[first : first + count]
        first += count
