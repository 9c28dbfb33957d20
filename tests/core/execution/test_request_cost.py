"""Work per request of a load, counted as Python calls, encodings, digests and timers."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from loadgen_sdk import compiled
from run_fixtures import NO_PAGES
from servers import shared

from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute
from loadgen.core.workload import load, read_flags
from loadgen.sim.server.options import Options

FRAMES, CALLS = (77, 156) if compiled.module is not None else (245, 555)
"""Upper bounds of Python frames for each request, alone and with calls of compiled functions.

They are about 3 % above the counts on an idle host, because a busy one adds polls and timer ticks.
"""
EVALUATION = ("/core/analysis/", "/core/metrics/", "/core/stats/")
"""Packages that evaluate a run. Their calls depend on its latencies, and not on each request."""


def calls(folder: Path, requests: int) -> Counter[str]:
    """Count the calls of a run of short requests by name. Python functions count under ""."""
    folder.mkdir()
    (folder / "w.yaml").write_text("name: w\nrequests: {input_tokens: 64, output_tokens: 4}\n")
    flags = read_flags(seed="1", warmup="0", num_requests=str(requests), concurrency="8")
    workload = load(str(folder / "w.yaml"), flags)
    endpoint = shared(Options(ttft="0.5ms", itl="0.1ms"))
    settings = Settings(
        url=endpoint.url, model="sim", server="trtllm", out=folder / "out", **NO_PAGES
    )
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, called: Any) -> None:
        is_evaluation = any(name in frame.f_code.co_filename for name in EVALUATION)
        if is_evaluation:
            return
        if event == "call":
            counts[""] += 1
        elif event == "c_call":
            counts[called.__qualname__] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        summary, _ = execute(workload, settings)
    finally:
        sys.setprofile(before)
    assert summary.requests.ok == requests
    return counts


@pytest.mark.processes
def test_a_request_is_encoded_once_hashed_twice_and_needs_no_timer(
    tmp_path: Path,
) -> None:
    """The difference of two runs excludes the fixed work of a run.

    Of the two encodings one is the body and the other belongs to the fingerprint of the prompts.
    One of the two digests is that of the body.
    """
    calls(tmp_path / "first", 16)  # imports, and what is kept from one run to the next
    few_counts, many_counts = calls(tmp_path / "few", 100), calls(tmp_path / "many", 900)

    def each(name: str) -> float:
        return (many_counts[name] - few_counts[name]) / 800

    assert each("encode") < 2.1 and each("blake2b") < 2.1 and each("socket.sendmsg") < 1.1
    decoded = 0.1 if compiled.module is not None else 7.1
    assert each("Decoder.decode") < decoded, (
        "an event is decoded once: role (again for unknown fields), four tokens, usage; or in C"
    )
    assert each("epoll.poll") < 2 and each("timerfd_settime") < 1
    assert each("") < FRAMES
    assert sum(map(each, many_counts.keys() | few_counts.keys())) < CALLS
