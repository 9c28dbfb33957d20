"""Speculative decoding: what accounts and metrics pages say of drafts, and what is told of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from loadgen_sdk.wire_formats.server_timing_lookup import parse_server_timing

from loadgen.core.analysis import speculation
from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.sections import Speculation
from loadgen.core.metrics.summary import Summary
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.results.manifest import RunManifest, StagePlan
from loadgen.core.results.record import ROW
from loadgen.core.run_summary import summarize
from loadgen.core.server_metrics.series import MetricSample
from loadgen.core.workload import dataset_rows, read_flags, recipe_fingerprint, row_errors
from loadgen.core.workload.loading import workload_from_mapping
from loadgen.runs import text

S = 1_000_000_000


def rows(drafted: Sequence[int], accepted: Sequence[int], output: int = 100) -> Any:
    """Ok requests, one a second, with these drafts in their accounts; -1: not told."""
    records = np.zeros(len(drafted), ROW)
    records["due_ns"] = records["sent_ns"] = np.arange(len(drafted)) * S
    records["slot"] = records["request"] = np.arange(len(drafted))
    for name in ("first_token_ns", "first_answer_ns", "last_token_ns", "end_ns", "done_ns"):
        records[name] = records["due_ns"] + S // 2
    records["last_token_ns"] += S // 4
    records["draft_tokens"], records["accepted_tokens"], records["output_tokens"] = (
        drafted,
        accepted,
        output,
    )
    return records


def pages(*reads: dict[str, float]) -> list[MetricSample]:
    """Return reads of one page, a second apart. A name may have a position after a slash."""
    samples = []
    for t_s, values in enumerate(reads):
        for key, value in {**values, "up": 1}.items():
            name, _, place = key.partition("/")
            labels = f'engine="0",position="{place}"' if place else ""
            samples.append(
                MetricSample(t_s=t_s, target=0, page="p", name=name, labels=labels, value=value)
            )
    return samples


VLLM = "vllm:spec_decode_num_"
COUNTED = [
    {
        f"{VLLM}drafts_total": n,
        f"{VLLM}draft_tokens_total": 3 * n,
        f"{VLLM}accepted_tokens_total": 1.5 * n,
        f"{VLLM}accepted_tokens_per_pos_total/0": 0.8 * n,
        f"{VLLM}accepted_tokens_per_pos_total/1": 0.5 * n,
        f"{VLLM}accepted_tokens_per_pos_total/2": 0.2 * n,
    }
    for n in (1000, 1000, 1400, 2000)
]


def summary(
    records: Any, samples: Sequence[MetricSample] = (), *, random_words: bool = True
) -> Summary:
    stages = (StagePlan(name="load", arrival="poisson 1/s", rate=1.0, end_ns=len(records) * S),)
    manifest = RunManifest(state="finished", stages=stages, random_words=random_words)
    return summarize(manifest, records, server_samples=samples)


def test_acceptance_and_accepted_length_are_computed_per_request() -> None:
    records = rows([60, 90, 0, -1], [30, 75, 0, -1])
    speculation_summary = speculation.summarize_speculation([Columns(records)], ())

    assert speculation_summary == Speculation(
        requests=2, drafted=150, accepted=105, acceptance=0.7, length=200 / 95
    )
    distributions_by_name = summary(records).other_metrics
    assert distributions_by_name["acceptance"].count == 2 and distributions_by_name[
        "acceptance"
    ].max == pytest.approx(75 / 90 * 100)
    assert (
        distributions_by_name["accepted_length"].max == pytest.approx(100 / 25)
        and distributions_by_name["accepted_length"].count == 2
    )
    assert (
        speculation.summarize_speculation(
            [Columns(rows([0, -1], [0, -1]))], pages({"vllm:num_requests_running": 1})
        )
        is None
    )


def test_acceptance_by_position_comes_from_the_metrics_pages() -> None:
    speculation_summary = speculation.summarize_speculation([], pages(*COUNTED))
    assert speculation_summary is not None and speculation_summary.requests == 0
    assert speculation_summary.server_acceptance == pytest.approx(
        0.5
    ) and speculation_summary.server_length == pytest.approx(2.5)
    assert speculation_summary.by_position == pytest.approx((0.8, 0.5, 0.2))


def test_gauges_of_recent_acceptance_are_averaged_over_the_load() -> None:
    gauges = [
        {"sglang:spec_accept_rate": share, "sglang:spec_accept_length": 1 + 4 * share}
        for share in (0, 0.5, 0.7)
    ]
    speculation_summary = speculation.summarize_speculation([], pages(*gauges))

    assert (
        speculation_summary is not None
        and speculation_summary.server_acceptance == pytest.approx(0.6)
    )
    assert speculation_summary.by_position == ()


def test_speculation_on_random_texts_causes_a_warning() -> None:
    measured_summary = summary(rows([60] * 40, [30] * 40), pages(*COUNTED))
    rendered_text = " ".join(text.render(measured_summary).split())

    assert "40 responses 2,400 1,200 50.0 % 1.43" in rendered_text and "3 20.0 %" in rendered_text
    assert "drafts_random" in {code.code for code in measured_summary.verdict.warning_codes}
    quiet = summary(rows([60] * 40, [30] * 40), random_words=False)
    assert (
        "drafts_random" not in {code.code for code in quiet.verdict.warning_codes}
        and quiet.speculation is not None
    )
    assert "Speculative" not in text.render(summary(rows([-1] * 40, [-1] * 40)))


def test_drafted_and_accepted_tokens_are_read_from_the_timing_of_vllm() -> None:
    form = {
        "queue_time_ms": 1.0,
        "speculative_decoding": {"num_draft_tokens": 9, "num_accepted_draft_tokens": 4},
    }
    account = parse_server_timing({"metrics": form})

    assert (account.drafted_tokens, account.accepted_tokens, account.queue_ns) == (9, 4, 1_000_000)

    without_drafts = parse_server_timing(
        {"metrics": {"queue_time_ms": 1.0, "speculative_decoding": 3}}
    )

    assert without_drafts.drafted_tokens is None


@pytest.mark.parametrize("length", [1, 5, 400, 60_000])
def test_natural_prompts_have_the_requested_length_and_different_beginnings(length: int) -> None:
    requests = {
        "input_tokens": length,
        "output_tokens": 5,
        "prompts": "natural",
        "shared_prefix_tokens": length // 4,
    }
    stages = [{"arrival": {"poisson": "5/s"}, "count": 9}]
    workload = workload_from_mapping(
        {"name": "w", "requests": requests, "stages": stages}, read_flags(seed=1)
    )
    tokenizer = load_tokenizer()
    prompts = [str(build_prompts(workload, 1, 1, tokenizer)[number].prompt) for number in range(3)]

    assert {tokenizer.count(text) for text in prompts} == {length} and len(set(prompts)) == 3
    assert length < 400 or all(" the " in text and " Alice " in text for text in prompts)
    assert len({text[:200] for text in prompts}) == (
        1 if length >= 400 else 3
    )  # the shared quarter

    random_too = workload_from_mapping(
        {"name": "w", "requests": requests | {"prompts": "random"}, "stages": stages}, read_flags()
    )
    plain = {name: value for name, value in requests.items() if name != "prompts"}
    without = workload_from_mapping(
        {"name": "w", "requests": plain, "stages": stages}, read_flags()
    )
    prints = [
        recipe_fingerprint(requested_workload, "server")
        for requested_workload in (random_too, without, workload)
    ]

    assert prints[0] == prints[1] != prints[2]


def test_a_file_of_speed_bench_is_read() -> None:
    row = {
        "question_id": "q1",
        "category": "coding",
        "sub_category": "",
        "turns": ["Write a loop.", "Now in C."],
        "source": "x",
        "src_id": "1",
        "difficulty": "",
        "multiturn": True,
    }
    dataset_row = dataset_rows.parse_row(json.dumps(row).encode())

    assert dataset_row.prompt == "Write a loop."
    assert "`turns`" in dataset_row.conversion_note
    with pytest.raises(row_errors.BadRowError):
        dataset_rows.parse_row(json.dumps(row | {"turns": []}).encode())


def test_the_acceptance_of_the_pages_is_printed_without_columns_of_unknown_numbers() -> None:
    without_numbers = text.render(summary(rows([-1] * 40, [-1] * 40), pages(*COUNTED)))
    with_numbers = text.render(summary(rows([60] * 40, [30] * 40), pages(*COUNTED)))

    assert "metrics pages of the servers 50.0 % 2.5" in " ".join(without_numbers.split())
    assert (
        "drafted" not in without_numbers.partition("Speculative decoding")[2].partition("\n\n")[0]
    )
    assert "metrics pages of the servers - - 50.0 % 2.5" in " ".join(with_numbers.split())
