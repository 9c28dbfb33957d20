"""Real servers, an optional suite: `LOADGEN_SERVERS=DIR pytest -m real_servers`.

DIR holds one executable script per server: `serve_NAME.sh PORT`, which serves an OpenAI-compatible API at that port of
127.0.0.1 until it is ended, and `NAME.model`, a file with the name of its model, if the server does not list just one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_run import rows_written

SERVERS = Path(os.environ.get("LOADGEN_SERVERS", "/nonexistent"))
SCRIPTS = sorted(SERVERS.glob("serve_*.sh"))
LOAD = ("--isl", "50", "--osl", "20", "--warmup", "0", "--timeout", "60s")

pytestmark = [
    pytest.mark.optional, pytest.mark.processes, pytest.mark.real_servers,
    pytest.mark.skipif(not SCRIPTS, reason="LOADGEN_SERVERS names no folder with serve_NAME.sh"),
]  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


class Server:
    """A server that can be killed and started again at its port."""

    def __init__(self, script: Path) -> None:
        self._script, self._port = script, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        named = SERVERS / f"{script.stem.removeprefix('serve_')}.model"
        self.model = ["--model", named.read_text().strip()] if named.exists() else []
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [str(self._script), str(self._port)], cwd=SERVERS, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for _ in range(300):
            try:
                with urllib.request.urlopen(self.url + "/v1/models", timeout=2) as answer:
                    if self.model or json.loads(answer.read()).get("data"):
                        return
            except urllib.error.HTTPError:
                if self.model:  # it serves, and cannot say what
                    return
            except (OSError, ValueError):
                pass
            assert self._process.poll() is None, f"{self._script} ended"
            select.select([], [], [], 1)
        self.kill()
        raise AssertionError(f"{self._script} lists no model")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="module", params=SCRIPTS, ids=lambda script: script.stem.removeprefix("serve_"))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(request.param)
    try:
        yield made
    finally:
        made.kill()


def run(server: Server, out: Path, *flags: str) -> subprocess.Popen[str]:
    model = [] if "--model" in flags else server.model
    command = [sys.executable, "-P", "-m", "loadgen", "run", "qa", "--url", server.url, *model, *LOAD, *flags]
    command += ["-o", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def requests(out: Path) -> dict[str, Any]:
    counts: dict[str, Any] = json.loads((out / "summary.json").read_bytes())["requests"]
    parts = ("ok", "failed", "dropped", "cancelled", "unfinished", "lost")
    assert sum(counts[part] for part in parts) == counts["scheduled"]
    return counts


def test_a_whole_run(server: Server, tmp_path: Path) -> None:
    process = run(server, tmp_path / "out", "-c", "4", "-n", "24")
    _, err = process.communicate(timeout=300)
    assert process.returncode in (0, 1, 3), err
    assert requests(tmp_path / "out")["ok"] == 24, err


PRECISIONS = [SERVERS / f"serve_transformers_{name}.sh" for name in ("float32", "bfloat16")]


@pytest.mark.skipif(not all(script.exists() for script in PRECISIONS), reason="no server in two precisions")
def test_two_precisions_of_one_model_are_told_apart(tmp_path: Path) -> None:
    """The answers in float32 are the references: bfloat16 loses against them, float32 itself does not."""
    exact, rounded = (Server(script) for script in PRECISIONS)
    try:
        rows = [{"prompt": f"Write about river and stone, number {i}.", "max_tokens": 48} for i in range(60)]

        def answers(name: str, url: str, *flags: str) -> int:
            data = tmp_path / f"{name}.jsonl"
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
            command = [sys.executable, "-P", "-m", "loadgen", "answers", str(data), "--url", url, *exact.model, *flags]
            command += ["-c", "4", "-o", str(tmp_path / name)]
            return subprocess.run(command, check=False, timeout=600).returncode

        assert answers("references", exact.url, "--keep-content") == 0
        texts = [json.loads(line)["a"] for line in (tmp_path / "references/texts.jsonl").read_text().splitlines()]
        rows = [{**row, "reference": text} for row, text in zip(rows, texts, strict=True) if text]
        other = ("--against", exact.url, *(["--against-model", exact.model[1]] if exact.model else []))
        assert answers("rounded", rounded.url, *other, "--within", "10%") == 1
        assert answers("same", exact.url, *other, "--within", "10%") == 0
    finally:
        exact.kill()
        rounded.kill()


def test_a_cancel_drains_and_reports(server: Server, tmp_path: Path) -> None:
    process = run(server, tmp_path / "out", "-c", "4", "-n", "100000")
    rows_written(tmp_path, 4)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    counts = requests(tmp_path / "out")
    assert (process.returncode, counts["failed"]) == (130, 0), err
    assert counts["ok"] >= 4


def test_a_wrong_model_is_refused_or_said(server: Server, tmp_path: Path) -> None:
    process = run(server, tmp_path / "out", "-c", "1", "-n", "2", "--model", "no-such-model-anywhere")
    _, err = process.communicate(timeout=120)
    assert "bug" not in err and "Traceback" not in err
    assert process.returncode == 3 or "answers to any model name" in err, err


def test_an_overflow_is_counted(server: Server, tmp_path: Path) -> None:
    """Prompts that no model of these tests can take: each is refused, or cut by the server; none hangs."""
    process = run(server, tmp_path / "out", "-c", "2", "-n", "4", "--isl", "300000", "--timeout", "90s")
    _, err = process.communicate(timeout=400)
    assert process.returncode in (0, 1, 2, 3), err
    assert "bug" not in err
    if (tmp_path / "out" / "summary.json").exists():
        assert requests(tmp_path / "out")["scheduled"] == 4


def test_a_server_that_is_killed_and_comes_back(server: Server, tmp_path: Path) -> None:
    process = run(server, tmp_path / "out", "--request-rate", "10", "-d", "60s", "--set", "on_target_failure=continue")
    rows_written(tmp_path, 20)
    server.kill()
    server.start()
    _, err = process.communicate(timeout=300)
    counts = requests(tmp_path / "out")
    assert counts["ok"] > 0 and counts["failed"] > 0, err
    assert set(counts["by_error"]) <= {"connect", "reset", "truncated", "http_5xx", "http_4xx", "timeout_total"}
