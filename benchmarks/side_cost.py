"""What it costs to read metrics pages and request accounts while a load runs.

    python benchmarks/side_cost.py

The scraper process reads each page once a second and parses it with prometheus-client. The script
prints the share of a core that this takes for the page of the simulated server, that of a DCGM
exporter with 8 GPUs, and a page of 2,000 series. The share grows with the number of series: about 9
microseconds each. The account of a request costs the worker CPU once per request; the script prints
its share of all the CPU that the worker uses for a request of 100 events. Exit 1 if a share is
above its limit.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import rig
from loadgen_sdk.wire_formats.server_timing_lookup import parse_server_timing

import loadgen
from loadgen.core.server_metrics import energy, request_accounts, series
from loadgen.sim.engine.latency_model import LatencyModel, LatencyOptions, parse_distribution
from loadgen.sim.server.metrics_pages import ServerMetrics

# Shares of a core at one read a second. A page of 2,000 series was seen to take 1.8 %.
LIMIT_PER_READ = 0.01
LIMIT_PER_LONG_READ = 0.03
LIMIT_PER_ACCOUNT = 0.02  # share of the CPU of a request
LONG_PAGE_SERIES = 2_000
WORKLOAD = {
    "name": "side-cost",
    "requests": {"input_tokens": 100, "output_tokens": 100},
}
TIMING = {
    "trtllm.perf_metrics": {
        "Server-Timing": "server_queue;dur=1.25, server_ttft;dur=8.5, server_e2e;dur=24"
    }
}
RECORD = (
    b'{"request_id":1,"perf_metrics":{"first_iter":1,"last_iter":9,"timing_metrics":{"arrival_time":1.5,'
    b'"first_scheduled_time":1.6,"first_token_time":1.7,"last_token_time":2.5}}}'
)


def create_simulated_page() -> str:
    """Return the metrics page of the simulated server."""
    latencies = LatencyOptions(
        ttft=parse_distribution("5ms", ""), itl=parse_distribution("1ms", "")
    )
    return ServerMetrics().prometheus_text(LatencyModel(latencies), "sim")


def create_dcgm_page(gpus: int) -> str:
    """Return the page of a DCGM exporter with so many GPUs."""
    names = [name for name, _ in energy.SOURCES["dcgm"].values()]
    return "".join(
        f'{name}{{gpu="{gpu}",UUID="GPU-{gpu}"}} 612.5\n' for name in names for gpu in range(gpus)
    )


def create_long_page(series_count: int) -> str:
    """Return a page with so many series of one metric."""
    return "".join(f'a_name_of_a_series{{label="{i}"}} {i}\n' for i in range(series_count))


def measure_reads(times: int) -> dict[str, float]:
    """Return the CPU-seconds of one read of each kind of page, in the mean of `times` reads."""
    simulated_page = create_simulated_page()
    dcgm_page = create_dcgm_page(gpus=8)
    energy_page = b'{"total_energy_j": 12.5, "query_time": 3.0}'
    breakdowns = b"[" + b",".join([RECORD] * 100) + b"]"
    reads: dict[str, Callable[[], object]] = {
        "metrics page of the simulated server": lambda: series.parse_page(simulated_page),
        "DCGM page of 8 GPUs": lambda: energy.select_hardware_values(series.parse_page(dcgm_page)),
        "/energy_metrics": lambda: energy.parse_energy_metrics(energy_page),
        "/perf_metrics with 100 requests": lambda: request_accounts.parse_breakdowns(breakdowns, 0),
    }

    return {name: rig.measure_cpu_s(read, calls_per_round=times) for name, read in reads.items()}


def measure_long_read(times: int) -> float:
    """Return the CPU-seconds of one read of a page with LONG_PAGE_SERIES series."""
    long_page = create_long_page(LONG_PAGE_SERIES)
    return rig.measure_cpu_s(
        lambda: series.parse_page(long_page), calls_per_round=max(1, times // 10)
    )


def measure_request(seconds: float) -> float:
    """Return the CPU-seconds of the worker per request of 100 events; 0 if it is unknown."""
    with tempfile.TemporaryDirectory() as scratch:
        run = loadgen.run(
            WORKLOAD,
            request_rate=100,
            duration=seconds,
            embedded={"ttft": "5ms", "itl": "1ms"},
            warmup=0,
            out=Path(scratch) / "r",
        )

    cpu_s: float = run.summary.client.cpu_s or 0.0
    ok_requests: int = run.summary.requests.ok
    return cpu_s / max(ok_requests, 1)


def main() -> int:
    """Print the cost of each read; return 1 if one is above its limit."""
    parser = rig.create_parser(__doc__)
    parser.add_argument(
        "--times", type=int, default=200, help="so many calls in each of five rounds"
    )
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="of the load that a request's cost is taken from"
    )
    args = rig.parse_arguments(parser, times=3, seconds=1.0)
    read_s_by_page = measure_reads(args.times)
    long_read_s = measure_long_read(args.times)
    all_reads = {**read_s_by_page, f"page of {LONG_PAGE_SERIES:,} series": long_read_s}
    rows = [[name, f"{read_s * 1e3:.2f}", f"{read_s:.2%}"] for name, read_s in all_reads.items()]
    print(rig.format_table(["a read of", "ms CPU", "of a core at one read a second"], rows) + "\n")
    request_s = measure_request(args.seconds)
    timing_s = rig.measure_cpu_s(lambda: parse_server_timing(TIMING), calls_per_round=args.times)
    timing_fraction = timing_s / request_s if request_s else 0.0
    print(f"a request of 100 events: {request_s * 1e6:,.0f} µs CPU of the worker")
    print(f"its account: {timing_s * 1e6:.1f} µs, {timing_fraction:.2%} of that")
    is_within_limits = (
        max(read_s_by_page.values()) <= LIMIT_PER_READ
        and long_read_s <= LIMIT_PER_LONG_READ
        and timing_fraction <= LIMIT_PER_ACCOUNT
    )

    return 0 if is_within_limits or args.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
