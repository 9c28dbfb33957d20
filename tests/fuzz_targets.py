"""The functions that are fuzzed: every parser of bytes from servers, users and other tools.

For any input, a parser either returns or raises one of the documented errors in `TOLD`. Any other
exception is a bug.
"""

from __future__ import annotations

import base64
import contextlib
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import date
from functools import cache
from pathlib import Path

import pyarrow as pa
from fuzz_documents import BETWEEN
from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.probe.server_info import parse_server_info
from loadgen_sdk.transport.chunk_size import MalformedResponseError
from loadgen_sdk.transport.http1 import ResponseParser
from loadgen_sdk.transport.target import Target
from loadgen_sdk.wire_formats.event_fields import error_text
from loadgen_sdk.wire_formats.event_timeline import EventTimeline
from loadgen_sdk.wire_formats.response_reader import ResponseReader
from loadgen_sdk.wire_formats.server_profiles import SERVER_PROFILES, Api
from loadgen_sdk.wire_formats.sse import EventTooLargeError, SseDecoder
from pyarrow import parquet

import loadgen
from loadgen import result_kinds
from loadgen.answers.questions import read_questions
from loadgen.bundle.archive import unpack_archive
from loadgen.cli.targets import load_targets
from loadgen.contracts.loading import load_contract
from loadgen.core.errors import CombinedError, LoadgenError
from loadgen.core.metrics.summary import load_summary
from loadgen.core.results import store
from loadgen.core.results.manifest import decode_manifest
from loadgen.core.server_metrics import energy, request_accounts, series
from loadgen.core.workload import load
from loadgen.core.workload.dataset import read_rows
from loadgen.core.workload.traces import read_trace
from loadgen.interop import application_calls, reader
from loadgen.mlperf import loadgen_log
from loadgen.pricing import price_file
from loadgen.repeated.capacity import load_capacity
from loadgen.runs.kind import load_compared_run
from loadgen.sim.presets.preset import load_preset
from loadgen.sim.server.error_responses import RefusalError
from loadgen.sim.server.request_parser import RequestRules, parse_completions_request

ROOT = Path(__file__).parent.parent
CORPUS = Path(__file__).parent / "data" / "fuzz"
REPORTED_ERRORS = (LoadgenError, CombinedError, TargetUnusable)


def _pieces(data: bytes) -> Iterator[bytes]:
    """Return the bytes in pieces as they may arrive; the first byte gives their length."""
    size = data[0] % 64 * 8 + 1 if data else 1
    yield from (data[i : i + size] for i in range(1, len(data), size))


def sse(data: bytes) -> None:
    decoder, reading = SseDecoder(), ResponseReader(EventTimeline())
    with contextlib.suppress(EventTooLargeError):
        for at, piece in enumerate(_pieces(data)):
            reading.feed(decoder.feed(piece), at)
        reading.feed(decoder.end(), 10**9)
    reading.find_failure(True, False, True)
    reading.usage()


def whole_answer(data: bytes) -> None:
    reading = ResponseReader(EventTimeline())
    reading.feed([data], 0)
    reading.find_failure(True, False, False)
    error_text(data)


def http(data: bytes) -> None:
    response = ResponseParser()
    with contextlib.suppress(MalformedResponseError):
        for piece in _pieces(data):
            response.feed(piece)
        response.feed_end()


def url(data: bytes) -> None:
    Target.parse(data.decode("utf-8", "replace"))


def workload(data: bytes) -> None:
    load(_file("w.yaml", data))


def contract(data: bytes) -> None:
    load_contract(Path(_file("c.yaml", data)), env={})


def bundle(data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=_SCRATCH) as directory:
        unpack_archive(Path(_file("b.zip", data)), Path(directory))


def questions(data: bytes) -> None:
    read_questions(Path(_file("q.jsonl", data)))


def prices(data: bytes) -> None:
    price_file.parse_prices(
        data.decode("utf-8", "replace"), "prices.yaml", today=date(2026, 11, 22), env={}
    )


def targets(data: bytes) -> None:
    load_targets(Path(_file("t.yaml", data)), {})


def trace(data: bytes) -> None:
    read_trace(_file("t.jsonl", data))


