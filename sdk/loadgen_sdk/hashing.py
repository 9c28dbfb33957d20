"""The sum of the hashes of several texts, by which two sets of texts can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

HASH_BYTES = 16
SALT_BYTES = 16
_SUM_MODULUS = 1 << (8 * HASH_BYTES)


def sum_of_hashes(salted_texts: Iterable[tuple[int, bytes]]) -> bytes:
    """Return the sum, modulo 2**128, of the BLAKE2b hashes of texts.

    The sum identifies a set of texts, whatever their order: two runs with the same sum have sent
    the same prompts. It can be computed in parts. Each worker returns the sum of the texts that it
    has sent, and the sum of these sums is that of all texts.

    Args:
        salted_texts: Pairs of a salt of at least 0 and a text. The salt, such as the index of a
            request, makes equal texts have different hashes.

    Returns:
        The 16 bytes of the sum, least significant byte first.
    """
    total = 0
    for salt, text in salted_texts:
        salt_bytes = salt.to_bytes(SALT_BYTES, "little")
        digest = blake2b(text, digest_size=HASH_BYTES, salt=salt_bytes).digest()
        total += int.from_bytes(digest, "little")
    return (total % _SUM_MODULUS).to_bytes(HASH_BYTES, "little")
