"""Exit codes and messages for closed streams, refused paths, full disks and signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from loadgen.cli.app import main
from loadgen.cli.exit_codes import run_to_exit_code
from loadgen.cli.settings import build_settings
from loadgen.core.errors import CombinedError
from loadgen.core.execution.shared_counters import SharedCounters
from loadgen.sim.server import embedded
from loadgen.sim.server.options import Options

RUN = ["run", "qa", "--url", "sim:h100x8", "-n", "20", "--request-rate", "5", "--seed", "1"]


def ended(*arguments: str, shell: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process. `shell` is appended to its command line in a shell."""
    env = dict(os.environ) | more
    command_line = [sys.executable, "-P", "-m", "loadgen", *arguments]
    script = 'set -o pipefail; "$@" ' + shell
    command = ["bash", "-c", script, "bash", *command_line] if shell else command_line
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=env, check=False
    )


@pytest.mark.processes
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_not_end_a_run(tmp_path: Path, closed: str) -> None:
    process = ended(*RUN, "--out", str(tmp_path / "out"), shell=closed)
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "out" / "summary.json").exists()


@pytest.mark.processes
def test_a_full_standard_output_is_reported_without_a_traceback() -> None:
    process = ended("--version", shell="> /dev/full")
    assert process.returncode == 2 and process.stderr.startswith("error: the host refused: ")
    assert process.stderr.count("\n") == 2


@pytest.mark.processes
@pytest.mark.parametrize("slo", ["e2e:1ms", "e2e:100s"])
def test_a_closed_pipe_does_not_change_the_exit_code(tmp_path: Path, slo: str) -> None:
    """The command writes more than a pipe holds, and `| true` reads nothing of it."""
    process = ended(*RUN, "--slo", slo, "--out", str(tmp_path / "out"), shell="| true")
    assert process.returncode == (1 if slo == "e2e:1ms" else 0), process.stderr
    report = ended("report", str(tmp_path / "out"), "--json", shell="| head -c 1")
    assert report.returncode == process.returncode, report.stderr
    assert "error" not in report.stderr


@pytest.mark.processes
def test_a_run_succeeds_on_a_terminal_without_utf_8(tmp_path: Path) -> None:
    process = ended(
        *RUN, "--out", str(tmp_path / "out"), PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C"
    )
    assert (process.returncode, "bug" in process.stderr) == (0, False), process.stderr


@pytest.mark.processes
def test_escape_sequences_in_texts_do_not_reach_the_terminal() -> None:
    code = (
        "from loadgen.cli import streams as s; s.protect_standard_streams()\n"
        "print('\\x1b]0;t\\x07 \\u202e \\x1b[1mbold\\x1b[0m \\x9b \\x1b[2J\\r')"
    )
    process = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout == "\\x1b]0;t\\x07 \\u202e \x1b[1mbold\x1b[0m \\x9b \\x1b[2J\\r\n"


