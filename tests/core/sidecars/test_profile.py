"""`--profile`: the server's profiler covers a part of the load and is always stopped."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from time import monotonic

import pytest
from expected_errors import refused
from servers import start

import loadgen
from loadgen.core import units
from loadgen.core.errors import LoadgenError, UserError
from loadgen.core.results.manifest import StagePlan
from loadgen.core.sidecars import profiler
from loadgen.sim.server.options import Options

WORKLOAD = {
    "name": "two",
    "requests": {"input_tokens": 12, "output_tokens": 4},
    "stages": [
        {"name": "before", "arrival": {"constant": "20/s"}, "duration": "1s"},
        {"name": "profiled", "arrival": {"constant": "20/s"}, "duration": "1s"},
    ],
}
STAGES = [
    StagePlan(name="warm-up", measured=False, start_ns=0, end_ns=5),
    StagePlan(name="a", start_ns=5, end_ns=9),
    StagePlan(name="b", start_ns=9),
]


def wait_until_profiling(url: str, wanted: bool, until: float) -> None:
    while bool(stats(url)["profiling"]) != wanted:
        assert monotonic() < until
        select.select([], [], [], 0.02)


def stats(url: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{url.removesuffix('/v1')}/_stats", timeout=10) as answer:
        counts: dict[str, int] = json.load(answer)
    return counts


def test_the_profile_option_selects_a_stage_and_limits_its_duration() -> None:
    assert profiler.profile_span(profiler.parse_profile_option("steady"), STAGES) == (5, None)
    assert profiler.profile_span(profiler.parse_profile_option("a"), STAGES) == (5, 9)
    assert profiler.profile_span(profiler.parse_profile_option("b:3s"), STAGES) == (
        9,
        9 + 3 * 10**9,
    )
    with refused(UserError, "unknown_name", "--profile"):
        profiler.profile_span(profiler.parse_profile_option("c"), STAGES)
    with pytest.raises(units.InvalidValueError):
        profiler.parse_profile_option(":3s")


@pytest.mark.processes
def test_the_profiler_runs_during_a_stage_and_the_verdict_has_a_warning(tmp_path: Path) -> None:
    with start(Options(ttft="5ms", itl="1ms")) as server:
        run = loadgen.run(
            WORKLOAD,
            url=server.url,
            profile="profiled",
            out=tmp_path / "run",
            limit="failure_share:9%",
        )
        after = stats(server.url)

    assert (after["profiling"], after["profiles"]) == (0, 1)
    (code,) = [code for code in run.summary.verdict.warning_codes if code.code == "profiled"]
    assert 0.9 < code.values["from_s"] < 2.0 and code.values["to_s"] > 1.9


@pytest.mark.processes
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_an_aborted_run_stops_the_profiler(tmp_path: Path, end: signal.Signals) -> None:
    with start(Options(ttft="5ms", itl="1ms")) as server:
        file = tmp_path / "long.yaml"
        file.write_text(
            json.dumps(
                {**WORKLOAD, "stages": [{"arrival": {"constant": "20/s"}, "duration": "60s"}]}
            )
        )
        run = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "loadgen",
                "run",
                str(file),
                "--url",
                server.url,
                "--profile",
                "steady",
                "--out",
                str(tmp_path / "run"),
                "--progress",
                "off",
            ],
            env=os.environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = monotonic() + 120
        wait_until_profiling(server.url, True, until)
        run.send_signal(end)
        run.wait(90)
        wait_until_profiling(server.url, False, until)


@pytest.mark.processes
def test_a_server_without_a_profiler_is_refused_before_the_load(tmp_path: Path) -> None:
    with refused(LoadgenError, "unsupported", "--profile"):
        loadgen.run(
            WORKLOAD, embedded={"api_flavor": "openai"}, profile="steady", out=tmp_path / "a"
        )

    with start(Options(api_flavor="openai")) as server, refused(LoadgenError, "unsupported"):
        loadgen.run(
            WORKLOAD,
            url=server.url,
            server="vllm",
            extra_body={"ignore_eos": None, "min_tokens": None},
            profile="steady",
            out=tmp_path / "b",
        )

    with refused(LoadgenError, "unsupported", "--profile"):
        loadgen.run(WORKLOAD, url="sim:gb300-vm", profile="steady", out=tmp_path / "c")
