"""Decode server-sent events: bytes in, events out.

Any split of the bytes gives the same events. Pure.

The decoder follows the WHATWG grammar of event streams: line ends LF, CRLF and CR, `data:` with or
without one space, several data lines, comments, and a byte order mark. It works on bytes, so that
U+2028 inside a token does not end a line.
"""

from __future__ import annotations

from msgspec import Struct

from .implementation import DecoderState

MAX_EVENT_BYTES = 16 << 20
"""The largest event that is read. A larger one comes from a broken server."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UNNAMED = (b"", b"message")
"""Names of events that count as unnamed: none, and the default name of the grammar."""

_DATA_FIELD = b"data: "
_END_OF_EVENT = b"\n\n"


class EventTooLargeError(ValueError):
    """One event grew past MAX_EVENT_BYTES."""


class NamedEvent(Struct, frozen=True):
    """An event with an `event:` field, such as `trtllm.perf_metrics` of trtllm-serve."""

    event: bytes
    data: bytes


class SseDecoder(DecoderState):
    """Decodes the events of one body.

    An event without a name is returned as its data, and one with a name as a NamedEvent. Comments
    and events without data are dropped, as the grammar requires. llama-server of 2025 reports an
    error in a field named `error`, which the grammar does not have. It is returned as an event
    with that name.
    """

    __slots__ = ()

    @property
    def pending(self) -> bool:
        """Whether an event is incomplete."""
        return bool(self._unparsed)

    @property
    def between_events(self) -> bool:
        """Whether the next byte is the first one of an event or of a comment."""
        return not self._unparsed and not self._after_cr

    def feed(self, data: bytes) -> list[bytes | NamedEvent]:
        """Decode the next bytes and return the events that they complete.

        Raises:
            EventTooLargeError: An event is larger than MAX_EVENT_BYTES.
        """
        if self._is_one_plain_event(data):
            return [data[len(_DATA_FIELD) : -len(_END_OF_EVENT)]]
        data = self._with_lf_line_ends(data)
        if not data:
            return []
        if self._unparsed:
            if self._continues_event(data):
                self._keep(data)
                return []
            data = b"".join((*self._earlier, self._unparsed, data))
            self._earlier.clear()
            self._earlier_bytes = 0
        if not self.started:
            if len(data) < len(_BYTE_ORDER_MARK) and _BYTE_ORDER_MARK.startswith(data):
                self._unparsed = data
                return []
            self.started = True
            data = data.removeprefix(_BYTE_ORDER_MARK)
        return self._decode_blocks(data)

    def end(self) -> list[bytes | NamedEvent]:
        """Return the last event of a body that ends without a blank line.

        The grammar drops such an event, but some servers send their last one so.
        """
        if not self._unparsed and not self._earlier:
            return []
        block = b"".join((*self._earlier, self._unparsed))
        self._unparsed = b""
        self._earlier.clear()
        return _parse_block(block)

    def _is_one_plain_event(self, data: bytes) -> bool:
        """Return True for the usual read, which is exactly one event of one line."""
        return (
            not self._unparsed
            and self.started
            and not self._after_cr
            and data.startswith(_DATA_FIELD)
            and data.find(b"\n") == len(data) - 2
            and data.endswith(b"\n")
            and len(data) > len(_DATA_FIELD) + len(_END_OF_EVENT)
            and b"\r" not in data
        )

    def _with_lf_line_ends(self, data: bytes) -> bytes:
        """Return the bytes with LF line ends. A CRLF may be split between two reads."""
        if not data:
            return data
        if self._after_cr:
            self._after_cr = False
            data = data.removeprefix(b"\n")
        if b"\r" in data:
            self._after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return data

    def _continues_event(self, data: bytes) -> bool:
        """Return True if the incomplete event goes on after these bytes."""
        ends_event = data.startswith(b"\n") and self._unparsed.endswith(b"\n")
        return self.started and _END_OF_EVENT not in data and not ends_event

    def _keep(self, data: bytes) -> None:
        """Keep one more read of an incomplete event, without copying the earlier ones."""
        self._earlier.append(self._unparsed)
        self._earlier_bytes += len(self._unparsed)
        self._unparsed = data
        if self._earlier_bytes + len(data) > MAX_EVENT_BYTES:
            raise _event_too_large()

    def _decode_blocks(self, data: bytes) -> list[bytes | NamedEvent]:
        """Return the complete events of the bytes and keep the rest.

        A single LF at the start of the rest does no harm: the blank line that it belongs to is
        found when the rest is joined with the next bytes.
        """
        *blocks, unparsed = data.split(_END_OF_EVENT)
        self._unparsed = unparsed
        if len(unparsed) > MAX_EVENT_BYTES:
            raise _event_too_large()
        events: list[bytes | NamedEvent] = []
        for block in blocks:
            is_one_line = block.startswith(_DATA_FIELD) and b"\n" not in block
            if is_one_line and len(block) > len(_DATA_FIELD):
                events.append(block[len(_DATA_FIELD) :])
            else:
                events += _parse_block(block)
        return events


def _event_too_large() -> EventTooLargeError:
    return EventTooLargeError(f"an event of more than {MAX_EVENT_BYTES} bytes")


def _parse_block(block: bytes) -> list[bytes | NamedEvent]:
    """Return the event of a block of lines, and the error that it may have beside it."""
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
    events: list[bytes | NamedEvent] = []
    data = b"\n".join(data_lines)
    if data:
        events.append(data if name in _UNNAMED else NamedEvent(name, data))
    if error:
        events.append(NamedEvent(b"error", error))
    return events