def dataset(data: bytes) -> None:
    read_rows(_file("d.jsonl", data))


def arrow(data: bytes) -> None:
    read_rows(_file("d.arrow", data))


def cells(data: bytes) -> None:
    read_rows(_file("d.csv", data))


def foreign(data: bytes) -> None:
    reader.parse_result(data, "result.json")


def mlperf_log(data: bytes) -> None:
    summary, _, detail = data.decode("utf-8", "replace").partition("\0")
    loadgen_log.parse_log(summary, detail)


def run_json(data: bytes) -> None:
    decode_manifest(data)


def summary(data: bytes) -> None:
    load_summary(data)


def capacity(data: bytes) -> None:
    load_capacity(data)


def folder(data: bytes) -> None:
    """Read a run in which any file may be damaged.

    The input holds `name NUL content` for each file, separated by BETWEEN.
    """
    with tempfile.TemporaryDirectory(dir=_SCRATCH) as directory:
        run = Path(directory)
        for entry in data.split(BETWEEN):
            name, _, content = entry.partition(b"\0")
            if name in FILES:
                path = run / name.decode()
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)
        load_compared_run(run)


FILES = (
    b"run.json",
    b"summary.json",
    b"seconds.jsonl",
    b"server.jsonl",
    b"spool/w0.rows",
    b"spool/w0.texts",
    b"spool/w0.seconds",
    b"flows/w0.gaps.0",
    b"flows/w0.timeline.0",
    b"flows/w0.heat",
    b"requests/requests.parquet",
)


def metrics_page(data: bytes) -> None:
    with contextlib.suppress(ValueError):  # what the scraper expects of it
        series.parse_page(data.decode("utf-8", "replace"))
    with contextlib.suppress(ValueError):
        series.IterationParser().parse(data)
    with contextlib.suppress(ValueError):
        energy.parse_energy_metrics(data)
    with contextlib.suppress(ValueError):
        request_accounts.parse_breakdowns(data, 0)
    energy.parse_nvidia_smi(data.decode("utf-8", "replace"))


def calls(data: bytes) -> None:
    path = Path(_file("calls.jsonl", data))
    application_calls.is_calls(path)
    application_calls.read_calls(path)


def preset(data: bytes) -> None:
    load_preset(_file("p.yaml", data))


def page(data: bytes) -> None:
    """Read a stored summary and render it as text and as a page."""
    with tempfile.TemporaryDirectory(dir=_SCRATCH) as directory:
        Path(directory, "summary.json").write_bytes(data)
        opened = result_kinds.opened(Path(directory))
        assert opened.text and opened.page


def facts(data: bytes) -> None:
    for server in ("trtllm", "vllm", "sglang", "llamacpp"):
        parse_server_info(SERVER_PROFILES[server], "1.0", data.decode("utf-8", "replace"))


def request(data: bytes) -> None:
    apis: tuple[Api, ...] = ("chat", "completions")
    for api in apis:
        with contextlib.suppress(RefusalError):
            parse_completions_request(data, api, RequestRules())


_SCRATCH = "/dev/shm" if Path("/dev/shm").is_dir() else None


_TEMPORARY_DIR = tempfile.TemporaryDirectory(dir=_SCRATCH)  # of this process; gone when it ends


def _file(name: str, data: bytes) -> str:
    path = Path(_TEMPORARY_DIR.name, name)
    path.write_bytes(data)
    return str(path)


