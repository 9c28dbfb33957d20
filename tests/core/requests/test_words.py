"""A text of random words: the compiled part and Python write the same."""

from __future__ import annotations

import random

import pytest
from loadgen_sdk import compiled
from loadgen_sdk.words import in_python, writer

from loadgen.core.requests.tokenizer import packaged

WORDS = {
    "the packaged": packaged().words,
    "one": [" a"],
    "not a power of two": [" a", " bc", " def"],
    "of every length and letter": [
        " ü",
        " 漢字",
        " " + "x" * 15,
        " " + "y" * 16,
        " " + "z" * 254,
        " 😀",
    ],
    "too long for the compiled part": [" a", " " + "x" * 255],
    "more than are drawn": [f" {n}" for n in range(70_000)],
}


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_both_write_the_same(words: list[str]) -> None:
    write, twin, rng = writer(words), in_python(words), random.Random(5)
    for begin in ("", "begin", "ümlaut 漢"):
        for chosen in (0, 1, 2, 3, 700):
            bits = rng.randbytes(2 * chosen)
            assert write(begin, bits) == twin(begin, bits)
    assert twin("begin", b"\x01\x00") == "begin" + words[1 % len(words)]


@pytest.mark.skipif(
    not hasattr(compiled.module, "written"), reason="built by pip install where a C compiler is"
)
def test_c_refuses_what_would_read_outside_its_words() -> None:
    written, one = compiled.module.written, (2).to_bytes(4, "little")
    assert written("", b"\0\0", one, b" a") == " a"
    for bits, spans, text in (
        (b"\0", one, b" a"),
        (b"", b"", b""),
        (b"", b"12345", b""),
        (b"\0\0", one, b" "),
    ):
        with pytest.raises(ValueError, match=r"pairs of bytes|behind the text"):
            written("", bits, spans, text)
    with pytest.raises(UnicodeDecodeError):
        written("", b"\0\0", one, b"\xff\xff")
    with pytest.raises(UnicodeEncodeError):
        written("\ud800", b"", one, b" a")


@pytest.mark.skipif(
    not hasattr(compiled.module, "written"), reason="built by pip install where a C compiler is"
)
def test_c_makes_room_where_long_words_are_drawn_more_often_than_short_ones() -> None:
    words = [" a"] * 63 + [" " + "x" * 254]
    drawn = (63).to_bytes(2, "little") * 3000
    assert (
        writer(words)("begin", drawn)
        == in_python(words)("begin", drawn)
        == "begin" + words[-1] * 3000
    )
