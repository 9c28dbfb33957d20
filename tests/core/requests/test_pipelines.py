"""Task steps that use other endpoints: embeddings, reranking and a second model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_page
from expected_errors import refused
from run_fixtures import NO_PAGES
from scripted_server import Heard, answer, events, serving

from loadgen.cli.settings import build_settings
from loadgen.compare.comparison import compare
from loadgen.compare.side_reader import read_sides
from loadgen.core import run_folder
from loadgen.core.errors import CombinedError, LoadgenError
from loadgen.core.execution.plan import Endpoint, Settings
from loadgen.core.execution.run import execute
from loadgen.core.execution.step_targets import resolve_step_targets
from loadgen.core.metrics.summary import Summary
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.prompts import PromptTarget
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.results import store
from loadgen.core.workload import load, read_flags
from loadgen.core.workload.loading import workload_from_mapping
from loadgen.pricing import price_file
from loadgen.pricing.evidence import Evidence
from loadgen.pricing.priced_result import price_result
from loadgen.pricing.step_cost import with_step_costs
from loadgen.pricing.units import TASK
from loadgen.runs import text

VECTOR = answer({"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 4}})
RANKS = answer({"results": [{"index": 0, "relevance_score": 0.3}], "usage": {"total_tokens": 7}})
CHAT = events(
    {"choices": [{"delta": {"content": "a"}}]},
    {
        "choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2},
    },
)
STEPS: dict[str, Any] = {
    "embed": {"kind": "embed", "target": "embedder", "input_tokens": 12},
    "rank": {
        "kind": "rerank",
        "target": "ranker",
        "model": "r",
        "after": "embed",
        "tool": "search",
        "documents": {"count": {"uniform": {"min": 3, "max": 6}}, "tokens": 20, "corpus": 50},
    },
    "answer": {"after": "rank", "system_tokens": 9, "best": 3, "output_tokens": 2},
}
PRICES = """
currency: USD
per_token:
  - {provider: x, model: m, per_million_input: 1, per_million_output: 2, as_of: 2026-11-01,
     source: test}
  - {provider: x, model: e, per_million_input: 3, per_million_output: 3, as_of: 2026-11-01,
     source: test}
