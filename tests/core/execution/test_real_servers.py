"""Optional suite of real servers, which are listed in `real_servers.py`.

Run it with `LOADGEN_SERVERS=DIR pytest -n 0 -m real_servers`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loadgen_sdk.wire_formats.server_profiles import SERVER_PROFILES
from pyarrow import parquet
from real_servers import BY_NAME, HOME, ROWS, Started, filled, lacks, started
from test_run import rows_written

LOADGEN = [sys.executable, "-P", "-m", "loadgen"]
LOAD = ("--isl", "50", "--osl", "20", "--warmup", "0", "--timeout", "60s")
FEW = ("-n", "8", "-c", "2", "--osl", "16", "--warmup", "0", "--timeout", "120s")
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}},
            "required": ["word"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,  # random weights go on as long as they may
}

pytestmark = [pytest.mark.optional, pytest.mark.processes, pytest.mark.real_servers]


@pytest.fixture(scope="module", params=ROWS, ids=lambda row: row.name)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    if missing := lacks(request.param) or (
        request.param.behind and lacks(BY_NAME[request.param.behind])
    ):
        pytest.skip(f"{request.param.name}: {missing}")
    with started(request.param, tmp_path_factory.mktemp("server")) as started_server:
        yield started_server


def needs(server: Started, word: str) -> None:
    if word not in server.row.can:
        pytest.skip(f"{server.row.name} cannot: {word}")


def target(server: Started, options: tuple[str, ...] = ()) -> list[str]:
    return [
        "--url",
        server.url,
        "--tokenizer",
        str(HOME / "model/tokenizer.json"),
        *(() if "--model" in options else server.flags),
    ]


def begun(server: Started, out: Path, *flags: str) -> subprocess.Popen[str]:
    command = [*LOADGEN, "run", "qa", *target(server, flags), *LOAD, *flags, "-o", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_loadgen(*arguments: str, codes: tuple[int, ...] = (0, 1, 3)) -> str:
    """Run `loadgen` and return its output. The exit code must be one of `codes`."""
    process = subprocess.run(
        [*LOADGEN, *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    assert process.returncode in codes, (
        f"{process.returncode}: {process.stdout[-3000:]}{process.stderr[-3000:]}"
    )
    assert "Traceback" not in process.stderr
    return process.stdout


def ran(
    server: Started, out: Path, workload: str, *flags: str, codes: tuple[int, ...] = (0, 1, 3)
) -> dict[str, Any]:
    """Run a workload and return its summary."""
    run_loadgen(
        "run", workload, *target(server), *flags, "--progress", "off", "-o", str(out), codes=codes
    )
    document: dict[str, Any] = json.loads((out / "summary.json").read_bytes())
    return document


def requests(out: Path) -> dict[str, Any]:
    counts: dict[str, Any] = json.loads((out / "summary.json").read_bytes())["requests"]
    parts = ("ok", "failed", "dropped", "cancelled", "unfinished", "lost")
    assert sum(counts[part] for part in parts) == counts["scheduled"]
    return counts


def rows(out: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = parquet.read_table(out / "requests").to_pylist()
    return records


def test_doctor_detects_the_server(server: Started) -> None:
    if "limits" in server.row.can:
        pytest.skip("it refuses so many questions")
    document = json.loads(run_loadgen("doctor", *target(server), "--json", codes=(0, 1)))
    findings_by_check = {finding["check"]: finding for finding in document["findings"]}

    assert (
        findings_by_check["make"]["found"].startswith(SERVER_PROFILES[server.row.kind].title)
        or server.row.kind == "generic"
    )
    assert findings_by_check["model"]["state"] in ("ok", "note")
    if "exact" in server.row.can:
        assert findings_by_check["length"]["state"] == "ok", findings_by_check["length"]
    assert not [finding for finding in document["findings"] if finding["state"] == "problem"]


def test_a_run_completes_on_a_real_server(server: Started, tmp_path: Path) -> None:
    """Every request answered, and answers as long as asked where the server can be made to."""
    if "limits" in server.row.can:
        ran(server, tmp_path / "out", "qa", *LOAD, "--request-rate", "40", "-n", "60", codes=(1, 3))
        counts = requests(tmp_path / "out")
        assert counts["ok"] >= 5 and counts["by_error"]["http_5xx"]["count"] == counts["failed"] > 0
        return
    document = ran(server, tmp_path / "out", "qa", *LOAD, "-c", "4", "-n", "24")

    assert requests(tmp_path / "out")["ok"] == 24
    counted = "events" if "no usage" in server.row.can else "server"
    assert document["tokens"]["sources"]["output"] == {counted: 24}
    if "exact" in server.row.can:
        assert document["tokens"]["output"] == 24 * 20
        assert {row["finish_reason"] for row in rows(tmp_path / "out")} == {"length"}


def test_a_gateway_that_buffers_events_is_reported(server: Started, tmp_path: Path) -> None:
    needs(server, "holds")
    document = json.loads(run_loadgen("doctor", *target(server), "--json", codes=(0, 1)))
    (finding,) = [
        reported_finding
        for reported_finding in document["findings"]
        if reported_finding["check"] == "streaming"
    ]

    assert finding["state"] == "warning" and "TTFT is late" in finding["meaning"], finding
    stored_document = ran(server, tmp_path / "out", "qa", *LOAD, "-c", "2", "-n", "24")
    assert any("TTFT may hold" in caveat for caveat in stored_document["verdict"]["caveats"]), (
        stored_document["verdict"]
    )


@pytest.mark.parametrize("profile", ["qa", "rag", "summarization", "agentic", "coding-agent"])
def test_each_packaged_workload_runs_on_a_real_server(
    server: Started, tmp_path: Path, profile: str
) -> None:
    """Agents' long contexts are included; their prefixes come from the cache if there is one."""
    needs(server, "profiles")
    few = {
        "agentic": ("-n", "2", *FEW[2:]),
        "coding-agent": ("-n", "1", "-c", "1", "--warmup", "0"),
    }.get(profile, FEW)
    document = ran(server, tmp_path / "out", profile, *few)

    assert requests(tmp_path / "out")["failed"] == 0

    if profile == "agentic" and "cached" in server.row.can:
        later = [row for row in rows(tmp_path / "out") if row["turn"] > 0]
        assert later
        for row in later:  # the conversation before it was in the cache, save a last block
            assert 0.4 * row["input_tokens"] < row["cached_tokens"] <= row["input_tokens"], row
        assert document["tokens"]["cached"] == sum(
            row["cached_tokens"] for row in rows(tmp_path / "out")
        )


