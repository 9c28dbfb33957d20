"""Whole runs on pods, which are processes of this machine here: what comes back, and what a lost one costs."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_server import serving
from pods import check, cluster, typed, wait
from servers import start

from loadgen.core import run_folder
from loadgen.core.results import manifest
from loadgen.kube import manifests, pod
from loadgen.sim.server.embedded import Embedded
from loadgen.sim.server.options import Options

pytestmark = pytest.mark.processes
SECRET = "sk-never-written-4711"
QUICK = ("--server-metrics", "off", "--energy", "off", "--warmup", "0", "--grace", "2s")
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Embedded]:
    (tmp_path / "key").write_text(SECRET)
    with start(Options(ttft="50ms", itl="1ms", api_key_file=str(tmp_path / "key"))) as made:
        yield made


def load(folder: Path, endpoint: Embedded, *more: str) -> list[str]:
    file = folder / "w.yaml"
    file.write_text("name: many\nrequests: {input_tokens: 8, output_tokens: 20}\n")
    return [str(file), "--url", endpoint.url, "--pods", "2", "--name", "bench", *QUICK, *more]


def test_the_page_is_typed_and_a_pod_that_is_lost_before_the_load_is_replaced(
    tmp_path: Path,
    endpoint: Embedded,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The commands of docs/kubernetes.md, but for the length of the load."""
    monkeypatch.chdir(tmp_path)
    lines = [line.split() for line in (ROOT / "docs/kubernetes.md").read_text("utf-8").splitlines()]
    found = [words[1:] for words in lines if words[:2] == ["loadgen", "kube"] and "soak" in words]
    assert [words[1] for words in found] == ["run", "status", "logs", "results"]
    short = {"http://vllm.serving:8000": endpoint.url, "10m": "2s"}
    with cluster(
        tmp_path / "cluster", STAND_IN_LOST="1:0", STAND_IN_CUT="1", OPENAI_API_KEY=SECRET
    ) as made:
        for words in found:
            words = [short.get(word, word) for word in words]
            code = typed(*words[1:], *(QUICK if words[1] == "run" else ()))
            said = capfd.readouterr()
            assert code in ((0, 1, 3) if words[1] == "results" else (0,)), (
                said
            )  # a busy host is late
        assert "results in soak" in said.err and "2 workers on 2 nodes" in said.out
        assert {path.name for path in made.root.glob("cut-*")} == {"cut-sh", "cut-tar", "cut-touch"}
        for one in made.objects():
            if one["kind"] != "Secret":
                assert base64.b64encode(SECRET.encode()).decode() not in json.dumps(one)
            check({key: value for key, value in one.items() if key != "status"})
        written = [
            *made.root.glob("calls"),
            *made.root.glob("pods/*/log"),
            *(tmp_path / "soak").rglob("*"),
        ]
        assert not any(SECRET.encode() in path.read_bytes() for path in written if path.is_file())
        wait(
            lambda: (
                typed("status", "soak", "--json") == 0
                and json.loads(capfd.readouterr().out)["phase"] != "running"
            )
        )
        assert typed("status", "soak", "--json") == 0
        assert [pod["replaced"] for pod in json.loads(capfd.readouterr().out)["pods"]] == [0, 1]
        assert typed("status") == 0 and "1 pod replaced" in capfd.readouterr().out
        assert typed("results", "soak", "-o", "again") == 3
        assert "its results with it" in capfd.readouterr().err
    summary = run_folder.open_run(tmp_path / "soak").summary
    assert summary.requests.ok > 40 and not summary.requests.lost
    header = manifest.decode((tmp_path / "soak" / "run.json").read_bytes(), "run.json")
    assert header.cluster is not None and [one.lost for one in header.cluster.workers] == [
        False,
        False,
    ]


