"""Request classes in one run: assignment, requests and metrics of each class."""

from __future__ import annotations

import json
import math
import re
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import repository_paths
import run_page
import yaml
from expected_errors import refused
from msgspec import structs
from run_fixtures import NO_PAGES
from scripted_server import events, serving
from servers import start

from loadgen.compare.comparison import compare
from loadgen.contracts.loading import load_contract
from loadgen.contracts.run import ValidationOptions, run_validation
from loadgen.core import run_folder, seeds
from loadgen.core.errors import CombinedError
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute
from loadgen.core.metrics.summary import Summary, exit_code
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.mix import MixPrompts
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.results import store
from loadgen.core.schedule.build import build_schedule
from loadgen.core.workload import Workload, load, read_flags, recipe_fingerprint
from loadgen.core.workload.loading import workload_from_mapping
from loadgen.runs import text
from loadgen.runs.comparison_side import Side
from loadgen.runs.kind import load_compared_run
from loadgen.sim.server.options import Options
from loadgen.sim.server.send_log import parse_log

SHARES = {"qa": 0.6, "rag": 0.25, "summary": 0.1, "bystander": 0.05}
LENGTHS = {"qa": (150, 20), "rag": (1302, 120), "summary": (3000, 40), "bystander": (16, 4)}
CLASSES = """
classes:
  qa: {weight: 60%, requests: {input_tokens: 150, output_tokens: 20}, slo: {ttft: 500ms, at: p90}}
  rag:
    weight: 25%
    requests: {input_tokens: 1302, output_tokens: 120, shared_prefix_tokens: 64}
    model: rag-lora
  summary:
    weight: 10%
    requests: {input_tokens: 3000, output_tokens: 40, shared_prefix_tokens: 64}
  bystander:
    weight: 5%
    requests: {input_tokens: 16, output_tokens: 4}
    priority: 3
    slo: {e2e: 1ms, at: p90}
"""
STAGES = "stages: [{name: load, arrival: {poisson: 50/s}, count: 1500}]\n"


STREAMED_RESPONSE = events(
    {"choices": [{"delta": {"content": "a"}}]},
    {
        "choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 2},
    },
)


def workload(folder: Path, classes: str = CLASSES, more: str = STAGES, **flags: Any) -> Workload:
    file = folder / "mix.yaml"
    file.write_text(f"name: mix\n{classes}\n{more}")
    return load(str(file), read_flags(**flags))


def prompts(requested_workload: Workload, seed: int = 7, salt: int = 1) -> MixPrompts:
    built_prompts = build_prompts(requested_workload, seed, salt, load_tokenizer())
    assert isinstance(built_prompts, MixPrompts)
    return built_prompts


def test_seed_and_number_determine_the_class_with_the_requested_shares(
    tmp_path: Path,
) -> None:
    mix_prompts = prompts(workload(tmp_path))
    numbers = np.arange(200_000)
    class_indexes = seeds.draw_classes(7, list(SHARES.values()), numbers)

    assert [mix_prompts.class_of(number) for number in (0, 1, 5000, 1023, 1024, 199_999)] == [
        class_indexes[number] for number in (0, 1, 5000, 1023, 1024, 199_999)
    ]
    assert (
        seeds.draw_classes(7, list(SHARES.values()), numbers[::-1]) == class_indexes[::-1]
    ).all()
    assert (seeds.draw_classes(8, list(SHARES.values()), numbers) != class_indexes).any()

    for index, share in enumerate(SHARES.values()):
        spread = math.sqrt(share * (1 - share) * len(numbers))
        assert abs(int((class_indexes == index).sum()) - share * len(numbers)) < 4 * spread
    pairs = np.bincount(4 * class_indexes[:-1] + class_indexes[1:], minlength=16).reshape(
        4, 4
    ) / len(numbers)
    expected = np.outer(list(SHARES.values()), list(SHARES.values()))

    assert np.abs(pairs - expected).max() < 0.005  # neighbours are independent


