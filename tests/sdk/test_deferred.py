"""Reads that are kept and decoded together give the same result as reads decoded singly."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import repository_paths
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loadgen_sdk.request import Completion
from loadgen_sdk.transport.exchange import Exchange
from loadgen_sdk.transport.plain_events import scan_plain_chunks
from loadgen_sdk.transport.response_state import EventBatch, PlainRun, Read
from loadgen_sdk.wire_formats.event_timeline import EventTimeline

RELAXED = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # the machine may be busy
TRANSCRIPTS = sorted((repository_paths.DATA / "transcripts").glob("*/*.http"))
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def as_run(reads: list[tuple[Read, int | EventBatch]]) -> list[PlainRun]:
    if not reads:
        return []
    return [([item for _, item in reads], sum(len(read[0]) for read, _ in reads), reads[-1][0][2])]


def plainly(read: Read, template: tuple[bytes, bytes] | None) -> int | EventBatch | None:
    """Return what a receiver keeps of a read of plain events only."""
    data, timestamp_ns, _, empty_at, _ = read
    chunks, events, used_bytes = (
        scan_plain_chunks(data, *template) if template is not None else (0, 0, 0)
    )
    if not events or used_bytes != len(data):
        return None
    return (
        timestamp_ns
        if events == 1
        else (timestamp_ns, events, timestamp_ns - empty_at if chunks > 1 else None)
    )


def read_in_groups(
    reads: list[Read], groups: list[int], *, templates: bool
) -> tuple[Completion, EventTimeline, bool]:
    """Return what an exchange reports of reads in groups of these sizes, and if it ended."""
    timeline = EventTimeline()
    completions: list[Completion] = []
    plain_reads: list[Read | PlainRun]
    run: list[tuple[Read, int | EventBatch]]
    exchange = Exchange(None, b"", b"", 0, completions.append, timeline, is_stream_requested=True)
    exchange.sent_at = 1
    if not templates:
        exchange.reader.learned_templates = 1 << 60
    over, plain_reads, run = False, [], []
    sizes = iter(groups)
    size = next(sizes, 1 << 60)
    for read in (
        reads
    ):  # as a receiver does: plain reads are a run, all else goes on at once or waits for its group
        template = exchange.template if templates and not plain_reads else None
        plain = plainly(read, template)
        if plain is not None:
            run.append((read, plain))
        else:
            plain_reads += as_run(run)
            run = []
            plain_reads.append(read)
        if (plain_reads and template is not None) or len(plain_reads) + len(run) >= size:
            plain_reads += as_run(run)
            over, plain_reads, run, size = (
                exchange.feed_reads(plain_reads),
                [],
                [],
                next(sizes, 1 << 60),
            )
            if over:
                break
    plain_reads += as_run(run)
    if plain_reads and not over:
        over = exchange.feed_reads(plain_reads)
    if not over:
        exchange.end_with_connection(10**9, "")
    exchange.report_completion()
    return completions[0], timeline, over


def one_by_one_events(timeline: EventTimeline) -> tuple[list[int], list[int], list[int]]:
    """Gaps, instants and errors of a timeline, each event on its own, in order of size."""
    errors = [error for error, many in timeline.uncertainties for _ in range(many)]
    further = sum(many for _, many in timeline.simultaneous_counts)
    return sorted(timeline.gaps + [0] * further), timeline.all_timestamps(), errors


def cut(data: bytes, instants: list[int], gaps: list[int]) -> list[Read]:
    """Return reads of the bytes, cut at these positions, with increasing times of arrival."""
    bounds = [0, *sorted(place % (len(data) + 1) for place in instants), len(data)]
    pieces = [data[a:b] for a, b in pairwise(bounds) if a < b]
    at, reads = 100, []
    for number, piece in enumerate(pieces):
        gap = gaps[number % len(gaps)] if gaps else 10
        at += gap
        reads.append((piece, at, at + 3, at - gap // 2, True))
    return reads


def assert_same(reads: list[Read], *groupings: list[int]) -> None:
    one_by_one, timeline, over = read_in_groups(reads, [1] * len(reads), templates=False)
    for groups in groupings:
        together, other_flow, other_over = read_in_groups(reads, groups, templates=True)
        assert together == one_by_one
        assert over == other_over
        assert one_by_one_events(other_flow) == one_by_one_events(timeline)


def chunks(payloads: list[bytes], per_chunk: int = 1) -> bytes:
    out = b""
    for first in range(0, len(payloads), per_chunk):
        data = b"".join(
            b"data: %s\n\n" % payload for payload in payloads[first : first + per_chunk]
        )
        out += b"%x\r\n%s\r\n" % (len(data), data)
    return out


def event(text: Any, field: str = "content", **more: Any) -> bytes:
    choice = {"index": 0, "delta": {field: text}, "finish_reason": None}
    document = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "choices": [choice],
        "usage": None,
    } | more
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")


END = chunks([b'{"choices":[{"delta":{},"finish_reason":"stop"}]}', b"[DONE]"]) + b"0\r\n\r\n"
CUTS = st.lists(st.integers(0, 1 << 20), max_size=40)
GAPS = st.lists(st.integers(0, 50), max_size=9)
GROUPS = st.lists(st.integers(1, 12), max_size=20)
TEXTS = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        [
            " the",
            "é",
            "\u2028",
            "index",
            "content",
            ":",
            ",",
            '"',
            "\\",
            "\n",
            "",
            "a\x7f",
            "\ud800",
            7,
            None,
        ]
    ),
)
ODD = st.sampled_from(
    [
        b"[DONE]",
        b"null",
        b"{",
        b'{"choices":[{"delta":{"content":"\xff"}}]}',
        b'{"choices":[{"delta":{"content":"x\x01"}}]}',
        b'{"error":{"message":"broken"}}',
        event("x", usage={"prompt_tokens": 3, "completion_tokens": 2}),
        event("x", field="tool_calls"),
        event([{"type": "text", "text": "chatcmpl-1"}]),
        event("hm", field="reasoning_content"),
        event("later", created=2),
        b'{"choices":[{"text":"a","finish_reason":null}]}',
        b'{"choices":[{"text":"a","finish_reason":"length"}]}',
    ]
)


@pytest.mark.parametrize("file", TRANSCRIPTS, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_real_streams_give_the_same_result_in_any_grouping(file: Path) -> None:
    data = file.read_bytes()
    by_chunk = [at + 2 for at in range(len(data)) if data[at : at + 2] == b"\r\n"]
    for instants in ([], by_chunk, list(range(len(data))), list(range(0, len(data), 97))):
        reads = cut(data, instants, [10])
        assert_same(reads, *([size] * len(reads) for size in (1, 2, 7, len(reads))))


@settings(RELAXED, max_examples=60)
@given(st.sampled_from(TRANSCRIPTS), CUTS, GAPS, GROUPS)
def test_real_streams_give_the_same_result_in_any_split(
    file: Path, instants: list[int], gaps: list[int], groups: list[int]
) -> None:
    assert_same(cut(file.read_bytes(), instants, gaps), groups)


@settings(RELAXED, max_examples=3 * settings().max_examples)
@given(
    st.lists(st.one_of(TEXTS.map(event), TEXTS.map(event), TEXTS.map(event), ODD), max_size=30),
    st.integers(1, 3),
    st.booleans(),
    CUTS,
    GAPS,
    GROUPS,
    st.sampled_from([END, b"", b"zz\r\n", END + b"more"]),
)
def test_batched_reads_of_any_stream_give_the_same_result_in_any_split(
    payloads: list[bytes],
    per_chunk: int,
    by_chunk: bool,
    instants: list[int],
    gaps: list[int],
    groups: list[int],
    end: bytes,
) -> None:
    data = HEAD + chunks(payloads, per_chunk) + end
    if by_chunk:  # as servers send it: most reads are whole chunks
        at = len(HEAD)
        for first in range(0, len(payloads), per_chunk):
            instants.append(at)
            at += len(chunks(payloads[first : first + per_chunk], per_chunk))
        instants.append(at)
    assert_same(cut(data, instants, gaps), groups)


@settings(RELAXED, max_examples=100)
@given(st.lists(st.text(min_size=1, max_size=4), min_size=2, max_size=60), CUTS, GROUPS)
def test_batched_reads_of_long_plain_streams_give_the_same_result_in_any_split(
    texts: list[str], instants: list[int], groups: list[int]
) -> None:
    data = HEAD + chunks([event(text) for text in texts]) + END
    ends = [at for at in range(len(data)) if data[at - 4 : at] == b"\n\n\r\n"]
    assert_same(cut(data, ends, [9]), groups)
    assert_same(cut(data, instants, [9]), groups)


def test_most_events_of_a_plain_stream_are_not_decoded() -> None:
    data = chunks([event(f" word{i}") for i in range(100)])
    exchange = Exchange(
        None, b"", b"", 0, lambda _: None, EventTimeline(), is_stream_requested=True
    )
    exchange.feed_reads([(HEAD + chunks([event("first")]), 10, 10, 5, True)])
    exchange.feed_reads([(data, 10, 10, 5, True)])

    assert (exchange.reader.learned_templates, exchange.reader.output_events) == (1, 101)
    before, after = exchange.reader.template or (b"", b"")
    assert scan_plain_chunks(data, before, after) == (100, 100, len(data))
    assert scan_plain_chunks(data[:-1], before, after)[0] == 99
    for text, plain in ((" a", 1), ("é", 1), ("", 0), ('"', 0), ("\n", 0)):
        assert scan_plain_chunks(chunks([event(text)]), before, after)[:2] == (plain, plain)


def test_a_response_can_be_deferred_from_its_first_output_until_its_end_is_near() -> None:
    def calm(*parts: bytes, requested_output_tokens: int = 0) -> list[int]:
        exchange = Exchange(
            None,
            b"",
            b"",
            0,
            lambda _: None,
            EventTimeline(),
            is_stream_requested=True,
            requested_output_tokens=requested_output_tokens,
        )
        deferrable_counts = []
        for part in parts:
            exchange.feed_reads([(part, 10, 10, 5, True)])
            deferrable_counts.append(exchange.deferrable_events)
        return deferrable_counts

    chunk = chunks([event("a")])
    assert calm(HEAD, chunk, chunk * 7, chunk, requested_output_tokens=12) == [0, 7, 0, 0]
    assert calm(HEAD + chunk)[0] > 1 << 30, "its end is not known"
    assert calm(HEAD + chunk, chunk[:9], chunk[9:], chunk, requested_output_tokens=99) == [
        94,
        0,
        0,
        0,
    ], "written in parts"


def test_a_stream_without_plain_events_learns_few_templates() -> None:
    payloads = [event(f" w{i}", created=i) for i in range(400)]
    exchange = Exchange(
        None, b"", b"", 0, lambda _: None, EventTimeline(), is_stream_requested=True
    )
    exchange.feed_reads([(HEAD + chunks(payloads), 10, 10, 5, True)])
    assert exchange.reader.output_events == 400
    assert exchange.reader.learned_templates <= 4
