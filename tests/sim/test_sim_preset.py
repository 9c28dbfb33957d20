"""A simulated server with a preset over HTTP: pages, cache, refusals, several processes."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from expected_errors import refused
from servers import start

from loadgen.core.errors import TargetError
from loadgen.sim.server import embedded
from loadgen.sim.server.embedded import EmbeddedServer
from loadgen.sim.server.options import Options

PRESET_TEXT = """
extends: gb300-vm
gpus_per_vm: 2
hardware: {overhead_ms: 0.2, bandwidth_tb_s: 400, peak_tflops: 900000}
server: {max_seq_len: 2048}
"""  # a machine that no test has to wait for


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> str:
    preset_file = tmp_path_factory.mktemp("preset") / "quick.yaml"
    preset_file.write_text(PRESET_TEXT)
    return str(preset_file)


@pytest.fixture(scope="module")
def endpoint(quick: str) -> Iterator[EmbeddedServer]:
    with start(Options(preset=quick)) as server:
        yield server


def ask(
    endpoint: EmbeddedServer, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    host, port = endpoint.url.split("//")[1].split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(
            method, path, data, {name.replace("_", "-"): value for name, value in headers.items()}
        )
        answer = connection.getresponse()
        return (
            answer.status,
            {name.lower(): value for name, value in answer.getheaders()},
            answer.read(),
        )
    finally:
        connection.close()


def completion(prompt: str, tokens: int = 4, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **fields}


def text_of_tokens(n: int, word: str = "token") -> str:
    return (
        f" {word}" * n
    )  # six bytes a token with five letters: blocks are cut where the cache says they are


@pytest.mark.processes
def test_a_repeated_prompt_hits_the_cache_of_its_replica(endpoint: EmbeddedServer) -> None:
    cached = []
    for _ in range(3):  # round robin over two replicas: the third comes to the first one's cache
        body = completion(
            text_of_tokens(320), 5, stream=True, stream_options={"include_usage": True}
        )
        status, _, data = ask(endpoint, "POST", "/v1/completions", body)
        events = [
            json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: {")
        ]
        usage = events[-1]["usage"]
        assert status == 200 and (usage["prompt_tokens"], usage["completion_tokens"]) == (320, 5)
        assert len([event for event in events if event["choices"]]) == 5
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    row = json.loads(ask(endpoint, "GET", "/metrics")[2])[-1]["kvCacheStats"]

    assert (row["reusedBlocks"], row["missedBlocks"]) == (9, 11)
    assert cached == [0, 0, 288]  # nine blocks of 32: the tenth is computed for its logits


@pytest.mark.processes
def test_reading_metrics_empties_the_iteration_statistics(endpoint: EmbeddedServer) -> None:
    ask(endpoint, "GET", "/metrics")
    ask(endpoint, "POST", "/v1/completions", completion(" drained", 7))
    rows = json.loads(ask(endpoint, "GET", "/metrics")[2])

    assert len(rows) == 7 and [row["numCompletedRequests"] for row in rows] == [0] * 6 + [1]
    assert [row["inflightBatchingStats"]["numContextRequests"] for row in rows] == [1] + [0] * 6
    assert all(
        row["iterLatencyMS"] > 0.2 and row["kvCacheStats"]["tokensPerBlock"] == 32 for row in rows
    )
    assert json.loads(ask(endpoint, "GET", "/metrics")[2]) == []


@pytest.mark.processes
def test_the_prometheus_page_counts_answered_and_refused_requests(endpoint: EmbeddedServer) -> None:
    def value(name: str) -> float:
        text = ask(endpoint, "GET", "/prometheus/metrics")[2].decode()
        return sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith(f"trtllm_{name}{{")
        )

    names = ("generation_tokens_total", "request_error_total", "e2e_request_latency_seconds_count")
    before = [value(name) for name in names]
    ask(endpoint, "POST", "/v1/completions", completion(" counted", 9))
    status, _, body = ask(endpoint, "POST", "/v1/completions", completion(text_of_tokens(2048), 9))
    assert status == 400 and b"should not exceed max_num_tokens (2048)" in body
    assert [value(name) - was for name, was in zip(names, before, strict=True)] == [9, 1, 1]


@pytest.mark.processes
def test_the_output_is_clamped_to_the_context_length(endpoint: EmbeddedServer) -> None:
    body = json.loads(
        ask(endpoint, "POST", "/v1/completions", completion(text_of_tokens(2000), 500))[2]
    )
    assert body["usage"]["completion_tokens"] == 48


@pytest.mark.processes
@pytest.mark.parametrize(
    ("version", "with_answer"), [("1.2.0", False), ("1.3.0rc2", True), ("2.0", True)]
)
def test_the_server_version_determines_where_timings_are_reported(
    quick: str, version: str, with_answer: bool
) -> None:
    with start(Options(preset=quick, version=version)) as server:
        assert json.loads(ask(server, "GET", "/version")[2]) == {"version": version}

        body = completion(" timed", 3)
        _, headers, _ = ask(server, "POST", "/v1/completions", body, X_TRTLLM_return_metrics="1")
        assert ("server-timing" in headers) is with_answer

        if with_answer:
            assert ask(server, "GET", "/perf_metrics")[0] == 404
            return
        [record] = json.loads(ask(server, "GET", "/perf_metrics")[2])
        timing = record["perf_metrics"]["timing_metrics"]

        assert timing["arrival_time"] <= timing["first_scheduled_time"] < timing["first_token_time"]
        assert timing["first_token_time"] < timing["last_token_time"]
        assert json.loads(ask(server, "GET", "/perf_metrics")[2]) == []


@pytest.mark.processes
def test_several_processes_share_a_port_and_the_replicas(quick: str) -> None:
    with embedded.start(Options(preset=quick, cores=2)) as server:
        served = set()
        for _ in range(40):  # the kernel deals connections out
            assert ask(server, "POST", "/v1/completions", completion(" shared", 2))[0] == 200
            served.add(ask(server, "GET", "/_stats")[2].split(b'"cpu_s"')[0])
        assert len(served) > 2


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"preset": "gb900"}, "unknown_name"),
        ({"preset": "QUICK", "cores": 3}, "out_of_range"),
        ({"preset": "QUICK", "version": "latest"}, "invalid_value"),
    ],
)
@pytest.mark.processes
def test_invalid_server_options_are_reported_at_start(
    quick: str, options: dict[str, Any], code: str
) -> None:
    if options["preset"] == "QUICK":
        options = options | {"preset": quick}
    with refused(TargetError, code):
        embedded.start(Options(**options))
    assert Path(quick).exists()
