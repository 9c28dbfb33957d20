"""`--harness loadgen`: the official LoadGen issues the queries, our client carries them, its own log files come out.

IO. LoadGen's threads call us with sample numbers; a loop in a thread of its own sends and, on the first token and at
the end, tells LoadGen. Its stamps are taken when Python tells it, ours by the kernel: both are printed, and the
difference between them.
"""

from __future__ import annotations

import asyncio
import platform
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen import seeds
from loadgen.errors import UserError
from loadgen.interop.loadgen_log import LoadGenLog, read_log
from loadgen.mlperf import result as mlperf
from loadgen.mlperf import rules, run
from loadgen.requests import build as build_prompts
from loadgen.requests import prompts
from loadgen.requests import tokenizer as tokens
from loadgen.stats.loadgen_spread import PERCENTILES

if TYPE_CHECKING:
    from loadgen_sdk.probe.probe import ProbeResult
    from loadgen_sdk.request import Completion

    from loadgen.execution.plan import Settings
    from loadgen.mlperf.result import MlperfResult
    from loadgen.mlperf.rules import Test
    from loadgen.mlperf.run import Data

BUILD_AHEAD = 200_000  # bodies: some 20 s and 300 MB
OWN = "own"  # folder of the log files by our stamps, beside the official ones
INSTALL = "pip install 'loadgen[mlperf]' (there is a wheel for Linux on x86-64)"


def official() -> Any:
    """The module. Raises UserError where it is not installed, or cannot be."""
    try:
        import mlperf_loadgen
    except ImportError:
        machine = f"{platform.system()} on {platform.machine()}"
        what = f"the official LoadGen is not installed here ({machine})"
        raise UserError(what, "--harness loadgen", f"{INSTALL}; --harness own needs nothing") from None
    return mlperf_loadgen


def test_settings(asked: Test, qps: float) -> Any:
    """The test in LoadGen's own terms."""
    lg = official()
    wanted = lg.TestSettings()
    wanted.mode = lg.TestMode.PerformanceOnly
    wanted.min_duration_ms = asked.min_duration_ns // 1_000_000
    wanted.min_query_count = asked.min_queries
    wanted.qsl_rng_seed, wanted.sample_index_rng_seed = asked.seeds.qsl, asked.seeds.sample_index
    wanted.schedule_rng_seed = asked.seeds.schedule
    wanted.performance_sample_count_override = asked.samples
    wanted.sample_concatenate_permutation = wanted.use_token_latencies = True
    if asked.scenario == "offline":
        wanted.scenario, wanted.offline_expected_qps = lg.TestScenario.Offline, qps
    else:
        wanted.scenario, wanted.server_target_qps = lg.TestScenario.Server, qps
        wanted.server_target_latency_percentile = asked.percentile
        wanted.ttft_latency, wanted.tpot_latency = asked.ttft_ns, asked.tpot_ns
    return wanted


class Carrier:
    """Queries in, LoadGen's two callbacks out; everything but `issue` runs in the loop's thread."""

    def __init__(self, lg: Any, asked: Test, requests: prompts.Prompts, lanes: int | None) -> None:
        self._lg, self._requests, self._samples = lg, requests, asked.samples
        order = _order(asked)
        self._place = {sample: place for place, sample in enumerate(order)}
        self._passes = [0] * asked.samples
        self._lanes, self._flying = lanes, 0
        self._waiting: deque[tuple[int, int]] = deque()
        self._bodies: dict[int, bytes] = {}
        self.issued_ns: list[int] = []
        self.done: list[Completion | None] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        self.client: Any = None

    def build(self, count: int) -> None:
        """Bodies of the first so many queries, ahead of their sends."""
        for number in range(min(count, BUILD_AHEAD)):
            self._bodies[number] = self.client.prepare(self._requests[number])

    def issue(self, queries: Any) -> None:
        """LoadGen's thread: hand the queries over. Nothing slow may happen here."""
        now = monotonic_ns()
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self._take, [(query.id, query.index) for query in queries], now)

    def _take(self, queries: list[tuple[int, int]], issued_ns: int) -> None:
        for query, sample in queries:
            number = self._passes[sample] * self._samples + self._place[sample]
            self._passes[sample] += 1
            self.issued_ns.append(issued_ns)
            self.done.append(None)
            self._waiting.append((query, number))
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting and (self._lanes is None or self._flying < self._lanes):
            query, number = self._waiting.popleft()
            self._flying += 1
            self._send(query, number, len(self.done) - len(self._waiting) - 1)

    def _send(self, query: int, number: int, slot: int) -> None:
        from loadgen_sdk.dialects.reader import Flow

        lg = self._lg
        body = self._bodies.pop(number, None) or self.client.prepare(self._requests[number])
        told = False

        def first(*_: Any) -> None:
            nonlocal told
            if not told:
                told = True
                lg.FirstTokenComplete([lg.QuerySampleResponse(query, 0, 0)])

        def finished(done: Completion) -> None:
            first()
            self.done[slot] = done
            counted = done.usage.output if done.usage.output is not None else done.output_events
            lg.QuerySamplesComplete([lg.QuerySampleResponse(query, 0, 0, 0 if done.failure else counted)])
            self._flying -= 1
            self._send_waiting()

        self.client.send(None, body, monotonic_ns(), finished, Flow(), name=f"mlperf-{slot}", sink=first)


