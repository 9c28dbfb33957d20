"""Tests of the checks of `loadgen doctor`, on live servers and on tables of observations."""

from __future__ import annotations

import asyncio
import http.server
import os
import select
import shutil
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from threading import Thread
from typing import Any

import pytest
import scripted_server
import trustme
from expected_errors import refused
from golden import check_golden
from loadgen_sdk.probe.http_types import HttpResponse
from loadgen_sdk.transport.tls import Tls
from loadgen_sdk.wire_formats.server_profiles import SERVER_PROFILES
from relay import Relay
from servers import start

from loadgen.core.errors import UserError
from loadgen.core.execution.plan import Settings
from loadgen.doctor import doctor, target_checks
from loadgen.doctor.findings import FAULT, NOTE, OK, UNKNOWN, WARNING, Finding, build_report
from loadgen.doctor.host_checks import HOST, Machine, check_host, read_cpu_limit
from loadgen.doctor.target_checks import Trial
from loadgen.render import text as as_text
from loadgen.sim.server.options import Options

SBIN = f"{os.environ['PATH']}:/usr/sbin"
KEY = "sk-very-secret-key-1234"
FAST = {"ttft": "1ms", "itl": "0.2ms"}


def examined(options: Options, **settings: Any) -> dict[str, Finding]:
    with start(options) as server:
        findings = asyncio.run(
            doctor.collect_findings(Settings(url=settings.pop("url", server.url), **settings))
        )
    assert len({finding.check for finding in findings}) == len(findings)
    assert KEY not in as_text.render(build_report("", findings))
    assert all(finding.meaning for finding in findings)
    return {finding.check: finding for finding in findings}


@pytest.mark.processes
def test_a_correct_trtllm_endpoint_has_no_problem() -> None:
    findings_by_name = examined(
        Options(ttft="1ms", itl="10ms")
    )  # slower than a busy machine can bundle
    target = (
        "name",
        "connect",
        "auth",
        "model",
        "server",
        "tokenizer",
        "usage",
        "length",
        "first token",
        "streaming",
    )
    target = (*target, "keep-alive")

    assert {check: findings_by_name[check].state for check in target} == dict.fromkeys(target, OK)
    assert "64 of 64" in findings_by_name["length"].observed
    assert "JSON list" in findings_by_name["metrics"].meaning


def test_token_counts_that_contradict_each_other_are_a_warning() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "cached_tokens": 99}
    events = [
        scripted_server.chunk("a"),
        scripted_server.chunk(finish="length"),
        {"choices": [], "usage": usage},
    ]
    with scripted_server.serving(scripted_server.events(*events)) as server:
        settings = Settings(url=server.url, model="m", server="generic")
        findings_by_name = {
            finding.check: finding for finding in asyncio.run(doctor.collect_findings(settings))
        }

    assert (
        findings_by_name["usage"].state == WARNING
        and "cached" in findings_by_name["usage"].observed
    )


@pytest.mark.processes
def test_an_openai_like_endpoint_cannot_force_lengths(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    options = Options(api_flavor="openai", api_key_file=str(tmp_path / "key"), **FAST)
    findings_by_name = examined(options, api_key=KEY, server="generic")

    assert (findings_by_name["auth"].state, findings_by_name["server"].state) == (OK, WARNING)
    assert findings_by_name["length"].state in (NOTE, WARNING)
    refused = examined(options, api_key="sk-another-one-entirely")
    assert refused["auth"].state == FAULT
    assert "401" in refused["auth"].observed
    assert "model" not in refused, "what a refused key hides is not guessed"
    assert "files" in refused, "the host is looked at all the same"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "check", "expected_text"),
    [
        (Options(stream_interval=8, **FAST), "streaming", "tokens per event"),
        (Options(faults="connection_close", **FAST), "keep-alive", "closes the connection"),
        (
            Options(faults="slow_first_byte@600ms", **FAST),
            "first token",
            "before the HTTP headers",
        ),
        (Options(ttft="600ms", itl="0.2ms"), "first token", "headers arrived at once"),
    ],
)
def test_doctor_warns_of_each_injected_failure(
    options: Options, check: str, expected_text: str
) -> None:
    finding = examined(options)[check]
    assert finding.state == WARNING
    assert expected_text in f"{finding.observed} {finding.meaning}"


