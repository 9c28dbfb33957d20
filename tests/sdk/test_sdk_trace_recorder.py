"""Tests of shape-only traces: they have no text, and a replay has the recorded shape."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from expected_errors import refused
from loadgen_sdk import Client, Request, WrongUse, instrument, record_shape
from loadgen_sdk.app.trace_recorder import BLOCK_BYTES, ShapeRecorder
from scripted_server import CHAT, CHAT_EVENTS, RESPONSE, answer, events, serving
from servers import start

import loadgen
from loadgen.core.requests.trace_prompts import TracePrompts
from loadgen.core.workload import traces
from loadgen.sim.server.options import Options

SYSTEM = "You are the most helpful assistant of the shop. " * 30


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recorded(
    path: Path, *calls: dict[str, Any], api: str = "chat", **options: Any
) -> list[dict[str, Any]]:
    """Return the trace of these calls, which all get the same response."""
    response = answer(CHAT) if api == "chat" else answer(RESPONSE)
    with serving(response) as server, record_shape(path, **options) as shape:
        with openai.OpenAI(base_url=server.url, api_key="sk-key-123456", max_retries=0) as client:
            measured = instrument(client, record=shape)
            for call in calls:
                if api == "chat":
                    measured.chat.completions.create(model="m", **call)
                else:
                    measured.responses.create(model="m", **call)
        shape.flush()
        assert (shape.written, shape.lost) == (len(calls), 0)
    return lines(path)


def test_a_trace_has_lengths_and_times_but_no_text(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    rows = recorded(
        path, {"messages": [message("user", "my secret question")], "user": "alice"}, salt="pepper"
    )

    assert [(row["input_length"], row["output_length"], row["input_source"]) for row in rows] == [
        (9, 3, "server")
    ]
    assert (
        rows[0]["status"] == "ok" and rows[0]["stream"] is False and len(rows[0]["hash_ids"]) == 1
    )
    raw = path.read_text()
    for secret in ("secret", "question", "alice", "sk-key", "Hello", "pepper"):
        assert secret not in raw
    assert path.stat().st_mode & 0o077 == 0


def test_a_conversation_is_recognised_by_its_beginning(tmp_path: Path) -> None:
    first = [message("system", SYSTEM), message("user", "one")]
    second = [*first, message("assistant", "Hello there."), message("user", "two")]
    third = [*second, message("assistant", "Hello there."), message("user", "three")]
    other = [message("system", SYSTEM), message("user", "somebody else")]
    rows = recorded(
        tmp_path / "t.jsonl",
        *({"messages": messages} for messages in (first, second, other, third)),
    )

    assert [row["turn"] for row in rows] == [0, 1, 0, 2]
    sessions = [row["session_id"] for row in rows]
    assert sessions[0] == sessions[1] == sessions[3] != sessions[2]
    assert ["delay" in row for row in rows] == [False, True, False, True] and rows[1]["delay"] >= 0

    shared = (len("system\n" + SYSTEM)) // BLOCK_BYTES
    hashes = [row["hash_ids"] for row in rows]
    assert shared == 2 and all(
        message_hash[:shared] == hashes[0][:shared] for message_hash in hashes
    )
    assert hashes[0][shared] != hashes[2][shared]
    for row in rows:
        assert row["block_size"] == pytest.approx(
            row["input_length"] / len(row["hash_ids"]), abs=1e-3
        )


@pytest.mark.skipif(
    not hasattr(openai.OpenAI(api_key="k"), "responses"), reason="an openai without responses"
)
def test_a_response_continues_the_session_of_its_previous_response_id(tmp_path: Path) -> None:
    calls = [{"input": "one"}, {"input": "two", "previous_response_id": "c1"}]
    assert [row["turn"] for row in recorded(tmp_path / "t.jsonl", *calls, api="responses")] == [
        0,
        1,
    ]


def test_traces_with_the_same_salt_can_be_compared(tmp_path: Path) -> None:
    call = {"messages": [message("user", "the same")]}
    hashes = [
        recorded(tmp_path / f"{number}.jsonl", call, **options)[0]["hash_ids"]
        for number, options in enumerate([{}, {}, {"salt": "s"}, {"salt": "s"}, {"salt": b"t"}])
    ]
    assert hashes[2] == hashes[3]
    assert len({str(message_hash) for message_hash in hashes}) == 4


def test_a_full_disk_causes_a_warning_and_no_failed_call() -> None:
    shape = record_shape("/dev/full")
    with (
        serving(answer(CHAT)) as server,
        openai.OpenAI(base_url=server.url, api_key="k") as client,
        pytest.warns(RuntimeWarning, match="the disk is full") as caught_warnings,
    ):
        measured = instrument(client, record=shape)
        for _ in range(5):
            assert measured.chat.completions.create(model="m", messages=[]).choices
        shape.flush()

    assert len(caught_warnings) == 1 and (shape.written, shape.lost) == (0, 0)
    with pytest.warns(UserWarning, match="5 calls are missing in /dev/full"):
        shape.close()
    assert shape.lost == 5


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """While inside, no file of this process may grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_waiting_rows_are_written_once_there_is_space(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    shape = ShapeRecorder(path)
    with (
        serving(events(*CHAT_EVENTS)) as server,
        openai.OpenAI(base_url=server.url, api_key="k") as client,
    ):
        measured = instrument(client, record=shape)
        with pytest.warns(RuntimeWarning, match="cannot write"):
            with room_for(0):
                for _ in range(3):
                    list(measured.chat.completions.create(model="m", messages=[], stream=True))
                shape.flush()
            with room_for(100):  # in the middle of a line
                shape.flush()
        assert path.stat().st_size == 100
        shape.flush()
    shape.close()

    assert len(lines(path)) == 3 and (shape.written, shape.lost) == (3, 0)


@pytest.mark.parametrize(
    ("path", "options", "code"),
    [
        ("/nowhere/t.jsonl", {}, "unwritable_file"),
        ("/", {}, "unwritable_file"),
        ("/dev/null", {"salt": ""}, "out_of_range"),
    ],
)
def test_invalid_recorders_are_refused(path: str, options: dict[str, Any], code: str) -> None:
    with refused(WrongUse, code):
        record_shape(path, **options)


@pytest.mark.processes
def test_a_recorded_application_replays_with_the_same_load_shape(tmp_path: Path) -> None:
    """Record an application with conversations, replay the trace, and compare both."""
    draw = random.Random(3)
    path = tmp_path / "traffic.jsonl"
    prompts: list[str] = []

    async def user(client: Any, number: int) -> None:
        await asyncio.sleep(0.02 * number)
        messages = [
            message("system", SYSTEM),
            message("user", f"question {number} " + "word " * draw.randint(5, 400)),
        ]
        for _ in range(draw.randint(1, 3)):
            prompts.append("\n".join(turn["content"] for turn in messages))
            stream = await client.chat.completions.create(
                model="sim",
                messages=messages,
                max_tokens=draw.randint(4, 20),
                stream=True,
                stream_options={"include_usage": True},
            )
            text = "".join(
                [event.choices[0].delta.content or "" async for event in stream if event.choices]
            )
            messages = [
                *messages,
                message("assistant", text),
                message("user", "and more? " * draw.randint(1, 20)),
            ]

    async def application(url: str) -> None:
        with record_shape(path) as shape:
            async with openai.AsyncOpenAI(
                base_url=url.removesuffix("/v1") + "/v1", api_key="k"
            ) as plain_client:
                client = instrument(plain_client, record=shape)
                await asyncio.gather(*(user(client, number) for number in range(12)))

    with start(Options(ttft="3ms", itl="1ms")) as endpoint:
        asyncio.run(application(endpoint.url))
        run = [sys.executable, "-m", "loadgen", "run", "--trace", str(path)]
        command = [*run, "--url", endpoint.url, "--out", str(tmp_path / "replay"), "--seed", "1"]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        assert process.returncode in (0, 3), (
            process.stderr
        )  # 3: a machine too busy for a sound measurement
    trace, result = traces.read_trace(path), loadgen.load(tmp_path / "replay")
    assert result.requests.ok == len(trace) == len(prompts)
    rows = result.rows.sort_by("slot").to_pydict()
    assert rows["due_ns"] == trace.due_ns.tolist()
    assert rows["output_tokens"] == trace.output_tokens.tolist()
    assert rows["input_tokens"] == trace.input_tokens.tolist()
    # The same pairs of prompts begin alike, to within a block of what they shared.
    second_trace_prompts = TracePrompts(trace, 1, 2, loadgen_tokens())
    texts = [second_trace_prompts[number].prompt or "" for number in range(len(trace))]
    recorded_shares = [
        len(set(trace.block_hashes(i)) & set(trace.block_hashes(j)))
        for i in range(len(trace))
        for j in range(i)
    ]
    replayed = [common(texts[i], texts[j]) for i in range(len(trace)) for j in range(i)]  # type: ignore[arg-type]
    assert np.corrcoef(recorded_shares, replayed)[0, 1] > 0.99


def loadgen_tokens() -> Any:
    from loadgen.core.requests import tokenizer

    return tokenizer.load_tokenizer(None)


def common(text: str, other: str) -> int:
    n = 0
    for a, b in zip(text, other, strict=False):
        if a != b:
            break
        n += 1
    return n


def test_the_sdk_client_records_its_calls(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"

    async def go(url: str) -> None:
        with record_shape(path) as shape:
            async with Client(url, model="m", server="vllm", record=shape) as client:
                await client.complete([message("user", "Hi")])
                async for _ in client.stream(Request(id="r", prompt="Hello")):
                    pass

    with serving(events(*CHAT_EVENTS)) as server:
        asyncio.run(go(server.url))
    assert [(row["input_length"], row["output_length"], row["status"]) for row in lines(path)] == [
        (9, 3, "ok")
    ] * 2


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_records_separate_sessions(tmp_path: Path) -> None:
    """As under gunicorn --preload: one recorder, made before the workers."""
    import msgspec
    from loadgen_sdk import Measurement

    recorder = record_shape(tmp_path / "t.jsonl")

    def record() -> None:
        shape = recorder.begin(1, {"messages": [{"role": "user", "content": "Hi"}]})
        recorder.end(
            shape,
            Measurement(api="chat", streamed=False, status="ok", started=1, started_unix_ns=1),
        )
        recorder.flush()

    record()  # with the background thread running, and a row that a child must not write again
    children = []
    for _ in range(2):
        if (child := os.fork()) == 0:
            try:
                record()
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    recorder.close()
    rows = [msgspec.json.decode(line) for line in (tmp_path / "t.jsonl").read_bytes().splitlines()]
    assert len(rows) == 3 and len({row["session_id"] for row in rows}) == 3
    assert len({tuple(row["hash_ids"]) for row in rows}) == 1


def test_only_selected_labels_are_written(tmp_path: Path) -> None:
    from loadgen_sdk import Measurement

    with record_shape(tmp_path / "t.jsonl", labels=("feature",)) as recorder:
        shape = recorder.begin(1, {"prompt": "Hi"})
        recorder.end(
            shape,
            Measurement(
                api="chat",
                streamed=False,
                status="ok",
                started=1,
                started_unix_ns=1,
                labels={"feature": "search", "user": "u-1"},
            ),
        )
    text = (tmp_path / "t.jsonl").read_text()
    assert '"labels":{"feature":"search"}' in text and "u-1" not in text


def test_a_change_of_the_messages_after_a_call_is_not_recorded(tmp_path: Path) -> None:
    """Hashing is done later: what was asked is what counts, whatever becomes of the list."""
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    with record_shape(tmp_path / "t.jsonl", salt="s") as recorder:
        shape = recorder.begin(1, {"messages": messages})
        messages[0]["content"] = "x" * 5000
        messages.append({"role": "user", "content": "y" * 5000})
        recorder.flush()
        assert len(shape.block_hashes) == 1 and shape.prompt is None