def _order(asked: Test) -> list[int]:
    from loadgen.mlperf import dataset

    return dataset.issue_order(asked)


def perform(
    asked: Test, data: Data, settings: Settings, *, qps: float, lanes: int | None = None
) -> tuple[MlperfResult, int | None]:
    """Run the official LoadGen against the target; its logs in the folder, ours in `own/`. The result is by our stamps,
    with LoadGen's beside it in the notes. Raises Fault for whatever stands in the way.
    """
    lg = official()
    if settings.url is not None and settings.url.startswith("sim:"):
        what = "the official LoadGen waits in real time; virtual time is not its own"
        raise UserError(what, "--harness loadgen", "loadgen sim --preset NAME, and its URL; or --harness own")
    assert settings.out is not None
    simulation = None
    simulated = settings.url is None
    if simulated:
        from loadgen.sim.server import embedded
        from loadgen.sim.server.options import Options

        simulation = embedded.start(Options(**settings.embedded))
        settings = replace(settings, url=simulation.url)
    try:
        return _perform(lg, asked, data, settings, qps, lanes, simulated)
    finally:
        if simulation is not None:
            simulation.stop()


def _perform(
    lg: Any, asked: Test, data: Data, settings: Settings, qps: float, lanes: int | None, simulated: bool
) -> tuple[MlperfResult, int | None]:
    from loadgen.execution.probing import find

    folder = settings.out
    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    loop = asyncio.new_event_loop()
    found = loop.run_until_complete(find(settings))
    tokenizer = tokens.load_tokenizer(settings.tokenizer)
    workload = run.workload(asked, data, qps=qps, lanes=lanes)
    requests = build_prompts.build(workload, seeds.fresh(), seeds.fresh(), tokenizer, found.template_tokens or 0)
    offline = asked.scenario == "offline"
    carrier = Carrier(lg, asked, requests, (lanes or run.LANES) if offline else None)
    opened = threading.Event()
    trouble: list[BaseException] = []
    planned = None if offline else rules.schedule(asked, qps).offsets

    async def serve() -> None:
        from loadgen_sdk.transport.pool import Pool

        client = Pool(
            found.target,
            model=found.model,
            quirk=found.quirk,
            stream=settings.stream,
            api_key=settings.api_key,
            headers=settings.headers,
            extra_body=settings.extra_body,
            timeout_ns=run.WAIT_NS,
            stall_timeout_ns=run.STALL_NS,
            tls=settings.tls,
            sources=settings.sources,
            keep_text=False,
            ahead=True,
        )
        carrier.client, carrier.loop = client, asyncio.get_running_loop()
        try:
            await client.open(32)
            carrier.build(rules.offline_samples(asked, qps) if planned is None else len(planned))
        except BaseException as error:
            trouble.append(error)
        finally:
            opened.set()
        await closing.wait()
        client.close()

    closing = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="harness", daemon=True)
    thread.start()
    opened.wait()
    try:
        if trouble:
            raise trouble[0]
        sut = lg.ConstructSUT(carrier.issue, lambda: None)
        qsl = lg.ConstructQSL(asked.samples, asked.samples, lambda _: None, lambda _: None)
        logs, output = lg.LogSettings(), lg.LogOutputSettings()
        output.outdir = str(folder)
        logs.log_output = output
        lg.StartTestWithLogSettings(sut, qsl, test_settings(asked, qps), logs)
        lg.DestroyQSL(qsl)
        lg.DestroySUT(sut)
    finally:
        loop.call_soon_threadsafe(closing.set)
        thread.join(30)
        loop.close()
    return _result(asked, data, settings, qps, folder, found, carrier, planned, simulated), settings.gpus


