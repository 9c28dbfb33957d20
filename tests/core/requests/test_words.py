"""Texts of random words."""

from __future__ import annotations

import pytest
from loadgen_sdk.words import create_text_writer

from loadgen.core.requests.tokenizer import packaged_tokenizer

WORD_LISTS = {
    "the packaged": packaged_tokenizer().inner_words,
    "one": [" a"],
    "not a power of two": [" a", " bc", " def"],
    "not ASCII": [" \u00fc", " \u6f22\u5b57", " " + "x" * 300],
    "more than can be drawn": [f" {n}" for n in range(70_000)],
}


@pytest.mark.parametrize("word_list", WORD_LISTS.values(), ids=WORD_LISTS)
def test_each_pair_of_random_bytes_selects_a_word_of_the_list(word_list: list[str]) -> None:
    write = create_text_writer(word_list)
    numbers = [0, 1, 2, 700, 65_535]
    random_bytes = b"".join(number.to_bytes(2, "little") for number in numbers)
    expected = [word_list[number % len(word_list)] for number in numbers]
    assert write("beginning", random_bytes) == "beginning" + "".join(expected)
    assert write("", b"") == ""
