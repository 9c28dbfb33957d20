"""Decode server-sent events: bytes in, events out.

Any split of the bytes gives the same events. Pure.

The decoder follows the WHATWG grammar of event streams: line ends LF, CRLF and CR, `data:` with or
without one space, several data lines, comments, and a byte order mark. It works on bytes, so that
U+2028 inside a token does not end a line.

An event is a *block* of lines, and a blank line ends the block. A usual stream is

    data: {"choices": [{"delta": {"content": "Hi"}}]}

    data: [DONE]

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

    The bytes of an incomplete event wait in two places. `_unparsed` has the newest read, with LF
    line ends. `_earlier_reads` has the reads before it, which contain no end of an event.
    They are joined only when the event is complete, because joining them at each read would cost
    quadratic time for a large event, such as a long embedding.
    """

    __slots__ = ()

    @property
    def pending(self) -> bool:
        """Whether an event is incomplete."""
        return bool(self._unparsed)

    @property
    def between_events(self) -> bool:
        """Whether the next byte is the first one of an event or of a comment."""
        return not self._unparsed and not self._is_after_cr

    def feed(self, data: bytes) -> list[bytes | NamedEvent]:
        r"""Decode the next bytes of the body and return the events that they complete.

        For example, `data: {"n":1}\n\ndata: {"n"` returns the event `{"n":1}`, and the rest waits
        until the next bytes complete it. The usual read is exactly one event.

        Raises:
            EventTooLargeError: An event is larger than MAX_EVENT_BYTES.
        """
        if self._is_single_event(data):
            return [data[len(_DATA_FIELD) : -len(_END_OF_EVENT)]]

        new_bytes = self._with_lf_line_ends(data)
        if not new_bytes:
            return []

        if self._unparsed and self._event_stays_incomplete(new_bytes):
            self._add_to_incomplete_event(new_bytes)
            return []

        unparsed = self._take_unparsed_bytes(new_bytes)
        if not self.has_started:
            return self._decode_start_of_body(unparsed)

        return self._decode_complete_blocks(unparsed)

    def _decode_start_of_body(self, body_start: bytes) -> list[bytes | NamedEvent]:
        """Decode the first bytes of a body, which may begin with a byte order mark.

        If only a part of the mark has come so far, it waits for the rest of it.
        """
        is_partial_mark = body_start != _BYTE_ORDER_MARK and _BYTE_ORDER_MARK.startswith(body_start)
        if is_partial_mark:
            self._unparsed = body_start
            return []
        self.has_started = True
        return self._decode_complete_blocks(body_start.removeprefix(_BYTE_ORDER_MARK))

    def end(self) -> list[bytes | NamedEvent]:
        """Return the last event of a body that ends without a blank line, or an empty list.

        The grammar drops such an event, but some servers send their last one so.
        """
        if not self._unparsed and not self._earlier_reads:
            return []
        block = self._take_unparsed_bytes(b"")
        return _parse_block(block)

    def _is_single_event(self, data: bytes) -> bool:
        """Return True if the data is one event of the usual form: `data: `, one line, LF LF.

        Nothing may be left from the read before it, and the line must not be empty or contain CR.
        """
        is_at_event_start = self.has_started and not self._unparsed and not self._is_after_cr
        line_bytes = len(data) - len(_END_OF_EVENT)
        return (
            is_at_event_start
            and data.startswith(_DATA_FIELD)
            and data.find(b"\n") == line_bytes  # the first LF ends the only line
            and data.endswith(_END_OF_EVENT)
            and line_bytes > len(_DATA_FIELD)
            and b"\r" not in data
        )

    def _with_lf_line_ends(self, data: bytes) -> bytes:
        """Return the bytes with LF line ends.

        A CRLF may be split between two reads. The CR of the first read has become a line end by
        then, so that the LF at the start of the second read is dropped.
        """
        if not data:
            return data

        if self._is_after_cr:
            self._is_after_cr = False
            data = data.removeprefix(b"\n")

        if b"\r" in data:
            self._is_after_cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

        return data

    def _event_stays_incomplete(self, data: bytes) -> bool:
        """Return True if `data` does not complete the incomplete event.

        The blank line that ends an event may be split between the earlier bytes and `data`.
        """
        completes_blank_line = data.startswith(b"\n") and self._unparsed.endswith(b"\n")
        return self.has_started and _END_OF_EVENT not in data and not completes_blank_line

    def _add_to_incomplete_event(self, data: bytes) -> None:
        """Store one more read of an incomplete event, without copying the earlier reads.

        Raises:
            EventTooLargeError: The event is larger than MAX_EVENT_BYTES.
        """
        self._earlier_reads.append(self._unparsed)
        self._earlier_bytes += len(self._unparsed)
        self._unparsed = data
        if self._earlier_bytes + len(data) > MAX_EVENT_BYTES:
            raise _event_too_large()

    def _take_unparsed_bytes(self, new_bytes: bytes) -> bytes:
        """Return all bytes of the incomplete event, followed by new ones, and store none of them.

        The usual read begins a new event, so that nothing has to be copied.
        """
        if not self._unparsed and not self._earlier_reads:
            return new_bytes
        unparsed = b"".join((*self._earlier_reads, self._unparsed, new_bytes))
        self._unparsed = b""
        self._earlier_reads.clear()
        self._earlier_bytes = 0
        return unparsed

    def _decode_complete_blocks(self, data: bytes) -> list[bytes | NamedEvent]:
        """Return the events of the complete blocks and store what follows the last of them.

        Several blank lines in a row give blocks that begin with LF or are empty. They do no harm,
        because `_parse_block` skips empty lines.

        Raises:
            EventTooLargeError: The incomplete block is larger than MAX_EVENT_BYTES.
        """
        *complete_blocks, incomplete_block = data.split(_END_OF_EVENT)
        self._unparsed = incomplete_block
        if len(incomplete_block) > MAX_EVENT_BYTES:
            raise _event_too_large()

        events: list[bytes | NamedEvent] = []
        for block in complete_blocks:
            is_data_line = block.startswith(_DATA_FIELD) and b"\n" not in block
            if is_data_line and len(block) > len(_DATA_FIELD):
                events.append(block[len(_DATA_FIELD) :])
            else:
                events += _parse_block(block)

        return events


def _event_too_large() -> EventTooLargeError:
    return EventTooLargeError(f"an event is longer than {MAX_EVENT_BYTES} bytes")


def _parse_block(block: bytes) -> list[bytes | NamedEvent]:
    """Return the events of a block of lines: none, its data, or its error as a NamedEvent.

    A line is `field: value`. Comments are lines without a field name (`: keep-alive`). They are
    skipped, as are empty lines and unknown fields.
    """
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