def _result(
    asked: Test,
    data: Data,
    settings: Settings,
    qps: float,
    folder: Path,
    found: ProbeResult,
    carrier: Carrier,
    planned: Any,
    simulated: bool,
) -> MlperfResult:
    """Ours by the kernel's stamps, and what LoadGen says, in notes."""
    from loadgen.execution.plan import version

    log = read_log(folder)
    trace, late_ns = _trace(carrier, planned)
    notes = [f"served by {found.target.redacted} ({found.model}); queries issued by the official LoadGen"]
    notes += run.cautions(asked)
    notes += _beside(log, mlperf.reduce(trace, asked))
    notes.append(f"LoadGen handed a query over {late_ns / 1e6:.3f} ms after its planned instant (p99)")
    name = f"{data.name}; queries by the official LoadGen"
    result = mlperf.reduce(trace, asked, dataset=name, target_qps=qps, notes=notes, simulated=simulated)
    own = folder / OWN
    own.mkdir(exist_ok=True)
    run.write(own, result, asked, sut=found.target.redacted, version=version())
    (folder / run.RESULT).write_bytes((own / run.RESULT).read_bytes())
    return result


def _trace(carrier: Carrier, planned: Any) -> tuple[mlperf.QueryTrace, int]:
    """By our stamps, from LoadGen's planned instants: its start is the earliest that fits all its issues. And by how
    much it issued late, p99.
    """
    issued = np.array(carrier.issued_ns, np.int64)
    n = len(issued)
    due = np.zeros(n, np.int64) if planned is None else planned[:n]
    start = int((issued - due).min()) if n else 0
    late = issued - due - start
    done = carrier.done
    ok = np.array([one is not None and one.failure is None for one in done], bool)

    def column(value: Any, other: int) -> Any:
        return np.array([other if one is None else value(one) for one in done], np.int64)

    end, first = column(lambda one: one.end, -1), column(lambda one: one.first_token, -1)
    counts = column(lambda one: one.usage.output if one.usage.output is not None else one.output_events, 0)
    latency = np.where(ok & (end >= 0), end - start - due, mlperf.UNRESOLVED)
    ttft = np.where(ok & (first >= 0), first - start - due, np.where(ok, latency, mlperf.UNRESOLVED))
    trace = mlperf.QueryTrace(due, ttft, latency, np.where(ok, np.maximum(counts, 0), 0))
    return trace, int(np.quantile(late, 0.99)) if n else 0


def _beside(log: LoadGenLog, ours: MlperfResult) -> list[str]:
    """LoadGen's own figures next to ours, and the difference: what Python took to tell it."""
    notes = [f"LoadGen's own result: {'VALID' if log.valid else 'INVALID'}"]
    notes += [f"LoadGen: {reason}" for reason in log.reasons]
    for name, theirs, own in (("TTFT", log.ttft, ours.ttft), ("TPOT", log.tpot, ours.tpot)):
        if theirs is None or own is None:
            continue
        place = PERCENTILES.index(0.99)
        left, right = theirs.percentiles[place], own.percentiles[place]
        if left is not None and right is not None:
            notes.append(
                f"{name} p99: {left / 1e6:.3f} ms by LoadGen's stamps, {right / 1e6:.3f} ms by ours: "
                f"{(left - right) / 1e6:+.3f} ms"
            )
    if log.tokens_per_s is not None and ours.completed_tokens_per_s is not None:
        both = f"{log.tokens_per_s:,.2f} by LoadGen's stamps, {ours.completed_tokens_per_s:,.2f} by ours"
        notes.append(f"completed tokens/s: {both}")
    return notes
