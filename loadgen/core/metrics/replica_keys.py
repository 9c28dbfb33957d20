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

    For the keys 9, 7, 9 the different keys are 7 and 9, and the indices are 1, 0, 1. They are
    looked up in a table, which is faster than a sort for millions of requests. Keys that are so far
    apart that the table would be large are sorted.
    """
    if not len(keys) or int(keys.max()) - int(keys.min()) > MAX_KEY_RANGE:
        different_keys, key_index = np.unique(keys, return_inverse=True)
        return NumberedKeys(different_keys, key_index)
    return _number_keys_by_table(keys)


def _number_keys_by_table(keys: NDArray[Any]) -> NumberedKeys:
    """Do what `number_keys` does, with tables that have an entry for each possible key.

    For the keys 9, 7, 9 the tables have entries for the keys 7, 8 and 9. The offsets of the keys
    are 2, 0, 2, and the present offsets are 0 and 2. The index table then has 0 at offset 0 and 1
    at offset 2.
    """
    smallest_key = int(keys.min())
    offsets = keys - smallest_key
    is_present = np.zeros(int(offsets.max()) + 1, bool)
    is_present[offsets] = True
    present_offsets = np.flatnonzero(is_present)

    # The smallest integer type that can store all indices saves memory.
    index_type = np.min_scalar_type(len(present_offsets))
    index_table = np.zeros(len(is_present), index_type)
    index_table[present_offsets] = np.arange(len(present_offsets))

    return NumberedKeys(keys=present_offsets + smallest_key, key_index=index_table[offsets])


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

    # The requests of the first key come first in `order`, then those of the second key, and so on.
    order = np.argsort(numbered.key_index, kind="stable")
    request_counts = np.bincount(numbered.key_index)
    groups = np.split(order, np.cumsum(request_counts)[:-1])
    yield from zip(numbered.keys.tolist(), groups, strict=True)
