"""What it costs to read metrics pages and the server's timing of requests while a load runs.

    python benchmarks/side_cost.py

The scraper process reads each page once a second and parses it with prometheus-client. The script
prints the share of a core that this takes for the page of the simulated server, that of a DCGM
exporter with 8 GPUs, and a page of 2,000 series. The share grows with the number of series: about 9
microseconds each. A response may have a header Server-Timing, which costs the worker CPU once per
request; the script prints its share of all the CPU that the worker uses for a request of 100
events. Exit 1 if a share is above its limit.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import rig
from loadgen_sdk.wire_formats.server_timing_lookup import parse_server_timing

import loadgen
from loadgen.core.server_metrics import energy, request_accounts, series
from loadgen.sim.engine.latency_model import LatencyModel, LatencyOptions, parse_distribution
from loadgen.sim.server.metrics_pages import ServerMetrics

# Limits as fractions of a core, with one read per second. A page of 2,000 series was seen to take
# 1.8 % of a core.
MAX_CORE_FRACTION = 0.01
MAX_CORE_FRACTION_LONG_PAGE = 0.03

# Limit of parsing the header Server-Timing, as a fraction of the CPU time of a request
MAX_REQUEST_FRACTION = 0.02

DCGM_GPUS = 8
PERF_METRICS_REQUESTS = 100
LONG_PAGE_SERIES = 2_000
LONG_PAGE_NAME = f"page of {LONG_PAGE_SERIES:,} series"
LONG_PAGE_CALLS_DIVISOR = 10  # one call takes about ten times as long as that of another page

WORKLOAD = {
    "name": "side-cost",
    "requests": {"input_tokens": 100, "output_tokens": 100},
}

# The timing of one request as TensorRT-LLM sends it in a header
SERVER_TIMING = {
    "trtllm.perf_metrics": {
        "Server-Timing": "server_queue;dur=1.25, server_ttft;dur=8.5, server_e2e;dur=24"
    }
}

# The timing of one request as TensorRT-LLM serves it on its page /perf_metrics
PERF_METRICS_RECORD = (
    b'{"request_id":1,"perf_metrics":{"first_iter":1,"last_iter":9,"timing_metrics":'
    b'{"arrival_time":1.5,"first_scheduled_time":1.6,"first_token_time":1.7,'
    b'"last_token_time":2.5}}}'
)
ENERGY_PAGE = b'{"total_energy_j": 12.5, "query_time": 3.0}'

COLUMNS = ("a read of", "ms CPU", "of a core at one read a second")


def create_simulated_page() -> str:
    """Return the metrics page of the simulated server."""
    latencies = LatencyOptions(
        ttft=parse_distribution("5ms", ""), itl=parse_distribution("1ms", "")
    )
    return ServerMetrics().prometheus_text(LatencyModel(latencies), "sim")


def create_dcgm_page(gpu_count: int) -> str:
    """Return the metrics page of a DCGM exporter, with each of its metrics for each GPU."""
    metric_names = [name for name, _ in energy.SOURCES["dcgm"].values()]
    lines = [
        f'{name}{{gpu="{gpu}",UUID="GPU-{gpu}"}} 612.5\n'
        for name in metric_names
        for gpu in range(gpu_count)
    ]
    return "".join(lines)


def create_long_page(series_count: int) -> str:
    """Return a metrics page with `series_count` series of one metric."""
    lines = [f'a_name_of_a_series{{label="{i}"}} {i}\n' for i in range(series_count)]
    return "".join(lines)


def create_perf_metrics_page(request_count: int) -> bytes:
    """Return the page /perf_metrics of TensorRT-LLM with the timing of `request_count` requests."""
    return b"[" + b",".join([PERF_METRICS_RECORD] * request_count) + b"]"


def create_page_parsers() -> dict[str, Callable[[], object]]:
    """Return a function for each kind of page that parses it once, by the name of the page."""
    simulated_page = create_simulated_page()
    dcgm_page = create_dcgm_page(DCGM_GPUS)
    perf_metrics_page = create_perf_metrics_page(PERF_METRICS_REQUESTS)
    long_page = create_long_page(LONG_PAGE_SERIES)
    return {
        "metrics page of the simulated server": lambda: series.parse_page(simulated_page),
        f"DCGM page of {DCGM_GPUS} GPUs": lambda: parse_dcgm_page(dcgm_page),
        "/energy_metrics": lambda: energy.parse_energy_metrics(ENERGY_PAGE),
        f"/perf_metrics with {PERF_METRICS_REQUESTS} requests": lambda: (
            request_accounts.parse_breakdowns(perf_metrics_page, target=0)
        ),
        LONG_PAGE_NAME: lambda: series.parse_page(long_page),
    }


def parse_dcgm_page(page: str) -> object:
    """Parse a page of a DCGM exporter and select the values of its GPUs."""
    return energy.select_hardware_values(series.parse_page(page))


def measure_reads(calls: int) -> dict[str, float]:
    """Return the CPU-seconds of parsing each kind of page once, by the name of the page.

    Each is the mean of `calls` calls. The long page takes much longer than the others, so fewer
    calls are enough for it.
    """
    read_s_by_page = {}
    for name, parse_once in create_page_parsers().items():
        page_calls = calls
        if name == LONG_PAGE_NAME:
            page_calls = max(1, calls // LONG_PAGE_CALLS_DIVISOR)
        read_s_by_page[name] = rig.measure_cpu_s(parse_once, calls_per_round=page_calls)
    return read_s_by_page


def measure_request_cpu_s(duration_s: float) -> float:
    """Run a load of requests with 100 events each, and return the worker's CPU-seconds per request.

    Raises SystemExit if no request succeeded or the CPU time is not known.
    """
    with tempfile.TemporaryDirectory() as scratch:
        run = loadgen.run(
            WORKLOAD,
            request_rate=100,
            duration=duration_s,
            embedded={"ttft": "5ms", "itl": "1ms"},
            warmup=0,
            out=Path(scratch) / "run",
        )

    worker_cpu_s: float | None = run.summary.client.cpu_s
    ok_requests: int = run.summary.requests.ok
    if not worker_cpu_s or not ok_requests:
        raise SystemExit(f"{ok_requests} requests took {worker_cpu_s} CPU-seconds of the worker")
    return worker_cpu_s / ok_requests


def is_page_within_limit(name: str, read_s: float) -> bool:
    """Return whether reading a page once a second uses no more of a core than its limit allows."""
    max_core_fraction = MAX_CORE_FRACTION
    if name == LONG_PAGE_NAME:
        max_core_fraction = MAX_CORE_FRACTION_LONG_PAGE

    core_fraction = read_s  # CPU-seconds per read, at one read per second
    return core_fraction <= max_core_fraction


def print_reads(read_s_by_page: dict[str, float]) -> None:
    """Print the CPU time of one read of each page, and its share of a core at one per second."""
    rows = [
        [name, f"{read_s * 1e3:.2f}", f"{read_s:.2%}"] for name, read_s in read_s_by_page.items()
    ]
    print(rig.format_table(COLUMNS, rows) + "\n")


def main() -> int:
    """Print the cost of each read and of Server-Timing; return 1 if one is above its limit."""
    parser = rig.create_parser(__doc__)
    parser.add_argument(
        "--times", type=int, default=200, help="so many calls in each of five rounds"
    )
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="of the load that a request's cost is taken from"
    )
    smoke_defaults = {"times": 3, "seconds": 1.0}
    args = rig.parse_arguments(parser, **smoke_defaults)

    read_s_by_page = measure_reads(args.times)
    print_reads(read_s_by_page)

    request_s = measure_request_cpu_s(args.seconds)
    timing_s = rig.measure_cpu_s(
        partial(parse_server_timing, SERVER_TIMING), calls_per_round=args.times
    )
    request_fraction = timing_s / request_s
    print(f"a request of 100 events: {request_s * 1e6:,.0f} µs CPU of the worker")
    print(f"its Server-Timing: {timing_s * 1e6:.1f} µs, {request_fraction:.2%} of that")

    are_pages_within_limits = all(
        is_page_within_limit(name, read_s) for name, read_s in read_s_by_page.items()
    )
    is_timing_within_limit = request_fraction <= MAX_REQUEST_FRACTION
    is_passed = are_pages_within_limits and is_timing_within_limit
    return 0 if is_passed or args.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