"""
RAG = {"steps": STEPS, "tools": {"search": {"time": "20ms"}}}


def workload(requests: dict[str, Any] | None = None, count: int = 6, **more: Any) -> Any:
    stages = [{"arrival": {"poisson": "50/s"}, "count": count}]
    return workload_from_mapping(
        {"name": "w", "requests": requests or RAG, "stages": stages, **more}, read_flags(seed=1)
    )


def steps_of(summary: Summary) -> dict[str, Any]:
    return {step.name: step for step in summary.steps}


def loads(received_requests: Sequence[Heard]) -> list[Heard]:
    """Return the requests of the load. The preflight sends no corpus document and short texts."""
    return [
        received_request
        for received_request in received_requests
        if received_request.body is not None and "hello" not in json.dumps(received_request.body)
    ]


@pytest.mark.processes
def test_each_step_uses_its_api_with_the_same_query(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK_KEY", "sk-rank")
    with serving(CHAT) as model, serving(VECTOR) as embedder, serving(RANKS) as ranker:
        file = tmp_path / "targets.yaml"
        file.write_text(
            f"- {{name: model, url: '{model.url}'}}\n- {{name: embedder, url: '{embedder.url}'}}\n"
            f"- {{name: ranker, url: '{ranker.url}', api_key_env: RANK_KEY}}\n"
        )
        settings = build_settings(
            {
                "targets": file,
                "model": "m",
                "server": "openai",
                "server_metrics": "off",
                "extra_body": {"temperature": 0},
                "out": tmp_path / "out",
                "api_key": "sk-run",
            }
        )
        steps = STEPS | {"embed": STEPS["embed"] | {"model": "e"}}
        summary, _ = execute(workload(RAG | {"steps": steps}, slo={"ttft": "5s"}), settings)
    texts = {load_request.body["input"] for load_request in loads(embedder.heard)}

    assert (
        len(loads(embedder.heard))
        == len(loads(ranker.heard))
        == len(loads(model.heard))
        == len(texts)
        == 6
    )
    assert {load_request.path for load_request in embedder.heard if load_request.body} == {
        "/v1/embeddings"
    }
    assert {load_request.path for load_request in ranker.heard if load_request.body} == {
        "/v1/rerank"
    }
    assert {load_request.headers["authorization"] for load_request in ranker.heard} == {
        "Bearer sk-rank"
    }
    assert {load_request.headers["authorization"] for load_request in embedder.heard} == {
        "Bearer sk-run"
    }
    assert {load_request.body["model"] for load_request in loads(ranker.heard)} == {"r"}

    ranked = {
        load_request.body["query"]: load_request.body["documents"]
        for load_request in loads(ranker.heard)
    }

    assert ranked.keys() == texts and {len(documents) for documents in ranked.values()} <= {
        3,
        4,
        5,
        6,
    }

    for received_request in loads(model.heard):
        system, user_message = received_request.body["messages"]
        assert (system["role"], received_request.body["temperature"]) == ("system", 0)
        *documents, question = user_message["content"].split("\n\n")
        assert documents == ranked[question][:3]

    assert all("temperature" not in load_request.body for load_request in loads(embedder.heard))
    step_metrics = steps_of(summary)
    assert [step_metrics[name].requests.ok for name in ("embed", "rank", "answer")] == [6, 6, 6]
    assert [step_metrics[name].targets for name in ("embed", "rank", "answer")] == [
        ("embedder",),
        ("ranker",),
        (),
    ]
    assert (
        step_metrics["answer"].tokens.output,
        step_metrics["embed"].ttft_ms.count,
        summary.ttft_ms.count,
    ) == (
        12,
        0,
        6,
    )
    assert summary.goodput.share == 1.0 and summary.rack is None
    assert "usage_missing" not in [code.code for code in summary.verdict.warning_codes]
    assert sum(part.requests.ok for part in summary.targets) == 18 == summary.requests.ok

    book = price_file.parse_prices(PRICES, "prices.yaml", env={})
    evidence = Evidence(name="run", folder="", summaries=(summary,))
    priced = with_step_costs(
        price_result(evidence, book.entries[0], "run", "", gpus=None, utilization=Decimal(1)), book
    )
    per_task = {name: step.per_task for name, step in priced.step_costs.items()}
    prompt, text_length = (
        step_metrics["answer"].tokens.input or 0,
        step_metrics["embed"].tokens.input or 0,
    )

    assert (
        per_task["answer"]
        == Decimal(prompt + 2 * 12) / 6 / 10**6
        == getattr(priced.costs[TASK], "total", 0)
    )
    assert (per_task["embed"], per_task["rank"]) == (Decimal(text_length) * 3 / 6 / 10**6, None)
    assert priced.step_costs["rank"].code == "no_price"
    rendered_text = text.render(summary)
    assert "search, before rank" in rendered_text and "rerank ranker r" in rendered_text
    assert "Steps of a task" in run_page.render(summary)


@pytest.mark.processes
def test_a_step_that_fails_ends_the_task_and_is_counted_there(tmp_path: Path) -> None:
    good = (RANKS,) * 10  # for the probe, and some of the first requests
    with (
        serving(CHAT) as model,
        serving(VECTOR) as embedder,
        serving(*good, answer({}, "500 Oops")) as ranker,
    ):
        urls = [model.url, f"embedder={embedder.url}", f"ranker={ranker.url}"]
        settings = build_settings(
            {"url": urls, "server_metrics": "off", "out": tmp_path / "out", "model": "m"}
        )
        steps = {name: step | {"model": "x"} for name, step in STEPS.items()}
        summary, _ = execute(workload(RAG | {"steps": steps}, 30), settings)
    step_metrics = steps_of(summary)
    answered, failed = step_metrics["rank"].requests.ok, step_metrics["rank"].requests.failed

    assert step_metrics["embed"].requests.ok == 30 == answered + failed and failed >= 20
    assert (step_metrics["answer"].requests.ok, step_metrics["answer"].requests.dropped) == (
        answered,
        failed,
    )
    assert summary.sessions is not None and summary.sessions.ok == answered


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
def test_the_shipped_pipeline_runs_against_one_simulated_server(
    workers: int, tmp_path: Path
) -> None:
    embedded = {"ttft": "20ms", "itl": "0.1ms", "per_input_token": "0.001ms"}
    settings = Settings(embedded=embedded, out=tmp_path / "out", workers=workers, **NO_PAGES)
    summary, _ = execute(
        load("rag-pipeline", read_flags(seed=3, request_rate="40", warmup="0", num_requests="12")),
        settings,
    )
    steps = steps_of(summary)

    assert [*steps] == ["embed", "rerank", "answer", "check"]
    assert {step.requests.ok for step in summary.steps} == {12} and summary.requests.failed == 0
    assert [steps[name].targets for name in steps] == [("embedder",), ("reranker",), (), ()]
    assert steps["embed"].tokens.output == 0 < steps["check"].tokens.output == 240
    assert steps["answer"].time_share is not None
    assert (steps["rerank"].e2e_ms.min or 0) > 20 + 384 * 0.001


def by_hand(folder: Path) -> dict[str, float]:
    """Return the fraction of each step and pause by walking back through each task."""
    stored = store.read_run(folder)
    steps = {turn: step for step in stored.manifest.steps for turn in step.turns}
    waits = {
        turn: after
        for step in stored.manifest.steps
        for turn, after in zip(step.turns, step.after, strict=True)
    }
    spent: dict[str, float] = {}
    tasks: dict[int, dict[int, Any]] = {}
    for row in stored.rows:
        tasks.setdefault(int(row["session"]), {})[int(row["turn"])] = row
    for task in tasks.values():
        turn = max(task)
        while True:
            row, name = task[turn], steps[turn].name
            spent[name] = spent.get(name, 0.0) + int(row["end_ns"]) - int(row["due_ns"])
            if not waits[turn]:
                break
            before = max(waits[turn], key=lambda slot: int(task[slot]["end_ns"]))
            pause = int(row["due_ns"]) - int(task[before]["end_ns"])
            spent[f"before {name}"] = spent.get(f"before {name}", 0.0) + pause
            turn = before
    everything = sum(spent.values())
    return {name: value / everything for name, value in spent.items()}


def test_the_shares_of_steps_in_the_time_of_a_task_add_up(tmp_path: Path) -> None:
    steps = STEPS | {
        "ask": {"input_tokens": 20, "output_tokens": 2},
        "embed": STEPS["embed"] | {"parallel": 3, "after": "ask"},
        "check": {
            "after": "rank",
            "context": "new",
            "input_tokens": 500,
            "think_time": "30ms",
            "output_tokens": 3,
        },
        "end": {"after": ["answer", "check"], "input_tokens": 5, "output_tokens": 8},
    }
    steps = {
        name: {key: value for key, value in step.items() if key != "model"}
        for name, step in steps.items()
    }
    summary, folder = execute(
        workload(RAG | {"steps": steps}, 30), Settings(url="sim:gb300-vm", out=tmp_path / "o")
    )
    step_metrics, expected = steps_of(summary), by_hand(folder)

    for name, step in step_metrics.items():
        assert step.time_share == pytest.approx(expected.get(name, 0.0))
        assert step.pause_share == pytest.approx(expected.get(f"before {name}", 0.0))
    shares = [share for step in summary.steps for share in (step.time_share, step.pause_share)]
    assert sum(shares) == pytest.approx(1.0) and step_metrics["embed"].requests.ok == 90
    assert step_metrics["rank"].pause == "search" and step_metrics[
        "rank"
    ].pause_ms.p50 == pytest.approx(20, abs=0.01)
    assert step_metrics["check"].pause == "thinking" and step_metrics[
        "check"
    ].pause_ms.p50 == pytest.approx(30, abs=0.01)
    assert run_folder.open_run(folder).summary.steps == summary.steps


def test_each_step_is_compared_with_a_separate_interval(tmp_path: Path) -> None:
    for name, url in (("a", "sim:gb300-vm"), ("b", "sim:h100x8")):
        execute(workload(RAG, 200), Settings(url=url, out=tmp_path / name))
    sides = read_sides([tmp_path / "a", tmp_path / "b"])
    differences_by_name = {
        difference.metric: difference
        for difference in compare(sides).differences
        if difference.metric.startswith("steps.")
    }

    assert {metric.split(".")[1] for metric in differences_by_name} == set(
        STEPS
    ) and "steps.embed.tokens.output_per_s" not in differences_by_name

    summaries = [run_folder.read_summary(tmp_path / name) for name in ("a", "b")]
    ranked = differences_by_name["steps.rank.e2e_ms.p50"]
    assert [ranked.before, ranked.after] == [
        steps_of(summary)["rank"].e2e_ms.p50 for summary in summaries
    ]
    assert ranked.low is not None


def test_steps_of_different_classes_are_distinguished(tmp_path: Path) -> None:
    classes = {
        "rag": {"weight": 1, "requests": RAG},
        "chat": {"weight": 2, "requests": {"input_tokens": 50, "output_tokens": 3}},
        "agent": {
            "weight": 1,
            "requests": {
                "steps": {
                    "a": {"input_tokens": 9, "output_tokens": 2},
                    "embed": {"after": "a", "input_tokens": 9, "output_tokens": 2},
                }
            },
        },
    }
    requested_workload = workload_from_mapping(
        {
            "name": "w",
            "classes": classes,
            "stages": [{"arrival": {"poisson": "50/s"}, "count": 80}],
        },
        read_flags(seed=1),
    )
    summary, _ = execute(requested_workload, Settings(url="sim:gb300-vm", out=tmp_path / "o"))
    starts = {part.name: part.starts for part in summary.classes}
    rows = {(step.of_class, step.name): step.requests.ok for step in summary.steps}
    expected = {("rag", name): starts["rag"] for name in STEPS} | {
        ("agent", name): starts["agent"] for name in ("a", "embed")
    }

    assert rows == expected and starts["rag"] and starts["agent"]


def test_requested_lengths_equal_the_lengths_of_texts() -> None:
    prompts = build_prompts(workload(), 1, 2, load_tokenizer())
    count = load_tokenizer().count
    for number in prompts.request_ids(12):
        request = prompts[number]
        if sequences := prompts.sequence_lengths(number):  # type: ignore[attr-defined]
            texts = request.extra.get("documents") or [""]
            assert sequences == tuple(
                count(str(request.prompt)) + count(rendered_text) for rendered_text in texts
            )
            assert request.input_tokens == sum(sequences) == prompts.requested_input_tokens(number)  # type: ignore[attr-defined]
            assert request.max_tokens == 0
        else:
            assert request.messages is not None
            assert sum(count(message["content"]) for message in request.messages) == pytest.approx(
                request.input_tokens, abs=8
            )
            assert request.input_tokens == sum(
                tokens for _, tokens in prompts.prompt_segments(number)
            )  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        ({"embed": {"kind": "embed"}}, "missing_key"),
        ({"embed": STEPS["embed"] | {"output_tokens": 3}}, "no_effect"),
        ({"embed": STEPS["embed"] | {"documents": {}}}, "no_effect"),
        ({"embed": {"kind": "rerank", "input_tokens": 4}}, "missing_key"),
        (
            {"embed": STEPS["embed"], "b": {"after": "embed", "best": 3, "output_tokens": 3}},
            "missing_key",
        ),
        ({"embed": {"input_tokens": 4}}, "missing_key"),
        ({"embed": STEPS["embed"] | {"kind": "embde"}}, "unknown_name"),
        ({"a": {"input_tokens": 4, "output_tokens": 2, "parallel": 2}}, "unsupported"),
        (
            {
                "a": {"input_tokens": 4, "output_tokens": 2},
                "b": {"after": "a", "context": "new", "parallel": 2, "output_tokens": 2},
            },
            "unsupported",
        ),
        (
            {
                "embed": {
                    "kind": "rerank",
                    "input_tokens": 4,
                    "documents": {"count": 60, "corpus": 50},
                }
            },
            "out_of_range",
        ),
    ],
)
def test_invalid_steps_are_reported(steps: dict[str, Any], code: str) -> None:
    with refused(CombinedError, code):
        workload({"steps": steps})


def targets(*urls: str, **more: Any) -> Settings:
    return build_settings({"url": list(urls), **more})


@pytest.mark.parametrize(
    ("urls", "code"),
    [
        (["http://a", "embeder=http://b"], "unknown_name"),
        (["http://a", "embedder=http://b"], "missing_option"),
        (["embedder=http://b", "ranker=http://c"], "missing_option"),
    ],
)
def test_targets_for_only_some_of_the_steps_are_refused(urls: list[str], code: str) -> None:
    with refused(CombinedError, code):
        resolve_step_targets(workload(), targets(*urls))


def test_steps_are_sent_to_their_targets() -> None:
    plain = workload({"input_tokens": 5, "output_tokens": 5})

    with refused(CombinedError, "unknown_name", "--url"):
        resolve_step_targets(plain, targets("http://a", "embedder=http://b"))
    assert resolve_step_targets(plain, targets("http://a")) == targets("http://a")

    settings = resolve_step_targets(
        workload(), targets("http://a", extra_body='{"x": 1}', model="m")
    )

    assert [(endpoint.url, endpoint.api, endpoint.serves) for endpoint in settings.endpoints] == [
        ("http://a", None, ""),
        ("http://a", "embeddings", "embedder"),
        ("http://a", "rerank", "ranker"),
    ]
    assert settings.step_targets == {
        ("", ""): (0,),
        ("", "embed"): (1,),
        ("", "rank"): (2,),
        ("", "answer"): (0,),
    }
    of_main, _, of_rank = (settings.for_endpoint(endpoint) for endpoint in settings.endpoints)
    assert (of_main.model, of_main.extra_body, of_rank.model, of_rank.extra_body) == (
        "m",
        {"x": 1},
        "r",
        None,
    )

    steps = STEPS | {
        "embed": STEPS["embed"] | {"target": {"url": "http://e", "api_key_env": "E_KEY"}}
    }

    with refused(CombinedError, "unset_variable", "E_KEY"):
        resolve_step_targets(workload({**RAG, "steps": steps}), targets("http://a"), {})

    step_settings = resolve_step_targets(
        workload({**RAG, "steps": steps}), targets("http://a"), {"E_KEY": "k"}
    )

    assert step_settings.endpoints[1] == Endpoint(
        url="http://e", api_key="k", name="embed", api="embeddings", serves="embed"
    )

    several = resolve_step_targets(
        workload(), targets("http://a", "embedder=http://b", "embedder=http://c", "ranker=http://d")
    )

    assert several.step_targets["", "embed"] == (1, 2)


def test_tasks_are_refused_for_the_embeddings_api() -> None:
    with refused(LoadgenError, "unsupported", "--api"):
        build_prompts(workload(), 1, 2, load_tokenizer(), PromptTarget(api="embeddings"))


def test_requests_without_generation_miss_no_term_about_tokens(tmp_path: Path) -> None:
    summary, folder = execute(
        workload(slo={"ttft": "5s", "tpot": "5s", "e2e": "9s"}),
        Settings(url="sim:gb300-vm", out=tmp_path),
    )
    rows = store.read_run(folder).rows
    assert summary.goodput.share == 1.0 and summary.tpot_undefined == 0
    assert int(np.sum(rows["asked_output"] == 0)) == 12 and summary.goodput.slo[0].count == 6
