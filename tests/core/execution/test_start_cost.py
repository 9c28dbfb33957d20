"""What the start of a run does: work that nobody needs is not done. Counted, not timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.core.execution import worker_resources
from loadgen.core.schedule.build import build_schedule
from loadgen.core.workload import loading
from loadgen.core.workload.flags import read_flags
from loadgen.sim.server import embedded
from loadgen.sim.server.options import Options

WATCHED = """
import sys, json
begun = []
def record_process_start(event, _):
    if event in ("os.fork", "subprocess.Popen"):
        begun.append(event)
sys.addaudithook(record_process_start)
from loadgen.__main__ import main
sys.argv[0] = "loadgen"
try:
    main()
except SystemExit as left:
    code = left.code
unneeded = {"http.client", "prometheus_client", "encodings.idna", "numpy.random"}
print(json.dumps([code, begun, sorted(unneeded & {*sys.modules})]), file=sys.stderr)
"""


@pytest.mark.processes
def test_a_short_run_starts_no_second_interpreter_and_imports_no_unneeded_module(
    tmp_path: Path,
) -> None:
    with embedded.start(Options(ttft="5ms", itl="1ms")) as server:
        arguments = [
            "run",
            "qa",
            "--url",
            server.url,
            "-n",
            "8",
            "-c",
            "4",
            "--osl",
            "4",
            "--warmup",
            "50ms",
        ]
        process = subprocess.run(
            [sys.executable, "-P", "-c", WATCHED, *arguments, "--out", str(tmp_path / "r")],
            capture_output=True,
            text=True,
            check=False,
            env={"HOME": str(tmp_path)},
        )
    code, begun, unneeded = json.loads(process.stderr.splitlines()[-1])

    assert code in (0, 3)
    # the scraper, an idle interpreter that waits for long runs, and the builder of bodies
    assert begun == ["os.fork", "subprocess.Popen", "os.fork"]

    pages = [
        json.loads(line) for line in (tmp_path / "r" / "server.jsonl").read_text().splitlines()
    ]

    assert pages[0]["t_s"] < 0 < pages[-1]["t_s"], "it read before and after the load"
    assert unneeded == []


@pytest.mark.parametrize(
    ("load", "opened"), [({"num_requests": 64}, 64), ({"num_requests": 300}, 256), ({}, 256)]
)
def test_no_more_connections_are_opened_than_there_are_requests(
    load: dict[str, int], opened: int
) -> None:
    workload = loading.load(
        "qa", read_flags(concurrency=256, warmup=0, **(load or {"duration": "9s"}))
    )
    assert worker_resources.connections_to_open(build_schedule(workload, 1)) == opened


COPIED = """
import json, os, sys, threading
from loadgen.core import child_process
def look(word):
    with open(0, "rb", closefd=False) as source:
        told = source.read().decode()
    descriptors = sorted(map(int, os.listdir("/proc/self/fd")))
    print(json.dumps([word, told, os.getsid(0) == os.getpid(), descriptors]),
          file=open(1, "w", closefd=False), flush=True)
def frozen(word):
    threading.Event().wait()
made = child_process.start_sidecar("look", work=lambda: look("word"))
made.stdin.write(b"told"); made.stdin.close()
print(made.stdout.readline().decode(), made.wait(20), sep="", end=" ")
stuck = child_process.start_sidecar("frozen", work=lambda: frozen(""))
try: stuck.wait(0.05)
except Exception as error: print(type(error).__name__, end=" ")
stuck.kill()
print(stuck.wait(20), end=" ")
threading.Thread(target=threading.Event().wait, args=(5,), daemon=True).start()
from loadgen.core.sidecars import scraper
other = child_process.start_sidecar(scraper.__name__, ".", work=sys.exit)
other.stdin.close(); other.wait()
print(type(made).__name__, type(other).__name__)
"""


@pytest.mark.processes
def test_a_forked_process_inherits_no_open_file_and_needs_a_single_thread(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-P", "-c", COPIED],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=tmp_path,
    )
    seen, stdout_rest = process.stdout.split("\n", 1)
    word, read, alone, files = json.loads(seen)

    assert (word, read, alone) == ("word", "told", True)
    assert files[:3] == [0, 1, 2] and len(files) == 4, "and the list that was just read"
    assert stdout_rest.split() == ["0", "TimeoutExpired", "-9", "ForkedProcess", "Popen"], (
        process.stderr
    )
