"""Compare the C functions that read server responses with their Python reference under libFuzzer.

    .ci/fuzzed VENV/bin/python [SECONDS]    build and start it; SEED=N selects other inputs

With `leaks` instead of SECONDS it looks for leaked memory, which needs Python's own allocator.

The first byte of an input says whether there is a response template and where
`count_leading_plain_events` begins, or how the response is cut into pieces. The rest is what a
server sent: chunks, or the data of events, each terminated by a zero byte.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import _fuzz
from compare_chunks import AFTER, BEFORE, check_chunks
from compare_responses import as_reads, check_response, chunked
from loadgen_sdk import _compiled as compiled
from loadgen_sdk.wire_formats import reference

EVENT = b"data: " + BEFORE + b"word" + AFTER + b"\n\n"
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
TWO = b"%x\r\n%s\r\n" % (2 * len(EVENT), 2 * EVENT)
SEEDS = (
    CHUNK,
    TWO,
    CHUNK + TWO,
    CHUNK[:-1],
    b"0" + CHUNK,
    CHUNK.replace(b"word", b'wo"d'),
    CHUNK.replace(b"word", b"\xff\\"),
    *(b"0\r\n\r\n", b"\r\n", b"fffffffff\r\n", b"7fffffff\r\n", b"zz\r\n", b"5\r\n: hi\n\r\n"),
    *(b"9\r\ndata: x\n\n\r\n", b"e\r\ndata: [DONE]\n\n\r\n", b"14\r\nevent: x\ndata: y\n\n\r\n"),
)
EVENTS = (
    b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}',
    b'{"id":"c","choices":[{"delta":{"content":" w","refusal":"","tool_calls":[]},'
    b'"logprobs":[-1.5]}],"error":null}',
    b'{"choices":[{"text":"w","finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":2}}',
    b"[DONE]",
)
SEEDS += (b"\0".join(EVENTS), b"\0".join((EVENTS[0], *[EVENTS[1]] * 3, EVENTS[2])))
TOKENS = (
    BEFORE,
    AFTER,
    b"data: ",
    b"\n\n",
    b"\r\n",
    b"\r\n\r\n",
    b"0\r\n",
    b"[DONE]",
    b"event: ",
    b"ffffffff",
)


def compare(data: bytes) -> None:
    """Raise AssertionError if C and Python read an input differently."""
    first, data = (data[0], data[1:]) if data else (0, b"")
    if first & 128:
        pieces = [*chunked(data.split(b"\x00"), first // 2 % 3 + 1), b"0\r\n\r\n"]
        check_response(
            as_reads(pieces, first // 8 % 4 + 1), requested_output_tokens=4 * (first & 1)
        )
        return
    check_chunks(compiled, data, templated=bool(first & 1))
    lines = [len(line) + 1 if line[:1] == b"#" else line for line in data.split(b"\x00")]
    start = first >> 1
    assert compiled.count_leading_plain_events(
        lines, start, BEFORE, AFTER
    ) == reference.count_leading_plain_events(lines, start, BEFORE, AFTER)


def leaves_nothing(rounds: int = 300) -> None:
    """Raise AssertionError if the module leaks memory.

    The module allocates only by Python's allocator, whose blocks are counted.
    """
    inputs = [bytes([first_literal]) + seed for seed in SEEDS for first_literal in (0, 1, 3, 129)]
    for data in inputs:
        compare(data)
    before = sys.getallocatedblocks()
    for _ in range(rounds):
        for data in inputs:
            compiled.parse_whole_chunks(data, BEFORE, AFTER)
            compiled.count_leading_plain_events([data, 3, EVENT], 0, BEFORE, AFTER)
    assert sys.getallocatedblocks() - before < rounds, "blocks are kept"


def main() -> None:
    seconds = sys.argv[1]
    if seconds == "leaks":
        leaves_nothing()
        print("fuzzed: no memory is kept")
        return
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus")
        corpus.mkdir()
        for i, seed in enumerate(SEEDS):
            for first_literal in (0, 1, 3, 129, 139):
                (corpus / f"{i}-{first_literal}").write_bytes(bytes([first_literal]) + seed)
        entries = ("".join(f"\\x{byte:02x}" for byte in word) for word in TOKENS)
        Path(folder, "words").write_text("".join(f'"{word}"\n' for word in entries))
        seed = os.environ.get(
            "SEED", "7"
        )  # the same at every build: one that fails by chance teaches to try again
        flags = [
            f"-max_total_time={seconds}",
            f"-seed={seed}",
            f"-dict={folder}/words",
            "-max_len=4096",
            "-detect_leaks=0",
        ]
        _fuzz.run(
            ["fuzz", *flags, f"-artifact_prefix={os.environ.get('FOUND', folder)}/", str(corpus)],
            compare,
        )


if __name__ == "__main__":
    main()
