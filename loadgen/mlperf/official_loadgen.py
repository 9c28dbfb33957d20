"""`--harness loadgen`: the official LoadGen issues the queries, our client sends them, LoadGen writes its log files.

IO. LoadGen's threads call us with sample numbers. An event loop in a thread of its own sends the requests and reports
the first token and the completion to LoadGen. LoadGen stamps the moment of the report, we use kernel stamps; the result
prints both and their difference.
"""

from __future__ import annotations

import asyncio
import platform
import threading
from collections import deque
from collections.abc import Coroutine
from datetime import UTC, datetime
from time import monotonic_ns
from typing import Any

import numpy as np
from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.request import Completion
from loadgen_sdk.wire_formats.usage import without_doubtful_counts

from loadgen.core import seeds
from loadgen.core.errors import UserError
from loadgen.core.execution.backend import serving
from loadgen.core.execution.host_facts import loadgen_version
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.probing import client_options, planned_output_lengths, probe_url
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.prompts import Prompts, PromptTarget
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.results import checksums
from loadgen.core.workload import FromFile
from loadgen.mlperf import dataset, rules, run
from loadgen.mlperf import result as mlperf
from loadgen.mlperf.loadgen_log import LoadGenLog, read_log
from loadgen.mlperf.loadgen_spread import PERCENTILES
from loadgen.mlperf.result import MlperfResult
from loadgen.mlperf.rules import Test
from loadgen.mlperf.run import Data

BUILD_AHEAD = 200_000  # request bodies built before the start: about 20 s and 300 MB
OWN = "own"  # subfolder for the log files by our stamps
INSTALL = "pip install 'loadgen[mlperf]' (there is a wheel for Linux on x86-64)"


def official() -> Any:
    """The module `mlperf_loadgen`. Raises UserError where it is not installed."""
    try:
        import mlperf_loadgen
    except ImportError:
        machine = f"{platform.system()} on {platform.machine()}"
        what = f"the official LoadGen is not installed here ({machine})"
        hint = f"{INSTALL}; --harness own needs nothing"
        raise UserError(
            "not_installed", what, "--harness loadgen", hint, key="mlperf_loadgen"
        ) from None
    return mlperf_loadgen


def test_settings(test: Test, qps: float) -> Any:
    """The test as LoadGen's `TestSettings`, at `qps` queries per second."""
    lg = official()
    lg_settings = lg.TestSettings()
    lg_settings.mode = lg.TestMode.PerformanceOnly
    lg_settings.min_duration_ms = test.min_duration_ns // 1_000_000
    lg_settings.min_query_count = test.min_queries
    lg_settings.qsl_rng_seed, lg_settings.sample_index_rng_seed = (
        test.seeds.qsl,
        test.seeds.sample_index,
    )
    lg_settings.schedule_rng_seed = test.seeds.schedule
    lg_settings.performance_sample_count_override = test.samples
    lg_settings.sample_concatenate_permutation = lg_settings.use_token_latencies = True
    if test.scenario == "offline":
        lg_settings.scenario, lg_settings.offline_expected_qps = lg.TestScenario.Offline, qps
    else:
        lg_settings.scenario, lg_settings.server_target_qps = lg.TestScenario.Server, qps
        lg_settings.server_target_latency_percentile = test.percentile
        lg_settings.server_target_latency_ns = (
            0  # as mlperf.conf: these benchmarks limit TTFT and TPOT, not the whole
        )
        lg_settings.ttft_latency, lg_settings.tpot_latency = test.ttft_ns, test.tpot_ns
    return lg_settings


