"""Recognise plain events in a chunked body, without decoding them.

A plain event differs from an earlier event of the same response in its text alone. Nearly all
events of a long stream are plain, and comparing bytes is several times cheaper than decoding JSON.
For example, after `ResponseReader` has decoded the event

    data: {"id":"c-1","choices":[{"delta":{"content":"The"}}]}

it learns the template of the response, which is a pair of bytes:

    before_text = b'{"id":"c-1","choices":[{"delta":{"content":"'
    after_text = b'"}}]}'

The next event, whose content is " cat", has the same bytes around its text and is plain. It is only
counted and timestamped. A text is plain if it needs no decoding either (see `is_plain_text`). An
event with a finish reason, a usage or another id is not plain. What is not recognised here is left
to `http1`, `sse` and `response_reader`, which define what a response means.

A server usually writes each event as one chunk, which arrives in one read:

    3c CRLF  data: {"id": ... "}}]} LF LF  CRLF

This is the reference implementation. `_compiled.c` has a faster one, and `implementation.py`
chooses between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..wire_formats.reference import is_plain_text
from .chunk_size import MalformedResponseError, chunk_size_of_line

if TYPE_CHECKING:
    from ..wire_formats.event_timeline import EventOrCount

_MAX_SIZE_DIGITS = 8
"""A chunk whose size has more hexadecimal digits than this is not recognised."""

_LARGE_READ_BYTES = 2048
"""In a read of this size or more (as in `receiver.py`), several chunks are not counted as plain."""

_MAX_CACHED_ITEMS = 1 << 14
_MAX_CACHED_TEXT_BYTES = 64
_EVENT_START = b"data: "
_EVENT_END = b"\n\n"
_CHUNK_END = b"\r\n"

_SINGLE_EVENT_SUFFIX = _EVENT_END + _CHUNK_END
"""How a read ends that is one chunk of whole events."""

_single_event_prefixes: dict[int, bytes | None] = {}
"""A cache of the results of `_single_event_prefix` by the size of the read."""

_plain_texts: set[bytes] = set()
"""A cache of plain texts that were seen before. The vocabulary of a model repeats itself."""


class PlainChunks(NamedTuple):
    """The chunks at the beginning of some data that hold plain events only."""

    chunks: int
    events: int
    size_bytes: int


class _ChunkBounds(NamedTuple):
    """The positions at which the content of a chunk begins and ends, and that after the chunk."""

    content_start: int
    content_end: int
    chunk_end: int


def count_plain_events(data: bytes, before_text: bytes, after_text: bytes) -> tuple[int, int]:
    """Count the chunks and events of a read, if all its events are plain.

    A plain event differs from an earlier event of the response in its text alone. The usual read
    has one event in one chunk, and its result is (1, 1).

    Args:
        data: The bytes of the read, which begin with a chunk.
        before_text: The bytes of a plain event before its text, from the template.
        after_text: The bytes after its text.

    Returns:
        The number of chunks and the number of events, or (0, 0) if the read has anything but plain
        events. A large read of several chunks is not counted either: it is passed on at once in any
        case, because waiting for more would save nothing.
    """
    if _is_one_plain_event(data, before_text, after_text):
        return 1, 1

    plain = scan_plain_chunks(data, before_text, after_text)
    has_other_events = plain.size_bytes != len(data)
    is_large_read_of_chunks = len(data) >= _LARGE_READ_BYTES and plain.chunks > 1
    if has_other_events or is_large_read_of_chunks:
        return 0, 0

    return plain.chunks, plain.events


def _is_one_plain_event(data: bytes, before_text: bytes, after_text: bytes) -> bool:
    r"""Return True if the data is one chunk that holds one plain event.

    This is the usual read of a stream, so it is recognised by comparing bytes, without parsing the
    size of the chunk. For the template (`{"text":"`, `"}`), such a read is

        14 CRLF  data: {"text":"Hello"}  LF LF  CRLF

    Args:
        data: The bytes of the read.
        before_text: The bytes of a plain event before its text, from the template.
        after_text: The bytes after its text.
    """
    prefix = _single_event_prefix(len(data))  # `14 CRLF data: `
    if prefix is None:
        return False

    text_start = len(prefix) + len(before_text)
    text_end = len(data) - len(_SINGLE_EVENT_SUFFIX) - len(after_text)
    has_text = text_start < text_end
    if not has_text:
        return False

    # The second argument of `startswith` is the position at which the bytes must be.
    begins_like_event = data.startswith(prefix) and data.startswith(before_text, len(prefix))
    ends_like_event = data.startswith(after_text, text_end) and data.endswith(_SINGLE_EVENT_SUFFIX)
    if not begins_like_event or not ends_like_event:
        return False

    text = data[text_start:text_end]
    is_known_text = text in _plain_texts
    return is_known_text or _is_new_plain_text(text)


def _single_event_prefix(read_bytes: int) -> bytes | None:
    r"""Return how a read of one chunk with one event begins, by the size of the read.

    It begins with the size line of the chunk and `data: `. A read of 66 bytes, for example, has 60
    (hexadecimal 3c) bytes of content, because `3c` and the two line ends take the other 6. So it
    begins with `3c\r\ndata: `. Return None if no chunk makes a read of this size.

    The results are cached, because the reads of a stream have a few dozen sizes.
    """
    if read_bytes in _single_event_prefixes:
        return _single_event_prefixes[read_bytes]
    size_line = _size_line_of_chunk_read(read_bytes)
    prefix = None if size_line is None else size_line + _CHUNK_END + _EVENT_START
    if len(_single_event_prefixes) < _MAX_CACHED_ITEMS:
        _single_event_prefixes[read_bytes] = prefix
    return prefix


def _size_line_of_chunk_read(read_bytes: int) -> bytes | None:
    r"""Return the first line of a read of this size that is one whole chunk, without its line end.

    A chunk is the size of its content in hexadecimal digits, CRLF, the content and CRLF. The number
    of digits is not known before the size of the content is, so 1, 2, 3 ... digits are tried. A
    read of 20 bytes:

        1 digit and two CRLF take 5 bytes, which leaves 15 of content. 15 is `f`, which has 1 digit.

    So the line is `f`. Return None if no number of digits is right, which is the case for 21 bytes:

        1 digit leaves 16 bytes of content. 16 is `10`, which has 2 digits.
        2 digits leave 15 bytes of content. 15 is `f`, which has 1 digit.
    """
    line_ends_bytes = 2 * len(_CHUNK_END)
    for digit_count in range(1, _MAX_SIZE_DIGITS):
        content_bytes = read_bytes - digit_count - line_ends_bytes
        if content_bytes <= 0:
            return None
        size_line = b"%x" % content_bytes
        has_right_digits = len(size_line) == digit_count
        if has_right_digits:
            return size_line

    return None


def _is_new_plain_text(text: bytes) -> bool:
    """Return True if this is a plain text, and remember it."""
    if not is_plain_text(text):
        return False
    if len(_plain_texts) < _MAX_CACHED_ITEMS and len(text) < _MAX_CACHED_TEXT_BYTES:
        _plain_texts.add(text)
    return True


def scan_plain_chunks(data: bytes, before_text: bytes, after_text: bytes) -> PlainChunks:
    """Find the whole chunks at the beginning of `data` that hold plain events only.

    A plain event differs from an earlier event of the response in its text alone. The scan ends at
    the first chunk that is incomplete or invalid, is the last one of the body (of size 0), or holds
    anything but plain events.

    Args:
        data: Bytes that begin with a chunk.
        before_text: The bytes of a plain event before its text, from the template.
        after_text: The bytes after its text.
    """
    chunks = 0
    events = 0

    position = 0
    while position < len(data):
        bounds = _find_chunk(data, position)
        if bounds is None:
            break

        content = data[bounds.content_start : bounds.content_end]
        events_in_chunk = _count_events(content, before_text, after_text)
        if not events_in_chunk:
            break

        chunks += 1
        events += events_in_chunk
        position = bounds.chunk_end

    return PlainChunks(chunks, events, position)


def _find_chunk(data: bytes, position: int) -> _ChunkBounds | None:
    r"""Return where the content of the chunk at `position` is, or None if it is not a whole chunk.

    Of the data `5\r\nhello\r\n`, the content is from 3 to 8, and the chunk ends at 10. The last
    chunk of a body, of size 0, has no content and is not returned.
    """
    max_line_end = position + _MAX_SIZE_DIGITS + len(_CHUNK_END)
    line_end = data.find(_CHUNK_END, position, max_line_end)
    has_size_line = line_end > position
    if not has_size_line:
        return None

    content_bytes = _size_in_line(data[position:line_end])
    if not content_bytes:
        return None

    content_start = line_end + len(_CHUNK_END)
    content_end = content_start + content_bytes
    chunk_end = content_end + len(_CHUNK_END)
    is_complete = data[content_end:chunk_end] == _CHUNK_END

    return _ChunkBounds(content_start, content_end, chunk_end) if is_complete else None


def _size_in_line(line: bytes) -> int:
    """Return the size in the line before a chunk, or 0 if it is invalid or that of the last one."""
    try:
        return chunk_size_of_line(line)
    except MalformedResponseError:
        return 0


def _count_events(content: bytes, before_text: bytes, after_text: bytes) -> int:
    """Return how many events a chunk holds if all of them are plain, else 0.

    The text of an event ends at the first quote: one that belongs to the text would be escaped with
    a backslash, and a text with a backslash is not plain.

    Args:
        content: The content of the chunk.
        before_text: The bytes of a plain event before its text, from the template.
        after_text: The bytes after its text.
    """
    event_start = _EVENT_START + before_text
    event_end = after_text + _EVENT_END
    events = 0

    position = 0
    while position < len(content):
        text_start = position + len(event_start)
        text_end = content.find(b'"', text_start)
        has_start = content.startswith(event_start, position)
        has_end = text_end >= 0 and content.startswith(event_end, text_end)
        if not has_start or not has_end or not is_plain_text(content[text_start:text_end]):
            return 0

        position = text_end + len(event_end)
        events += 1

    return events


def parse_whole_chunks(
    data: bytes, before_text: bytes, after_text: bytes
) -> tuple[int, list[EventOrCount], int]:
    """Recognise the events in whole chunks at the beginning of `data`.

    This implementation recognises chunks of plain events, which differ from an earlier event in
    their text alone, and nothing before the template is known. The compiled one recognises other
    usual events too. The result is right in both cases, because the caller decodes the bytes after
    the chunks that were recognised.

    Args:
        data: A part of a chunked body that begins with a chunk and an event.
        before_text: The bytes of a plain event before its text, from the template. Empty if no
            template is known.
        after_text: The bytes after its text.

    Returns:
        The number of chunks, their events (a number stands for that many plain events), and the
        number of bytes. For two chunks of one plain event each this is `(2, [2], size)`.
    """
    has_template = before_text != b""
    if not has_template:
        return 0, [], 0
    plain = scan_plain_chunks(data, before_text, after_text)
    events: list[EventOrCount] = [plain.events] if plain.events else []
    return plain.chunks, events, plain.size_bytes
