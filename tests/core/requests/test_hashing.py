"""The sum of the hashes of several texts."""

from __future__ import annotations

import hashlib
import random

from loadgen_sdk.hashing import sum_of_hashes


def test_the_sum_of_one_hash_is_that_hash() -> None:
    expected = hashlib.blake2b(b"text", digest_size=16, salt=(7).to_bytes(16, "little")).digest()
    assert sum_of_hashes([(7, b"text")]) == expected
    assert sum_of_hashes([]) == bytes(16)


def test_the_sum_of_hashes_is_modulo_128_bits_and_independent_of_the_order() -> None:
    rng = random.Random(5)
    texts = [(rng.getrandbits(63), rng.randbytes(100)) for _ in range(20)]
    hashes = [int.from_bytes(sum_of_hashes([text]), "little") for text in texts]
    assert sum(hashes) >= 1 << 128
    expected = (sum(hashes) % (1 << 128)).to_bytes(16, "little")
    assert sum_of_hashes(texts) == sum_of_hashes(reversed(texts)) == expected