def test_a_request_has_lengths_model_priority_and_prefix_of_its_class(tmp_path: Path) -> None:
    mix_prompts, count = prompts(workload(tmp_path)), load_tokenizer().count
    texts: dict[str, list[str]] = {name: [] for name in SHARES}
    for number in range(300):
        name, request = mix_prompts.names[mix_prompts.class_of(number)], mix_prompts[number]
        assert isinstance(request.prompt, str)
        assert (
            (request.input_tokens, request.max_tokens)
            == LENGTHS[name]
            == (count(request.prompt), request.max_tokens)
        )
        assert request.extra == {"rag": {"model": "rag-lora"}, "bystander": {"priority": 3}}.get(
            name, {}
        )
        texts[name].append(request.prompt)
    beginnings = {
        name: {class_name[:120] for class_name in of_class} for name, of_class in texts.items()
    }

    assert len(beginnings["rag"]) == len(beginnings["summary"]) == 1
    assert beginnings["rag"] != beginnings["summary"]
    assert len({class_name for of_class in texts.values() for class_name in of_class}) == 300


@pytest.mark.parametrize(
    ("classes", "place", "code"),
    [
        (CLASSES.replace("60%", "55%"), "mix.yaml:4:", "out_of_range"),
        (CLASSES.replace("60%", "6"), "mix.yaml:4:", "conflict"),
        (CLASSES.replace("60%", "0"), "mix.yaml:4:", "invalid_value"),
        (CLASSES.replace("60%", "-60%"), "mix.yaml:4:", "invalid_value"),
        (CLASSES.replace("60%", ".inf"), "mix.yaml:4:", "invalid_value"),
        (CLASSES.replace("60%", "true"), "mix.yaml:4:", "invalid_value"),
        (CLASSES.replace("weight: 60%, ", ""), "mix.yaml:4:", "missing_key"),
        (CLASSES.replace("weight: 60%", "wieght: 60%"), "mix.yaml:4:", "unknown_key"),
        (CLASSES.replace("priority: 3", "priority: high"), "mix.yaml:15:", "wrong_type"),
        (
            CLASSES.replace("priority: 3", "headers: {Authorization: a}"),
            "mix.yaml:15:",
            "unsupported",
        ),
        (CLASSES.replace("priority: 3", "headers: {host: a}"), "mix.yaml:15:", "unsupported"),
        (CLASSES.replace("priority: 3", 'tenant: "a\\r\\nb"'), "mix.yaml:15:", "invalid_value"),
        (CLASSES.replace("qa:", "a b:"), "mix.yaml:4:", "invalid_value"),
        (CLASSES.replace("output_tokens: 20", "output_tokens: 0"), "mix.yaml:4:", "out_of_range"),
        (CLASSES + "requests: {input_tokens: 1, output_tokens: 1}", "mix.yaml:1:", "conflict"),
        ("classes: {}", "mix.yaml:2:", "missing_value"),
    ],
)
def test_errors_in_classes_are_reported_with_their_line(
    tmp_path: Path, classes: str, place: str, code: str
) -> None:
    with refused(CombinedError, code) as exc_info:
        workload(tmp_path, classes)
    assert place in str(exc_info.value)


def test_length_flags_are_refused_for_a_workload_of_classes(tmp_path: Path) -> None:
    with pytest.raises(CombinedError, match="--> --input-tokens 100"):
        workload(tmp_path, input_tokens="100")


def test_equal_weights_and_percentages_have_the_same_fingerprint(
    tmp_path: Path,
) -> None:
    relative = (
        CLASSES.replace("60%", "12").replace("25%", "5").replace("10%", "2").replace("5%", "1")
    )
    fingerprint = recipe_fingerprint(workload(tmp_path), "server")

    assert recipe_fingerprint(workload(tmp_path, relative), "server") == fingerprint
    assert (
        recipe_fingerprint(workload(tmp_path, relative.replace("12", "11")), "server")
        != fingerprint
    )


