"""A long text as JSON: the compiled part makes what the encoder makes, or leaves the text to it."""

from __future__ import annotations

import random

import msgspec
import pytest
from loadgen_sdk import compiled
from loadgen_sdk.dialects import quirks
from loadgen_sdk.dialects.body import body
from loadgen_sdk.dialects.quirks import Api
from loadgen_sdk.json_text import LONG, ready
from loadgen_sdk.request import Request

PLAIN = (
    "".join(chr(code) for code in range(32, 127) if chr(code) not in '"\\') + "\x7füß漢字😀\u2028"
)
ESCAPED = [*map(chr, range(32)), '"', "\\"]
in_c = pytest.mark.skipif(
    not hasattr(compiled.module, "quoted"), reason="built by pip install where a C compiler is"
)


def test_what_is_ready_is_encoded_as_the_text_itself() -> None:
    rng = random.Random(5)
    for extra in (0, 1, 15, 16, 17, 300):
        text = "".join(rng.choices(PLAIN, k=LONG + extra))
        for whole in (text, text[:-1] + "\n", '"' + text):
            assert msgspec.json.encode({"content": ready(whole)}) == msgspec.json.encode(
                {"content": whole}
            )
    for other in (None, "short", [1, 2], [{"role": "user"}]):
        assert ready(other) is other


@pytest.mark.parametrize("api", ["chat", "completions", "responses", "messages", "embeddings"])
@pytest.mark.parametrize("end", ["", '"\n'])
def test_the_body_of_a_long_text_is_that_of_the_encoder(api: Api, end: str) -> None:
    text = (PLAIN * LONG)[:LONG] + end
    made = body(Request(id="1", prompt=text, max_tokens=4), quirks.row_of("vllm"), api, "m", True)
    assert (
        msgspec.json.encode(text) in made and msgspec.json.encode(msgspec.json.decode(made)) == made
    )


@in_c
def test_c_finds_each_character_to_escape_at_each_place() -> None:
    quoted = compiled.module.quoted
    for length in range(50):
        plain = (PLAIN * 2)[7 : 7 + length]
        assert quoted(plain) == msgspec.json.encode(plain)
        for at in range(length):
            assert (
                quoted(plain[:at] + ESCAPED[(at + length) % len(ESCAPED)] + plain[at + 1 :]) is None
            )
    for one in ESCAPED:
        assert quoted(one) is quoted("x" * 16 + one) is quoted(one + "x" * 16) is None


@in_c
def test_what_c_cannot_encode_is_told_by_the_encoder() -> None:
    assert compiled.module.quoted("\ud800") is None
    for encoded in (ready("\ud800" * LONG), "\ud800" * LONG):
        with pytest.raises(UnicodeEncodeError):
            msgspec.json.encode(encoded)
    with pytest.raises(TypeError):
        compiled.module.quoted(b"bytes")