@pytest.mark.parametrize(
    ("out", "expected_text"),
    [
        ("/dev/null", "/dev/null"),
        ("/dev/null/x", "not a directory"),
        ("/proc/nothing", "/proc/nothing"),
        ("x" * 300, "name too long"),
    ],
)
def test_a_path_that_the_host_refuses_is_a_user_error(
    tmp_path: Path,
    out: str,
    expected_text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exc_info:
        main([*RUN, "--out", out])
    stderr = capsys.readouterr().err
    assert exc_info.value.code == 2, stderr
    assert expected_text in stderr and "hint:" in stderr
    assert "bug" not in stderr and "Traceback" not in stderr


@pytest.mark.parametrize("out", ["/dev/null", "/dev/null/x", "x" * 300])
def test_an_invalid_output_path_is_refused_before_the_run(out: str) -> None:
    with pytest.raises(CombinedError, match="--> --out "):
        build_settings({"out": out})


@pytest.mark.parametrize(
    ("flags", "expected_text"),
    [
        (
            ("--request-rate", "1000000/s", "-d", "2000s"),
            "their scheduled times alone need 16.0 GB",
        ),
        (("--input-tokens", "1000000000"), "too many"),
        (("--output-tokens", "1" + "0" * 40), "too many"),
        (("--extra-body", "[" * 90_000), "not a JSON object"),
        (("--workers", "1" + "0" * 30), "--workers"),
        (("--timeout", "1" + "0" * 400 + "s"), "--timeout"),
        (("--slo", "ttft:1" + "0" * 400 + "s"), "--slo"),
        (("-d", "1" + "0" * 30 + "h"), "--duration"),
        (("-n", "1" + "0" * 30), "--num-requests"),
        (("-c", "1" + "0" * 30), "--concurrency"),
    ],
)
def test_options_that_need_too_much_memory_are_refused(
    flags: tuple[str, ...], expected_text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exc_info:
        main(["run", "qa", "--url", "sim:gb300-vm", *flags])
    stderr = capsys.readouterr().err
    assert (exc_info.value.code, expected_text in stderr) == (2, True), stderr[:500]


def test_a_damaged_run_exits_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("run.json", "summary.json"):
        for data in (
            b"[" * 100_000,
            b'{"schema": 1, "run": "\xff\xfe"}',
            b'{"schema": 1e400}',
            b"",
        ):
            (tmp_path / name).write_bytes(data)
            with pytest.raises(SystemExit) as exc_info:
                main(["report", str(tmp_path)])
            assert exc_info.value.code == 2, capsys.readouterr().err[:500]
        (tmp_path / name).unlink()


def on_a_full_disk(most_bytes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command while files may not grow: a limit on their size stands in for a full disk."""
    limited = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limited += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({most_bytes}, {most_bytes})); "
    limited += "from loadgen.cli.app import main; main()"
    command = [sys.executable, "-P", "-c", limited, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.processes
def test_a_full_disk_is_reported_with_the_number_of_stored_records(tmp_path: Path) -> None:
    load = (*RUN[:4], "-n", "500", "--request-rate", "50")
    process = on_a_full_disk(20_000, *load, "--out", str(tmp_path / "out"))
    assert process.returncode == 2, process.stderr
    assert "free some space" in process.stderr and "kept" in process.stderr
    assert "bug" not in process.stderr


@pytest.mark.processes
def test_a_disk_that_is_full_for_worker_processes_is_reported_as_a_full_disk(
    tmp_path: Path,
) -> None:
    """The workers died of it, and the run was INVALID because "not one request succeeded"."""
    out = tmp_path / "out"
    with embedded.start(Options(ttft="5ms", itl="1ms")) as server:
        load = ("run", "qa", "--url", server.url, "-n", "400", "--request-rate", "200")
        process = on_a_full_disk(20_000, *load, "--workers", "2", "--out", str(out))
    assert process.returncode == 2, process.stderr
    assert "free some space" in process.stderr and "kept" in process.stderr
    assert not (out / "summary.json").is_file(), "the failures were not the server's"


def test_the_counters_of_workers_have_space_on_the_disk_before_they_are_mapped(
    tmp_path: Path,
) -> None:
    """A map of a file without space ends the process with SIGBUS where the disk is full."""
    counters = SharedCounters(tmp_path / "board", 2)
    counters.close()
    file = (tmp_path / "board").stat()
    assert file.st_blocks * 512 >= file.st_size > 0


@pytest.mark.processes
def test_a_disk_that_is_full_before_the_first_file_is_reported_without_records(
    tmp_path: Path,
) -> None:
    load = (*RUN[:4], "-n", "5", "--request-rate", "50")
    process = on_a_full_disk(100, *load, "--out", str(tmp_path / "out"))
    assert process.returncode == 2, process.stderr
    assert "free some space" in process.stderr and "nothing was recorded" in process.stderr


def test_a_folder_moved_during_a_run_is_reported_as_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def works_in_it() -> int:
        (tmp_path / "run").mkdir()
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        (tmp_path / "run" / "flows" / "w0.heat").write_bytes(b"")
        return 0

    assert run_to_exit_code(works_in_it) == 2
    stderr = capsys.readouterr().err
    assert "moved or deleted" in stderr and f"--> {tmp_path / 'run'}\n" in stderr


def test_a_signal_during_class_creation_is_an_interruption(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Python 3.11 wraps an exception of `__set_name__` in a RuntimeError."""

    class Named:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    def work() -> int:
        type("Made", (), {"named": Named()})
        return 0

    assert run_to_exit_code(work) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_thread_that_arrow_cannot_start_is_a_user_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import pyarrow

    def work() -> int:
        raise pyarrow.ArrowException(
            "Unknown error: Failed to launch worker thread: Resource temporarily unavailable"
        )

    with pytest.raises(SystemExit) as exc_info:
        sys.exit(run_to_exit_code(work))
    assert exc_info.value.code == 2 and "out of memory" in capsys.readouterr().err


INTERRUPTED_AT_ITS_END = """
import io, os, signal, sys

class Out(io.TextIOWrapper):
    def flush(self):
        super().flush()
        os.kill(os.getpid(), signal.SIGINT)  # at the end of the command, and where its end is told

sys.stdout = Out(sys.stdout.detach())
sys.argv = ["loadgen", "--version"]
from loadgen.cli.app import main
main()
"""


@pytest.mark.processes
def test_an_interruption_after_the_end_of_a_command_prints_no_traceback() -> None:
    command = [sys.executable, "-P", "-c", INTERRUPTED_AT_ITS_END]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Traceback" not in process.stderr
    assert process.returncode == 130


INTERRUPTED_AS_A_LOOP_BEGINS = """
import os, signal, socket, sys

pair = socket.socketpair
def interrupted_pair(*asked):  # uvloop asks for one as it begins to run
    os.kill(os.getpid(), signal.SIGTERM)
    return pair(*asked)
socket.socketpair = interrupted_pair

import asyncio, uvloop
from loadgen.cli.exit_codes import run_to_exit_code

def call():
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(60))

sys.exit(run_to_exit_code(call))
"""


@pytest.mark.processes
def test_an_interruption_as_a_loop_begins_waits_until_it_runs() -> None:
    """Raised there, the loop could not be closed: exit 70, a bug in loadgen."""
    command = [sys.executable, "-P", "-c", INTERRUPTED_AS_A_LOOP_BEGINS]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert (process.returncode, process.stderr) == (130, "interrupted\n")


def test_the_password_of_a_misplaced_url_is_not_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever repeats what was typed: the screen of a build is read by many."""
    for typed in ("run qa {}", "run {}/w.yaml", "run qa --dry-run --prometheus {}"):
        with pytest.raises(SystemExit) as exc_info:
            main(typed.format("http://user:s3cret@h").split())
        stderr = capsys.readouterr().err
        assert exc_info.value.code == 2 and "s3cret" not in stderr and "://***@h" in stderr, stderr


@pytest.mark.parametrize("twice", [(signal.SIGHUP, signal.SIGTERM), (signal.SIGINT, signal.SIGINT)])
@pytest.mark.parametrize("make", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_signals_cancel_the_task_and_raise_nothing_in_callbacks(
    twice: tuple[int, int],
    make: Callable[[], asyncio.AbstractEventLoop],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """An exception in a callback of uvloop is printed, or leaves a loop that cannot close."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    seen: list[str] = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(in_a_callback, "went on")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            in_a_callback("cancelled")
            raise

    def in_a_callback(word: str) -> None:
        signal.raise_signal(twice[len(seen)])
        seen.append(word)

    def command() -> int:
        with asyncio.Runner(loop_factory=make) as runner:
            runner.run(work())
        return 0

    try:
        assert run_to_exit_code(command) == 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert seen == ["went on", "cancelled"] and capfd.readouterr().err == "interrupted\n"


SIGNALLED_LOOP = """
import asyncio, signal
from loadgen.cli.exit_codes import run_to_exit_code

async def held():
    for _ in range(3):
        signal.raise_signal(signal.SIGINT)
    print("went on")

run_to_exit_code(lambda: asyncio.run(held()))
"""


@pytest.mark.processes
def test_the_third_signal_within_a_loop_ends_the_command_at_once() -> None:
    """Whatever holds it there."""
    process = subprocess.run(
        [sys.executable, "-c", SIGNALLED_LOOP], capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stdout, process.stderr) == (130, "", "interrupted\n")