def buckets(out: Path, name: str) -> tuple[dict[float, float], dict[float, float]]:
    """Return the counts of a histogram by upper bound in seconds, before and after the load."""
    read: dict[tuple[str, str], list[float]] = {}
    for line in (out / "server.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row.get("name") == f"{name}_bucket":
            read.setdefault((row["page"], row["labels"]), []).append(row["value"])
    before, after = dict[float, float](), dict[float, float]()
    for (_, labels), values in read.items():
        limit = float(labels.split('le="')[1].split('"')[0])
        before[limit] = before.get(limit, 0.0) + values[0]
        after[limit] = after.get(limit, 0.0) + values[-1]
    return before, after


def around_the_middle(before: dict[float, float], after: dict[float, float]) -> tuple[float, float]:
    """Return the range in seconds in which a median can lie, with the neighbouring buckets."""
    limits = sorted(after)
    counts = [after[limit] - before.get(limit, 0.0) for limit in limits]
    middle = next(i for i, count in enumerate(counts) if count >= counts[-1] / 2)
    return (limits[middle - 2] if middle > 1 else 0.0), limits[min(middle + 1, len(limits) - 1)]


def test_metrics_agree_with_those_of_the_server(server: Started, tmp_path: Path) -> None:
    """Token counts, TTFT and TPOT are compared with the server's own metrics."""
    needs(server, "counters")
    ran(
        server, tmp_path / "first", "qa", *LOAD, "-c", "1", "-n", "1"
    )  # a counter is on the page when it has counted
    document = ran(server, tmp_path / "out", "agentic", "-n", "6", *FEW[2:])
    their_server = document["server"]
    ours = {f"{part}_tokens": document["tokens"][part] for part in ("input", "output", "cached")}
    if server.row.kind == "llamacpp":  # it counts the prompt tokens that it computed
        ours["input_tokens"] -= ours["cached_tokens"]
    shared_names = {
        name for name in ours if their_server[name] is not None and ours[name] is not None
    }

    assert {name: their_server[name] for name in shared_names} == {
        name: ours[name] for name in shared_names
    }
    assert their_server["input_tokens"] and their_server["output_tokens"]

    for metric, histogram in server.row.histograms:
        low, high = around_the_middle(*buckets(tmp_path / "out", histogram))
        assert document[metric] and document[metric]["p50"] is not None, (
            f"{metric} withheld: {document['verdict']['reasons']}"
        )
        assert low <= document[metric]["p50"] / 1e3 <= high, metric


def test_streamed_tool_calls_are_measured(server: Started, tmp_path: Path) -> None:
    needs(server, "tools")
    data = tmp_path / "tools.jsonl"
    data_row = {
        "messages": [{"role": "user", "content": "Look up river."}],
        "max_tokens": 24,
        "tools": [TOOL],
    }
    choices: list[dict[str, Any]] = (
        [{}] if server.row.kind != "llamacpp" else [{}, {"tool_choice": "required"}]
    )
    data.write_text(
        "".join(json.dumps(data_row | choice) + "\n" for choice in choices for _ in range(3))
    )
    ran(
        server,
        tmp_path / "out",
        "qa",
        "--dataset",
        str(data),
        "-c",
        "2",
        "-n",
        str(3 * len(choices)),
        "--warmup",
        "0",
    )

    assert requests(tmp_path / "out")["failed"] == 0
    assert all(
        row["output_tokens"] > 0 and row["output_events"] > 0 for row in rows(tmp_path / "out")
    )


def test_structured_output_is_valid_json(server: Started, tmp_path: Path) -> None:
    needs(server, "schema")
    data = tmp_path / "schema.jsonl"
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    row = {
        "messages": [{"role": "user", "content": "Is it?"}],
        "max_tokens": 40,
        "response_format": form,
    }
    data.write_text((json.dumps(row) + "\n") * 4)
    arguments = [
        "answers",
        str(data),
        "--url",
        server.url,
        *server.flags,
        "--keep-content",
        "-c",
        "2",
    ]
    run_loadgen(*arguments, "-o", str(tmp_path / "out"))
    texts = [
        json.loads(line)["a"] for line in (tmp_path / "out/texts.jsonl").read_text().splitlines()
    ]

    assert [type(json.loads(text)["yes"]) for text in texts] == [bool] * 4


def test_a_short_search_ends_with_a_result(server: Started, tmp_path: Path) -> None:
    """Short probes: it ends, with a load or with the reason why there is none."""
    needs(server, "exact")
    arguments = [
        "search",
        "qa",
        *target(server),
        "--isl",
        "20",
        "--osl",
        "8",
        "--over",
        "concurrency",
        "--low",
        "1",
    ]
    arguments += [
        "--high",
        "8",
        "-d",
        "4s",
        "--max-probes",
        "4",
        "--no-sustain",
        "--slo",
        "ttft:2s:p50",
    ]
    run_loadgen(*arguments, "-o", str(tmp_path / "out"))

    assert (tmp_path / "out/probes.jsonl").read_text()


def test_a_dry_run_plans_a_contract_for_a_real_server(server: Started) -> None:
    run_loadgen("validate", "chatbot", *target(server), "--dry-run")


def test_an_overload_is_explained_by_a_queue(server: Started, tmp_path: Path) -> None:
    """Far more than it answers at once: the later requests wait, and the report says for what."""
    needs(server, "slots")
    flags = (
        "--isl",
        "20",
        "--osl",
        "24",
        "--request-rate",
        "200",
        "-n",
        "240",
        "--warmup",
        "0",
        "--timeout",
        "200s",
    )
    document = ran(server, tmp_path / "out", "qa", *flags, "--server-timing")

    assert requests(tmp_path / "out")["failed"] == 0
    assert [cause["code"] for cause in document["causes"]["causes"]] == ["queue"], document[
        "causes"
    ]


def test_an_interrupted_run_drains_and_reports(server: Started, tmp_path: Path) -> None:
    process = begun(server, tmp_path / "out", "-c", "4", "-n", "4000")
    rows_written(tmp_path, 4, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    counts = requests(tmp_path / "out")
    assert process.returncode == 130, err
    assert counts["failed"] == 0 or "limits" in server.row.can, err
    assert counts["ok"] >= 4


def test_an_unknown_model_is_refused_or_reported(server: Started, tmp_path: Path) -> None:
    process = begun(
        server, tmp_path / "out", "-c", "1", "-n", "2", "--model", "no-such-model-anywhere"
    )
    _, err = process.communicate(timeout=120)
    assert "bug" not in err and "Traceback" not in err
    assert process.returncode == 3 or "accepts any model name" in err, err


def test_a_prompt_above_the_context_length_is_counted_and_never_hangs(
    server: Started, tmp_path: Path
) -> None:
    """A prompt that is too long is refused or cut by the server, and never hangs."""
    process = begun(
        server, tmp_path / "out", "-c", "2", "-n", "4", "--isl", "140000", "--timeout", "90s"
    )
    _, err = process.communicate(timeout=400)
    assert process.returncode in (0, 1, 2, 3), err
    assert "bug" not in err
    if (tmp_path / "out" / "summary.json").exists():
        assert requests(tmp_path / "out")["scheduled"] == 4


def test_a_server_that_restarts_has_failed_and_successful_requests(
    server: Started, tmp_path: Path
) -> None:
    process = begun(
        server,
        tmp_path / "out",
        "--request-rate",
        "10",
        "-d",
        "20s",
        "--set",
        "on_target_failure=continue",
    )
    rows_written(tmp_path, 20, process)
    server.kill()
    ended = rows_written(tmp_path, 0)
    rows_written(
        tmp_path, ended + 20, process
    )  # a proxy is back at once: more than the 16 that can be in flight meet none
    server.start()
    _, err = process.communicate(timeout=300)

    assert process.returncode != 2 and (tmp_path / "out" / "summary.json").exists(), err
    counts = requests(tmp_path / "out")
    assert counts["ok"] > 0 and counts["failed"] > 0, err
    assert set(counts["by_error"]) <= {
        "connect",
        "reset",
        "truncated",
        "http_5xx",
        "http_4xx",
        "timeout_total",
    }


def test_responses_of_another_precision_differ_from_the_reference(tmp_path: Path) -> None:
    """Responses in float32 are the reference: bfloat16 differs from them, float32 does not."""
    row = BY_NAME["transformers"]
    if missing := lacks(row):
        pytest.skip(missing)

    def as_(precision: str) -> Any:
        return started(
            row._replace(start=(f"{row.start[0]} --dtype {precision}",)), tmp_path / precision
        )

    with as_("float32") as exact, as_("bfloat16") as rounded:
        prompts = [
            {"prompt": f"Write about river and stone, number {i}.", "max_tokens": 48}
            for i in range(60)
        ]

        def answers(name: str, url: str, *flags: str) -> int:
            data = tmp_path / f"{name}.jsonl"
            data.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
            model = [filled(row, flag) for flag in row.flags]
            command = [*LOADGEN, "answers", str(data), "--url", url, *model, *flags, "-c", "4"]
            command += ["-o", str(tmp_path / name)]
            return subprocess.run(command, check=False, timeout=600).returncode

        assert answers("references", exact.url, "--keep-content") == 0
        texts = [
            json.loads(line)["a"]
            for line in (tmp_path / "references/texts.jsonl").read_text().splitlines()
        ]
        prompts = [
            {**row, "reference": text} for row, text in zip(prompts, texts, strict=True) if text
        ]
        assert answers("rounded", rounded.url, "--against", exact.url, "--within", "10%") == 1
        assert answers("same", exact.url, "--against", exact.url, "--within", "10%") == 0