def test_metrics_of_classes_add_up_to_the_total(tmp_path: Path) -> None:
    requested_workload = workload(tmp_path, seed="3")
    summary, folder = execute(
        requested_workload, Settings(url="sim:gb300-vm", out=tmp_path / "out")
    )
    rows = store.read_run(folder).rows
    of_class = seeds.draw_classes(3, list(SHARES.values()), rows["request"])
    assert [part.name for part in summary.classes] == list(SHARES)
    for index, (part, (input_tokens, output_tokens)) in enumerate(
        zip(summary.classes, LENGTHS.values(), strict=True)
    ):
        class_records = rows[of_class == index]
        assert part.requests.ok == len(class_records) > 50
        assert (part.tokens.input, part.tokens.output) == (
            len(class_records) * input_tokens,
            len(class_records) * output_tokens,
        )
        ttft = np.sort(class_records["first_token_ns"] - class_records["due_ns"])
        assert part.ttft_ms.p50 == ttft[len(class_records) // 2] / 1e6
    assert sum(part.requests.ok for part in summary.classes) == summary.requests.ok == 1500
    qa, rag, _, bystander = (part.goodput for part in summary.classes)
    assert (qa.met, bystander.met, rag.has_slo) == (True, False, False)
    total = summary.goodput
    assert (total.good, total.counted) == (qa.good, (qa.counted or 0) + (bystander.counted or 0))
    assert total.met is False and exit_code(summary) == 1
    assert total.rps == pytest.approx((qa.rps or 0) + (bystander.rps or 0))
    assert total.steady_rps == pytest.approx((qa.steady_rps or 0) + (bystander.steady_rps or 0))
    for name in (
        "offered_rps",
        "achieved_rps",
        "completed_rps",
        "steady_completed_rps",
    ):  # all over one time
        expected_total = getattr(summary.load, name)
        assert sum(getattr(part.load, name) for part in summary.classes) == pytest.approx(
            expected_total
        ), name

    lines = text.render(summary)
    assert "Request classes" in lines and "bystander" in lines and "MISSED" in lines
    assert re.search(r"^rag +25.0 % ", lines, flags=re.M)
    page = run_page.render(summary)
    assert 'id="classes"' in page and "rag-lora" in page


def test_an_slo_of_all_classes_is_the_slo_of_the_run(tmp_path: Path) -> None:
    plain = CLASSES.replace(", slo: {ttft: 500ms, at: p90}", "").replace(
        "    slo: {e2e: 1ms, at: p90}\n", ""
    )
    requested_workload = workload(
        tmp_path, plain, STAGES + "slo: {ttft: 500ms, at: p90}\n", seed="3", num_requests="400"
    )
    summary, _ = execute(requested_workload, Settings(url="sim:gb300-vm", out=tmp_path / "out"))

    assert summary.goodput.met and len(summary.goodput.slo) == 1
    assert sum(part.goodput.good or 0 for part in summary.classes) == summary.goodput.good == 400

    mixed = workload(
        tmp_path, CLASSES, STAGES + "slo: {ttft: 1ms, at: p90}\n", seed="3", num_requests="400"
    )
    summary, _ = execute(mixed, Settings(url="sim:gb300-vm", out=tmp_path / "out"))

    assert [part.goodput.slo[0].limit_ms for part in summary.classes] == [500, 1, 1, 1]


def test_limits_by_flag_that_no_class_is_judged_by_are_refused(tmp_path: Path) -> None:
    for flags in ({"slo": ("ttft:1s",)}, {"slo": ("attainment:99%",)}):
        with refused(CombinedError, "no_effect", "--slo"):
            load("mixed", read_flags(**flags))

    requested_workload = workload(
        tmp_path, slo=("ttft:1s",)
    )  # rag and summary have none of their own

    assert requested_workload.slo is not None and [
        term.metric for term in requested_workload.slo.terms
    ] == ["ttft"]


@pytest.mark.parametrize("objective", ["+ttft:3s", "+answers:95%"])
def test_a_copy_of_a_workload_without_slos_of_classes_takes_limits_by_flag(
    tmp_path: Path, objective: str
) -> None:
    """The hint of the refusal recommends such a copy."""
    questions = str(repository_paths.ROOT / "examples" / "questions.jsonl")
    flags = read_flags(slo=(objective,), check_answers=questions)
    with refused(CombinedError, "no_effect", "--slo"):
        load("mixed", flags)

    packaged_file = repository_paths.ROOT / "workloads" / "mixed.yaml"
    document = yaml.safe_load(packaged_file.read_text("utf-8"))
    for request_class in document["classes"].values():
        del request_class["slo"]
    copy = tmp_path / "copy.yaml"
    copy.write_text(yaml.safe_dump(document), "utf-8")
    changed_workload = load(str(copy), flags)

    assert changed_workload.slo is not None


@pytest.mark.processes
def test_the_server_counts_the_requested_tokens_of_each_class(tmp_path: Path) -> None:
    with start(Options(ttft="5ms", itl="0.1ms")) as endpoint:
        requested_workload = workload(tmp_path, seed="5", num_requests="80", request_rate="400")
        settings = Settings(
            url=endpoint.url,
            model="sim",
            server="trtllm",
            out=tmp_path / "out",
            api="completions",
            **NO_PAGES,
        )
        summary, folder = execute(requested_workload, structs.replace(settings, workers=2))
    rows = store.read_run(folder).rows
    class_indexes = seeds.draw_classes(5, list(SHARES.values()), rows["request"])
    lengths = np.array(list(LENGTHS.values()))[class_indexes]

    assert len(rows) == summary.requests.ok == 80
    assert (rows["output_tokens"] == lengths[:, 1]).all()
    assert (rows["built_tokens"] == lengths[:, 0]).all()
    manifest = msgspec.json.decode((folder / "run.json").read_bytes())
    assert [plan["share"] for plan in manifest["classes"]] == list(SHARES.values())
    assert manifest["shares_prompts"] is True


@pytest.mark.processes
def test_each_model_has_a_row_whose_counts_equal_those_of_the_server(tmp_path: Path) -> None:
    """Two classes ask for one adapter, one for another, one for the target's model."""
    requests = {"input_tokens": 8, "output_tokens": 2}
    models = {"a": "lora-1", "b": "lora-2", "c": "lora-1", "d": None}
    classes = {
        name: {"weight": weight, "requests": requests, **({"model": model} if model else {})}
        for weight, (name, model) in enumerate(models.items(), 1)
    }
    classes["a"] |= {"tenant": "acme", "headers": {"X-Gateway-Inference-Objective": "premium"}}
    classes["c"] |= {"tenant": "acme"}
    file = {
        "name": "w",
        "classes": classes,
        "slo": {"ttft": "5s"},
        "stages": [{"arrival": {"poisson": "100/s"}, "count": 60}],
        # The server answers at once, so that a busy host would withhold the maximum.
        "limits": {"stamp_error_share": "100%"},
    }
    with serving(STREAMED_RESPONSE) as server:
        settings = Settings(
            url=server.url,
            model="base",
            server="openai",
            out=tmp_path / "out",
            server_metrics=("off",),
        )
        summary, folder = execute(workload_from_mapping(file, read_flags(seed=2)), settings)
        of_load = [
            received_request
            for received_request in server.heard
            if received_request.body and "hello" not in str(received_request.body)
        ]
        heard = Counter(
            received_request.body["model"] for received_request in of_load if received_request.body
        )
        tenants = Counter(
            received_request.headers.get("x-gateway-inference-fairness-id")
            for received_request in of_load
        )
        premium = sum(
            received_request.headers.get("x-gateway-inference-objective") == "premium"
            for received_request in of_load
        )
    model_summaries_by_name = {part.model: part for part in summary.models}

    assert {model: part.requests.ok for model, part in model_summaries_by_name.items()} == dict(
        heard
    )
    assert {model: part.classes for model, part in model_summaries_by_name.items()} == {
        "lora-1": ("a", "c"),
        "lora-2": ("b",),
        "base": ("d",),
    }
    ok = [part.requests.ok for part in summary.classes]
    assert tenants == {"acme": ok[0] + ok[2], None: ok[1] + ok[3]} and premium == ok[0]
    assert summary.fairness is not None and summary.fairness.worst == ""
    assert {
        tenant_share.name: tenant_share.classes for tenant_share in summary.fairness.tenants
    } == {
        "acme": ("a", "c"),
        "b": ("b",),
        "d": ("d",),
    }
    assert summary.fairness.ok_index == summary.fairness.good_index == 1

    rows = store.read_run(folder).rows
    share = [plan.share for plan in store.read_run(folder).manifest.classes]
    class_indexes = seeds.draw_classes(2, share, rows["request"])
    for model, part in model_summaries_by_name.items():
        model_records = rows[
            np.isin(
                class_indexes,
                [place for place, name in enumerate(models) if (models[name] or "base") == model],
            )
        ]
        waits = np.sort(model_records["first_token_ns"] - model_records["due_ns"]) / 1e6
        assert part.ttft_ms.max == pytest.approx(waits[-1])
        assert part.ttft_ms.count == len(waits) == part.goodput.good
        assert part.tokens.output == 2 * len(model_records) and part.load.completed_rps

    assert sum(part.load.completed_rps or 0 for part in summary.models) == pytest.approx(
        summary.load.completed_rps
    )
    assert "\nmodel " in text.render(summary) and "lora-1 (a, c)" in run_page.render(summary)
    assert run_folder.open_run(folder).summary.models == summary.models


def test_runs_are_compared_class_by_class(tmp_path: Path) -> None:
    sides = []
    for name, preset in (("a", "gb300-vm"), ("b", "h100x8")):
        requested_workload = workload(tmp_path, seed="3", request_rate="8")
        _, folder = execute(requested_workload, Settings(url=f"sim:{preset}", out=tmp_path / name))
        sides.append(Side(name=name, runs=(load_compared_run(folder),)))
    differences_by_name = {
        difference.metric: difference for difference in compare(sides).differences
    }
    alone = {
        difference.metric
        for difference in compare([sides[0], sides[0]]).differences
        if difference.change
    }

    assert not alone

    for index, name in enumerate(SHARES):
        class_difference = differences_by_name[f"classes.{name}.ttft_ms.p50"]
        assert class_difference.name == f"{name}: TTFT p50"
        assert (class_difference.before, class_difference.after) == tuple(
            side.runs[0].summary.classes[index].ttft_ms.p50 for side in sides
        )

    assert differences_by_name["classes.qa.tpot_ms.p50"].detailed_outcome == "these two runs differ"
    assert (
        differences_by_name["classes.qa.goodput.share"].is_fraction
        and "classes.rag.goodput.share" not in differences_by_name
    )


def test_a_contract_term_of_a_class_is_judged_by_its_requests_only(tmp_path: Path) -> None:
    workload(
        tmp_path, CLASSES.replace("e2e: 1ms", "e2e: 9s"), STAGES + "slo: {ttft: 5s, at: p90}\n"
    )
    contract = tmp_path / "contract.yaml"
    contract.write_text(
        "name: c\n"
        "horizon: 1s\n"
        "levels:\n"
        "- {name: one, workload: mix.yaml, rate: 8/s, duration: 400s, must: [\n"
        "  {e2e: {limit: 9s, at: p50, class: summary}}, {ttft: {limit: 1ms, at: p50, class: qa}},\n"
        "  {goodput: {share: 80%, class: qa}}, {errors: {limit: 1%, class: rag}},\n"
        "  {slowdown: {level: two, of: ttft, limit: 1.5x, class: qa}}, "
        "{slowdown: {level: two, of: ttft, limit: 5x, class: rag}}]}\n"
        "- {name: two, workload: mix.yaml, rate: 8/s, duration: 400s, must: [fairness: 90%]}\n"
    )
    settings = Settings(url="sim:gb300-vm")
    options = ValidationOptions(execute=execute, show_status=str, seed=3)
    validation, _ = run_validation(load_contract(contract), settings, tmp_path / "out", options)
    terms = validation.levels[0].terms

    assert [term.verdict for term in terms] == ["PASS", "FAIL", *["PASS"] * 4], [
        t.reason for t in terms
    ]
    assert [
        (term_verdict.term, term_verdict.verdict) for term_verdict in validation.levels[1].terms
    ] == [("Jain's index over tenants at least 90.0 %", "PASS")], validation.levels[1].terms
    assert "1.5x that of two" in terms[4].term and terms[4].sample == terms[1].sample
    assert terms[0].term.startswith("e2e at p50 within 9.0 s")
    assert terms[0].sample < terms[1].sample / 3
    contract.write_text(contract.read_text().replace("class: rag", "class: rga"))
    with refused(CombinedError, "unknown_name", "levels[0].must[3]") as exc_info:
        load_contract(contract)
    assert 'did you mean "rag"?' in str(exc_info.value)


@pytest.mark.processes
def test_a_class_from_a_trace_has_its_weight_lengths_and_times(
    tmp_path: Path,
) -> None:
    rows = [
        {"timestamp": 50 * i, "input_length": 30 + i, "output_length": 3 + i % 5} for i in range(40)
    ]
    (tmp_path / "traffic.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "w.yaml").write_text(
        "name: w\nclasses:\n  chat: {weight: 60%, requests: {input_tokens: 25, output_tokens: 9}}\n"
        "  traffic: {weight: 40%, requests: {trace: traffic.jsonl}}\n"
        "stages: [{arrival: {poisson: 80/s}, count: 120}]\n"
    )
    requested_workload = load(str(tmp_path / "w.yaml"), read_flags(seed="5"))
    with start(Options(ttft="1ms", itl="0.2ms", log_events="ends")) as server:
        summary, folder = execute(
            requested_workload, Settings(url=server.url, out=tmp_path / "out", **NO_PAGES)
        )
        log = parse_log(urllib.request.urlopen(server.url + "/_log").read())
    built_prompts: Any = build_prompts(requested_workload, 5, 1, load_tokenizer())
    due_ns = build_schedule(requested_workload, 5).columns().due_ns
    heard = {int(entry.id.rpartition("-")[2]): entry for entry in log.requests if "-" in entry.id}

    assert sorted(heard) == list(range(120))
    of_trace = [number for number in heard if built_prompts.class_and_id(number)[0] == 1]
    assert abs(len(of_trace) - 48) < 3 * (120 * 0.4 * 0.6) ** 0.5
    assert [part.starts for part in summary.classes] == [120 - len(of_trace), len(of_trace)]

    for number, entry in heard.items():
        row = rows[number % len(rows)]
        expected_lengths = (
            (row["input_length"], row["output_length"]) if number in of_trace else (25, 9)
        )
        assert (entry.input_tokens, entry.output_tokens) == expected_lengths, (
            "the server's count, template and all"
        )
    sent = {int(row["slot"]): row for row in store.read_run(folder).rows}

    assert all(sent[number]["due_ns"] == due_ns[number] for number in heard), (
        "by the law, not the instants of the trace"
    )

    first = min(heard)
    ahead_ns = (
        heard[first].arrival_ns
        - due_ns[first]
        - int(sent[first]["sent_ns"] - sent[first]["due_ns"])
    )

    assert all(
        entry.arrival_ns - ahead_ns > due_ns[number] - 100_000_000
        for number, entry in heard.items()
    ), "early"


def test_slo_headers_state_the_objectives_of_each_class(tmp_path: Path) -> None:
    """That of its class, or of the workload; a header that the class writes stands over it."""
    single_class = {"requests": {"input_tokens": 8, "output_tokens": 2}}
    classes = {
        "a": single_class | {"weight": 1, "headers": {"X-SLO-TTFT-ms": "7"}},
        "b": single_class | {"weight": 2, "slo": {"ttft": "0.3s", "tpot": "12.5ms"}},
        "c": single_class | {"weight": 3},
    }
    file = {
        "name": "w",
        "slo": {"ttft": "1.5s"},
        "stages": [{"arrival": {"poisson": "200/s"}, "count": 20}],
    }

    def run_with_classes(
        class_fields: dict[str, Any], out: str
    ) -> tuple[Counter[tuple[str, ...]], Summary]:
        with serving(STREAMED_RESPONSE) as server:
            settings = Settings(
                url=server.url,
                model="m",
                server="openai",
                out=tmp_path / out,
                server_metrics=("off",),
                slo_headers=True,
            )
            summary, folder = execute(
                workload_from_mapping(file | class_fields, read_flags(seed=2)), settings
            )
            assert store.read_run(folder).manifest.slo_headers
            names = ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-slo-tpot-ms", "x-llm-d-slo-tpot-ms")
            received_requests = [
                tuple(received_request.headers.get(name, "") for name in names)
                for received_request in server.heard
            ]
        return Counter(each for each in received_requests if any(each)), summary

    slos, summary = run_with_classes({"classes": classes}, "classes")
    sent = {part.name: part.requests.ok for part in summary.classes}
    assert slos == {
        ("7", "1500", "", ""): sent["a"],
        ("300", "300", "12.5", "12.5"): sent["b"],
        ("1500", "1500", "", ""): sent["c"],
    }
    assert run_with_classes(single_class, "alone")[0] == {("1500", "1500", "", ""): 20}
    with pytest.raises(CombinedError, match="no TTFT or TPOT objective"):
        run_with_classes(single_class | {"slo": {"e2e": "1s"}}, "none")
