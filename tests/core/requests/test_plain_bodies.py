"""Bodies that the compiled part makes, many at a time, are those that are made of each request alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from loadgen_sdk import compiled
from loadgen_sdk.dialects.body import around, maker
from loadgen_sdk.dialects.quirks import QUIRKS
from loadgen_sdk.request import Request

from loadgen.core.execution.bodies import Bodies
from loadgen.core.requests.prompts import SyntheticPrompts
from loadgen.core.requests.tokenizer import Tokenizer, packaged
from loadgen.core.workload import (
    EmpiricalTokens,
    FixedTokens,
    LogNormalTokens,
    NormalTokens,
    Synthetic,
    UniformTokens,
)

needs_c = pytest.mark.skipif(
    not hasattr(compiled.module, "bodies"), reason="built by pip install where a C compiler is"
)

LENGTHS = (
    FixedTokens(value=4),
    FixedTokens(value=3000),
    UniformTokens.model_construct(min=0, max=9),
    UniformTokens(min=1, max=400),
    LogNormalTokens(median=90, sigma=0.9),
    NormalTokens(mean=20, stddev=9),
    EmpiricalTokens(values=[1, 5, 70]),
)
WORDS = {
    "plain": [" a", " bc", " def", " " + "x" * 17, " " + "y" * 200],
    "one": [" a"],
    "a power of two": [f" w{n}" for n in range(64)],
    "not ASCII": [" a", " ü"],
    "to escape": [" a", ' "'],
    "too long": [" a", " " + "x" * 255],
}
NOT_IN_C = ("not ASCII", "to escape", "too long")
EXTRA = (
    {},
    {},
    {"top_p": 0.5},
    {"max_tokens": 7},
    {"said": "one prompt"},
    {"n": 987_654_321},
    {"t": 123_456_789},
)


def vocabulary(words: list[str]) -> Tokenizer:
    return Tokenizer(
        tag="estimate",
        name="made",
        sha256="",
        starts=[word[1:] for word in words[:3]],
        words=words,
        additive=True,
        loaded=lambda: lambda text: [0] * len(text.split()),
    )


def both(
    prompts: Any, make: Callable[[Request], bytes], numbers: list[int], parts: list[int]
) -> bool:
    """Hold the two against each other; returns whether the compiled part made bodies."""
    made = [
        Bodies(prompts, lambda _, request: make(request), 1, alike=alike) for alike in (True, False)
    ]
    for bodies in made:
        asked = iter(numbers)
        assert sum(bodies.build(0, asked, most=part) for part in [*parts, len(numbers)]) == len(
            numbers
        )
    plain, single = made
    for number in numbers:
        assert plain.take(0, number) == single.take(0, number)
    assert plain.stored[0] == single.stored[0] and plain.late == single.late == 0
    assert (
        plain.digest.hexdigest() == single.digest.hexdigest()
        and plain.sent_bytes.total == single.sent_bytes.total
    )
    for bodies in made:
        bodies.close()
    return plain._plain is not None


@pytest.mark.parametrize("seed", range(40))
def test_of_any_load_both_make_the_same(seed: int) -> None:
    rng = random.Random(seed)
    api = rng.choice(["chat", "chat", "completions", "messages", "responses", "embeddings"])
    name = rng.choice(["packaged", "packaged", *WORDS])
    asked = Synthetic.model_construct(
        input_tokens=rng.choice(LENGTHS),
        output_tokens=rng.choice(LENGTHS),
        system_tokens=rng.choice([0, 0, 0, 5]),
    )
    tokenizer = packaged() if name == "packaged" else vocabulary(WORDS[name])
    prompts = SyntheticPrompts(asked, seed, rng.randrange(9), tokenizer, rng.choice([0, 0, 6]), api)
    extra, quirk = rng.choice(EXTRA), rng.choice([QUIRKS[name] for name in sorted(QUIRKS)])
    make = maker(
        quirk,
        api,
        'a "model" 漢',
        rng.random() < 0.8,
        extra_body=extra,
        continuous_usage=rng.random() < 0.5,
    )
    numbers = sorted(rng.sample(range(rng.choice([300, 1 << 40])), 130))
    by_c = both(prompts, make, numbers, [1, 0, 7, rng.randrange(80)])
    if (
        name in NOT_IN_C
        or api == "embeddings"
        or asked.system_tokens
        or not hasattr(compiled.module, "bodies")
    ):
        assert not by_c
    elif extra in EXTRA[:4]:
        assert by_c


def test_what_is_around_a_prompt() -> None:
    def make(request: Request) -> bytes:
        return b'{"a":%d,"p":"%s","b":[%d,1]}' % (
            request.max_tokens,
            request.prompt.encode(),
            request.max_tokens,
        )

    ends = around(make)
    assert ends is not None and ends(5) == (b'{"a":5,"p":', b',"b":[5,1]}')
    assert around(lambda request: 2 * make(request)) is None
    assert around(lambda request: b"%d" % len(make(request))) is None


@pytest.mark.skipif(
    not hasattr(compiled.module, "bodies"), reason="built by pip install where a C compiler is"
)
def test_c_refuses_what_would_read_outside_its_words() -> None:
    bodies, ends = compiled.module.bodies, (4, b",4,", b"<", b">")
    words = (b" ab", compiled.module.spans(bytes([2, 1])), 1, 3, 5, 7)
    told, rows, *_ = bodies(words, [0], [1], [b""], [ends], 9)
    assert told == b'<"b">' and rows == b"".join(
        one.to_bytes(8, "little") for one in (0, 9, 5, 1, 4)
    )
    assert bodies(words, [], [], [], [], 0) == (b"", b"", bytes(16), bytes(16))
    assert bodies(words, [3], [6], [b"\0\0" * 2], [ends], 0)[0] == b'<"b a a a a a">'
    for wrong in (
        ((b" ab", words[1], 2, 3, 5, 7), [0], [1], [b""], [ends], 0),
        ((b" ab", words[1], 0, 3, 5, 7), [0], [1], [b""], [ends], 0),
        ((b" ab", words[1], 1, 3, 5, 0), [0], [1], [b""], [ends], 0),
        ((b" ab", words[1][1:], 1, 3, 5, 7), [0], [1], [b""], [ends], 0),
        ((b" a", words[1], 1, 3, 5, 7), [0], [1], [b""], [ends], 0),
        (words, [0], [1], [b"\0"], [ends], 0),
        (words, [-1], [1], [b""], [ends], 0),
        (words, [1 << 63], [1], [b""], [ends], 0),
        (words, [0], [1], [b""], [], 0),
        (words, [0, 1], [1], [b""], [ends], 0),
        (words, [0], [1], [""], [ends], 0),
        (words, [0], [1], [b""], [ends[1:]], 0),
        (words, [0], [1], [b""], [(4, b"", b"", "")], 0),
        (words, [0], [1], [b""], [("4", b"", b"", b"")], 0),
        (words, (0,), [1], [b""], [ends], 0),
        (words, [0], ["1"], [b""], [ends], 0),
    ):
        with pytest.raises((ValueError, TypeError)):
            bodies(*wrong)
    with pytest.raises(TypeError):
        compiled.module.spans("a")