class Carrier:
    """Sends LoadGen's queries and calls its two callbacks. All but `issue` runs in the thread of the event loop."""

    def __init__(
        self,
        lg: Any,
        test: Test,
        requests: Prompts,
        lanes: int | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._lg, self._requests, self._samples, self._loop = lg, requests, test.samples, loop
        self._place_in_pass = {
            sample: place for place, sample in enumerate(dataset.issue_order(test))
        }
        self._pass_of_sample = [0] * test.samples
        self._lanes, self._in_flight = lanes, 0
        self._waiting: deque[tuple[int, int]] = deque()
        self._bodies: dict[int, bytes] = {}
        self.issued_ns: list[int] = []
        self.done: list[Completion | None] = []
        self.client: Any = None

    async def open(self, settings: Settings, probed: ProbeResult, queries: int) -> None:
        """Open connections, and build the bodies of the first `queries` (at most BUILD_AHEAD) before they are sent."""
        from loadgen_sdk.transport.pool import Pool

        self.client = Pool(
            probed.target,
            **client_options(settings, probed),
            timeout_ns=run.WAIT_NS,
            stall_timeout_ns=run.STALL_NS,
            sources=settings.sources,
            keep_text=False,
            open_ahead=True,
        )
        await self.client.open(32)
        for number in range(min(queries, BUILD_AHEAD)):
            self._bodies[number] = self.client.prepare(self._requests[number])

    def issue(self, queries: Any) -> None:
        """Pass queries to the event loop. Runs in LoadGen's thread, so it must be quick."""
        now = monotonic_ns()
        self._loop.call_soon_threadsafe(
            self._take, [(query.id, query.index) for query in queries], now
        )

    def _take(self, queries: list[tuple[int, int]], issued_ns: int) -> None:
        for query, sample in queries:
            number = self._pass_of_sample[sample] * self._samples + self._place_in_pass[sample]
            self._pass_of_sample[sample] += 1
            self.issued_ns.append(issued_ns)
            self.done.append(None)
            self._waiting.append((query, number))
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting and (self._lanes is None or self._in_flight < self._lanes):
            query, number = self._waiting.popleft()
            self._in_flight += 1
            self._send(query, number, len(self.done) - len(self._waiting) - 1)

    def _send(self, query: int, number: int, slot: int) -> None:
        from loadgen_sdk.wire_formats.event_timeline import EventTimeline

        lg = self._lg
        body = self._bodies.pop(number, None) or self.client.prepare(self._requests[number])
        first_token_reported = False

        def report_first_token(*_: Any) -> None:
            nonlocal first_token_reported
            if not first_token_reported:
                first_token_reported = True
                lg.FirstTokenComplete([lg.QuerySampleResponse(query, 0, 0)])

        def report_completion(completion: Completion) -> None:
            report_first_token()
            self.done[slot] = completion
            tokens = 0 if completion.failure else _output_tokens(completion)
            lg.QuerySamplesComplete([lg.QuerySampleResponse(query, 0, 0, tokens)])
            self._in_flight -= 1
            self._send_waiting()

        self.client.send(
            None,
            body,
            monotonic_ns(),
            report_completion,
            EventTimeline(),
            name=f"mlperf-{slot}",
            sink=report_first_token,
        )


def _output_tokens(completion: Completion) -> int:
    """Return the output tokens by the server's count or, without one, the events of the stream."""
    counted = without_doubtful_counts(completion.usage).output
    return completion.output_events if counted is None else counted


def perform(
    test: Test, data: Data, settings: Settings, *, qps: float, lanes: int | None = None
) -> tuple[MlperfResult, int | None]:
    """Run the official LoadGen against the target. Returns the result, and the GPUs of the settings.

    LoadGen's logs go into the folder of `settings`, ours into `own/`. The result uses our stamps; its notes give
    LoadGen's figures. Raises Fault for whatever prevents the run.
    """
    lg = official()
    if settings.virtual:
        what = "the official LoadGen waits in real time; virtual time is not its own"
        raise UserError(
            "unsupported",
            what,
            "--harness loadgen",
            "loadgen sim --preset NAME, and its URL; or --harness own",
        )
    assert settings.out is not None
    with serving(settings) as served:
        return _perform(lg, test, data, served, qps, lanes, simulated=settings.backend.simulated)


def _perform(
    lg: Any,
    test: Test,
    data: Data,
    settings: Settings,
    qps: float,
    lanes: int | None,
    simulated: bool,
) -> tuple[MlperfResult, int | None]:
    folder = settings.out
    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    offline = test.scenario == "offline"
    planned = None if offline else rules.schedule(test, qps).offsets_ns
    workload = run.workload(test, data, qps=qps, lanes=lanes)
    seed = workload.seed if workload.seed is not None else seeds.fresh()
    salt = seeds.salt_of(seed, workload.salt)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="harness", daemon=True)
    thread.start()

    def result_of(steps: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(steps, loop).result()

    try:
        probe_result: ProbeResult = result_of(
            probe_url(settings, workload.timeout_ns / 1e9, planned_output_lengths(workload))
        )
        tokenizer, template_tokens = (
            load_tokenizer(settings.tokenizer),
            probe_result.template_tokens or 0,
        )
        requests = build_prompts(
            workload, seed, seeds.salt_number(salt), tokenizer, PromptTarget(template_tokens)
        )
        carrier = Carrier(lg, test, requests, (lanes or run.LANES) if offline else None, loop)
        queries = rules.offline_samples(test, qps) if planned is None else len(planned)
        result_of(carrier.open(settings, probe_result, queries))
        try:
            sut = lg.ConstructSUT(carrier.issue, lambda: None)
            qsl = lg.ConstructQSL(test.samples, test.samples, lambda _: None, lambda _: None)
            logs, output = lg.LogSettings(), lg.LogOutputSettings()
            output.outdir = str(folder)
            logs.log_output = output
            lg.StartTestWithLogSettings(sut, qsl, test_settings(test, qps), logs)
            lg.DestroyQSL(qsl)
            lg.DestroySUT(sut)
        finally:
            loop.call_soon_threadsafe(carrier.client.close)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
    trace, late_ns = _trace(carrier, planned)
    shown = probe_result.target.redacted
    drawn = (
        []
        if isinstance(data.requests, FromFile)
        else [f"prompts: {seeds.reproduction_options(seed, salt)}"]
    )
    warnings = [*run.cautions(test), *_uncounted(carrier)]
    log = read_log(folder)
    notes = [
        f"served by {shown} ({probe_result.model}); queries issued by the official LoadGen",
        *drawn,
        *warnings,
        *_loadgen_notes(log, mlperf.reduce(trace, test)),
        f"LoadGen handed a query over {late_ns / 1e6:.3f} ms after its planned instant (p99)",
    ]
    name = f"{data.name}; queries by the official LoadGen"
    result = mlperf.reduce(
        trace,
        test,
        dataset=name,
        target_qps=qps,
        notes=notes,
        warnings=warnings,
        simulated=simulated or probe_result.simulated,
    )
    own_folder = folder / OWN
    own_folder.mkdir(exist_ok=True)
    started = datetime.strptime(log.detail["test_datetime"], "%Y-%m-%dT%H:%M:%SZ").replace(
        tzinfo=UTC
    )
    run.write_queries(own_folder, trace, shown, loadgen_version(), started)
    run.write(own_folder, result, test, sut=shown, version=loadgen_version(), started=started)
    (folder / run.RESULT).write_bytes((own_folder / run.RESULT).read_bytes())
    checksums.write(folder)
    return result, settings.gpus


def _trace(carrier: Carrier, planned: Any) -> tuple[mlperf.QueryTrace, int]:
    """The trace by our stamps, relative to LoadGen's planned instants; and LoadGen's p99 lateness of issue in ns.

    LoadGen does not tell its start: it is taken as the latest one with which no query is issued before it is due.
    """
    issued = np.array(carrier.issued_ns, np.int64)
    n = len(issued)
    due = np.zeros(n, np.int64) if planned is None else planned[:n]
    start = int((issued - due).min()) if n else 0
    lateness_ns = issued - due - start
    done = carrier.done
    ok = np.array(
        [completion is not None and completion.failure is None for completion in done], bool
    )

    def column(value: Any, missing: int) -> Any:
        return np.array(
            [missing if completion is None else value(completion) for completion in done], np.int64
        )

    end, first = (
        column(lambda completion: completion.end, -1),
        column(lambda completion: completion.first_token, -1),
    )
    counts = column(_output_tokens, 0)
    latency = np.where(ok & (end >= 0), end - start - due, mlperf.UNRESOLVED)
    ttft = np.where(
        ok & (first >= 0), first - start - due, np.where(ok, latency, mlperf.UNRESOLVED)
    )
    trace = mlperf.QueryTrace(due, ttft, latency, np.where(ok, np.maximum(counts, 0), 0))
    return trace, int(np.quantile(lateness_ns, 0.99)) if n else 0


def _uncounted(carrier: Carrier) -> list[str]:
    """A warning where answers came without usage: their tokens are the events of the stream."""
    answers = [
        completion
        for completion in carrier.done
        if completion is not None and completion.failure is None
    ]
    events = sum(completion.usage.output is None for completion in answers)
    return run.uncounted({"events": events}, len(answers))


def _loadgen_notes(log: LoadGenLog, ours: MlperfResult) -> list[str]:
    """Notes with LoadGen's own figures beside ours. The difference is the time Python takes to report to LoadGen."""
    notes = [f"LoadGen's own result: {'VALID' if log.valid else 'INVALID'}"]
    notes += [f"LoadGen: {reason}" for reason in log.reasons]
    for name, their_spread, our_spread in (
        ("TTFT", log.ttft, ours.ttft),
        ("TPOT", log.tpot, ours.tpot),
    ):
        if their_spread is None or our_spread is None:
            continue
        p99_index = PERCENTILES.index(0.99)
        their_p99, our_p99 = their_spread.percentiles[p99_index], our_spread.percentiles[p99_index]
        if their_p99 is not None and our_p99 is not None:
            notes.append(
                f"{name} p99: {their_p99 / 1e6:.3f} ms by LoadGen's stamps, {our_p99 / 1e6:.3f} ms by ours: "
                f"{(their_p99 - our_p99) / 1e6:+.3f} ms"
            )
    if log.tokens_per_s is not None and ours.completed_tokens_per_s is not None:
        both_rates = f"{log.tokens_per_s:,.2f} by LoadGen's stamps, {ours.completed_tokens_per_s:,.2f} by ours"
        notes.append(f"completed tokens/s: {both_rates}")
    return notes
