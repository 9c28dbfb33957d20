"""The paths of the simulated server that are not an inference API, such as metrics and logs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from loadgen.core.errors import UserError
from loadgen.sim.server.engine_setup import EngineSetup
from loadgen.sim.server.http_messages import HttpResponse
from loadgen.sim.server.metrics_pages import (
    ServerMetrics,
    build_iteration_stats,
    build_stats_without_engine,
)
from loadgen.sim.server.options import Options
from loadgen.sim.server.send_log import SendLog

PROMETHEUS_TEXT = "text/plain; version=0.0.4"
PLAIN_TEXT = "text/plain"
BINARY = "application/octet-stream"

# Since this version, TensorRT-LLM reports timings in the response; before, at /perf_metrics.
_FIRST_RELEASE_WITH_TIMING_IN_RESPONSE = (1, 3)


Responder = Callable[[], HttpResponse]
"""Returns a page or carries out a command."""

_CACHE_IN_USE_TEXT = b"Cache not flushed because there are pending requests."


@dataclass
class ServerCounters:
    """Counters since the start of the server."""

    requests: int = 0
    completed: int = 0
    events: int = 0  # output events sent
    open_connections: int = 0
    slow_readers: int = 0  # connections reset because their clients read too slowly
    profiles: int = 0  # profiler runs that were started
    is_profiling: bool = False


class ServerPages:
    """Answers GET requests for pages, and POST requests that control the server.

    Attributes:
        reports_timing_in_response: Whether this version of the server reports timings in responses.
    """

    def __init__(
        self,
        options: Options,
        setup: EngineSetup,
        counters: ServerCounters,
        metrics: ServerMetrics,
        log: SendLog,
    ) -> None:
        """Create the pages that a server with these options has.

        Args:
            options: The options of the server.
            setup: The engine of the server.
            counters: Counters since the start of the server.
            metrics: Metrics of the finished requests.
            log: The log of requests and events.

        Raises:
            UserError: The options are for trtllm-serve, and their version is not valid.
        """
        self._options = options
        self._setup = setup
        self._counters = counters
        self._metrics = metrics
        self._log = log
        self._start_ns = time.monotonic_ns()
        self._events_at_last_read = 0  # `counters.events` when the page /metrics was last read

        is_trtllm = setup.rules.flavor == "trtllm"
        self.reports_timing_in_response = is_trtllm and _has_timing_in_response(options.version)

        # Pages are read with GET, commands are carried out with POST.
        self._pages = self._list_common_pages()
        self._commands: dict[str, Responder] = {}
        if is_trtllm:
            self._pages |= self._list_trtllm_pages()
            self._commands = self._list_trtllm_commands()

    def _list_common_pages(self) -> dict[str, Responder]:
        """Return the pages that all servers have, by their paths."""
        return {
            "/v1/models": self._list_models,
            "/health": self._respond_empty,
            "/version": self._report_version,
            "/metrics": self._take_iteration_stats,
            "/_log": self._take_send_log,
            "/_stats": self._report_stats,
        }

    def _list_trtllm_pages(self) -> dict[str, Responder]:
        """Return the pages that only trtllm-serve has, by their paths.

        The timings of requests have a page of their own if they are not in the responses.
        """
        pages: dict[str, Responder] = {
            "/prometheus/metrics": self._report_prometheus_metrics,
            "/energy_metrics": self._report_energy,
        }
        if not self.reports_timing_in_response:
            pages["/perf_metrics"] = self._take_request_timings
        return pages

    def _list_trtllm_commands(self) -> dict[str, Responder]:
        """Return the commands that only trtllm-serve has, by their paths."""
        return {
            "/start_profile": self._start_profile,
            "/stop_profile": self._stop_profile,
            "/reset_prefix_cache": self._reset_cache,
            "/flush_cache": self._flush_cache,
        }

    def allowed_method(self, path: str) -> str:
        """Return the HTTP method of a path, or "" if there is no such page."""
        if path in self._pages:
            return "GET"
        return "POST" if path in self._commands else ""

    def answer(self, path: str) -> HttpResponse:
        """Return the page at an existing path, or carry out its command."""
        respond = self._pages.get(path) or self._commands[path]
        return respond()

    def _respond_empty(self) -> HttpResponse:
        return HttpResponse(200, b"", "")

    def _report_version(self) -> HttpResponse:
        return _json_response({"version": self._options.version})

    def _take_send_log(self) -> HttpResponse:
        return HttpResponse(200, self._log.drain(), BINARY)

    def _take_request_timings(self) -> HttpResponse:
        return _json_response(self._metrics.take_records())

    def _start_profile(self) -> HttpResponse:
        self._counters.is_profiling = True
        self._counters.profiles += 1
        return self._respond_empty()

    def _stop_profile(self) -> HttpResponse:
        self._counters.is_profiling = False
        return self._respond_empty()

    def _reset_cache(self) -> HttpResponse:
        """Empty the prefix cache as TensorRT-LLM and vLLM do, if there is one.

        The blocks of requests in flight stay. A server with several processes answers 400, because
        the command would reach only one of them.
        """
        if self._options.cores > 1:
            problem = "needs a simulated server with one process"
            return _json_response({"success": False, "error": problem}, status=400)
        if self._setup.fleet is not None:
            for replica in self._setup.fleet.replicas:
                replica.reset_cache()
        return _json_response({"success": True})

    def _flush_cache(self) -> HttpResponse:
        """Empty the prefix cache as SGLang does, which refuses it while requests are in flight."""
        fleet = self._setup.fleet
        is_busy = fleet is not None and (fleet.active_count or fleet.queued_count)
        if is_busy and self._options.cores == 1:
            return HttpResponse(400, _CACHE_IN_USE_TEXT)
        return self._reset_cache()

    def _report_energy(self) -> HttpResponse:
        """Return the energy used since the start, computed from the constant power `--watts`."""
        if not self._options.watts:
            return _json_response({"error": "Energy monitoring is not available"}, status=503)
        uptime_s = (time.monotonic_ns() - self._start_ns) / 1e9
        joules = self._options.watts * uptime_s
        return _json_response(
            {"total_energy_j": round(joules, 4), "query_time": time.perf_counter()}
        )

    def _take_iteration_stats(self) -> HttpResponse:
        """Return the page with the statistics of the iterations since it was last read.

        Only an engine that simulates replicas (`fleet`) has iterations. With the other engine,
        which draws its latencies, the page has the current totals instead.
        """
        fleet = self._setup.fleet
        if fleet is None:
            return _json_response(self._take_totals())

        rows = [build_iteration_stats(iteration, fleet) for iteration in fleet.iterations]
        fleet.iterations.clear()
        return _json_response(rows)

    def _take_totals(self) -> list[dict[str, Any]]:
        """Return one row with the totals, or none if no event was sent since the last call."""
        counters = self._counters
        has_new_events = counters.events > self._events_at_last_read
        self._events_at_last_read = counters.events
        if not has_new_events:
            return []

        engine = self._setup.engine
        row = build_stats_without_engine(
            counters.events, engine.active_count, engine.queued_count, counters.completed
        )
        return [row]

    def _list_models(self) -> HttpResponse:
        """Return the list of served models, which has one entry.

        The owner is the one that trtllm-serve reports, so that a client recognizes the kind of
        server.
        """
        rules = self._setup.rules
        model = {
            "id": rules.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "tensorrt_llm" if rules.flavor == "trtllm" else "loadgen-sim",
            "max_model_len": rules.max_seq_len,
        }
        return _json_response({"object": "list", "data": [model]})

    def _report_prometheus_metrics(self) -> HttpResponse:
        setup = self._setup
        text = self._metrics.prometheus_text(
            setup.engine, setup.rules.model, setup.weight_precision, setup.kv_cache_precision
        )
        return HttpResponse(200, text.encode(), PROMETHEUS_TEXT)

    def _report_stats(self) -> HttpResponse:
        """Return counters since the start, for tests and benchmarks of a client.

        No real server has this page. `cpu_s` is the CPU time of the whole process.
        """
        counters = self._counters
        engine = self._setup.engine
        stats = {
            "requests": counters.requests,
            "completed": counters.completed,
            "events": counters.events,
            "active": engine.active_count,
            "queued": engine.queued_count,
            "connections": counters.open_connections,
            "slow_readers": counters.slow_readers,
            "profiling": counters.is_profiling,
            "profiles": counters.profiles,
            "cpu_s": time.process_time(),
        }

        return _json_response(stats)


def _json_response(value: object, status: int = 200) -> HttpResponse:
    return HttpResponse(status, msgspec.json.encode(value))


def _has_timing_in_response(version: str) -> bool:
    """Return whether this version of TensorRT-LLM reports timings in responses, since release 1.3.

    Raises UserError if the version is not valid.
    """
    return _parse_release(version) >= _FIRST_RELEASE_WITH_TIMING_IN_RESPONSE


def _parse_release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (1, 3) for 1.3.0rc2. Raises UserError."""
    numbers = version.split(".")[:2]
    if len(numbers) < 2 or not all(number.isdecimal() for number in numbers):
        problem = f'"{version}" must be a version'
        hint = "for example 1.3.0"
        raise UserError("invalid_value", problem, "--trtllm-version", hint)
    return tuple(int(number) for number in numbers)
