"""What C makes of the reads of an answer, held against the method in Python. For the tests and the fuzzer."""

from __future__ import annotations

from typing import Any

from loadgen_sdk.dialects.reader import Flow, PurePythonReading
from loadgen_sdk.dialects.sse import PurePythonDecoder
from loadgen_sdk.transport.exchange import Exchange, PurePythonExchange
from loadgen_sdk.transport.http1 import PurePythonResponse

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CLASSES = (PurePythonExchange, PurePythonResponse, PurePythonDecoder, PurePythonReading)
FIELDS = {one.__name__: tuple(one.__slots__) for one in CLASSES}
TOLD = ("on_done", "on_first")
STEP_NS = 1_000


def state(one: Any) -> Any:
    """All fields of an exchange but for who is told, and of what it holds."""
    if isinstance(one, Flow):
        return one.gaps[:], one.instants[:], one.together[:], one.errors[:]
    names = FIELDS.get(type(one).__name__)
    return (
        one
        if names is None
        else {name: state(getattr(one, name)) for name in names if name not in TOLD}
    )


def said(reads: list[bytes], way: str, **given: Any) -> list[Any]:
    """Return what an exchange is after each read, and what it reported.

    `way` names the method that takes the reads.
    """
    heard: list[Any] = []
    made = Exchange(
        None, b"", b"", 0, heard.append, Flow(), stream=True, on_first=heard.append, **given
    )
    made.sent, at, after = 7, 10, []
    for number, data in enumerate(reads):
        at += STEP_NS
        over = getattr(made, way)([(data, at, at + 5, at - 9, not number % 3)])
        after.append((over, state(made)))
        if over:
            break
    else:
        made.ended(at + STEP_NS, "")
    made.tell()
    return [after, heard]


def hold_answer(reads: list[bytes], **given: Any) -> None:
    """Raises AssertionError where both differ. Twice: the second time its head is known."""
    reads = [data for data in reads if data]
    for _ in range(2):
        assert said(reads, "arrived", **given) == said(reads, "arrived_in_python", **given)


def chunked(payloads: list[bytes], per_chunk: int = 1) -> list[bytes]:
    """Chunks of so many events."""
    events = [b"data: %s\n\n" % payload for payload in payloads]
    joined = [b"".join(events[at : at + per_chunk]) for at in range(0, len(events), per_chunk)]
    return [b"%x\r\n%s\r\n" % (len(data), data) for data in joined]


def as_reads(pieces: list[bytes], per_read: int) -> list[bytes]:
    """The head, and pieces of an answer, so many in a read, the head with the first."""
    whole = [HEAD, *pieces]
    return [b"".join(whole[at : at + per_read]) for at in range(0, len(whole), per_read)]