def test_a_pod_that_is_lost_under_load_is_a_lost_worker_and_the_result_says_so(
    tmp_path: Path, endpoint: Embedded, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with cluster(tmp_path / "cluster", OPENAI_API_KEY=SECRET) as made:
        flags = ("--request-rate", "40", "-d", "10s", "-o", str(out), "--detach")
        assert typed("run", *load(tmp_path, endpoint, *flags), "--namespace", "perf") == 0
        said = capfd.readouterr().err
        assert f"loadgen kube results bench -o {out} --namespace=perf" in said
        rows = made.root / "pods/bench-0-try0/results/bench/spool/w1.rows"
        wait(lambda: rows.exists() and rows.stat().st_size > 0)
        assert typed("results", "bench", "-o", str(out)) == 2
        assert "the run goes on" in capfd.readouterr().err
        made.kill("bench-1-try0")
        assert typed("results", "bench", "-o", str(out), "--wait") == 3
        assert "worker 1 was lost with node" in capfd.readouterr().out
        assert typed("logs", "bench") == 0 and "INVALID" in capfd.readouterr().out
        assert typed("logs", "bench", "--index", "2") == 2
    summary = run_folder.open_run(out).summary
    assert summary.requests.lost and summary.requests.ok and not summary.verdict.valid


def test_a_pod_that_cannot_be_made_is_told_to_who_follows(
    tmp_path: Path, endpoint: Embedded, capfd: pytest.CaptureFixture[str]
) -> None:
    """While pod 0 runs and waits for it: by the warning that Kubernetes gives."""
    why = "is forbidden: exceeded quota: small"
    with cluster(
        tmp_path / "cluster", STAND_IN_REFUSED="12", STAND_IN_SILENT="3", OPENAI_API_KEY=SECRET
    ):
        flags = ("-n", "20", "-c", "4", "-o", str(tmp_path / "out"))
        assert typed("run", *load(tmp_path, endpoint, *flags), "--detach") == 0
        assert typed("status", "bench") == 0
        said = " ".join(capfd.readouterr().out.split())
        assert "1 of 2 pods: Error creating" in said and why in said
        assert typed("results", "bench", "--wait", "-o", str(tmp_path / "out")) in (0, 1, 3)
        said = capfd.readouterr()
        assert said.err.count("connection refused") == 1  # of a node that is gone for three looks
        assert said.err.count(why) == 1 and "2 workers on 2 nodes" in said.out
        assert said.out.count("repeat with --seed") == 1


def test_a_pod_that_is_taken_away_ends_at_once() -> None:
    """As process 1 of a container, for which a signal without a handler is none: its 30 s would be waited out."""
    env = {
        **os.environ,
        "JOB_COMPLETION_INDEX": "1",
        "POD_IP": "127.77.0.2",
        "LOADGEN_TOKEN": "t" * 32,
    }
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "loadgen.kube.pod", "a", "0", "agents:a:1"], env=env
    ) as pod:
        wait(lambda: reached("127.77.0.2", manifests.PORT))
        pod.terminate()
        assert pod.wait(30) == 128 + signal.SIGTERM


def test_an_agent_that_fails_ends_with_a_code_for_which_its_pod_is_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended with Python's 1, an answer of the run by the policy: the whole Job failed."""
    before = signal.getsignal(signal.SIGTERM)
    for name, value in (
        ("JOB_COMPLETION_INDEX", "1"),
        ("POD_IP", "192.0.2.1"),
        ("LOADGEN_TOKEN", "t" * 32),
    ):
        monkeypatch.setenv(name, value)  # an address that is not of this host
    try:
        code = pod.carry_out("a", "agents:a:1", 0, [])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code not in (0, *manifests.ANSWERS)
    assert "192.0.2.1" in capsys.readouterr().err


def reached(host: str, port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex((host, port)) == 0


def test_a_cluster_that_does_not_answer_is_a_fault(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with cluster(tmp_path / "cluster"):
        assert typed("status", "nobody") == 3
        assert 'jobs.batch "nobody" not found' in capfd.readouterr().err
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", str(tmp_path))
            assert typed("status") == 2
    assert "no kubectl on the path" in capfd.readouterr().err


@pytest.mark.optional
def test_the_real_kubectl_does_the_same_at_an_api_server(
    tmp_path: Path,
    endpoint: Embedded,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kubectl as Google packages it, and behind it the paths of the API over the stand-in's pods."""
    path = os.environ["PATH"]
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl on the path")
    out = tmp_path / "out"
    with (
        cluster(tmp_path / "cluster", STAND_IN_LOST="1:0", OPENAI_API_KEY=SECRET),
        serving(tmp_path) as config,
    ):
        monkeypatch.setenv("PATH", path)
        at = ("--kubeconfig", str(config), "--context", "here")
        code = typed(
            "run", *load(tmp_path, endpoint, "--num-requests", "40", "-c", "4", "-o", str(out)), *at
        )
        said = capfd.readouterr()
        assert code in (0, 3), said
        assert f"results in {out}" in said.err and "2 workers on 2 nodes" in said.out
        assert typed("status", "bench", *at) == 0 and "1 pod replaced" in capfd.readouterr().out
        assert typed("logs", "bench", *at) == 0 and "2 workers on 2 nodes" in capfd.readouterr().out
        assert typed("status", "nobody", *at) == 3 and "not found" in capfd.readouterr().err
        assert typed("run", *load(tmp_path, endpoint, "-c", "1", "-n", "1", "-o", "more"), *at) == 3
        assert "already exists" in capfd.readouterr().err
    assert run_folder.open_run(out).summary.requests.ok == 40


@pytest.mark.optional
def test_a_lead_that_is_lost_begins_the_run_again(
    tmp_path: Path, endpoint: Embedded, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with cluster(tmp_path / "cluster", OPENAI_API_KEY=SECRET) as made:
        flags = ("--request-rate", "40", "-d", "4s", "-o", str(out), "--detach")
        assert typed("run", *load(tmp_path, endpoint, *flags)) == 0
        rows = made.root / "pods/bench-0-try0/results/bench/spool/w1.rows"
        wait(lambda: rows.exists() and rows.stat().st_size > 0)
        made.kill("bench-0-try0")
        assert typed("results", "bench", "-o", str(out), "--wait") in (0, 3)
        capfd.readouterr()
        assert typed("status", "bench", "--json") == 0
        assert [pod["replaced"] for pod in json.loads(capfd.readouterr().out)["pods"]] == [1, 0]
    requests = run_folder.open_run(out).summary.requests
    assert requests.ok > 100 and not requests.lost