TARGETS: dict[str, tuple[Callable[[bytes], None], tuple[str, ...]]] = {
    "sse": (sse, ("tests/data/transcripts/*/*_stream*.http",)),
    "whole_answer": (
        whole_answer,
        ("tests/data/transcripts/*/*nostream.http", "tests/data/transcripts/*/err*.http"),
    ),
    "http": (http, ("tests/data/transcripts/*/*.http",)),
    "url": (url, ()),
    "workload": (workload, ("workloads/*.yaml",)),
    "contract": (contract, ("contracts/*.yaml",)),
    "prices": (prices, ("docs/prices.example.yaml",)),
    "targets": (targets, ()),
    "trace": (trace, ("tests/data/oracle/trace.jsonl",)),
    "dataset": (dataset, ()),
    "arrow": (arrow, ()),
    "cells": (cells, ()),
    "foreign": (foreign, ("tests/data/rivals/*.json*",)),
    "mlperf_log": (mlperf_log, ()),
    "run_json": (run_json, ("tests/data/run_example.json",)),
    "summary": (summary, ("tests/data/summary_example*.json",)),
    "capacity": (capacity, ()),
    "folder": (folder, ()),
    "metrics_page": (metrics_page, ()),
    "page": (page, ("tests/data/summary_example*.json",)),
    "calls": (calls, ()),
    "preset": (preset, ("loadgen/sim/presets/*.yaml",)),
    "facts": (facts, ()),
    "request": (request, ()),
    "bundle": (bundle, ()),
    "questions": (questions, ()),
}
"""Name -> the function, and files of the repository to begin with, beside those in CORPUS."""


def _body(recorded: bytes) -> bytes:
    return b"".join(ResponseParser().feed(recorded))


PIECES = b"\x05"  # see `_pieces`
INPUT_OF: dict[str, Callable[[bytes], bytes]] = {
    "sse": lambda recorded: PIECES + _body(recorded),
    "whole_answer": _body,
    "http": lambda recorded: PIECES + recorded,
}
"""What a file of the repository is as an input, where it is not its bytes."""


def _run_folder(*, spooled: bool = False) -> bytes:
    """Return the files of a short run. `spooled` leaves its records as a killed run does."""
    with tempfile.TemporaryDirectory(dir=_SCRATCH) as directory:
        loadgen.run(
            "qa",
            url="sim:gb300-vm",
            request_rate="10",
            num_requests=8,
            out=Path(directory, "r"),
            seed=1,
        )
        if spooled:
            rows = store.read_run(Path(directory, "r")).rows
            shutil.rmtree(Path(directory, "r", "requests"))
            Path(directory, "r", "spool").mkdir(exist_ok=True)
            Path(directory, "r", "spool", "w0.rows").write_bytes(rows.tobytes())
        files = [(name, Path(directory, "r", name.decode())) for name in FILES]
        return BETWEEN.join(
            name + b"\0" + path.read_bytes() for name, path in files if path.is_file()
        )


def _tables(name: str) -> list[bytes]:
    """Small tables as the files that a parser of tables reads."""
    rows = pa.table({"prompt": ["a", "b c"], "output_tokens": [3, 4], "words": [["x"], ["y", "z"]]})
    times = pa.table(
        {"TIMESTAMP": [0, 1000, 2000], "ContextTokens": [10, 20, 30], "GeneratedTokens": [1, 2, 3]}
    )
    buffer = io.BytesIO()
    if name in ("dataset", "trace"):
        parquet.write_table(rows if name == "dataset" else times, buffer)
        return [buffer.getvalue()]
    if name == "cells":
        return [b'prompt,output_tokens\n"a ""b""",3\nc,4\n']
    if name != "arrow":
        return []
    streamed = io.BytesIO()
    for make, sink in ((pa.ipc.new_file, buffer), (pa.ipc.new_stream, streamed)):
        with make(sink, rows.schema) as writer:
            writer.write_table(rows)
    return [buffer.getvalue(), streamed.getvalue()]


@cache
def corpus(name: str) -> list[bytes]:
    """Return the stored inputs of a target: files of the repository and results of fuzzing."""
    paths = [path for glob in TARGETS[name][1] for path in sorted(ROOT.glob(glob))]
    files = [INPUT_OF.get(name, bytes)(path.read_bytes()) for path in paths]
    if name == "folder":
        files += [_run_folder(), _run_folder(spooled=True)]
    files += _tables(name)
    corpus_file = CORPUS / f"{name}.txt"
    lines = corpus_file.read_text().splitlines() if corpus_file.exists() else []
    return files + [base64.b85decode(line) for line in lines]


def run_target(name: str, data: bytes) -> str:
    """Run a target on one input; the faults that it told, in their words. Raises what is a bug."""
    try:
        TARGETS[name][0](data)
    except REPORTED_ERRORS as fault:
        return str(fault)
    return ""
