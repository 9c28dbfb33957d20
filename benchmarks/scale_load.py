"""Run a load against embedded endpoints and return what it costs, for `scale.py`.

Each load is a full run as a user has it: worker processes, recorder and files. CPU time is what the
workers measure of themselves since the start time. The recorder and the endpoints have processes of
their own, whose CPU time is not included.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import rig

from loadgen.core.execution import run
from loadgen.core.execution.events import EventHandler
from loadgen.core.execution.plan import Endpoint, Settings, Tuning
from loadgen.core.metrics.summary import Summary
from loadgen.core.workload import Workload, load, read_flags
from loadgen.sim.server import embedded
from loadgen.sim.server.options import Options

PROMPT_TOKENS = 20  # short prompts, because the cost of the responses is measured
DEFAULT_SEED = "1"


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """A load on embedded endpoints, and the processes that send it.

    By default it is a closed loop that sends one request on each stream.

    Attributes:
        streams: Requests that are open at once.
        tokens: Tokens of each response.
        itl_ms: Time between two tokens of a response.
        ttft_mean_ms: Mean of the time to the first token, which is normally distributed.
        ttft_deviation_ms: Standard deviation of the time to the first token.
        tokens_per_event: Tokens in each event of a response.
        workers: Worker processes that send the load.
        endpoints: Endpoints that answer it, each in a process of its own.
        targets: If not 0, the first endpoint serves alone, under so many names.
        output_dir: Where the results are kept. They are deleted without it.
        listener: Is called with each event of the run.
        ray_address: A Ray cluster on which the workers run, instead of this machine.
        tuning: Sizes and time limits of the run.
        options: Further options of `loadgen run`. A `request_rate` makes it an open loop.
    """

    streams: int
    tokens: int
    itl_ms: float
    ttft_mean_ms: float = 500.0
    ttft_deviation_ms: float = 100.0
    tokens_per_event: int = 1
    workers: int = 1
    endpoints: int = 1
    targets: int = 0
    output_dir: Path | None = None
    listener: EventHandler | None = None
    ray_address: str | None = None
    tuning: Tuning = field(default_factory=Tuning)
    options: Mapping[str, str | None] = field(default_factory=dict)


class EndpointUsage(NamedTuple):
    """The events that all endpoints sent, and the CPU time that they used."""

    events: float
    cpu_s: float


class LoadResult(NamedTuple):
    """The summary of a load, and what its endpoints did while it ran."""

    summary: Summary
    endpoint_usage: EndpointUsage

    @property
    def worker_cpu_s(self) -> float:
        """Return the CPU-seconds of all workers since the start time of the load."""
        cpu_s = self.summary.client.cpu_s
        assert cpu_s is not None, "the workers did not measure their CPU time"
        return cpu_s

    @property
    def event_gaps(self) -> int:
        """Return the number of gaps between output events, which counts nearly all events."""
        return self.summary.inter_chunk_ms.count

    @property
    def cpu_s_per_event(self) -> float:
        """Return the CPU-seconds of the workers per output event."""
        return self.worker_cpu_s / self.event_gaps

    @property
    def window_s(self) -> float:
        """Return the length of the measurement window, or 1 s if it has no length."""
        return self.summary.window.duration_s or 1.0

    @property
    def events_per_s(self) -> float:
        """Return the output events per second in the measurement window."""
        return self.event_gaps / self.window_s

    @property
    def busiest_worker_fraction(self) -> float:
        """Return the fraction of a core that the busiest worker used, or 0 if it is unknown."""
        return self.summary.client.cpu_share_max or 0.0

    @property
    def worker_memory_mb(self) -> float:
        """Return the peak memory of all workers in MB, or 0 if it is unknown."""
        return (self.summary.client.peak_rss_bytes or 0) / 1e6


def run_load(spec: LoadSpec) -> LoadResult:
    """Start the endpoints, run one load against them and return its result.

    The counts of requests are printed if some of them did not succeed.
    """
    with ExitStack() as stack:
        urls = [
            stack.enter_context(embedded.start(_endpoint_options(spec))).url
            for _ in range(spec.endpoints)
        ]
        scratch_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workload = _load_workload(spec, scratch_dir)
        settings = _create_settings(spec, urls, scratch_dir)
        listeners = () if spec.listener is None else (spec.listener,)

        before = _read_endpoint_usage(urls)
        summary, _ = run.execute(workload, settings, listeners)
        after = _read_endpoint_usage(urls)

    if summary.requests.ok != summary.requests.scheduled:
        print(f"Not all requests succeeded: {summary.requests}", flush=True)

    usage = EndpointUsage(events=after.events - before.events, cpu_s=after.cpu_s - before.cpu_s)
    return LoadResult(summary, usage)


def _endpoint_options(spec: LoadSpec) -> Options:
    """Return the options of each endpoint: its latencies and how many tokens an event has."""
    return Options(
        ttft=f"normal:{spec.ttft_mean_ms}ms,{spec.ttft_deviation_ms}ms",
        itl=f"{spec.itl_ms}ms",
        stream_interval=spec.tokens_per_event,
        idle_close="600s",  # longer than any load, so that no connection is opened twice
    )


def _load_workload(spec: LoadSpec, scratch_dir: Path) -> Workload:
    """Write a workload of short prompts to a file and load it with the options of the load."""
    workload_path = scratch_dir / "workload.yaml"
    workload_path.write_text(
        f"name: scale\nrequests: {{input_tokens: {PROMPT_TOKENS}, output_tokens: {spec.tokens}}}\n"
    )
    options: dict[str, Any] = {
        "num_requests": str(spec.streams),
        "warmup": "0",
        "seed": DEFAULT_SEED,
        **spec.options,
    }
    if "request_rate" not in options:
        options["concurrency"] = str(spec.streams)

    return load(str(workload_path), read_flags(**options))


def _create_settings(spec: LoadSpec, urls: list[str], scratch_dir: Path) -> Settings:
    """Return the settings of a run against the endpoints with these URLs."""
    return Settings(
        url=urls[0],
        targets=_list_targets(urls, spec.targets),
        model="sim",
        server="trtllm",
        workers=spec.workers,
        ray=spec.ray_address,
        out=spec.output_dir or scratch_dir / "results",
        tuning=spec.tuning,
    )


def _list_targets(urls: list[str], target_count: int) -> tuple[Endpoint, ...]:
    """Return the targets of a load: the first endpoint under many names, or all endpoints.

    Many names let one endpoint stand for many machines. Each of them has its own API key. A single
    endpoint is addressed by its URL, so the result is empty.
    """
    if target_count:
        return tuple(
            Endpoint(url=urls[0], name=f"vm-{index:03}", api_key=f"key-{index}")
            for index in range(target_count)
        )
    if len(urls) == 1:
        return ()

    return tuple(Endpoint(url=url, name=url) for url in urls)


def _read_endpoint_usage(urls: list[str]) -> EndpointUsage:
    """Return what all endpoints together have sent and used since their start."""
    counters = [rig.read_counters(url) for url in urls]
    return EndpointUsage(
        events=sum(counter["events"] for counter in counters),
        cpu_s=sum(counter["cpu_s"] for counter in counters),
    )
