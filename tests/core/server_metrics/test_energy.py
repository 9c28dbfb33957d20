"""Energy of a run from metrics pages and nvidia-smi, and where it is shown.

The pages are fake. None of them may disturb a run.
"""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted_server import running

import loadgen
from loadgen.core.errors import CombinedError
from loadgen.core.server_metrics import energy
from loadgen.core.server_metrics.series import UP, MetricSample, parse_page
from loadgen.runs import text

WORKLOAD = {"name": "few", "requests": {"input_tokens": 12, "output_tokens": 40}}
DCGM = """# HELP DCGM_FI_DEV_POWER_USAGE Power draw (in W).
# TYPE DCGM_FI_DEV_POWER_USAGE gauge
DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-1",modelName="NVIDIA H200"} 612.5
DCGM_FI_DEV_POWER_USAGE{gpu="1",UUID="GPU-2",modelName="NVIDIA H200"} 587.5
# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0",UUID="GPU-1"} 612500
DCGM_FI_DEV_SM_CLOCK{gpu="0",UUID="GPU-1"} 1410
DCGM_FI_DEV_CLOCKS_EVENT_REASONS{gpu="0",UUID="GPU-1"} 4
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-1"} 131072
something_else_entirely 7
"""


def read(
    name: str, values: list[tuple[float, float | None]], labels: str = "", page: str = "p"
) -> list[MetricSample]:
    """Return samples as the scraper writes them; None stands for a read that failed.

    Only changed values are written, and `up` at every read.
    """
    lines, last = [], None
    for t_s, value in values:
        if value is not None and value != last:
            lines.append(
                MetricSample(t_s=t_s, target=0, page=page, name=name, labels=labels, value=value)
            )
            last = value
        up = 0.0 if value is None else 1.0
        lines.append(MetricSample(t_s=t_s, target=0, page=page, name=UP, labels="", value=up))
    return lines


COUNTER = "trtllm_energy_joules_total"
WATTS = "nvidia_smi_power_watts"


def test_only_energy_samples_of_a_metrics_page_are_stored() -> None:
    hardware_values = energy.select_hardware_values(parse_page(DCGM))

    assert hardware_values["DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", 'gpu="0",UUID="GPU-1"'] == 4
    assert len(hardware_values) == 6 and not [
        name for name, _ in hardware_values if name.startswith("something")
    ]
    assert energy.parse_energy_metrics(b'{"total_energy_j": 12.5, "query_time": 3}') == {
        (COUNTER, ""): 12.5
    }

    line = (
        "0, 612.40, 700.00, 1410, 131072, 0x0000000000000004\n"
        "1, [N/A], 700.00, 1980, 5, 0x0000000000000001\n"
    )
    smi = energy.parse_nvidia_smi("garbage\n0, 1.0, 2\n" + line)

    assert smi[WATTS, 'gpu="0"'] == 612.4 and (WATTS, 'gpu="1"') not in smi
    assert smi["nvidia_smi_throttle_reasons", 'gpu="0"'] == 4


@pytest.mark.parametrize(
    "page", [b"", b"[]", b"7", b'{"error": "no"}', b'{"total_energy_j": "x"}', b"[" * 5000, b"\xff"]
)
def test_a_page_without_energy_is_refused(page: bytes) -> None:
    with pytest.raises(ValueError):
        energy.parse_energy_metrics(page)


def test_energy_of_a_counter_has_the_uncertainty_of_its_readings_at_the_ends() -> None:
    """100 W from 0 to 20 s, 300 W from there: the window from 9.5 s to 30.5 s held 4,200 J."""
    values = [(float(t), 100.0 * min(t, 20) + 300.0 * max(t - 20, 0)) for t in range(-1, 41)]
    energy_use = energy.measure_energy(read(COUNTER, values), 9.5, 30.5)
    assert energy_use is not None and energy_use.joules == pytest.approx(1050 + 3150)
    assert energy_use.error_j == pytest.approx(50 + 150) and energy_use.watts == pytest.approx(200)


