"""Keep Python's garbage collector and the C library's allocator from disturbing a load."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

LARGEST_KEPT_BLOCK = 1 << 23
"""Largest freed block that is kept while bodies are built or a run is summed up.

Otherwise the memory of every long prompt or column would be returned to the system, and allocated
and cleared again for the next one.
"""

LARGEST_KEPT_BLOCK_UNDER_LOAD = 1 << 17
"""Largest freed block that is kept while requests are sent.

glibc starts with this limit but raises it whenever a larger block is freed. Such blocks then leave
holes in the heap, which small blocks break up: in 45 minutes with 1,000 streams the holes grew to
21 MB, as much as was in use.
"""

# Numbers of the parameters of mallopt, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


@contextlib.contextmanager
def garbage_collection_disabled() -> Iterator[None]:
    """Disable Python's cyclic garbage collector. Enter this before the start time is chosen.

    A collection over all objects would block the sending loop for tens of milliseconds, and
    requests create no cycles. Existing garbage is collected after the load, since looking for it
    costs as much as 300 requests.
    """
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def set_largest_kept_block(max_bytes: int) -> None:
    """Limit the size of freed memory blocks that the C allocator keeps for later allocations.

    A larger block returns to the system when it is freed, so that the process does not occupy
    memory that it does not use. A kept block is faster to allocate again. Memory that is free
    already is returned at once.

    Only glibc has these functions (see mallopt(3)). With other C libraries nothing changes.

    Args:
        max_bytes: The size of the largest block that is kept.
    """
    libc = ctypes.CDLL(None)
    is_glibc = hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")
    if not is_glibc:
        return
    libc.mallopt(_M_TRIM_THRESHOLD, max_bytes)
    libc.mallopt(_M_MMAP_THRESHOLD, max_bytes)
    libc.malloc_trim(0)