def streaming(url: str) -> Finding:
    findings = asyncio.run(doctor.collect_findings(Settings(url=url)))
    return next(finding for finding in findings if finding.check == "streaming")


@pytest.mark.processes
def test_a_response_that_arrives_at_once_is_no_stream() -> None:
    """On a quiet host it is a warning; who reads late cannot tell."""
    with start(Options(flood=True, ttft="1ms")) as server:
        finding = streaming(server.url)
    assert finding.state in (WARNING, UNKNOWN) and "proxy" not in finding.advice, finding


@pytest.mark.processes
def test_a_busy_host_is_not_taken_for_a_buffer() -> None:
    """The server streams; its tokens arrive in groups because both processes get a core late."""
    spin = [sys.executable, "-S", "-c", "while True: pass"]
    with start(Options(ttft="5ms", itl="2ms")) as server:
        processes = [subprocess.Popen(spin) for _ in range(2 * (os.cpu_count() or 1))]
        try:
            finding = streaming(server.url)
        finally:
            for other in processes:
                other.kill()
                other.wait()

    assert finding.state in (OK, UNKNOWN), finding


@pytest.mark.processes
def test_a_stalled_server_is_not_taken_for_a_buffer() -> None:
    with start(Options(ttft="5ms", itl="2ms")) as server:
        thread = Thread(target=lambda: findings.append(streaming(server.url)))
        findings: list[Finding] = []
        thread.start()
        while thread.is_alive():
            os.kill(server.pid, SIGSTOP)
            thread.join(0.04)
            os.kill(server.pid, SIGCONT)
            thread.join(0.005)

    assert [finding.state for finding in findings] in ([OK], [UNKNOWN]), findings


@pytest.mark.processes
@pytest.mark.parametrize("hold", [4096, 1 << 20])
def test_a_relay_that_buffers_responses_is_detected(hold: int) -> None:
    with start(Options(ttft="5ms", itl="5ms")) as server, Relay(server.url) as relay:
        relay.hold = hold
        findings = (streaming(f"http://127.0.0.1:{relay.port}") for _ in range(10))
        finding = next(
            (candidate for candidate in findings if candidate.state != UNKNOWN), None
        )  # of a busy host it says that, rightly
    assert finding is not None
    assert finding.state == WARNING and "proxy" in finding.advice, finding


NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error;
events {{}}
http {{
    access_log off; client_body_temp_path {folder}/1; proxy_temp_path {folder}/2;
    fastcgi_temp_path {folder}/3;
    uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
    server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass {url}; proxy_buffering on; }} }}
}}
"""


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("nginx", path=SBIN) is None, reason="nginx is not installed")
@pytest.mark.parametrize(
    ("faults", "state"),
    [
        ("close_delimited", WARNING),
        ("", OK),
    ],  # nginx holds what ends with its connection, and passes chunks on at once
)
def test_a_buffering_nginx_is_detected(tmp_path: Path, faults: str, state: str) -> None:
    with start(Options(ttft="5ms", itl="10ms", faults=faults)) as server, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.close()
        (tmp_path / "conf").write_text(NGINX.format(folder=tmp_path, port=port, url=server.url))
        binary = shutil.which("nginx", path=SBIN)
        nginx = subprocess.Popen([binary, "-c", tmp_path / "conf", "-e", tmp_path / "error"])
        try:
            while not (tmp_path / "pid").exists():  # written when it listens
                assert nginx.poll() is None, (tmp_path / "error").read_text()
                select.select([], [], [], 0.01)
            findings = (streaming(f"http://127.0.0.1:{port}") for _ in range(10))
            finding = next(
                (candidate for candidate in findings if candidate.state != UNKNOWN), None
            )  # of a busy host it says that, rightly
        finally:
            nginx.terminate()
            nginx.wait()

    assert finding is not None
    assert finding.state == state and ("proxy" in finding.advice) == (state == WARNING), finding


@pytest.mark.processes
@pytest.mark.parametrize("fault", ["truncate", "engine_error", "reset_after"])
def test_a_truncated_response_is_not_taken_for_tls(fault: str) -> None:
    finding = examined(Options(faults=fault, **FAST))["target"]
    assert finding.state == FAULT
    assert "during a response" in finding.advice
    assert "https" not in finding.advice


@pytest.mark.processes
def test_a_tls_port_is_distinguished_from_plain_http(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    leaf = authority.issue_cert("127.0.0.1")
    leaf.private_key_pem.write_to_path(tmp_path / "key.pem")
    leaf.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    options = Options(cert=str(tmp_path / "cert.pem"), key=str(tmp_path / "key.pem"), **FAST)
    trusted = examined(options, tls=Tls(ca=str(tmp_path / "ca.pem")))

    assert trusted["tls"].state == OK
    assert "certificate valid for" in trusted["tls"].observed
    unknown = examined(options)
    assert (unknown["target"].state, unknown["target"].code) == (FAULT, "tls")
    assert "--cacert" in unknown["target"].advice
    assert examined(options, tls=Tls(verify=False))["tls"].state == NOTE


@pytest.mark.parametrize(
    ("url", "expected_text"),
    [
        ("http://127.0.0.1:1", "nothing listens"),
        ("ftp://h", "scheme"),
        ("http://h.invalid", "resolve"),
    ],
)
def test_an_unreachable_target_is_a_finding_and_no_error(url: str, expected_text: str) -> None:
    findings = asyncio.run(doctor.collect_findings(Settings(url=url)))
    assert doctor.has_fault(findings)
    assert expected_text in findings[0].observed
    assert any(finding.check == "cpu" for finding in findings)


def test_without_a_target_this_host_is_checked_and_nothing_is_sent() -> None:
    title, findings = doctor.examine_host()
    assert title.startswith("doctor: this host, ")
    checks = {finding.check for finding in findings}
    assert {"clock", "timer", "cpu", "files"} <= checks <= {*HOST, "plug-in"}


def test_doctor_describes_a_virtual_target_without_connecting() -> None:
    title, (only,) = doctor.examine_target(Settings(url="sim:gb300-vm"))
    assert (
        "simulated: gb300-vm" in title
        and "4 x GB300" in only.observed
        and not doctor.has_fault([only])
    )
    with refused(UserError, "unknown_name", "--url"):
        doctor.examine_target(Settings(url="sim:nope"))


MS = 1_000_000
TOGETHER = Trial(output_tokens=4, event_times_ns=(5, 5, 5, 9 * MS))


def in_turns(pairs: int, by_ms: float, jitter_ms: float = 0.0) -> tuple[list[Trial], list[Trial]]:
    """Return responses of 64 tokens in 4 reads, whose first token is later than in a short one."""

    def trial(first_ms: float, tokens: int) -> Trial:
        instants = [int((first_ms + 100 * (n // 16)) * MS) for n in range(tokens)]
        return Trial(
            output_tokens=tokens, event_times_ns=tuple(instants), timer_lateness_ms=jitter_ms
        )

    shorts = [trial(20 + n + jitter_ms * (n % 2), 1) for n in range(pairs)]
    return [trial(99, 64), *(trial(25 + n + by_ms, 64) for n in range(pairs))], shorts


VLLM, GENERIC = SERVER_PROFILES["vllm"], SERVER_PROFILES["generic"]


@pytest.mark.parametrize(
    ("finding", "state", "expected_text"),
    [
        (
            target_checks.check_output_lengths(
                VLLM, Trial(max_tokens=64, output_tokens=64), Trial(max_tokens=64, output_tokens=3)
            ),
            OK,
            "requested length",
        ),
        (
            target_checks.check_output_lengths(
                VLLM, Trial(max_tokens=64, output_tokens=64), Trial(max_tokens=64, output_tokens=64)
            ),
            OK,
            "without these fields",
        ),
        (
            target_checks.check_output_lengths(
                VLLM, Trial(max_tokens=64, output_tokens=9), Trial(max_tokens=64, output_tokens=3)
            ),
            WARNING,
            "differ from the workload",
        ),
        (
            target_checks.check_output_lengths(
                VLLM, Trial(max_tokens=64, output_tokens=71), Trial(max_tokens=64, output_tokens=71)
            ),
            WARNING,
            "exceeds max_tokens",
        ),
        (
            target_checks.check_output_lengths(
                GENERIC, Trial(max_tokens=64, output_tokens=64), Trial(output_tokens=64)
            ),
            NOTE,
            "cannot force output lengths",
        ),
        (
            target_checks.check_output_lengths(VLLM, Trial(max_tokens=64), Trial()),
            UNKNOWN,
            "no token count",
        ),
        (
            target_checks.check_output_lengths(
                GENERIC, Trial(failure="http_4xx: no"), Trial(), "ignore_eos"
            ),
            WARNING,
            "failed: http_4xx",
        ),
        (
            target_checks.check_output_lengths(
                GENERIC,
                Trial(max_tokens=64, output_tokens=64),
                Trial(output_tokens=2),
                "ignore_eos",
            ),
            NOTE,
            "--extra-body",
        ),
        (
            target_checks.check_streaming([Trial(output_tokens=64, event_times_ns=(5,))]),
            WARNING,
            "did not stream",
        ),
        (
            target_checks.check_streaming([Trial(output_tokens=4, event_times_ns=(5, 5, 5, 6))]),
            OK,
            "one by one",
        ),
        (
            target_checks.check_streaming([Trial(output_tokens=None, event_times_ns=(5, 6, 7, 8))]),
            OK,
            "one by one",
        ),
        (target_checks.check_streaming([TOGETHER]), UNKNOWN, "busy host"),
        (
            target_checks.check_streaming(
                [TOGETHER, Trial(output_tokens=4, event_times_ns=(5, 6, 7, 8))]
            ),
            OK,
            "one by one",
        ),
        (
            target_checks.check_streaming([Trial(output_tokens=64, event_times_ns=(5,) * 64)]),
            WARNING,
            "at once",
        ),
        (
            target_checks.check_streaming(
                [Trial(output_tokens=64, event_times_ns=(5,) * 64, timer_lateness_ms=9)]
            ),
            UNKNOWN,
            "9 ms late",
        ),
        (
            target_checks.check_streaming(*in_turns(4, by_ms=50)),
            UNKNOWN,
            "busy host",
        ),  # too few to be sure
        (target_checks.check_streaming(*in_turns(5, by_ms=50)), WARNING, "proxy"),
        (
            target_checks.check_streaming(*in_turns(5, by_ms=2)),
            UNKNOWN,
            "busy host",
        ),  # sure, and next to nothing
        (
            target_checks.check_streaming(*in_turns(5, by_ms=50, jitter_ms=60)),
            UNKNOWN,
            "busy host",
        ),  # a busy host
        (
            target_checks.check_prefix_cache(Trial(cached_tokens=None), 256),
            UNKNOWN,
            "does not report",
        ),
        (target_checks.check_prefix_cache(Trial(cached_tokens=240), 256), NOTE, "240 of about 256"),
        (target_checks.check_authentication(True, 200, 200), NOTE, "without it"),
        (target_checks.check_authentication(False, 403, None), FAULT, "OPENAI_API_KEY"),
        (
            target_checks.check_name_resolution("h", ["10.0.0.1", "10.0.0.2"], 1.0),
            NOTE,
            "servers stay idle",
        ),
        (target_checks.check_connect_time([180.0, 150.0, 190.0]), WARNING, "180 ms"),
        (
            target_checks.check_metrics_pages({"/metrics": HttpResponse(404, {}, b"")}),
            NOTE,
            "no metrics",
        ),
        (
            target_checks.check_metrics_pages(
                {"/metrics": HttpResponse(200, {}, b"# TYPE vllm:x gauge\nvllm:x 1\n")}
            ),
            OK,
            "1 Prometheus metrics of vLLM",
        ),
    ],
)
def test_each_observation_of_doctor_has_its_finding(
    finding: Finding, state: str, expected_text: str
) -> None:
    assert finding.state == state
    assert expected_text in f"{finding.observed} {finding.meaning} {finding.advice}"


def test_expiring_certificates_and_different_clocks_are_findings() -> None:
    now = datetime(2026, 11, 21, tzinfo=UTC)

    assert (
        target_checks.check_tls("TLSv1.3", True, now + timedelta(days=3), now, 1.0).state == WARNING
    )
    assert target_checks.check_tls("TLSv1.3", True, now + timedelta(days=90), now, 1.0).state == OK
    finding = target_checks.check_wall_clock("Sat, 21 Nov 2026 00:01:00 GMT", now)
    assert finding is not None
    assert finding.state == WARNING
    assert finding.observed.endswith(" +60 s")
    assert target_checks.check_wall_clock("yesterday", now) is None


def test_rate_limits_are_read_from_response_headers() -> None:
    finding = target_checks.check_rate_limit(
        {"x-ratelimit-limit-requests": "600", "x-ratelimit-remaining-tokens": "9"}
    )
    assert finding is not None
    assert finding.observed == "600 requests"
    assert target_checks.check_rate_limit({"server": "x"}) is None


@pytest.mark.parametrize(
    ("machine", "check"),
    [
        (Machine(clock="hpet"), "clock"),
        (Machine(timer_late_ms=4.0), "timer"),
        (Machine(cpus=8, cpu_quota=1.0, load_average=0.9), "cpu"),
        (Machine(governor="powersave"), "cpu"),
        (Machine(files=1024), "files"),
    ],
)
def test_a_host_that_cannot_measure_well_has_findings(machine: Machine, check: str) -> None:
    assert {finding.check for finding in check_host(machine) if finding.state == WARNING} == {check}


V1, PERIOD = "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"/sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),  # v2, in a container
        ({"/sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({V1: "50000", PERIOD: "100000"}, 0.5),  # v1, in a container
        ({V1: "-1", PERIOD: "100000"}, None),
        (  # v2, a service: the least of its groups
            {
                "/proc/self/cgroup": "0::/a/b",
                "/sys/fs/cgroup/a/cpu.max": "200000 100000",
                "/sys/fs/cgroup/a/b/cpu.max": "400000 100000",
            },
            2.0,
        ),
        (  # v1, a group below the root, beside controllers of other things
            {
                "/proc/self/cgroup": "4:memory:/x\n2:cpu,cpuacct:/job/7\n0::/",
                PERIOD: "100000",
                V1: "-1",
                "/sys/fs/cgroup/cpu/job/7/cpu.cfs_quota_us": "300000",
                "/sys/fs/cgroup/cpu/job/7/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
    ],
)
def test_the_cpu_limit_of_a_control_group_is_read(
    files: dict[str, str], cores: float | None
) -> None:
    assert read_cpu_limit(lambda path: files.get(path, "")) == cores


def test_doctor_reports_whether_the_compiled_extension_is_used() -> None:
    missing = Machine(not_compiled="LOADGEN_PURE is set")
    findings = {finding.check: finding for finding in check_host(missing)}
    assert findings["compiled"].state == "note"
    assert "LOADGEN_PURE" in findings["compiled"].observed
    in_use = {finding.check: finding for finding in check_host(Machine())}
    assert in_use["compiled"].state == "ok"


def test_a_refused_long_prompt_is_no_evidence_about_shorter_prompts() -> None:
    """As of llama-server with --embeddings, whose longest text is its physical batch."""

    class Embeds(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.respond(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})

        def do_POST(self) -> None:
            long = len(self.rfile.read(int(self.headers["Content-Length"]))) > 500
            values = {
                "data": [{"embedding": [0.5]}],
                "usage": {"prompt_tokens": 9, "total_tokens": 9},
            }
            self.respond(
                400 if long else 200,
                {"error": {"message": "input is too large"}} if long else values,
            )

        def respond(self, status: int, value: Any) -> None:
            self.wfile.write(scripted_server.answer(value, f"{status} x"))

        def log_message(self, *_: Any) -> None: ...

    with scripted_server.running(Embeds) as url:
        findings = asyncio.run(
            doctor.collect_findings(Settings(url=url, api="embeddings", stream=False))
        )
    (target,) = [finding for finding in findings if finding.check == "target"]
    assert "too large" in target.observed


def test_the_report_of_doctor_equals_the_stored_text() -> None:
    findings = [
        target_checks.check_connect_time([0.4, 0.5, 0.6]),
        target_checks.check_authentication(True, 200, 200),
        target_checks.check_keep_alive(False),
        target_checks.check_prefix_cache(Trial(cached_tokens=None), 256),
        Finding("target", FAULT, "HTTP 503", "no request could be sent", "start the server", "x"),
    ]
    report = build_report("doctor: http://h:8000/v1", findings)
    check_golden("doctor_brief", as_text.render(report))
    check_golden("doctor_full", as_text.render(report, full=True))
