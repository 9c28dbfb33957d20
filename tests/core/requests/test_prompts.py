"""Prompts are pure functions of (seed, salt, number) with exactly the requested lengths."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import repository_paths
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import train

from loadgen.core import workload
from loadgen.core.requests import digest as digests
from loadgen.core.requests import sampling
from loadgen.core.requests import tokenizer as tokens
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.prompts import AssistantTurn, PromptTarget
from loadgen.core.requests.synthetic_prompts import iter_requests
from loadgen.core.workload import (
    EmpiricalTokens,
    FixedTokens,
    FromFile,
    LogNormalTokens,
    NormalTokens,
    Synthetic,
    Turns,
    UniformTokens,
)
from loadgen.core.workload.request_kinds import Chunks, Images

CL100K = tokens.load_tokenizer(None)
WORKLOADS = repository_paths.ROOT / "workloads"
UNIFORM = UniformTokens.model_construct(min=0, max=400)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tokens.load_tokenizer(str(train(tmp_path_factory.mktemp("tiny") / "tokenizer.json")))


def built(seed=1, salt=2, tokenizer=CL100K, **requests):
    requests = {
        "input_tokens": FixedTokens(value=50),
        "output_tokens": FixedTokens(value=20),
        **requests,
    }
    model = FromFile if "path" in requests else Synthetic
    return build_prompts(
        SimpleNamespace(requests=model.model_construct(**requests)), seed, salt, tokenizer
    )


def talk(count=4, tool=500, history="scripted"):
    return Turns(count=count, tool_result_tokens=FixedTokens(value=tool), history=history)


def texts(request):
    return (
        [request.prompt]
        if request.messages is None
        else [message["content"] for message in request.messages]
    )


def true_count(request, tokenizer=CL100K):
    return sum(tokenizer.count(text) for text in texts(request))


KINDS = {
    "plain": {"input_tokens": UNIFORM},
    "prefix": {"input_tokens": UNIFORM, "shared_prefix_tokens": 100, "prefixes": 3},
    "system": {"input_tokens": UNIFORM, "system_tokens": 30, "shared_prefix_tokens": 7},
    "talk": {
        "input_tokens": UNIFORM,
        "output_tokens": UNIFORM,
        "system_tokens": 5,
        "turns": talk(3, 11),
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_has_exactly_the_requested_tokens(kind):
    prompts = built(**KINDS[kind])
    for number in range(300):
        request = prompts[number]
        assert true_count(request) == request.input_tokens == prompts.requested_input_tokens(number)
        assert request.input_source == "estimate"


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 17])
def test_short_prompts_have_exactly_the_requested_tokens(n):
    assert {
        true_count(built(input_tokens=FixedTokens.model_construct(value=n), salt=salt)[9])
        for salt in range(50)
    } == {n}


@pytest.mark.parametrize("kind", KINDS)
@given(numbers=st.lists(st.integers(0, 10**15), max_size=5))
def test_a_request_does_not_depend_on_earlier_requests(kind, numbers):
    prompts, other = built(**KINDS[kind]), built(**KINDS[kind])
    assert [prompts[n] for n in numbers] == [other[n] for n in reversed(numbers)][::-1]


OTHER_KINDS = {
    "words": {
        "input_tokens": UniformTokens.model_construct(min=0, max=9),
        "output_tokens": UNIFORM,
    },
    "cached": {"input_tokens": UNIFORM, "cache": 0.5},
    "images": {"images": Images(width=64, height=64)},
    "chunks": {
        "input_tokens": FixedTokens(value=90),
        "chunks": Chunks(count=2, tokens=30, corpus=5),
    },
    "natural": {"input_tokens": UNIFORM, "prompts": "natural"},
    "real": {"turns": talk(3, 11, "server")},
}


@pytest.mark.parametrize("kind", [*KINDS, *OTHER_KINDS])
def test_iter_requests_returns_the_same_as_single_requests(tiny, kind):
    rng = random.Random(kind)
    fields = {"input_tokens": FixedTokens(value=50), "output_tokens": FixedTokens(value=20)} | (
        KINDS | OTHER_KINDS
    )[kind]
    requested_workload = SimpleNamespace(requests=Synthetic.model_construct(**fields))
    kinds = [
        (CL100K, 0, "chat"),
        (CL100K, 8, "completions"),
        (CL100K, 0, "embeddings"),
        (tiny, 8, "chat"),
    ]
    for tokenizer, template, api in kinds[
        : 1 if kind in ("images", "natural") else 2 if "turns" in fields else 4
    ]:
        prompts = build_prompts(
            requested_workload, rng.randrange(9), 2, tokenizer, PromptTarget(template, api)
        )
        numbers = [rng.randrange(rng.choice([9, 500, 10**15])) for _ in range(12)]
        assert list(iter_requests(prompts, numbers)) == [prompts[number] for number in numbers]


@pytest.mark.parametrize("file", sorted(WORKLOADS.glob("*.yaml")), ids=lambda file: file.stem)
def test_iter_requests_of_a_packaged_workload_returns_the_same_as_single_requests(file):
    requested_workload = workload.load(str(file), workload.read_flags())
    prompts = build_prompts(requested_workload, 1, 2, CL100K)
    numbers = [*prompts.request_ids(24)][::-1]
    assert list(iter_requests(prompts, numbers)) == [prompts[number] for number in numbers]
    digest = digests.Digest(includes_replies=prompts.history == "scripted")
    for number in numbers:
        digest.add([(number, prompts[number])])
    assert digest.hexdigest() == digests.fingerprint(prompts, 24)


def test_a_turn_contains_the_scripted_history_of_earlier_turns():
    """Generating the texts again for each of 50 turns was most of the cost of the bodies."""
    prompts = built(**KINDS["talk"] | {"turns": talk(50, 11)})
    requests = [prompts[number] for number in range(100)]
    for before, after in itertools.pairwise(requests):
        if after.turn:
            message_pairs = zip(
                before.messages[2:], after.messages[2:], strict=False
            )  # behind the message of the user
            assert all(
                message["content"] is repeated_message["content"]
                for message, repeated_message in message_pairs
            )


def test_a_seed_gives_the_same_texts_in_every_version():
    """If a text changes, two versions send different bytes for the same seed."""
    assert texts(built(input_tokens=FixedTokens(value=9))[5]) == [
        "voor torture kernel catalog motivate judgement video magn classifier"
    ]
    assert digests.fingerprint(built(**KINDS["talk"]), 12) == "c4e47f4b10d198276952de8d38614964"


def test_beginnings_of_prompts_are_unique_within_a_run_and_between_runs():
    heads = [
        tuple(built_one[number].prompt.split()[:4])
        for built_one in (built(salt=1), built(salt=2))
        for number in range(8_000)
    ]

    assert len(set(heads)) == 16_000
    assert (
        len({head[0] for head in heads[:4096]}) == 4096
    )  # neighbours do not even share their first word


@pytest.mark.parametrize(("n", "different"), [(1, 4096), (2, 20_000), (3, 20_000)])
def test_short_prompts_differ_as_far_as_their_length_allows(n, different):
    prompts = built(input_tokens=FixedTokens(value=n))
    assert len({prompts[number].prompt for number in range(20_000)}) == different
    assert "4 are needed" in prompts.warnings(10)[0]


def test_the_seed_decides_lengths_and_the_salt_decides_texts():
    prompts, other, third = (
        built(seed, salt, **KINDS["talk"]) for seed, salt in ((1, 2), (1, 3), (2, 2))
    )
    numbers = range(1, 60)

    assert [prompts.requested_input_tokens(n) for n in numbers] == [
        other.requested_input_tokens(n) for n in numbers
    ]
    assert [prompts.requested_input_tokens(n) for n in numbers] != [
        third.requested_input_tokens(n) for n in numbers
    ]
    assert all(texts(prompts[n]) != texts(other[n]) for n in numbers)


def test_only_shared_prefixes_are_shared():
    prompts = built(input_tokens=FixedTokens(value=40), shared_prefix_tokens=30, prefixes=3)
    word_lists = [prompts[number].prompt.split(" ") for number in range(300)]
    groups = {tuple(word_list[:30]) for word_list in word_lists}

    assert len(groups) == 3
    assert len({tuple(word_list[30:34]) for word_list in word_lists}) == 300
    assert (
        sorted(
            sum(tuple(word_list[:30]) == group for word_list in word_lists) > 60 for group in groups
        )
        == [True] * 3
    )


def test_all_prompts_have_the_same_system_message():
    prompts = built(system_tokens=12)
    assert {prompts[number].messages[0]["content"] for number in range(20)} == {
        prompts[0].messages[0]["content"]
    }
    assert [message["role"] for message in prompts[0].messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("name", "prompt_and_answers"), [("qa", 650), ("rag", 2502), ("summarization", 2500)]
)
def test_packaged_workloads_have_the_published_size(name, prompt_and_answers):
    prompts = build_prompts(workload.load(str(WORKLOADS / f"{name}.yaml")), 1, 2, CL100K)
    assert {true_count(prompts[number]) + prompts[number].max_tokens for number in range(20)} == {
        prompt_and_answers
    }


def test_an_agentic_task_has_10_000_tokens_including_its_repeated_history():
    prompts = build_prompts(workload.load(str(WORKLOADS / "agentic.yaml")), 1, 2, CL100K)
    for task in (0, 1, 77):
        requests = [prompts[task * 4 + turn] for turn in range(4)]
        assert sum(true_count(request) + request.max_tokens for request in requests) == 10_000
        assert [(request.session, request.turn) for request in requests] == [
            (task, turn) for turn in range(4)
        ]


def test_each_turn_begins_with_the_messages_of_the_previous_turn():
    prompts = built(**KINDS["talk"])
    for turn in (1, 2):
        before, now = prompts[30 + turn - 1].messages, prompts[30 + turn].messages
        assert now[: len(before)] == before
        assert [message["role"] for message in now[len(before) :]] == ["assistant", "user"]
        assert CL100K.count(now[len(before)]["content"]) == prompts[30 + turn - 1].max_tokens


def replies(*texts: str) -> dict[int, AssistantTurn]:
    return {turn: AssistantTurn(text) for turn, text in enumerate(texts)}


def test_real_replies_take_the_place_of_scripted_ones():
    prompts = built(system_tokens=3, turns=talk(3, history="server"))
    request, scripted = prompts.with_replies(5, replies("first", "second")), prompts[5]

    assert prompts.history == "server"
    assert [m["content"] for m in request.messages if m["role"] == "assistant"] == [
        "first",
        "second",
    ]
    assert [m for m in request.messages if m["role"] != "assistant"] == [
        m for m in scripted.messages if m["role"] != "assistant"
    ]
    assert request.input_tokens is None
    with pytest.raises(ValueError, match="turns \\[1\\]"):
        prompts.with_replies(5, replies("first"))


def test_the_fingerprint_does_not_depend_on_the_split_between_workers():
    prompts = built(**KINDS["talk"])
    shards = [digests.Digest() for _ in range(3)]
    for number in random.Random(1).sample(range(100), 100):
        shards[number % 3].add([(number, prompts[number])])
    total = sum(shard.total for shard in shards) % (1 << 128)
    combined_digest = digests.Digest(total, sum(shard.count for shard in shards))
    assert combined_digest.hexdigest() == digests.fingerprint(prompts, 100)


def test_the_fingerprint_depends_on_texts_lengths_order_and_number_of_requests():
    base = digests.fingerprint(built(), 10)
    other_fingerprints = [
        digests.fingerprint(built(salt=3), 10),
        digests.fingerprint(built(output_tokens=FixedTokens(value=21)), 10),
        digests.fingerprint(built(), 11),
        digests.fingerprint(built(), None),
    ]
    swapped = digests.Digest()
    swapped.add((number, built()[number ^ 1]) for number in range(10))

    assert len({base, *other_fingerprints, swapped.hexdigest()}) == 6
    assert digests.fingerprint(built(), 10) == base


def test_the_fingerprint_of_server_history_excludes_the_replies():
    prompts = built(turns=talk(2, history="server"))
    digest = digests.Digest(includes_replies=False)
    digest.add([(0, prompts[0]), (1, prompts.with_replies(1, replies("what the server said")))])
    assert digest.hexdigest() == digests.fingerprint(prompts, 2)


@pytest.mark.parametrize(
    ("length", "mean", "low", "high"),
    [
        (FixedTokens(value=7), 7, 7, 7),
        (UniformTokens(min=10, max=19), 14.5, 10, 19),
        (NormalTokens(mean=100.0, stddev=20.0), 100, 1, 300),
        (NormalTokens(mean=100.0, stddev=50.0, min=90, max=110), 100, 90, 110),
        (LogNormalTokens(median=100.0, sigma=0.5), 113.3, 1, 10_000),
        (LogNormalTokens(mean=100.0, sigma=0.5), 100, 1, 10_000),
        (LogNormalTokens(median=10.0, sigma=10.0, max=50), 10.92, 1, 50),
        (EmpiricalTokens(values=(1, 5, 9), weights=(1.0, 0.0, 3.0)), 7, 1, 9),
        (EmpiricalTokens(values=(2, 4)), 3, 2, 4),
    ],
)
def test_length_samplers_follow_their_distributions(length, mean, low, high):
    law, key = sampling.length_sampler(length), sampling.derive_key(5)
    lengths = [law(key, "input", index) for index in range(2000)]

    assert sampling.sample_lengths(length, key, "input", range(2000)) == lengths
    assert low <= min(lengths) <= max(lengths) <= high
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.05)
    if length.tag == "uniform":
        assert set(lengths) == set(range(10, 20))
    if length.tag == "empirical":
        assert 5 not in lengths


def test_a_length_outside_its_bounds_is_clamped():
    length, key = NormalTokens(mean=1.0, stddev=0.0, min=50), sampling.derive_key(5)
    assert (
        sampling.sample_lengths(length, key, "input", range(20))
        == [sampling.length_sampler(length)(key, "input", 3)] * 20
        == [50] * 20
    )


def test_prompts_have_exactly_the_requested_tokens_of_a_local_tokenizer(tmp_path):
    local = tokens.load_tokenizer(str(train(tmp_path / "tokenizer.json")))
    prompts = built(tokenizer=local, **KINDS["prefix"])

    for number in range(100):
        assert (
            true_count(prompts[number], local)
            == prompts[number].input_tokens
            == prompts.requested_input_tokens(number)
        )
    assert prompts[0].input_source == "tokenizer"


def test_lengths_that_cannot_be_met_cause_a_warning():
    """With a tokenizer that joins words, texts are counted and adjusted, or the count is true."""

    def encode(text):
        """Return a token per run of words with one first letter, and never an odd number."""
        firsts = [word[0] for word in text.split()]
        n = sum(a != b for a, b in zip(["", *firsts], firsts, strict=False))
        return list(range(n + n % 2))

    odd = tokens.Tokenizer(
        tag="tokenizer",
        name="odd",
        sha256="",
        start_words=CL100K.start_words,
        inner_words=CL100K.inner_words,
        is_additive=False,
        load_encode=lambda: encode,
    )
    even, uneven = (built(tokenizer=odd, input_tokens=FixedTokens(value=n)) for n in (40, 41))
    assert [even[number].input_tokens for number in range(50)] == [40] * 50
    assert even.warnings(50) == []
    for number in range(50):
        assert uneven[number].input_tokens == odd.count(uneven[number].prompt) in (40, 42)
    assert "16 of the first 16" in uneven.warnings(50)[0]
