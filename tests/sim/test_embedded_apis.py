"""Embeddings, rerank and responses of the simulated server, over HTTP and in virtual time."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_fixtures import NO_PAGES
from servers import start
from test_apis import SHORT, workload
from test_sim_server import FAST, ask

from loadgen.core.errors import LoadgenError
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute
from loadgen.core.metrics.summary import Summary
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.prompts import PromptTarget
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.sim.engine.fleet import Fleet
from loadgen.sim.presets.preset import load_preset
from loadgen.sim.server.embedded import EmbeddedServer
from loadgen.sim.server.options import Options

RANKED = {"input_tokens": 6_100, "output_tokens": 1, "chunks": {"count": 20, "tokens": 300}}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EmbeddedServer]:
    with start(Options(**FAST, max_seq_len=64)) as server:
        yield server


def post_json(endpoint: EmbeddedServer, path: str, **body: Any) -> tuple[int, Any]:
    status, _, pieces = ask(endpoint, path, {"model": "m", **body})
    return status, json.loads(b"".join(pieces))


@pytest.mark.processes
def test_embeddings_accept_texts_and_token_ids(endpoint: EmbeddedServer) -> None:
    status, answer = post_json(
        endpoint, "/v1/embeddings", input=["a b c", "d", "a b c"], dimensions=8
    )
    vectors = [row["embedding"] for row in answer["data"]]

    assert (status, answer["usage"]) == (200, {"prompt_tokens": 7, "total_tokens": 7})
    assert [row["index"] for row in answer["data"]] == [0, 1, 2] and vectors[0] == vectors[
        2
    ] != vectors[1]
    assert sum(value * value for value in vectors[0]) == pytest.approx(1, abs=1e-5)

    _, packed = post_json(
        endpoint, "/v1/embeddings", input="a b c", dimensions=8, encoding_format="base64"
    )

    assert struct.unpack("<8f", base64.b64decode(packed["data"][0]["embedding"])) == pytest.approx(
        vectors[0], abs=1e-6
    )
    assert post_json(endpoint, "/v1/embeddings", input=[5, 6, 7])[1]["usage"]["prompt_tokens"] == 3
    assert len(post_json(endpoint, "/v1/embeddings", input="a")[1]["data"][0]["embedding"]) == 1024


@pytest.mark.processes
@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_rerank_counts_the_query_with_each_document(endpoint: EmbeddedServer, path: str) -> None:
    documents = ["x y", {"text": "z"}, "one two three"]
    status, answer = post_json(endpoint, path, query="a b", documents=documents, top_n=2)
    assert (status, answer["usage"]["total_tokens"]) == (200, 3 * 2 + 6)
    best, second = answer["results"]
    assert best["relevance_score"] >= second["relevance_score"]
    assert best["document"]["text"] == ["x y", "z", "one two three"][best["index"]]
    _, bare = post_json(endpoint, path, query="a b", documents=documents, return_documents=False)
    assert len(bare["results"]) == 3 and "document" not in bare["results"][0]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": []}),
        ("/v1/embeddings", {"input": ["a", 3]}),
        ("/v1/embeddings", {"input": "a " * 70}),  # longer than the context
        ("/v1/embeddings", {"input": "a", "max_tokens": 3}),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}),
        ("/v1/rerank", {"query": "a", "documents": []}),
        ("/v1/rerank", {"query": "a"}),
        ("/v1/responses", {"input": ""}),
        ("/v1/responses", {"input": "a", "max_tokens": 3}),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_of_nobody"}),
    ],
)
def test_each_api_of_the_embedded_server_refuses_invalid_requests(
    endpoint: EmbeddedServer, path: str, body: dict[str, Any]
) -> None:
    assert post_json(endpoint, path, **body)[0] == 400


@pytest.mark.processes
def test_a_response_continues_a_previous_response(endpoint: EmbeddedServer) -> None:
    _, first = post_json(endpoint, "/v1/responses", input="hello there", max_output_tokens=3)

    assert (first["status"], first["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )

    usage = first["usage"]
    _, second = post_json(
        endpoint,
        "/v1/responses",
        input=[{"role": "user", "content": "go on"}],
        max_output_tokens=2,
        previous_response_id=first["id"],
    )

    assert second["usage"]["input_tokens"] == usage["input_tokens"] + usage["output_tokens"] + 2
    _, unstored = post_json(endpoint, "/v1/responses", input="hello", store=False)
    assert (
        post_json(endpoint, "/v1/responses", input="on", previous_response_id=unstored["id"])[0]
        == 400
    )


@pytest.mark.processes
def test_a_streamed_response_has_numbered_events_and_the_text_of_a_complete_one(
    endpoint: EmbeddedServer,
) -> None:
    body = {"model": "m", "input": "tell me", "max_output_tokens": 5}
    _, _, chunks = ask(endpoint, "/v1/responses", {**body, "stream": True})
    events = [json.loads(chunk.partition(b"data: ")[2]) for chunk in chunks]

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.incomplete"

    text = "".join(
        event["delta"] for event in events if event["type"] == "response.output_text.delta"
    )
    full_response = post_json(
        endpoint, "/v1/responses", **{key: value for key, value in body.items() if key != "model"}
    )[1]

    assert (
        text
        == full_response["output"][0]["content"][0]["text"]
        == events[-1]["response"]["output"][0]["content"][0]["text"]
    )


def simulated(
    api: Any, requests: dict[str, Any], folder: Path, count: int = 40, **more: Any
) -> Summary:
    settings = Settings(url="sim:gb300-vm", api=api, stream=api == "responses", out=folder)
    return execute(workload(requests, count, **more), settings)[0]


def test_embeddings_in_virtual_time_take_their_prefill_time(tmp_path: Path) -> None:
    embedded = simulated("embeddings", {"input_tokens": 1_000, "output_tokens": 9}, tmp_path / "e")
    ranked = simulated("rerank", RANKED, tmp_path / "r")

    for summary in (embedded, ranked):
        assert (
            summary.requests.ok,
            summary.tokens.output,
            summary.ttft_ms.count,
            summary.e2e_ms.count,
        ) == (
            40,
            0,
            0,
            40,
        )
        assert "asked_length" not in [code.code for code in summary.verdict.warning_codes]
    assert (embedded.tokens.input, ranked.tokens.input) == (40 * 1_000, 40 * 20 * 400)
    assert 20 < (embedded.e2e_ms.min or 0) < 100 < (ranked.e2e_ms.min or 0)
    assert (
        simulated("embeddings", {"input_tokens": 1_000, "output_tokens": 9}, tmp_path / "e2").e2e_ms
        == embedded.e2e_ms
    )


def test_an_embeddings_request_that_times_out_has_one_record(tmp_path: Path) -> None:
    summary = simulated("rerank", RANKED, tmp_path / "r", 40, timeout="60ms")

    assert summary.requests.failed == summary.requests.scheduled == 40
    assert list(summary.requests.by_error) == ["timeout_total"]
    assert (
        simulated(
            "embeddings", {"input_tokens": 5_000, "output_tokens": 1}, tmp_path / "e"
        ).requests.failed
        == 40
    )


def test_sequences_of_one_request_share_a_replica_and_an_iteration() -> None:
    preset = load_preset("gb300-vm")
    fleet = Fleet(preset.system)
    fleet.submit_prefills(0, ["a", "b", "c"], [400, 400, 400])
    assert [replica.active_count for replica in fleet.replicas] == [3, 0, 0, 0]
    ends = set()
    while (at := fleet.next_event_ns()) is not None:
        ends |= {(emission.key, emission.is_last, at) for emission in fleet.advance(at)}
    assert {key for key, *_ in ends} == {"a", "b", "c"} and len({at for *_, at in ends}) == 1


@pytest.mark.processes
def test_a_run_completes_on_each_api_of_the_embedded_server(tmp_path: Path) -> None:
    embedded = {"ttft": "20ms", "itl": "1ms", "per_input_token": "0.1ms"}
    turns = {"turns": {"count": 2, "tool_result_tokens": 7, "history": "server"}}
    for api, requests in (
        ("embeddings", SHORT),
        ("rerank", RANKED | {"input_tokens": 6_010}),
        ("responses", SHORT | turns),
    ):
        settings = Settings(
            api=api, stream=api == "responses", out=tmp_path / api, embedded=embedded, **NO_PAGES
        )  # type: ignore[arg-type]
        summary, _ = execute(workload(requests, 12), settings)
        assert (summary.requests.ok, summary.requests.failed) == (
            24 if api == "responses" else 12,
            0,
        )
        assert "prompt_counts" not in " ".join(code.code for code in summary.verdict.warning_codes)
        if api == "rerank":
            assert summary.tokens.input == 12 * 20 * 310 and (summary.e2e_ms.min or 0) > 20 + 31
        if api == "responses":  # the second turn is the first with its answer, and what is new
            assert summary.tokens.input > 12 * 20 * 2 and summary.sessions is not None


def test_conversations_refuse_apis_without_text() -> None:
    requested_workload = workload(SHORT | {"turns": {"count": 3, "tool_result_tokens": 7}})
    with pytest.raises(LoadgenError, match="--> --api embeddings"):
        build_prompts(requested_workload, 1, 2, load_tokenizer(), PromptTarget(api="embeddings"))
