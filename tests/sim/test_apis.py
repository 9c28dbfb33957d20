"""The Responses API, Messages, embeddings, rerank, and images in messages."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from command_line import exits
from expected_errors import refused
from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.request import Request
from loadgen_sdk.transport.target import Target
from loadgen_sdk.wire_formats.request_body import BodyFormat, encode_body
from loadgen_sdk.wire_formats.server_profiles import SERVER_PROFILES
from run_fixtures import NO_PAGES
from scripted_server import Heard, answer, events, serving
from servers import log, shared, start

from loadgen.cli.settings import build_settings
from loadgen.core.errors import LoadgenError
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute
from loadgen.core.metrics.summary import Summary
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.prompts import PromptTarget
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.workload import read_flags
from loadgen.core.workload.loading import workload_from_mapping
from loadgen.runs import text
from loadgen.sim.server.options import Options

pytestmark = pytest.mark.processes

SHORT = {"input_tokens": 20, "output_tokens": 5}
USAGE = {
    "input_tokens": 20,
    "output_tokens": 5,
    "input_tokens_details": {"cached_tokens": 4},
    "output_tokens_details": {"reasoning_tokens": 1},
}


def workload(requests: dict[str, Any], count: int = 10, **more: Any) -> Any:
    stages = [{"arrival": {"poisson": "100/s"}, "count": count}]
    return workload_from_mapping(
        {"name": "w", "requests": requests, "stages": stages, **more}, read_flags(seed=1)
    )


def run(
    api: Any,
    response_bytes: bytes,
    folder: Path,
    requests: dict[str, Any] | None = None,
    stream: bool = False,
    **more: Any,
) -> tuple[Summary, list[Heard]]:
    with serving(response_bytes) as server:
        settings = Settings(
            url=server.url,
            model="m",
            server="openai",
            api=api,
            stream=stream,
            out=folder / "out",
            server_metrics=("off",),
        )
        summary, _ = execute(workload(requests or SHORT, **more), settings)
        return summary, server.heard


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def response(status: str, **fields: Any) -> dict[str, Any]:
    output_items = [{"type": "message", "content": [{"type": "output_text", "text": "one two"}]}]
    return {
        "id": "resp_1",
        "object": "response",
        "status": status,
        "error": None,
        "output": output_items,
        "usage": USAGE,
        **fields,
    }


STREAM = (
    event("response.created", response=response("in_progress", usage=None, output=[])),
    event("response.output_item.added", item={"type": "message"}),
    event("response.reasoning_text.delta", delta="hm"),
    *(event("response.output_text.delta", delta=f" w{number}") for number in range(4)),
    event("response.output_text.done", text="w"),
)


def test_streamed_responses_have_their_tokens_and_timestamps(tmp_path: Path) -> None:
    response_bytes = events(
        *STREAM, event("response.completed", response=response("completed")), done=False
    )
    summary, received_requests = run("responses", response_bytes, tmp_path, stream=True)

    assert (summary.requests.ok, summary.requests.failed, summary.tokens.output) == (10, 0, 50)
    assert summary.ttft_ms.count == 10 and summary.tokens.cached_share == pytest.approx(0.2)
    assert summary.tokens.reasoning == 10
    load = received_requests[-1]
    assert load.path == "/v1/responses" and set(load.body) == {
        "model",
        "input",
        "stream",
        "max_output_tokens",
    }
    assert (load.body["max_output_tokens"], load.body["stream"]) == (5, True)


@pytest.mark.parametrize(
    ("last", "ok"),
    [
        (response("incomplete", incomplete_details={"reason": "max_output_tokens"}), True),
        (response("incomplete", incomplete_details={"reason": "tired"}), True),
        (response("incomplete"), True),
        (response("cancelled"), False),
        (response("failed", error={"code": "server_error", "message": "out of memory"}), False),
        (response("in_progress"), False),
    ],
)
def test_response_events_end_with_their_status(last: dict[str, Any], ok: bool) -> None:
    import msgspec
    from loadgen_sdk.wire_formats.event_timeline import EventTimeline
    from loadgen_sdk.wire_formats.response_reader import ResponseReader

    reading = ResponseReader(EventTimeline(), keep_text=True)
    reading.feed([msgspec.json.encode(last)], 5)
    failure = reading.find_failure(True, False, False)
    assert (failure is None) == ok
    if ok:
        assert (
            "".join(reading.text_pieces or ()),
            reading.usage().cached,
            reading.response_id,
        ) == (
            "one two",
            4,
            "resp_1",
        )
    if last["status"] == "failed":
        assert failure is not None and "out of memory" in failure.text


def message_event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "content": [],
    "model": "m",
    "stop_reason": None,
    "stop_sequence": None,
    "usage": {
        "input_tokens": 6,
        "cache_creation_input_tokens": 10,
        "cache_read_input_tokens": 4,
        "output_tokens": 1,
    },
}
MESSAGES = (
    message_event("message_start", message=MESSAGE),
    message_event(
        "content_block_start",
        index=0,
        content_block={"type": "thinking", "thinking": "", "signature": ""},
    ),
    message_event("ping"),
    message_event(
        "content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "hm"}
    ),
    message_event(
        "content_block_delta", index=0, delta={"type": "signature_delta", "signature": "EqQB"}
    ),
    message_event("content_block_stop", index=0),
    message_event("content_block_start", index=1, content_block={"type": "text", "text": ""}),
    message_event("content_block_delta", index=1, delta={"type": "text_delta", "text": "Hello"}),
    message_event("content_block_delta", index=1, delta={"type": "text_delta", "text": "!"}),
    message_event("content_block_stop", index=1),
    message_event(
        "content_block_start",
        index=2,
        content_block={"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}},
    ),
    message_event(
        "content_block_delta", index=2, delta={"type": "input_json_delta", "partial_json": ""}
    ),
    message_event(
        "content_block_delta",
        index=2,
        delta={"type": "input_json_delta", "partial_json": '{"at": '},
    ),
    message_event(
        "content_block_delta", index=2, delta={"type": "input_json_delta", "partial_json": '"SF"}'}
    ),
    message_event("content_block_stop", index=2),
    message_event("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 5}),
    message_event("message_stop"),
)
FULL_MESSAGE = MESSAGE | {
    "stop_reason": "end_turn",
    "content": [
        {"type": "thinking", "thinking": "hm", "signature": "EqQB"},
        {"type": "text", "text": "Hello!"},
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"at": "SF"}},
    ],
}


def read(*event_list: dict[str, Any], streamed: bool = True) -> Any:
    """Return the reading of these events, one per read, or of whole responses."""
    import msgspec
    from loadgen_sdk.wire_formats.event_timeline import EventTimeline
    from loadgen_sdk.wire_formats.response_reader import ResponseReader
    from loadgen_sdk.wire_formats.sse import NamedEvent

    reading = ResponseReader(EventTimeline(), keep_text=True)
    for at, event_document in enumerate(event_list):
        text = msgspec.json.encode(event_document)
        reading.feed([NamedEvent(event_document["type"].encode(), text) if streamed else text], at)
    return reading


@pytest.mark.parametrize("message_events", [MESSAGES, (FULL_MESSAGE,)])
def test_a_response_of_messages_has_text_thinking_tool_call_and_counts(
    message_events: tuple[dict[str, Any], ...],
) -> None:
    for completion in (
        read(*message_events),
        read(*message_events, streamed=False),
    ):  # a gateway may leave out the names of the events
        assert completion.find_failure(True, False, True) is None
        assert ("".join(completion.text_pieces), "".join(completion.reasoning_pieces)) == (
            "Hello!",
            "hm",
        )
        ((call),) = completion.tool_calls()
        assert (call["id"], call["name"], json.loads(call["arguments"])) == (
            "toolu_1",
            "get_weather",
            {"at": "SF"},
        )
        usage = completion.usage()
        assert (usage.input, usage.cached, usage.cache_written) == (20, 4, 10)
        assert usage.output == (5 if len(message_events) > 1 else 1)
    streamed = read(*MESSAGES)

    assert (streamed.first_event, streamed.first_token, streamed.first_answer) == (0, 3, 7)
    assert (streamed.last_token, streamed.end, streamed.output_events) == (13, 15, 6)
    assert streamed.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (
            message_event("error", error={"type": "overloaded_error", "message": "Overloaded"}),
            "error_event",
        ),
        (
            message_event("message_delta", delta={"stop_reason": None}, usage={}),
            "no_finish_reason",
        ),
        (message_event("ping"), "no_finish_reason"),
    ],
)
def test_error_events_of_the_messages_api_are_failures(last: dict[str, Any], kind: str) -> None:
    for streamed in (True, False):
        failure = read(*MESSAGES[:9], last, streamed=streamed).find_failure(True, False, True)
        assert failure is not None and failure.kind == kind
        assert kind != "error_event" or failure.text == "Overloaded"


def test_a_chat_is_converted_to_the_messages_api() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "user", "content": "and now?"},
    ]
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "description": "adds", "parameters": {"type": "object"}},
        }
    ]
    extra = {"tools": tools, "tool_choice": "required", "stop": "\n", "temperature": 0}
    request = Request(id="r", messages=messages, max_tokens=7, extra=extra)

    assert json.loads(
        encode_body(request, BodyFormat(SERVER_PROFILES["vllm"], "messages", "m", True))
    ) == {
        "model": "m",
        "max_tokens": 7,
        "stream": True,
        "system": "be brief",
        "temperature": 0,
        "stop_sequences": ["\n"],
        "tool_choice": {"type": "any"},
        "tools": [{"name": "f", "description": "adds", "input_schema": {"type": "object"}}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "see"},
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
                    },
                ],
            },
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "2"}],
            },
            {"role": "user", "content": "and now?"},
        ],
    }

    alone = json.loads(
        encode_body(
            Request(id="r", prompt="hi"),
            BodyFormat(SERVER_PROFILES["anthropic"], "messages", "m", False),
        )
    )

    assert alone == {
        "model": "m",
        "max_tokens": 4096,
        "stream": False,
        "messages": [{"role": "user", "content": "hi"}],
    }


def test_messages_send_the_api_key_in_the_header_of_the_host() -> None:
    ours = Target.parse("https://api.anthropic.com/v1/messages", api="messages")
    assert ours.path == "/v1/messages"
    assert dict(ours.auth_headers("k")) == {"anthropic-version": "2023-06-01", "x-api-key": "k"}
    other = dict(Target.parse("http://host:8000", api="messages").auth_headers("k"))
    assert (other["x-api-key"], other["Authorization"]) == ("k", "Bearer k")


def test_a_load_of_messages_has_its_tokens_tools_and_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, received_requests = run(
        "messages", events(*MESSAGES, done=False), tmp_path, stream=True
    )

    assert (summary.requests.ok, summary.tokens.output, summary.ttft_ms.count) == (10, 50, 10)
    assert summary.tokens.cached_share == pytest.approx(0.2) and summary.requests.by_finish == {
        "tool_calls": 10
    }
    load = received_requests[-1]
    assert load.path == "/v1/messages" and load.headers["anthropic-version"] == "2023-06-01"
    assert set(load.body or {}) == {"model", "messages", "stream", "max_tokens"}

    with start(Options(preset="h100x8")) as server:
        settings = Settings(url=server.url, api="messages", out=tmp_path / "turns", **NO_PAGES)
        turns = {"turns": {"count": 3, "tool_result_tokens": 7}}
        talked, _ = execute(
            workload({"input_tokens": 200, "output_tokens": 5} | turns, count=4), settings
        )
        assert talked.requests.ok == 12 and (talked.tokens.cached or 0) > 0
        forced = {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "required",
        }
        for stream in (True, False):
            out = tmp_path / f"called-{stream}"
            settings = Settings(
                url=server.url,
                api="messages",
                stream=stream,
                out=out,
                extra_body=forced,
                **NO_PAGES,
            )
            called_summary, _ = execute(workload(SHORT, count=4), settings)
            assert called_summary.requests.by_finish == {"tool_calls": 4}
        assert exits("doctor", "--url", server.url, "--api", "messages", "--full") == 0
    stdout = " ".join(capsys.readouterr().out.split())

    assert "max_tokens: " in stdout and "ignore_eos" not in stdout


def test_a_conversation_on_the_responses_api_sends_only_new_messages(tmp_path: Path) -> None:
    response_bytes = events(
        *STREAM, event("response.completed", response=response("completed")), done=False
    )
    turns = {"turns": {"count": 3, "tool_result_tokens": 7, "history": "server"}}
    _, received_requests = run(
        "responses", response_bytes, tmp_path, SHORT | turns, stream=True, count=2
    )
    later = [
        received_request.body
        for received_request in received_requests
        if "previous_response_id" in (received_request.body or {})
    ]

    assert len(later) == 4 and {body["previous_response_id"] for body in later} == {"resp_1"}
    assert all([message["role"] for message in body["input"]] == ["user"] for body in later)


def test_embeddings_have_a_latency_and_no_first_token(tmp_path: Path) -> None:
    response_bytes = answer(
        {"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 20, "total_tokens": 20}}
    )
    summary, received_requests = run(
        "embeddings", response_bytes, tmp_path, slo={"ttft": "1s", "e2e": "5s"}
    )

    assert (summary.requests.ok, summary.tokens.input, summary.tokens.output) == (10, 200, 0)
    assert (summary.e2e_ms.count, summary.ttft_ms.count) == (10, 0)
    rendered_text = text.render(summary)
    assert "only E2E latency" in rendered_text
    assert "not evaluated: ttft, because" in " ".join(rendered_text.split())
    assert "usage_missing" not in [code.code for code in summary.verdict.warning_codes]
    assert received_requests[-1].path == "/v1/embeddings" and set(received_requests[-1].body) == {
        "model",
        "input",
        "encoding_format",
    }


def test_a_search_without_ttft_needs_no_longer_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    response_bytes = answer(
        {"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 20, "total_tokens": 20}}
    )
    with serving(response_bytes) as server:
        arguments = (
            "--url",
            server.url,
            "--model",
            "m",
            "--server",
            "openai",
            "--api",
            "embeddings",
            "--server-metrics",
            "off",
        )
        exits(
            "run", "qa", *arguments, "-c", "2", "-n", "4", "--warmup", "0", "-o", tmp_path / "out"
        )
    stderr = capsys.readouterr().err

    assert "not evaluated: ttft, tpot" in stderr and "too few to verify" not in stderr


def test_an_embeddings_response_without_values_is_a_failure(tmp_path: Path) -> None:
    good = answer({"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 20}})
    with serving(*[good] * 12, answer({"data": [], "usage": {"prompt_tokens": 20}})) as server:
        settings = Settings(
            url=server.url,
            model="m",
            server="openai",
            api="embeddings",
            stream=False,
            out=tmp_path / "o",
            server_metrics=("off",),
        )
        summary, _ = execute(workload(SHORT, 30), settings)

    assert summary.requests.failed >= 10 and summary.requests.ok >= 1


def test_a_rerank_request_sends_the_chunks_as_documents(tmp_path: Path) -> None:
    response_bytes = answer(
        {"results": [{"index": 0, "relevance_score": 0.3}], "usage": {"total_tokens": 7}}
    )
    chunks = {
        "input_tokens": 100,
        "output_tokens": 1,
        "chunks": {"count": 4, "tokens": 20, "corpus": 9},
    }
    summary, received_requests = run("rerank", response_bytes, tmp_path, chunks)
    count = load_tokenizer().count
    load = received_requests[-1].body

    assert summary.requests.ok == 10 and received_requests[-1].path == "/v1/rerank"
    assert [count(document) for document in load["documents"]] == [20] * 4 and count(
        load["query"]
    ) == 20
    with pytest.raises(LoadgenError, match="--> requests"):
        build_prompts(workload(SHORT), 1, 2, load_tokenizer(), PromptTarget(api="rerank"))


def test_images_of_requests_have_the_requested_size_and_differ() -> None:
    requested_workload = workload(SHORT | {"images": {"count": 2, "width": 100, "height": 40}})
    prompts = build_prompts(requested_workload, 1, 2, load_tokenizer())
    urls = set()
    for number in range(3):
        request = prompts[number]
        assert request.messages is not None and request.input_tokens is None
        text_part, *pictures = request.messages[-1]["content"]
        assert text_part["type"] == "text" and load_tokenizer().count(text_part["text"]) == 20
        for picture in pictures:
            kind, _, data = picture["image_url"]["url"].partition(";base64,")
            png = base64.b64decode(data)
            assert kind == "data:image/png" and png.startswith(b"\x89PNG\r\n\x1a\n")
            assert struct.unpack(">II", png[16:24]) == (100, 40)
            size = struct.unpack(">I", png[33:37])[0]
            assert len(zlib.decompress(png[41 : 41 + size])) == 40 * (1 + 3 * 100)
            assert (
                zlib.crc32(png[37 : 41 + size])
                == struct.unpack(">I", png[41 + size : 45 + size])[0]
            )
            urls.add(data)

    assert len(urls) == 6
    parts = encode_body(prompts[0], BodyFormat(SERVER_PROFILES["openai"], "responses", "m", False))
    assert (
        b'"type":"input_image","image_url":"data:image/png' in parts
        and b'"type":"input_text"' in parts
    )
    with pytest.raises(LoadgenError, match=r"--> requests\.images"):
        build_prompts(requested_workload, 1, 2, load_tokenizer(), PromptTarget(api="completions"))


@pytest.mark.parametrize(
    ("command", "expected_text"),
    [
        (
            "answers {rows} --api embeddings --url http://127.0.0.1:9",
            "responses are scored as texts",
        ),
        (
            "mlperf offline -b llama2-70b --api rerank --url http://127.0.0.1:9",
            "MLPerf rules apply to generated tokens",
        ),
        (
            "mlperf accuracy -b llama2-70b --dataset {rows} --api embeddings --url http://127.0.0.1:9",
            "accuracy is scored on texts",
        ),
        (
            "search qa --api embeddings --url sim:gb300-vm",
            "no objective of the SLO can be evaluated",
        ),
        (
            "validate chatbot --api embeddings --url sim:gb300-vm --dry-run",
            "ttft at p50 within 500 ms: responses of embeddings have no tokens",
        ),
        (
            "run qa --api embeddings --url sim:gb300-vm --stop-when ttft:p50:1s",
            "so this rule never applies",
        ),
        (
            "run agentic --api embeddings --url sim:gb300-vm",
            "not text, so no later request can continue it",
        ),
        (
            "run coding-agent --api rerank --url sim:gb300-vm",
            "tool calls need the chat API",
        ),
        ("run qa --api rerank --url sim:gb300-vm", "the requests have no documents to rerank"),
    ],
)
def test_commands_that_need_text_refuse_apis_without_text(
    command: str,
    expected_text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    assert exits(*command.format(rows="rows.jsonl").split()) == 2
    stderr = " ".join(capsys.readouterr().err.split())
    assert expected_text in stderr and "Traceback" not in stderr and "hint: " in stderr


def test_doctor_and_search_support_embeddings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start(Options(ttft="5ms")) as endpoint:
        assert exits("doctor", "--url", endpoint.url, "--api", "rerank", "--full") == 0
    stdout = capsys.readouterr().out

    assert "(rerank)" in stdout and "one by one" not in stdout

    arguments = [
        "search",
        "qa",
        "--api",
        "embeddings",
        "--url",
        "sim:gb300-vm",
        "--slo",
        "e2e:60ms:p90",
        "--seed",
        "1",
    ]
    arguments += [
        "-d",
        "20s",
        "--max-probes",
        "3",
        "--out",
        str(tmp_path / "s"),
        "--progress",
        "off",
    ]

    assert exits(*arguments) == 3, "no more probes were allowed"
    assert "exceeded E2E 60.0 ms (p90 allows" in " ".join(capsys.readouterr().out.split())


def test_options_that_an_api_does_not_support_are_refused() -> None:
    assert build_settings({"api": "embeddings", "url": ["http://a"]}).stream is False
    ids = Request(id="r", prompt=[1, 2, 3], max_tokens=2)
    assert b'"input":[1,2,3]' in encode_body(
        ids, BodyFormat(SERVER_PROFILES["vllm"], "embeddings", "m", False)
    )
    for api in ("chat", "responses", "messages"):
        with refused(TargetUnusable, "unsupported"):
            encode_body(ids, BodyFormat(SERVER_PROFILES["vllm"], api, "m", False))


@pytest.mark.parametrize("api", ["chat", "completions", "responses", "messages", "embeddings"])
def test_prompts_have_the_requested_tokens_by_the_servers_count(tmp_path: Path, api: Any) -> None:
    (tmp_path / "ids.jsonl").write_text(
        '{"prompt": [11, 12, 13, 14, 15, 16, 17], "output_tokens": 5}\n'
    )
    counted: dict[str, set[int]] = {}
    server = shared()
    loads: dict[str, dict[str, Any]] = {"text": {"input_tokens": 130, "output_tokens": 5}}
    if api in ("chat", "responses", "messages"):
        loads["image"] = loads["text"] | {"images": {"width": 32, "height": 32}}
    if api not in ("responses", "messages"):  # they have no field for them
        loads["ids"] = {"from": str(tmp_path / "ids.jsonl")}
    for name, requests in loads.items():
        settings = Settings(
            url=server.url, api=api, stream=api != "embeddings", out=tmp_path / name, **NO_PAGES
        )
        summary, _ = execute(workload(requests, count=4), settings)
        assert summary.requests.ok == 4, summary.requests.by_error
        counted[name] = {entry.input_tokens for entry in log(server).requests if "-" in entry.id}
        assert summary.tokens.input == 4 * sum(counted[name]), "one length, and the run has it"

    assert counted == {name: {7 if name == "ids" else 130} for name in loads}
