"""Whole runs against the embedded endpoint: records, interruptions, secrets and targets."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from time import monotonic_ns
from typing import Any

import expected_errors
import numpy as np
import pytest
import trustme
from loadgen_sdk import compiled
from loadgen_sdk.transport.tls import Tls
from processes import children
from run_fixtures import NO_PAGES, says, when_started
from servers import log, start

from loadgen.cli.app import main
from loadgen.core.errors import CombinedError, TargetError, UserError
from loadgen.core.execution import run
from loadgen.core.execution.events import RunningLoad
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.probing import probe_url
from loadgen.core.metrics.summary import Summary
from loadgen.core.results import store
from loadgen.core.results.record import KINDS, ROW, STATUSES
from loadgen.core.results.store import Stored
from loadgen.core.workload import load, read_flags
from loadgen.runs import text
from loadgen.sim.server.embedded import EmbeddedServer
from loadgen.sim.server.fault_injection import FAILURE_EFFECTS, parse_failure_plan
from loadgen.sim.server.options import Options
from loadgen.sim.server.request_parser import TEMPLATE_TOKENS

FAST = {"ttft": "5ms", "itl": "0.2ms"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EmbeddedServer]:
    with start(Options(**FAST, log_bodies=True)) as server:
        yield server


def file(folder: Path, more: str = "") -> str:
    path = folder / "w.yaml"
    path.write_text(f"name: t\nrequests:\n  input_tokens: 20\n  output_tokens: 8\n{more}")
    return str(path)


def go(
    folder: Path,
    url: str | None,
    *,
    more: str = "",
    settings: dict[str, Any] | None = None,
    begun: Any = None,
    **flags: str,
) -> tuple[Summary, Stored]:
    flags = {"seed": "7", "warmup": "0"} | flags
    workload = load(
        file(folder, more),
        read_flags(**{name: value for name, value in flags.items() if value is not None}),
    )
    directory = {"url": url, "model": "sim", "server": "trtllm", "out": folder / "out"}
    run_settings = Settings(**(directory | NO_PAGES | (settings or {})))
    summary, out = run.execute(workload, run_settings, when_started(begun or (lambda _: None)))
    stored = store.read_run(out)
    assert not (out / "spool").exists()
    assert [path.name for path in (out / "requests").iterdir()] == ["requests.parquet"]
    assert (
        json.loads((out / "summary.json").read_bytes())["requests"]["scheduled"]
        == summary.requests.scheduled
    )
    return summary, stored


def outcomes(rows: np.ndarray) -> Counter[tuple[str, str]]:
    assert len(np.unique(rows["slot"])) == len(rows), "a slot has two records"
    return Counter(
        (STATUSES[s], KINDS[k])
        for s, k in zip(rows["status"].tolist(), rows["kind"].tolist(), strict=True)
    )


def after_the_probe(plan: str) -> dict[str, Any]:
    """Return endpoint options with a seed that injects no failure into the first requests."""
    seed = next(
        seed
        for seed in count()
        if not any(parse_failure_plan(plan, seed).draw_failure(number, 8) for number in range(6))
    )
    return {"faults": plan, "seed": seed}


def bodies(endpoint: EmbeddedServer) -> Counter[str]:
    """Of the requests of a run (a probe has no name), the hashes of what was received."""
    return Counter(request.body_sha256 for request in log(endpoint).requests if request.id)


def adds_up(summary: Summary) -> bool:
    requests = summary.requests
    parts = requests.ok + requests.failed + requests.dropped + requests.cancelled + requests.lost
    return parts == requests.scheduled


# -- records ---------------------------------------------------------------------------------------

STRIKE = {
    name: 0.04
    for name in FAILURE_EFFECTS
    if name not in ("stall", "http_429", "slow_first_byte", "oversized")
}
EXPECTED = {
    "http_500": "http_5xx",
    "http_503": "http_5xx",
    "empty": "empty",
    "reset_before": "reset",
    "reset_after": "reset",
    "truncate": "truncated",
    "malformed": "malformed",
    "error_event": "error_event",
    "engine_error": "truncated",
    "no_finish": "no_finish_reason",
}


@pytest.mark.processes
@pytest.mark.parametrize("load", [{"request_rate": "500"}, {"concurrency": "9"}])
def test_every_slot_has_one_record_whatever_the_server_does(
    tmp_path: Path, load: dict[str, str]
) -> None:
    plan = ",".join(f"{name}:{share}" for name, share in STRIKE.items())
    with start(Options(**FAST, **after_the_probe(plan), log_bodies=True)) as endpoint:
        summary, stored = go(
            tmp_path, endpoint.url, num_requests="200", settings={"server": "trtllm"}, **load
        )
        logged_requests = [request for request in log(endpoint).requests if request.id]
    counts = outcomes(stored.rows)

    assert summary.requests.scheduled == 200 == sum(counts.values())
    assert adds_up(summary)

    # The endpoint's log has the injected failure of each request by its id. The last try counts.
    struck = {
        int(request.id.rpartition("-")[2]): EXPECTED.get(request.fault, "")
        for request in logged_requests
    }
    kind_by_slot = dict(
        zip(
            stored.rows["slot"].tolist(),
            (KINDS[k] for k in stored.rows["kind"].tolist()),
            strict=True,
        )
    )

    assert kind_by_slot == struck
    assert summary.requests.resent == sum(
        request.fault == "idle_reset" and not request.status for request in logged_requests
    )
    assert (
        summary.requests.failed
        == sum(count for (status, _), count in counts.items() if status == "failed")
        > 10
    )
    assert {kind: error_kind.count for kind, error_kind in summary.requests.by_error.items()} == {
        kind: count for (_, kind), count in counts.items() if kind
    }
    assert all(error_kind.first_text for error_kind in summary.requests.by_error.values())
    assert summary.verdict.valid is False


@pytest.mark.processes
def test_the_records_of_a_run_agree_with_the_log_of_the_server(
    tmp_path: Path, endpoint: EmbeddedServer
) -> None:
    log(endpoint)
    summary, stored = go(tmp_path, endpoint.url, request_rate="400", num_requests="60")
    rows = stored.rows

    assert outcomes(rows) == {("ok", ""): 60}
    assert len(bodies(endpoint)) == 60
    assert (rows["output_tokens"] == 8).all()
    assert (rows["asked_output"] == 8).all()
    assert (
        rows["input_tokens"] == 20
    ).all()  # by the server's count, which holds the 8 tokens of its template
    assert (rows["built_tokens"] == 20 - TEMPLATE_TOKENS).all()
    assert (rows["output_events"] == 8).all()
    assert summary.tokens.output == 480
    assert np.diff(rows[np.argsort(rows["slot"])]["due_ns"]).min() > 0
    assert (rows["first_token_ns"] - rows["due_ns"]).min() >= 5_000_000
    assert (stored.manifest.state, stored.manifest.seed) == ("finished", 7)
    assert sum(gaps.count for gaps in stored.gaps) == 60 * 7
    assert sum(int(bins.sum()) for bins in stored.timeline) == 480


@pytest.mark.processes
def test_closed_loops_end_by_time_and_by_conversations(
    tmp_path: Path, endpoint: EmbeddedServer
) -> None:
    turns = "  turns: {count: 3, tool_result_tokens: 5, tool_time: 1ms, history: server}\n"
    (tmp_path / "a").mkdir()
    summary, stored = go(tmp_path / "a", endpoint.url, more=turns, concurrency="4", duration="0.3s")

    assert adds_up(summary)
    rows = stored.rows
    assert set(outcomes(rows)) == {("ok", "")}
    assert set(rows["turn"].tolist()) == {0, 1, 2}
    by_turn = [rows["input_tokens"][rows["turn"] == turn].mean() for turn in range(3)]
    assert (
        by_turn[0] + 13 <= by_turn[1] <= by_turn[2] - 13
    )  # each sends the reply of 8 and the result of 5 again

    (tmp_path / "b").mkdir()
    _, stored = go(
        tmp_path / "b",
        endpoint.url,
        more=turns.replace("server", "scripted"),
        concurrency="4",
        num_requests="6",
    )

    assert outcomes(stored.rows) == {("ok", ""): 18}


@pytest.mark.processes
def test_responses_without_streaming_are_not_judged_by_streaming_metrics(
    tmp_path: Path, endpoint: EmbeddedServer
) -> None:
    more = "slo: {ttft: 10s, tpot: 1ms, attainment: 90%}\n"
    flags = {"request_rate": "500", "num_requests": "30"}
    summary, _ = go(tmp_path, endpoint.url, more=more, settings={"stream": False}, **flags)
    assert [term.metric for term in summary.goodput.slo] == ["ttft"]
    assert summary.goodput.met or not summary.verdict.valid  # a busy host makes it so
    assert says(summary.verdict.warning_codes, "not_judged", metrics=["tpot"])
    assert "were not streamed" in text.render(summary)


@pytest.mark.processes
def test_requests_above_the_limit_in_flight_are_dropped(tmp_path: Path) -> None:
    with start(Options(ttft="400ms", itl="0")) as endpoint:
        summary, stored = go(
            tmp_path, endpoint.url, request_rate="2000", num_requests="100", max_in_flight="10"
        )
    assert outcomes(stored.rows) == {("ok", ""): 10, ("dropped", "in_flight_cap"): 90}
    assert (summary.requests.dropped, summary.requests.scheduled) == (90, 100)


@pytest.mark.processes
def test_dns_tcp_and_tls_times_are_separate(tmp_path: Path, endpoint: EmbeddedServer) -> None:
    """Only the first request of a connection has TCP and TLS times.

    An address needs no name lookup, and a plain connection has no TLS handshake.
    """
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    issued = authority.issue_cert("localhost")
    issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    load: dict[str, Any] = {"concurrency": "3", "num_requests": "12"}
    options = Options(cert=str(tmp_path / "cert.pem"), key=str(tmp_path / "key.pem"), **FAST)
    with start(options) as secure:
        url = secure.url.replace("127.0.0.1", "localhost")
        summary, stored = go(
            tmp_path, url, settings={"tls": Tls(ca=str(tmp_path / "ca.pem"))}, **load
        )
    first = stored.rows["reused"] == 0

    assert (first == (stored.rows["tls_ns"] > 0)).all() and (
        first == (stored.rows["tcp_ns"] > 0)
    ).all()
    assert (
        summary.other_metrics["tls_ms"].count
        == summary.other_metrics["tcp_ms"].count
        == int(first.sum())
        >= 1
    )
    assert (summary.dns_ms or 0) > 0
    rendered_text = text.render(summary)
    assert "name lookup" in rendered_text and "TLS handshake" in rendered_text

    (tmp_path / "plain").mkdir()
    summary, stored = go(tmp_path / "plain", endpoint.url, **load)
    assert set(stored.rows["tls_ns"]) == {-1, 0} and summary.dns_ms is None
    assert summary.other_metrics["tls_ms"].count == 0 and "TLS handshake" not in text.render(
        summary
    )


def in_prefill(rows: Any) -> int:
    """Return the largest number of requests that were waiting for a first token."""
    steps = sorted(
        [(at, 1) for at in rows["sent_ns"]] + [(at, -1) for at in rows["first_token_ns"]]
    )
    return int(np.cumsum([change for _, change in steps]).max())


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
def test_virtual_users_wait_for_room_in_prefill(tmp_path: Path, workers: int) -> None:
    """Two users at a time need 10 ms of prefill and 480 ms of decoding: all eight stay busy."""
    load = {
        "concurrency": "8",
        "stagger": "0",
        "num_requests": "24",
        "max_in_prefill": "2",
    }
    with start(Options(ttft="10ms", itl="60ms")) as endpoint:
        summary, stored = go(tmp_path, endpoint.url, settings={"workers": workers}, **load)

    assert outcomes(stored.rows) == {("ok", ""): 24}
    assert in_prefill(stored.rows) == 2 and (summary.load.in_flight_max or 0) > 4
    assert "at most 2 in prefill" in summary.load.arrival


@pytest.mark.processes
def test_a_limit_in_prefill_needs_streaming_and_one_place_per_worker(
    tmp_path: Path, endpoint: EmbeddedServer
) -> None:
    load = {"concurrency": "4", "num_requests": "8", "max_in_prefill": "1"}
    for settings, rendered_text in (
        ({"stream": False}, "show the end of prefill"),
        ({"workers": 2}, "spread over 2"),
    ):
        with pytest.raises(CombinedError, match=rendered_text):
            go(tmp_path, endpoint.url, settings=settings, **load)


@pytest.mark.processes
def test_a_seed_reproduces_the_bytes_sent_and_another_salt_changes_the_texts(
    tmp_path: Path, endpoint: EmbeddedServer
) -> None:
    """The seed alone fixes what arrives; without one, the seed that was drawn and stored does."""

    def received(name: str, **flags: Any) -> tuple[Any, Any]:
        folder = tmp_path / name
        folder.mkdir()
        log(endpoint)
        _, stored = go(folder, endpoint.url, request_rate="500", num_requests="20", **flags)
        return bodies(endpoint), stored.manifest

    first, manifest = received("first", seed=None)
    same_seed_texts, repeated = received("again", seed=str(manifest.seed), settings={"workers": 2})
    assert first == same_seed_texts
    assert len(first) == 20
    assert (manifest.seed, manifest.salt, manifest.fingerprints) == (
        repeated.seed,
        repeated.salt,
        repeated.fingerprints,
    )
    other, salted = received("other", seed=str(manifest.seed), salt="blue")
    assert not set(first) & set(other)
    assert salted.salt == "blue"
    assert salted.fingerprints.recipe == manifest.fingerprints.recipe
    assert salted.fingerprints.schedule == manifest.fingerprints.schedule
    assert salted.fingerprints.prompts != manifest.fingerprints.prompts
    assert salted.fingerprints.bodies != manifest.fingerprints.bodies
    fresh, fresh_manifest = received("fresh", seed=str(manifest.seed), salt="fresh")
    assert not set(first) & set(fresh)
    repeat, _ = received("drawn", seed=str(manifest.seed), salt=fresh_manifest.salt)
    assert repeat == fresh


def cli(
    folder: Path,
    *flags: str,
    env: dict[str, str] | None = None,
    pages: bool = False,
    before: tuple[str, ...] = (),
) -> subprocess.Popen[bytes]:
    """Start `loadgen run`, with `before` in front of it. `pages` reads the server's metrics."""
    if not pages:
        flags = (*flags, "--server-metrics", "off", "--energy", "off")
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI_", "AZURE_"))
    }
    return subprocess.Popen(
        [
            *before,
            sys.executable,
            "-m",
            "loadgen",
            "run",
            file(folder),
            "--warmup",
            "0",
            "--out",
            str(folder / "out"),
            *flags,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=clean | (env or {}),
    )


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out.decode(), err.decode()


def ok_requests(folder: Path) -> int:
    """Return how many requests of the run in `folder`/out succeeded."""
    summary = json.loads((folder / "out" / "summary.json").read_bytes())
    return int(summary["requests"]["ok"])


def rows_written(folder: Path, least: int, run: subprocess.Popen[str] | None = None) -> int:
    """Return the number of records once there are `least`, or when the run ends."""
    for _ in range(60_000):
        count = (
            sum(path.stat().st_size for path in folder.glob("out/spool/w*.rows")) // ROW.itemsize
        )
        if count >= least or (run is not None and run.poll() is not None):
            return count
        select.select([], [], [], 0.005)
    raise AssertionError("the run did not get so far")


pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@pytest.mark.processes
@pytest.mark.parametrize("load", [("--request-rate", "200", "-n", "400"), ("-c", "6", "-d", "3s")])
def test_requests_of_a_worker_that_dies_are_lost(
    tmp_path: Path, endpoint: EmbeddedServer, load: tuple[str, ...]
) -> None:
    process = cli(tmp_path, "--url", endpoint.url, "--workers", "2", *load)
    rows_written(tmp_path, 40)
    workers = [
        pid
        for pid in children(process.pid)
        if "backends.worker" in Path(f"/proc/{pid}/cmdline").read_text()
    ]

    assert len(workers) == 2

    os.kill(workers[0], signal.SIGKILL)
    code, out, err = ended(process)
    stored = store.read_run(tmp_path / "out")
    counts = outcomes(stored.rows)
    lost = counts[("lost", "worker_died")]

    assert lost > 0
    assert code == 3, err
    assert "died" in out
    assert set(counts) == {("ok", ""), ("lost", "worker_died")}
    if "-n" in load:
        assert sum(counts.values()) == 400
    else:
        assert lost == 3  # its lanes
    dead = stored.rows[stored.rows["status"] == STATUSES.index("lost")]
    assert {stored.texts[i] for i in dead["text"].tolist()} == {f"worker {dead['worker'][0]} died"}
    assert len(set(dead["worker"].tolist())) == 1


# -- endings ---------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_run_interrupted_once_drains_and_reports(
    tmp_path: Path, endpoint: EmbeddedServer, workers: str
) -> None:
    flags = ("--request-rate", "200", "-n", "4000", "--workers", workers)
    process = cli(tmp_path, "--url", endpoint.url, *flags)
    rows_written(tmp_path, 20)
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)

    assert code == 130, err
    assert "Traceback" not in err

    stored = store.read_run(tmp_path / "out")
    counts = outcomes(stored.rows)
    assert set(counts) == {("ok", ""), ("cancelled", "interrupted")}
    assert sum(counts.values()) == 4000
    assert counts[("ok", "")] >= 20
    assert stored.manifest.state == "interrupted"
    assert "interrupted" in out


