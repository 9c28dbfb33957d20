"""The sum of the hashes of several texts, by the compiled part where it is installed: it hashes eight at once. Pure."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from .compiled import module

Kept = list[tuple[int, bytes]]  # salts, from 0, and texts


def in_python(kept: Kept) -> bytes:
    """The sum of their BLAKE2b of 16 bytes, least byte first, without what it has above these. The twin of C's."""
    hashes = [
        blake2b(text, digest_size=16, salt=salt.to_bytes(16, "little")).digest()
        for salt, text in kept
    ]
    return (sum(int.from_bytes(one, "little") for one in hashes) % (1 << 128)).to_bytes(
        16, "little"
    )


summed: Callable[[Kept], bytes] = getattr(
    module, "hashed", in_python
)  # a wheel of its own may be older than it
