"""The prefix cache as part of a load: requested reuse, generated prompts and measured hits."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from expected_errors import refused
from run_fixtures import NO_PAGES

from loadgen.core.errors import CombinedError, LoadgenError
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.prompts import PromptTarget
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.workload import Workload, load, read_flags, recipe_fingerprint
from loadgen.runs import text

SHAPE = "input_tokens: {uniform: {min: 900, max: 1500}}, output_tokens: 20"


def workload(folder: Path, more: str, shape: str = SHAPE, **flags: str) -> Workload:
    (folder / "w.yaml").write_text(
        "name: w\n"
        f"requests: {{{shape}{more}}}\n"
        "stages: [{arrival: {poisson: 5/s}, count: 300}]\n"
    )
    return load(str(folder / "w.yaml"), read_flags(**flags))


@pytest.mark.parametrize(
    ("cache", "share"), [("cold", 0.0), ("warm", 1.0), ("{hit_rate: 60%}", 0.6)]
)
def test_prompts_share_the_requested_tokens_and_the_server_caches_them(
    tmp_path: Path, cache: str, share: float
) -> None:
    requested_workload = workload(tmp_path, f", prefixes: 2, cache: {cache}", seed="3")
    prompts = build_prompts(
        requested_workload, 3, 1, load_tokenizer(), PromptTarget(template_tokens=8)
    )
    texts = [prompts[number].prompt for number in range(40)]
    lengths = [prompts[number].input_tokens + 8 for number in range(40)]
    groups: dict[int, list[int]] = {}
    for number in range(40):
        groups.setdefault(prompts.prefix_group(number), []).append(number)

    assert len(groups) == 2

    for members in groups.values():
        for a, b in pairwise(members):
            word_pairs = zip(texts[a].split(), texts[b].split(), strict=False)
            equal = next(i for i, (x, y) in enumerate(word_pairs) if x != y)
            built = min(share * lengths[a], share * lengths[b], lengths[a] - 4, lengths[b] - 4) - 8
            assert abs(equal - max(built, 0)) <= 2

    assert len(set(texts)) == 40
    summary, _ = execute(requested_workload, Settings(url="sim:gb300-vm", out=tmp_path / "out"))
    assert summary.requested_cache_share == share
    assert summary.tokens.cached_share == pytest.approx(
        share, abs=0.05
    )  # whole blocks, and each group grows
    assert "cache_differs" not in [code.code for code in summary.verdict.warning_codes]
    assert f"{share:.0%}".rstrip("%") in text.render(summary) and "target " in text.render(summary)


def test_a_server_cache_too_small_for_the_hit_rate_is_reported(tmp_path: Path) -> None:
    requested_workload = workload(tmp_path, ", prefixes: 300, cache: {hit_rate: 60%}", seed="3")
    summary, _ = execute(requested_workload, Settings(url="sim:gb300-vm", out=tmp_path / "out"))
    code = next(code for code in summary.verdict.warning_codes if code.code == "cache_differs")
    assert code.values["asked"] == 0.6 and code.values["share"] == summary.tokens.cached_share < 0.5


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (", cache: hot", "unknown_name"),
        (", cache: 0.6", "unknown_name"),
        (", cache: {hit_rate: 0.6}", "unknown_name"),
        (", cache: {hit_rate: 160%}", "out_of_range"),
        (", cache: warm, shared_prefix_tokens: 5", "conflict"),
        (", cache: warm, turns: {count: 2, tool_result_tokens: 5}", "conflict"),
    ],
)
def test_invalid_cache_settings_are_reported(tmp_path: Path, more: str, code: str) -> None:
    with refused(CombinedError, code):
        workload(tmp_path, more)


def test_a_cache_setting_makes_the_salt_fresh_and_changes_the_fingerprint(tmp_path: Path) -> None:
    assert workload(tmp_path, ", cache: cold").salt == "fresh"
    assert workload(tmp_path, ", cache: cold", salt="blue").salt == "blue"
    assert workload(tmp_path, "").salt is None
    of = [
        recipe_fingerprint(workload(tmp_path, more), "server")
        for more in ("", ", cache: cold", ", cache: warm")
    ]
    assert len(set(of)) == 3


# -- retrieval -------------------------------------------------------------------------------------

RAG = ", chunks: {count: 3, tokens: 384, corpus: 200, zipf: 1.2}"


def test_prompts_begin_with_chunks_by_popularity_and_their_reuse_is_stated(tmp_path: Path) -> None:
    requested_workload = workload(tmp_path, RAG, "input_tokens: 1302, output_tokens: 20", seed="3")
    prompts, tokenizer = (
        build_prompts(requested_workload, 3, 1, load_tokenizer(), PromptTarget(template_tokens=8)),
        load_tokenizer(),
    )
    chunks = [prompts.chunks_of(number) for number in range(300)]

    assert all(
        len(set(response_chunk)) == 3 and max(response_chunk) < 200 for response_chunk in chunks
    )
    all_chunks = [chunk for response_chunk in chunks for chunk in response_chunk]
    assert all_chunks.count(0) > 2 * all_chunks.count(3) > 0  # 1 / k^1.2
    texts = [str(prompts[number].prompt) for number in range(40)]
    assert {tokenizer.count(text) for text in texts} == {1302 - 8} and len(set(texts)) == 40
    first = {
        response_chunk[0]: text.split(" ")[:384]
        for response_chunk, text in zip(chunks, texts, strict=False)
    }
    assert all(
        text.split(" ")[:384] == first[response_chunk[0]]
        for response_chunk, text in zip(chunks, texts, strict=False)
    )

    summary, _ = execute(requested_workload, Settings(url="sim:gb300-vm", out=tmp_path / "out"))
    before: set[int] = set()
    reused = 0
    for response_chunk in chunks:
        reused += sum(chunk in before for chunk in response_chunk)
        before |= set(response_chunk)

    assert summary.chunks is not None and summary.chunks.requests == 300
    assert summary.chunks.reused_share == pytest.approx(reused / 900)
    assert 0 < summary.chunks.leading_share < summary.chunks.reused_share

    known: set[tuple[int, tuple[int, ...]]] = set()
    # Requests go to four replicas in turn. A prefix cache has a chunk after the same chunks only.
    leading = 0
    for number, response_chunk in enumerate(chunks):
        beginnings = {(number % 4, response_chunk[:end]) for end in (1, 2, 3)}
        leading += len(beginnings & known)
        known |= beginnings

    assert summary.tokens.cached_share == pytest.approx(leading * 384 / (300 * 1302), abs=0.02)
    assert "sent before" in text.render(summary)


@pytest.mark.parametrize(
    ("more", "shape", "code"),
    [
        (RAG, "input_tokens: 1152, output_tokens: 2", "out_of_range"),
        (RAG, SHAPE, "out_of_range"),
        (RAG + ", cache: warm", "input_tokens: 2000, output_tokens: 2", "conflict"),
        (RAG + ", shared_prefix_tokens: 9", "input_tokens: 2000, output_tokens: 2", "conflict"),
        (", chunks: {count: 3, corpus: 2}", "input_tokens: 2000, output_tokens: 2", "out_of_range"),
    ],
)
def test_invalid_chunks_are_refused(more: str, shape: str, code: str, tmp_path: Path) -> None:
    with refused(CombinedError, code):
        workload(tmp_path, more, shape)


# -- the servers' side -----------------------------------------------------------------------------


def test_each_server_type_has_its_cache_reset_request() -> None:
    import asyncio

    from loadgen_sdk.transport.target import Target
    from loadgen_sdk.wire_formats.server_profiles import SERVER_PROFILES
    from scripted_server import answer, serving

    from loadgen.core.sidecars import cache_reset

    def reset(kind: str, *answers: bytes) -> list[str]:
        with serving(*answers) as server:
            probe_result = SimpleNamespace(
                target=Target.parse(server.url), server_profile=SERVER_PROFILES[kind]
            )
            asyncio.run(cache_reset.reset_caches(Settings(api_key="sk-12345"), [probe_result]))  # type: ignore[list-item]
            return [received_request.path for received_request in server.heard]

    assert reset("vllm", answer({})) == ["/reset_prefix_cache"]
    assert reset("sglang", answer({})) == ["/flush_cache"]
    assert reset("trtllm", answer({"success": True})) == ["/reset_prefix_cache"]
    with refused(LoadgenError, "unsupported") as none:
        reset("llamacpp", answer({}))
    assert "--salt fresh" in none.value.hint
    with refused(LoadgenError, "invalid_answer") as not_there:
        reset("vllm", answer({"detail": "Not Found"}, "404 Not Found"))
    assert "VLLM_SERVER_DEV_MODE=1" in not_there.value.hint
    with refused(LoadgenError, "invalid_answer"):
        reset("vllm", answer({"success": False}))


def test_the_cached_share_comes_from_the_cache_counters_of_the_server() -> None:
    from loadgen.core.server_metrics.series import MetricSample, find_cache_difference, summarize

    def page(**counters: tuple[float, float]) -> list[MetricSample]:
        return [
            MetricSample(t_s=at, target=0, page="p", name=name, labels="", value=value)
            for index, at in enumerate((0.0, 9.0))
            for name, value in [
                *((name.replace("__", ":"), pair[index]) for name, pair in counters.items()),
                ("up", 1.0),
            ]
        ]

    vllm = summarize(
        page(vllm__prefix_cache_hits_total=(50, 350), vllm__prefix_cache_queries_total=(100, 600)),
        None,
    )
    assert vllm is not None and vllm.cached_share == 0.6
    counts = summarize(
        page(sglang__cached_tokens_total=(0, 100), sglang__prompt_tokens_total=(0, 400)), None
    )
    assert counts is not None and counts.cached_share == 0.25
    rate = summarize(page(trtllm_kv_cache_hit_rate=(0.1, 0.5)), None)
    assert rate is not None and rate.cached_share == 0.5
    assert (
        find_cache_difference(vllm, 0.6, None) is None
        and find_cache_difference(vllm, None, 0.1) is None
    )
    assert (
        find_cache_difference(vllm, 0.2, 0.59) is None
    )  # of answers and asked, `cache_differs` speaks
    assert find_cache_difference(vllm, 0.6, 0.2) == {
        "share": 0.6,
        "beside": 0.2,
        "of": "cache_answers",
    }
    assert find_cache_difference(counts, 0.6, None) == {
        "share": 0.25,
        "beside": 0.6,
        "of": "cache_asked",
    }


@pytest.mark.parametrize(
    ("tokens", "requested_share"), [(150, 0.6), (150, 1.0), (1302, 0.6), (2000, 0.6), (2000, 0.0)]
)
def test_the_simulated_server_caches_complete_blocks_of_a_prompt(
    tmp_path: Path, tokens: int, requested_share: float
) -> None:
    """Of short prompts that is less than was asked for, and the run says so."""
    shape = f"input_tokens: {tokens}, output_tokens: 20"
    cache = {0.6: "{hit_rate: 60%}", 1.0: "warm", 0.0: "cold"}[requested_share]
    requested_workload = workload(tmp_path, f", cache: {cache}", shape, seed="3")
    summary, _ = execute(requested_workload, Settings(url="sim:gb300-vm", out=tmp_path / "out"))
    built = min(
        round(requested_share * tokens), tokens - 4
    )  # four tokens make each prompt different
    whole_blocks = built // 32 * 32 / tokens

    assert summary.tokens.cached_share == pytest.approx(whole_blocks, abs=0.02)
    differs = "cache_differs" in [code.code for code in summary.verdict.warning_codes]
    assert differs == (requested_share - whole_blocks > 0.1)


@pytest.mark.processes
def test_a_cache_reset_empties_the_prefix_cache_of_a_simulated_server(tmp_path: Path) -> None:
    from servers import start

    from loadgen.sim.server.options import Options

    shares: dict[str, float | None] = {}
    requested_workload = workload(
        tmp_path,
        "",
        "input_tokens: 700, output_tokens: 4",
        seed="3",
        num_requests="12",
        request_rate="40",
    )
    (tmp_path / "one.yaml").write_text(
        "extends: gb300-vm\nname: one\ngpus_per_vm: 1\n"
    )  # no replica that knows less
    with start(Options(preset=str(tmp_path / "one.yaml"))) as server:
        for name, more in {
            "first": {},
            "again": {},
            "trtllm": {"reset_cache": True},
            "sglang": {"reset_cache": True, "server": "sglang"},
        }.items():
            summary, _ = execute(
                requested_workload,
                Settings(url=server.url, out=tmp_path / name, **NO_PAGES, **more),
            )  # type: ignore[arg-type]
            assert summary.requests.ok == 12 and summary.cache_reset == bool(more)
            shares[name] = summary.tokens.cached_share
    assert shares["first"] == shares["trtllm"] == shares["sglang"] == 0
    assert (shares["again"] or 0) > 0.9


@pytest.mark.parametrize(
    ("requests", "requested"),
    [
        ("input_tokens: 60, output_tokens: 4", True),
        ("input_tokens: 60, output_tokens: 4, prompts: natural", True),
        ("from: prompts.jsonl, output_tokens: 4", False),
    ],
    ids=["random words", "natural text", "prompts of a file"],
)
def test_the_manifest_states_whether_the_lengths_of_prompts_were_requested(
    tmp_path: Path, requests: str, requested: bool
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "How long is a day on Mars?"}\n')
    (tmp_path / "w.yaml").write_text(
        f"name: w\nrequests: {{{requests}}}\nstages: [{{arrival: {{closed: 1}}, count: 2}}]\n"
    )
    settings = Settings(url="sim:gb300-vm", out=tmp_path / "out", **NO_PAGES)
    _, folder = execute(load(str(tmp_path / "w.yaml")), settings)
    manifest = msgspec.json.decode((folder / "run.json").read_bytes())
    assert manifest["prompt_lengths_requested"] is requested
