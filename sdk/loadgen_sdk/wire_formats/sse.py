"""A decoder of server-sent events, without IO: bytes in, events out. Any split of the bytes gives the same events.

It follows the WHATWG event-stream grammar: LF, CRLF and CR line ends, `data:` with or without one space, several data
lines, comments, a BOM. It works on bytes, so that U+2028 inside a token does not end a line. No socket, no clock.
"""

from __future__ import annotations

from msgspec import Struct

from .implementation import DecoderState

_BOM = b"\xef\xbb\xbf"
_DEFAULT_NAMES = (b"", b"message")  # an event with the grammar's default name counts as unnamed
MAX_EVENT_BYTES = 16 << 20  # a larger event means a broken server


class EventTooLargeError(ValueError):
    """One event grew past MAX_EVENT_BYTES."""


class NamedEvent(Struct, frozen=True):
    """An event with an `event:` field, such as trtllm-serve's `trtllm.perf_metrics` after `[DONE]`."""

    event: bytes
    data: bytes


class SseDecoder(DecoderState):
    """Decodes one body. Each call of `feed` returns the events that its bytes complete.

    An event without a name is returned as its data (`bytes`), one with a name as a `NamedEvent`.
    Comments and events without data, or with empty data, are dropped, as the grammar says.
    llama-server of 2025 reports an error in a field named `error`, which the grammar does not know;
    it is returned as an event with the name `error`.
    `pending` is true while an event is incomplete. `started`: no BOM can come any more.
    """

    __slots__ = ()

    @property
    def pending(self) -> bool:
        return bool(self._unparsed)

    @property
    def between_events(self) -> bool:
        """Whether the next byte is the first one of an event (or of a comment)."""
        return not self._unparsed and not self._after_cr

    def feed(self, data: bytes) -> list[bytes | NamedEvent]:
        if (
            not self._unparsed  # the usual case: a read is exactly one event of one line
            and self.started
            and not self._after_cr
            and data.startswith(b"data: ")
            and data.find(b"\n") == len(data) - 2
            and data.endswith(b"\n")
            and len(data) > len(b"data: \n\n")
            and b"\r" not in data
        ):
            return [data[6:-2]]
        if not data:
            return []
        if self._after_cr:  # the LF of a CRLF that was split between two reads
            self._after_cr = False
            if data[:1] == b"\n":
                data = data[1:]
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if self._unparsed:
            unparsed = self._unparsed
            if (
                self.started
                and b"\n\n" not in data
                and not (data[:1] == b"\n" and unparsed.endswith(b"\n"))
            ):
                self._keep(unparsed, data)  # the event goes on: no byte of it is copied again
                return []
            data = b"".join((*self._earlier, unparsed, data))
            self._earlier.clear()
            self._earlier_bytes = 0
        if not self.started:
            if len(data) < 3 and _BOM.startswith(data):
                self._unparsed = data
                return []
            self.started = True
            data = data.removeprefix(_BOM)
        blocks = data.split(b"\n\n")
        unparsed = self._unparsed = blocks.pop()
        if len(unparsed) > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        # A lone "\n" is kept without harm: a "\n\n" split between two reads is found when they are joined.
        events: list[bytes | NamedEvent] = []
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block and len(block) > len(b"data: "):
                events.append(block[6:])
            else:
                self._parse_block(block, events)
        return events

    def _keep(self, unparsed: bytes, data: bytes) -> None:
        """One more read of an event that is not complete. Raises EventTooLarge."""
        if not data:  # all of it was the second half of a line end
            return
        self._earlier.append(unparsed)
        self._earlier_bytes += len(unparsed)
        self._unparsed = data
        if self._earlier_bytes + len(data) > MAX_EVENT_BYTES:
            raise EventTooLargeError(f"an event of more than {MAX_EVENT_BYTES} bytes")

    def end(self) -> list[bytes | NamedEvent]:
        """The last event of a body that ends without a blank line. The grammar drops it, but some servers send this."""
        events: list[bytes | NamedEvent] = []
        if not self._unparsed and not self._earlier:
            return events
        block, self._unparsed = b"".join((*self._earlier, self._unparsed)), b""
        self._earlier.clear()
        self._parse_block(block, events)
        return events

    def _parse_block(self, block: bytes, events: list[bytes | NamedEvent]) -> None:
        name = b""
        error = b""
        data_lines: list[bytes] = []
        for line in block.split(b"\n"):
            field, _, value = line.partition(b":")
            if field == b"data":
                data_lines.append(value.removeprefix(b" "))
            elif field == b"event":
                name = value.removeprefix(b" ")
            elif field == b"error":
                error = value.removeprefix(b" ")
        data = b"\n".join(data_lines)
        if data:
            events.append(data if name in _DEFAULT_NAMES else NamedEvent(name, data))
        if error:
            events.append(NamedEvent(b"error", error))
