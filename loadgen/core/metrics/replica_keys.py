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


class IndexedKeys(NamedTuple):
    """The unique keys in ascending order, and for each request the index of its key among them."""

    unique_keys: NDArray[np.int64]
    key_index: NDArray[np.int64]


def index_keys(keys: NDArray[Any]) -> IndexedKeys:
    """Return the unique keys, and for each request the index of its key among them.

    For the keys 9, 7, 9 the unique keys are 7 and 9, and the indices are 1, 0, 1.
    """
    if len(keys):
        key_range = int(keys.max()) - int(keys.min())
        if key_range <= MAX_KEY_RANGE:
            return _index_keys_by_table(keys)

    # A table would be too large, so the keys are sorted, which takes longer.
    unique_keys, key_index = np.unique(keys, return_inverse=True)
    return IndexedKeys(unique_keys, key_index)


def _index_keys_by_table(keys: NDArray[Any]) -> IndexedKeys:
    """Return the unique keys, and for each request the index of its key among them, by a table.

    The table has an entry for each integer from the smallest to the largest key, which is faster
    than sorting the keys. The keys 9, 7, 9 have the offsets 2, 0, 2 from the smallest key. So the
    table marks offsets 0 and 2, which get the indices 0 and 1.
    """
    smallest_key = int(keys.min())
    offset_of_request = keys - smallest_key
    table_size = int(offset_of_request.max()) + 1

    # Mark each offset that occurs.
    occurs = np.zeros(table_size, bool)
    occurs[offset_of_request] = True
    unique_offsets = np.flatnonzero(occurs)
    key_count = len(unique_offsets)

    # Number the unique offsets. The smallest type that can store all indices saves memory.
    index_type = np.min_scalar_type(key_count)
    index_of_offset = np.zeros(table_size, index_type)
    index_of_offset[unique_offsets] = np.arange(key_count)

    return IndexedKeys(
        unique_keys=unique_offsets + smallest_key,
        key_index=index_of_offset[offset_of_request],
    )


def group_by_key(keys: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each unique key, in ascending order, with the indices of the requests that have it.

    For the keys 9, 7, 9 it yields 7 with [1], and then 9 with [0, 2].
    """
    unique_keys, key_index = index_keys(keys)
    if len(unique_keys) <= MAX_KEYS_WITHOUT_SORT:
        groups = _find_groups(key_index, len(unique_keys))
    else:
        groups = _sort_into_groups(key_index)

    yield from zip(unique_keys.tolist(), groups, strict=True)


def _find_groups(key_index: NDArray[np.int64], key_count: int) -> Iterator[NDArray[np.int64]]:
    """Yield the requests of each key, by one search for each key, which needs little memory.

    Args:
        key_index: The index of the key of each request.
        key_count: The number of unique keys.
    """
    for index in range(key_count):
        yield np.flatnonzero(key_index == index)


def _sort_into_groups(key_index: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the requests of each key, by one sort, which is faster than a search for many keys.

    Args:
        key_index: The index of the key of each request.
    """
    requests_by_key = np.argsort(key_index, kind="stable")
    request_counts = np.bincount(key_index)
    starts_of_later_keys = np.cumsum(request_counts)[:-1]
    yield from np.split(requests_by_key, starts_of_later_keys)
