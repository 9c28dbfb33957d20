"""Server-sent events, sans IO: bytes in, event payloads out; any split of the bytes gives the same events.

Follows the WHATWG event-stream grammar (LF, CRLF and CR line ends, `data:` with or without one space, several data
lines, comments, a BOM), on bytes, so that U+2028 inside a token is nothing special. No socket and no clock here.
"""

from __future__ import annotations

from typing import NamedTuple

_BOM = b"\xef\xbb\xbf"
_UNNAMED = (b"", b"message")  # the grammar's default name is no name
MAX_EVENT_BYTES = 16 << 20  # an event larger than this is not a token, it is a broken server


class EventTooLarge(ValueError):
    """One event grew past MAX_EVENT_BYTES."""


class Named(NamedTuple):
    """An event with an `event:` field, such as trtllm-serve's `trtllm.perf_metrics` after `[DONE]`."""

    event: bytes
    data: bytes


class Decoder:
    """Feed it the body; each call returns the events completed by these bytes.

    An anonymous event is its data as `bytes`; one with a name is a `Named`. Comments and events without data vanish.
    `pending` is true while an event is unfinished.
    """

    __slots__ = ("_after_cr", "_held", "_started")

    def __init__(self) -> None:
        self._held = b""
        self._after_cr = False
        self._started = False

    @property
    def pending(self) -> bool:
        return bool(self._held)

    def feed(self, data: bytes) -> list[bytes | Named]:
        if (
            not self._held  # most often a read is exactly one event of one line
            and self._started
            and not self._after_cr
            and data.startswith(b"data: ")
            and data.find(b"\n") == len(data) - 2
            and data.endswith(b"\n")
            and b"\r" not in data
        ):
            return [data[6:-2]]
        if not data:
            return []
        if self._after_cr:  # the LF of a CRLF that fell between two reads
            self._after_cr = False
            if data[:1] == b"\n":
                data = data[1:]
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if self._held:
            data = self._held + data
        if not self._started:
            if len(data) < 3 and _BOM.startswith(data):
                self._held = data
                return []
            self._started = True
            data = data.removeprefix(_BOM)
        blocks = data.split(b"\n\n")
        held = self._held = blocks.pop()
        if len(held) > MAX_EVENT_BYTES:
            raise EventTooLarge(f"an event of more than {MAX_EVENT_BYTES} bytes")
        # Holding back a lone "\n" is harmless, and "\n\n" split between two reads is found when they are joined.
        events: list[bytes | Named] = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block:
                events.append(block[6:])
            else:
                self._block(block, events)
        return events

    def end(self) -> list[bytes | Named]:
        """The last event of a body that ends without its blank line: the grammar drops it, but servers do this."""
        events: list[bytes | Named] = []
        block, self._held = self._held, b""
        self._block(block, events)
        return events

    def _block(self, block: bytes, events: list[bytes | Named]) -> None:
        name = b""
        lines: list[bytes] = []
        for line in block.split(b"\n"):
            field, _, value = line.partition(b":")
            if field == b"data":
                lines.append(value.removeprefix(b" "))
            elif field == b"event":
                name = value.removeprefix(b" ")
        if lines:
            data = b"\n".join(lines)
            events.append(data if name in _UNNAMED else Named(name, data))