def test_a_rarely_updated_counter_has_a_large_uncertainty() -> None:
    values = [(float(t), 100.0 * (t // 30 * 30)) for t in range(-31, 100)]
    energy_use = energy.measure_energy(read(COUNTER, values), 15.0, 75.0)
    assert energy_use is not None and energy_use.joules == pytest.approx(6000)
    assert energy_use.error_j is not None and energy_use.error_j >= 3000


def test_a_restarted_counter_is_continued() -> None:
    values = [(float(t), 5000.0 + 100 * t if t < 10 else 100.0 * (t - 10)) for t in range(-1, 30)]
    energy_use = energy.measure_energy(read(COUNTER, values), 5.0, 20.0)
    assert energy_use is not None and energy_use.joules == pytest.approx(1500, abs=101)


def test_watts_are_integrated_with_an_error_for_the_time_between_readings() -> None:
    steps = [(float(t), 400.0 if t < 10 else 600.0) for t in range(-1, 32)]
    energy_use = energy.measure_energy([*read(WATTS, steps, 'gpu="0"')], 0.0, 20.0)
    assert energy_use is not None and energy_use.source == "nvidia-smi" and energy_use.devices == 1
    assert energy_use.joules == pytest.approx(4000 + 6000, abs=101)
    assert energy_use.error_j == pytest.approx(2 * 200 / 12**0.5)
    assert energy_use.watts_max == 600


@pytest.mark.parametrize(
    ("values", "has_reason"),
    [
        ([(0.0, 400.0), (1.0, 400.0)], True),  # ends before the window does
        ([(-1.0, 400.0), *[(float(t), None) for t in range(20)], (21.0, 400.0)], True),  # a hole
    ],
)
def test_readings_with_gaps_give_no_energy_and_a_reason(
    values: list[tuple[float, float | None]], has_reason: bool
) -> None:
    energy_use = energy.measure_energy(read(WATTS, values), 0.0, 20.0)
    assert (
        energy_use is not None
        and energy_use.joules is None
        and bool(energy_use.missing_reason) is has_reason
    )


def test_throttle_reasons_are_shares_of_the_readings_and_exclude_idle() -> None:
    marks = [(float(t), 1.0 if t < 5 else 4.0 if t < 15 else 0x40) for t in range(21)]
    lines = read(WATTS, [(float(t), 500.0) for t in range(21)], page="a")
    lines += read("nvidia_smi_throttle_reasons", marks, page="a")
    lines.sort(key=lambda sample: (sample.t_s, sample.name == UP))
    energy_use = energy.measure_energy(lines, 0.0, 20.0)

    assert energy_use is not None
    assert energy_use.throttled == {
        "power cap": pytest.approx(10 / 21, abs=0.03),
        "thermal": pytest.approx(6 / 21, abs=0.03),
    }


# -- beside a run ----------------------------------------------------------------------------------


@contextmanager
def serving(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Serve a page on a free port and yield its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    with running(Handler) as url:
        yield f"{url}/metrics"


def send(handler: http.server.BaseHTTPRequestHandler, body: bytes, status: int = 200) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def once_then(strange: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Any:
    """Return a handler that serves a good page once and then `strange`."""
    reads = 0

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        nonlocal reads
        reads += 1
        send(handler, DCGM.encode()) if reads == 1 else strange(handler)

    return answer


def drip(handler: http.server.BaseHTTPRequestHandler) -> None:
    """Send single bytes of a page that never ends."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    stopped = threading.Event()
    while not stopped.wait(0.3):
        handler.wfile.write(b"#")
        handler.wfile.flush()


STRANGE = {
    "slow": drip,
    "huge": lambda handler: send(handler, b"# " + b"x" * (17 << 20)),
    "malformed": lambda handler: send(handler, b'DCGM_FI_DEV_POWER_USAGE{gpu="0 612\n{{{}\x00'),
    "refused": lambda handler: send(handler, b"who are you?", 401),
    "gone": lambda handler: send(handler, b"", 404),
    "hung up": lambda handler: handler.connection.close(),
}


@pytest.mark.processes
def test_unusual_energy_pages_are_named_in_the_verdict_and_change_no_value(tmp_path: Path) -> None:
    """One run reads all strange pages and a good one, and only the good one has a value."""
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(once_then(strange))) for strange in STRANGE.values()]
        good = stack.enter_context(serving(lambda handler: send(handler, DCGM.encode())))
        run = loadgen.run(
            WORKLOAD,
            embedded={"ttft": "5ms", "itl": "1ms"},
            concurrency=2,
            duration="4s",
            out=tmp_path / "run",
            warmup=0,
            energy=[*urls, good],
            server_metrics="off",
        )

    assert run.summary.requests.failed == 0 and run.summary.requests.ok > 20

    named = {
        code.values["page"]
        for code in run.summary.verdict.warning_codes
        if code.code == "page_failed"
    }

    assert named == set(urls)
    assert run.summary.energy is not None
    read = {page.url: page for page in run.summary.energy.pages}
    assert read[good].failed == 0 and read[good].reads >= 3


@pytest.mark.processes
def test_the_energy_of_a_run_is_in_summary_report_and_contract(tmp_path: Path) -> None:
    run = loadgen.run(
        WORKLOAD,
        embedded={"ttft": "5ms", "itl": "1ms", "watts": 700.0},
        concurrency=4,
        duration="5s",
        warmup=0,
        out=tmp_path / "run",
        gpus=1,
        metadata={"system.accelerator.power_limit_w": 750},
    )
    used = run.summary.energy

    assert used is not None and used.source == "energy_metrics" and used.declared_watts == 750
    assert used.joules is not None and used.window_s is not None and used.error_j is not None
    assert used.watts == pytest.approx(700, abs=used.error_j / used.window_s)
    tokens = run.summary.tokens.steady_output_per_s
    assert tokens and used.joules_per_output_token == pytest.approx(used.watts / tokens)
    rendered_text = " ".join(text.render(run.summary).split())
    assert "J/output token" in rendered_text and "(750 W declared)" in rendered_text
    stored = json.loads((tmp_path / "run" / "summary.json").read_bytes())
    assert stored["energy"]["joules"] == used.joules
    assert loadgen.load(tmp_path / "run").summary.energy == used


@pytest.mark.processes
def test_local_nvidia_smi_is_read_if_the_target_is_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\nwhile true; do\n"
        "echo '0, 612.40, 700.00, 1410, 131072, 0x0000000000000004'\n"
        "echo '1, 587.60, 700.00, 1980, 1024, 0x0000000000000000'\nsleep 0.5\ndone\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    run = loadgen.run(
        WORKLOAD,
        embedded={"ttft": "5ms", "itl": "1ms"},
        concurrency=2,
        duration="4s",
        warmup=0,
        out=tmp_path / "run",
    )
    used = run.summary.energy

    assert used is not None and (used.source, used.devices) == ("nvidia-smi", 2)
    assert (
        used.watts == pytest.approx(1200)
        and used.limit_watts == 1400
        and used.memory_used_gib == 129
    )
    assert used.clock_min_mhz == 1410 and used.throttled == {"power cap": 1.0}


@pytest.mark.parametrize(
    "arguments", [("auto", "off"), ("off", "nvidia-smi"), ("ftp://h/metrics",), ("watts",)]
)
def test_an_invalid_energy_option_is_refused_before_any_request(arguments: tuple[str, ...]) -> None:
    with pytest.raises(CombinedError):
        loadgen.run(WORKLOAD, url="sim:gb300-vm", energy=arguments)
