"""The sum of the hashes of several texts: the compiled part and Python have the same."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest
from loadgen_sdk import compiled
from loadgen_sdk.hashing import in_python, summed

LENGTHS = (0, 1, 127, 128, 129, 255, 256, 257, 3000)  # around the blocks of 128 bytes


def test_both_have_the_same_sum() -> None:
    rng = random.Random(5)
    for texts in range(60):
        kept = [
            (rng.getrandbits(rng.choice([1, 40, 63])), rng.randbytes(rng.choice(LENGTHS)))
            for _ in range(texts % 14)
        ]
        assert summed(kept) == in_python(kept)


def test_of_one_text_it_is_its_hash() -> None:
    expected = hashlib.blake2b(b"text", digest_size=16, salt=(7).to_bytes(16, "little")).digest()
    assert summed([(7, b"text")]) == in_python([(7, b"text")]) == expected
    assert summed([]) == in_python([]) == bytes(16)


@pytest.mark.skipif(
    not hasattr(compiled.module, "hashed"), reason="built by pip install where a C compiler is"
)
def test_c_refuses_what_is_no_list_of_salts_and_texts() -> None:
    wrong: list[Any] = [
        ((1, b"a"),),
        [b"a"],
        [(1, 2)],
        [("1", b"a")],
        [(1, b"a", 3)],
        [(1,)],
        [(1, b"a"), [1, b"a"]],
    ]
    for kept in wrong:
        with pytest.raises(TypeError):
            compiled.module.hashed(kept)
    with pytest.raises(OverflowError):
        compiled.module.hashed([(1 << 64, b"a")])