@pytest.mark.processes
def test_a_run_interrupted_twice_exits_at_once(tmp_path: Path) -> None:
    with start(Options(**FAST, **after_the_probe("stall@0:0.5"))) as endpoint:
        process = cli(
            tmp_path,
            "--url",
            endpoint.url,
            "--model",
            "sim",
            "--server",
            "trtllm",
            "--request-rate",
            "100",
            "-n",
            "1000",
        )
        rows_written(tmp_path, 5)
        process.send_signal(signal.SIGINT)
        rows_written(
            tmp_path, 500
        )  # what will not be sent is recorded at once; those that stall are still in flight
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        code, _, err = ended(process)

    assert code == 130, err
    counts = outcomes(store.read_run(tmp_path / "out").rows)
    assert set(counts) == {("ok", ""), ("cancelled", "interrupted")}
    assert sum(counts.values()) == 1000


@pytest.mark.processes
@pytest.mark.parametrize(("workers", "rows"), [("1", 500), ("2", 50)])
def test_a_killed_run_leaves_a_readable_folder(
    tmp_path: Path, endpoint: EmbeddedServer, workers: str, rows: int
) -> None:
    log(endpoint)
    process = cli(
        tmp_path, "--url", endpoint.url, "--request-rate", "200", "-n", "4000", "--workers", workers
    )
    rows_written(tmp_path, rows)
    child_pids = children(process.pid)
    killed_ns = monotonic_ns()
    process.kill()
    process.communicate()
    for pid in child_pids:  # nothing goes on without it: no load, no recorder
        gone(pid)
    stored = store.read_run(tmp_path / "out")

    assert (stored.manifest.state, stored.manifest.host.hot_path) == ("running", compiled.RUNS)
    assert set(outcomes(stored.rows)) <= {
        ("ok", ""),
        ("cancelled", "interrupted"),
    }  # orphaned workers stop at once

    written = set(stored.rows["slot"].tolist())
    logged_requests = [request for request in log(endpoint).requests if request.id]
    old = {
        int(logged_request.id.rpartition("-")[2])
        for logged_request in logged_requests
        if logged_request.arrival_ns < killed_ns - 2 * 10**9
    }

    assert old <= written
    assert (
        len(old) > 20 or workers == "2"
    )  # each takes some 7 ms, so all these were finished two seconds before

    _, out, err = ended(
        subprocess.Popen(
            [sys.executable, "-m", "loadgen", "report", str(tmp_path / "out")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    )

    assert "TTFT" in out.upper()
    assert "Traceback" not in err


def gone(pid: int) -> None:
    for _ in range(4_000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        select.select([], [], [], 0.005)
    raise AssertionError(f"process {pid} goes on: {Path(f'/proc/{pid}/cmdline').read_text()}")


# -- secrets and targets ---------------------------------------------------------------------------

KEY, PASSWORD, HEADER, QUERY = "sk-key-4f81aa", "pa55-word-9c", "hdr-value-77e1", "qry-value-03bd"


@pytest.mark.processes
@pytest.mark.parametrize("user", [f"user:{PASSWORD}@", ""])
def test_no_secret_is_stored_or_printed(tmp_path: Path, user: str) -> None:
    """A URL with a user name authenticates with that name, so the key is not sent there."""
    (tmp_path / "key").write_text(KEY + "\n")
    guard = {} if user else {"api_key_file": str(tmp_path / "key")}
    with start(
        Options(**FAST, api_flavor="openai", **guard, **after_the_probe("http_500:0.3"))
    ) as server:
        url = server.url.replace("http://", f"http://{user}") + f"/?code={QUERY}"
        process = cli(
            tmp_path,
            "--url",
            url,
            "--api-key-file",
            str(tmp_path / "key"),
            "--server",
            "openai",
            "--header",
            f"X-Sim-Note: {HEADER}",
            "--request-rate",
            "400",
            "-n",
            "40",
            pages=True,
        )
        code, out, err = ended(process)
        assert code in (1, 3), err

    assert len(store.read_run(tmp_path / "out").rows) == 40

    texts = [
        out.encode(),
        err.encode(),
        *(p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()),
    ]

    assert len(texts) >= 5, err
    for secret in (KEY, PASSWORD, HEADER, QUERY):
        assert not [text for text in texts if secret.encode() in text], secret


@pytest.mark.processes
def test_a_secret_echoed_by_the_server_is_not_printed(tmp_path: Path) -> None:
    """A server that quotes the request's headers in its error."""
    echo = (
        "import socket,sys\n"
        "s=socket.create_server(('127.0.0.1',0)); print(s.getsockname()[1],flush=True)\n"
        "while True:\n"
        " c,_=s.accept(); d=b''\n"
        " while b'\\r\\n\\r\\n' not in d:\n"
        "  p=c.recv(65536)\n"
        "  if not p: break\n"
        "  d+=p\n"
        " b=b'{\"error\": '+__import__('json').dumps(d.decode('latin-1')).encode()+b'}'\n"
        " head='HTTP/1.1 400 x\\r\\nConnection: close\\r\\nContent-Length: %d\\r\\n\\r\\n'\n"
        " c.sendall((head%len(b)).encode()+b)\n"
        " c.shutdown(1); c.recv(1<<20); c.close()\n"
    )
    server = subprocess.Popen([sys.executable, "-c", echo], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        (tmp_path / "key").write_text(KEY)
        process = cli(
            tmp_path,
            "--url",
            f"http://user:{PASSWORD}@127.0.0.1:{port}/",
            "--model",
            "m",
            "--server",
            "vllm",
            "-n",
            "3",
            "--header",
            f"X-Note: {HEADER}",
            "--request-rate",
            "100",
            "--api-key-file",
            str(tmp_path / "key"),
            pages=True,
        )
        code, out, err = ended(process)
    finally:
        server.kill()
        server.communicate()

    assert code == 3

    texts = [
        out.encode(),
        err.encode(),
        *(p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()),
    ]

    for secret in (KEY, PASSWORD, HEADER):
        assert not [text for text in texts if secret.encode() in text], (secret, err)


def refused(folder: Path, url: str, **settings: Any) -> TargetError:
    with pytest.raises(TargetError) as exc_info:
        go(
            folder,
            url,
            num_requests="5",
            concurrency="1",
            settings={"model": None, "server": "auto"} | settings,
        )
    assert exc_info.value.exit_code == 3
    assert "Traceback" not in str(exc_info.value)
    return exc_info.value


@pytest.mark.processes
def test_unusable_targets_are_reported_before_the_load(
    tmp_path: Path, endpoint: EmbeddedServer
) -> None:
    assert refused(tmp_path, "http://127.0.0.1:1").code == "connect"
    assert refused(tmp_path, "http://no-such-host.invalid:8000").code == "dns"
    assert refused(tmp_path, endpoint.url.replace("http", "https")).code == "tls"

    (tmp_path / "key").write_text(KEY)
    with start(
        Options(**FAST, api_flavor="openai", model="sim", api_key_file=str(tmp_path / "key"))
    ) as guarded:
        for key in (None, "sk-wrong-wrong"):
            error = refused(tmp_path, guarded.url, api_key=key)
            assert error.code == "unauthorized"
            assert "sk-wrong-wrong" not in str(error)
        error = refused(tmp_path, guarded.url, api_key=KEY, model="no-such-model", server="openai")
        assert error.code == "unknown_model"
        summary, _ = go(
            tmp_path,
            guarded.url,
            num_requests="5",
            concurrency="1",
            settings={"api_key": KEY, "model": None, "server": "openai"},
        )
        assert summary.requests.ok == 5


@pytest.mark.processes
def test_the_preflight_accepts_a_server_that_fails_occasionally() -> None:
    with start(
        Options(**FAST, faults="reset_before:0.04,http_429:0.03,truncate:0.03", seed=3)
    ) as endpoint:
        for _ in range(25):
            assert (
                asyncio.run(probe_url(Settings(url=endpoint.url, server="trtllm"), 10.0)).model
                == "sim"
            )


@pytest.mark.processes
def test_the_probe_waits_as_long_as_a_request_may_take() -> None:
    with start(Options(ttft="1.5s", itl="0")) as endpoint:
        with expected_errors.refused(TargetError, "timeout"):
            asyncio.run(probe_url(Settings(url=endpoint.url), 0.3))
        # A busy host may take the time of sending a little after the server has started its clock.
        assert asyncio.run(probe_url(Settings(url=endpoint.url), 30.0)).one_token_response_ms > 1000


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "127.0.0.1:8000"])
def test_an_invalid_url_is_a_user_error(tmp_path: Path, url: str) -> None:
    with expected_errors.refused(UserError, "invalid_url", "--url") as caught:
        go(tmp_path, url, num_requests="5", concurrency="1")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("header", "expected_text"),
    [
        ("X: 日本", "--header"),
        ("Content-Length: 3", "--header Content-Length"),
        ("transfer-encoding: 3", "--header tra"),
    ],
)
def test_a_header_that_cannot_be_sent_is_a_user_error(
    header: str, expected_text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text that no header holds, and those that frame the message."""
    with pytest.raises(SystemExit) as ending:
        main(["run", "qa", "--url", "http://127.0.0.1:1", "-c", "1", "-n", "1", "--header", header])
    err = capsys.readouterr().err
    assert ending.value.code == 2, err
    assert expected_text in err
    assert "bug" not in err


@pytest.mark.processes
def test_event_handlers_follow_a_running_load(tmp_path: Path, endpoint: EmbeddedServer) -> None:
    running_loads: list[RunningLoad] = []
    go(tmp_path, endpoint.url, concurrency="2", num_requests="10", begun=running_loads.append)
    (running,) = running_loads
    counters = running.counters()
    assert (counters.sent, counters.ok, counters.failed, counters.in_flight) == (10, 10, 0, 0)
    assert len(counters.recent_ttft_ns) == 10


def test_an_invalid_workload_is_refused_before_any_request(tmp_path: Path) -> None:
    with pytest.raises(CombinedError):
        go(tmp_path, "http://127.0.0.1:1", request_rate="-3")
    assert not (tmp_path / "out").exists()


@pytest.mark.processes
def test_no_process_of_a_run_executes_code_from_the_current_folder(
    tmp_path: Path, endpoint: EmbeddedServer
) -> None:
    """Two workers, the scraper, the compactor: one of these two is imported by each."""
    for name in ("numpy.py", "subprocess.py"):
        (tmp_path / name).write_text(
            "import os\nopen(os.path.dirname(__file__) + '/executed', 'w')\n"
        )
    load = [
        "run",
        "qa",
        "--url",
        endpoint.url,
        "-n",
        "4",
        "-c",
        "2",
        "--workers",
        "2",
        "--output-tokens",
        "4",
        "--out",
        str(tmp_path / "out"),
    ]
    process = subprocess.run(
        [sys.executable, "-P", "-m", "loadgen", *load],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (tmp_path / "out" / "summary.json").exists(), process.stderr
    assert ok_requests(tmp_path) == 4
    assert not (tmp_path / "executed").exists()
    assert json.loads((tmp_path / "out" / "run.json").read_bytes())["energy_pages"] == []


@pytest.mark.processes
def test_a_key_in_a_header_replaces_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preflight, the requests of the load and the metrics pages all carry the key."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-environment")
    (tmp_path / "key").write_text("sk-header-header")
    with start(
        Options(**FAST, api_flavor="openai", model="sim", api_key_file=str(tmp_path / "key"))
    ) as guarded:
        header = "Authorization: Bearer sk-header-header"
        code, _, err = ended(
            cli(
                tmp_path, "--url", guarded.url, "-n", "4", "-c", "2", "--header", header, pages=True
            )
        )

    assert code in (0, 3), err
    assert ok_requests(tmp_path) == 4
