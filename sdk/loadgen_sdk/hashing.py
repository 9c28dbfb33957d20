"""The sum of the hashes of several texts."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

HASH_BYTES = 16
SALT_BYTES = 16


def sum_of_hashes(salted_texts: Iterable[tuple[int, bytes]]) -> bytes:
    """Return the sum, modulo 2**128, of the BLAKE2b hashes of texts.

    Args:
        salted_texts: A salt of at least 0, and a text, for each hash.

    Returns:
        The 16 bytes of the sum, least significant byte first.
    """
    total = 0
    for salt, text in salted_texts:
        salt_bytes = salt.to_bytes(SALT_BYTES, "little")
        digest = blake2b(text, digest_size=HASH_BYTES, salt=salt_bytes).digest()
        total += int.from_bytes(digest, "little")
    return (total % (1 << 8 * HASH_BYTES)).to_bytes(HASH_BYTES, "little")
