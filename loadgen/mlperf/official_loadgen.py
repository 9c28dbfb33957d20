"""`--harness loadgen`: the official LoadGen issues the queries and this load generator sends them.

LoadGen's threads call `QuerySender.issue` with sample numbers. An event loop in its own thread
sends the requests and reports first tokens and completions to LoadGen, which writes its log files.
LoadGen takes the time of the report, and this load generator that of the kernel; the result has
both and their difference.
"""

from __future__ import annotations

import asyncio
import platform
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple, TypeVar

import numpy as np
from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.request import NEVER, Completion
from loadgen_sdk.transport.pool import Pool
from loadgen_sdk.wire_formats.event_timeline import EventTimeline
from loadgen_sdk.wire_formats.usage import without_doubtful_counts
from numpy.typing import NDArray

from loadgen.core import seeds
from loadgen.core.errors import UserError
from loadgen.core.execution.backend import running_server
from loadgen.core.execution.host_facts import loadgen_version
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.probing import client_options, planned_output_lengths, probe_url
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.prompts import Prompts, PromptTarget
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.results import checksums
from loadgen.core.workload import FromFile, Workload
from loadgen.mlperf import dataset, rules, run
from loadgen.mlperf.loadgen_log import LoadGenLog, read_log
from loadgen.mlperf.loadgen_spread import PERCENTILES, LoadGenSpread
from loadgen.mlperf.log_files import LogContext
from loadgen.mlperf.result import UNRESOLVED, MlperfResult, MlperfRunFacts, QueryTrace, judge_trace
from loadgen.mlperf.rules import Test
from loadgen.mlperf.run import DatasetRequests

T = TypeVar("T")

MAX_PREPARED_REQUESTS = 200_000
"""Request bodies that are built before the start, which takes about 20 s and 300 MB."""

OPEN_CONNECTIONS = 32
"""Connections that are opened before the start."""

OWN_DIR = "own"
"""The subdirectory of the log files with the timestamps of this load generator."""

THREAD_STOP_TIMEOUT_S = 30

INSTALL_HINT = "pip install 'loadgen[mlperf]' (there is a wheel for Linux on x86-64)"

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

LoadGenModule = Any
"""The module `mlperf_loadgen`, which has no type annotations."""


def import_loadgen() -> LoadGenModule:
    """Return the module `mlperf_loadgen`, which is an optional dependency.

    Raises UserError with how to install it if it is missing.
    """
    try:
        import mlperf_loadgen
    except ImportError:
        machine = f"{platform.system()} on {platform.machine()}"
        raise UserError(
            "not_installed",
            f"MLPerf LoadGen (package mlperf_loadgen) is not installed here ({machine})",
            "--harness loadgen",
            f"{INSTALL_HINT}; --harness own works without it",
            key="mlperf_loadgen",
        ) from None
    return mlperf_loadgen


def create_test_settings(test: Test, qps: float) -> object:
    """Return LoadGen's `TestSettings` for a test at a rate in queries/s, in Offline in samples/s.

    The values are those that the rules require. LoadGen's own configuration files are not read.
    """
    loadgen = import_loadgen()
    settings = loadgen.TestSettings()
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.min_duration_ms = test.min_duration_ns // NS_PER_MS
    settings.min_query_count = test.min_queries
    settings.qsl_rng_seed = test.seeds.qsl
    settings.sample_index_rng_seed = test.seeds.sample_index
    settings.schedule_rng_seed = test.seeds.schedule
    settings.performance_sample_count_override = test.samples
    settings.sample_concatenate_permutation = True

    settings.use_token_latencies = True
    if test.scenario == "offline":
        settings.scenario = loadgen.TestScenario.Offline
        settings.offline_expected_qps = qps
        return settings

    settings.scenario = loadgen.TestScenario.Server
    settings.server_target_qps = qps
    settings.server_target_latency_percentile = test.percentile

    # 0 as in mlperf.conf: these benchmarks limit TTFT and TPOT, not the whole latency.
    settings.server_target_latency_ns = 0
    settings.ttft_latency = test.ttft_ns
    settings.tpot_latency = test.tpot_ns

    return settings


# -- sending LoadGen's queries ---------------------------------------------------------------------


class _WaitingQuery(NamedTuple):
    """A query that LoadGen has issued and that has not been sent yet.

    Attributes:
        query_id: LoadGen's identifier of the query, with which its response is reported.
        request_number: Which request of the workload has the prompt of the query.
        issue_index: The position of the query in the order of issue.
    """

    query_id: int
    request_number: int
    issue_index: int


class QuerySender:
    """Sends LoadGen's queries and reports first tokens and completions to it.

    LoadGen calls `issue` in its own thread. Every other method runs in the thread of the event
    loop.

    Attributes:
        issued_ns: When each query was issued, in the order of issue.
        completions: The response to each query, in the same order; None until it has completed.
    """

    def __init__(
        self,
        loadgen: LoadGenModule,
        test: Test,
        prompts: Prompts,
        concurrency: int | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Create a sender. It has no connections until `open` is called.

        Args:
            loadgen: The module of the official LoadGen.
            test: The test that LoadGen runs.
            prompts: The requests of the workload, in the order in which LoadGen issues samples.
            concurrency: The maximum number of requests in flight, or None for no limit.
            loop: The event loop that sends the requests.
        """
        # What the caller reads after the test: see the attributes of the class.
        self.issued_ns: list[int] = []
        self.completions: list[Completion | None] = []

        self._loadgen = loadgen
        self._loop = loop
        self._prompts = prompts
        self._request_numbers = _RequestNumbers(test)
        self._concurrency = concurrency
        self._in_flight = 0
        self._waiting_queries: deque[_WaitingQuery] = deque()
        self._prepared_bodies: dict[int, bytes] = {}  # by request number
        self._pool: Pool | None = None

    async def open(self, settings: Settings, probe: ProbeResult, query_count: int) -> None:
        """Open connections, and build the bodies of the first requests before the test starts.

        Building a body takes time that would delay queries during the test.

        Args:
            settings: How requests are sent.
            probe: What the first request to the endpoint showed about it.
            query_count: The number of queries that LoadGen will issue at least.
        """
        pool = Pool(
            probe.target,
            **client_options(settings, probe),
            timeout_ns=run.MAX_WAIT_NS,
            stall_timeout_ns=run.MAX_STALL_NS,
            sources=settings.sources,
            keep_text=False,
            open_ahead=True,
        )
        await pool.open(OPEN_CONNECTIONS)

        for number in range(min(query_count, MAX_PREPARED_REQUESTS)):
            self._prepared_bodies[number] = pool.prepare(self._prompts[number])

        self._pool = pool

    def close(self) -> None:
        """Close the connections."""
        assert self._pool is not None, "open() was not called"
        self._pool.close()

    def issue(self, queries: Any) -> None:
        """Pass queries to the event loop. Runs in LoadGen's thread, so it must be quick."""
        issued_ns = monotonic_ns()
        ids_and_samples = [(query.id, query.index) for query in queries]
        self._loop.call_soon_threadsafe(self._accept_queries, ids_and_samples, issued_ns)

    def _accept_queries(self, ids_and_samples: list[tuple[int, int]], issued_ns: int) -> None:
        """Queue queries in the order of issue, and send those that the concurrency allows.

        Args:
            ids_and_samples: LoadGen's identifier of each query, and the index of its sample.
            issued_ns: When LoadGen issued the queries.
        """
        for query_id, sample in ids_and_samples:
            query = _WaitingQuery(
                query_id,
                request_number=self._request_numbers.next_number(sample),
                issue_index=len(self.completions),
            )
            self.issued_ns.append(issued_ns)
            self.completions.append(None)
            self._waiting_queries.append(query)
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Send queries in the order of issue while the concurrency allows it."""
        while self._waiting_queries and self._may_send():
            self._send(self._waiting_queries.popleft())

    def _may_send(self) -> bool:
        return self._concurrency is None or self._in_flight < self._concurrency

    def _send(self, query: _WaitingQuery) -> None:
        """Send the request of a query now, and report its first token and its end to LoadGen.

        When the response is complete, a waiting query takes its place.
        """
        assert self._pool is not None, "open() was not called"
        reporter = _QueryReporter(self._loadgen, query.query_id)

        def on_completion(completion: Completion) -> None:
            self.completions[query.issue_index] = completion
            reporter.report_completion(completion)
            self._in_flight -= 1
            self._send_waiting()

        self._in_flight += 1
        self._pool.send(
            request=None,  # a completion would refer to it, which nothing here needs
            body=self._take_body(self._pool, query.request_number),
            due=monotonic_ns(),
            on_done=on_completion,
            timeline=EventTimeline(),
            name=f"mlperf-{query.issue_index}",
            on_output=reporter.report_first_token,
        )

    def _take_body(self, pool: Pool, request_number: int) -> bytes:
        """Return the body of a request: the one that `open` built, or else a new one."""
        prepared_body = self._prepared_bodies.pop(request_number, None)
        if prepared_body is not None:
            return prepared_body
        return pool.prepare(self._prompts[request_number])


class _RequestNumbers:
    """Assigns a request of the workload to each query of LoadGen.

    The requests are in the order in which LoadGen issues the samples of a pass, one pass after the
    other. LoadGen's query only names a sample, so the number of its passes is counted here.
    """

    def __init__(self, test: Test) -> None:
        order = dataset.issue_order(test)
        self._sample_count = test.samples
        self._index_in_pass = {sample: index for index, sample in enumerate(order)}
        self._times_issued = [0] * test.samples

    def next_number(self, sample: int) -> int:
        """Return the number of the request for the next query of a sample."""
        pass_index = self._times_issued[sample]
        self._times_issued[sample] += 1
        return pass_index * self._sample_count + self._index_in_pass[sample]


class _QueryReporter:
    """Reports one query to LoadGen: its first token once, then its completion."""

    def __init__(self, loadgen: LoadGenModule, query_id: int) -> None:
        self._loadgen = loadgen
        self._query_id = query_id
        self._has_reported_first_token = False

    def report_first_token(self, *_: object) -> None:
        """Report the first token, and ignore later calls."""
        if self._has_reported_first_token:
            return
        self._has_reported_first_token = True
        self._loadgen.FirstTokenComplete([self._loadgen.QuerySampleResponse(self._query_id, 0, 0)])

    def report_completion(self, completion: Completion) -> None:
        """Report the end of a response. A failed request has no tokens."""
        self.report_first_token()
        tokens = 0 if completion.failure else _output_tokens(completion)
        response = self._loadgen.QuerySampleResponse(self._query_id, 0, 0, tokens)
        self._loadgen.QuerySamplesComplete([response])


def _output_tokens(completion: Completion) -> int:
    """Return the output tokens by the server's count or, without one, the events of the stream."""
    count = without_doubtful_counts(completion.usage).output
    return completion.output_events if count is None else count


class _LoopThread:
    """An event loop that runs in its own thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="harness", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, wait until it has ended and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def post(self, function: Callable[[], object]) -> None:
        """Let the loop call a function soon, without waiting for it."""
        self.loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """Stop the loop and wait for its thread."""
        self.post(self.loop.stop)
        self._thread.join(THREAD_STOP_TIMEOUT_S)
        self.loop.close()


@contextmanager
def _loop_thread() -> Iterator[_LoopThread]:
    thread = _LoopThread()
    try:
        yield thread
    finally:
        thread.stop()


# -- the test --------------------------------------------------------------------------------------


class _OfficialTest(NamedTuple):
    """A test that the official LoadGen runs, with its data and endpoint.

    Attributes:
        test: The requirements of the rules.
        data: The requests.
        settings: The endpoint, and how requests are sent.
        qps: The rate in queries/s, in Offline the expected rate in samples/s.
        concurrency: The most requests in flight in Offline, or None for the default.
        output_dir: The directory of LoadGen's logs and of the results.
    """

    test: Test
    data: DatasetRequests
    settings: Settings
    qps: float
    concurrency: int | None
    output_dir: Path

    @property
    def workload(self) -> Workload:
        """The load of the test."""
        return run.build_workload(self.test, self.data, qps=self.qps, concurrency=self.concurrency)

    @property
    def schedule_offsets_ns(self) -> NDArray[np.int64] | None:
        """The scheduled time of each query, from the start of the schedule.

        It is None in Offline, where LoadGen issues all samples as one query at the start.
        """
        if self.test.scenario == "offline":
            return None
        return rules.create_schedule(self.test, self.qps).offsets_ns

    @property
    def query_count(self) -> int:
        """The number of queries; in Offline, of samples."""
        offsets_ns = self.schedule_offsets_ns
        if offsets_ns is None:
            return rules.offline_samples(self.test, self.qps)
        return len(offsets_ns)

    @property
    def max_in_flight(self) -> int | None:
        """The most concurrent requests; None without a limit."""
        if self.test.scenario == "offline":
            return self.concurrency or run.OFFLINE_CONCURRENCY
        return None


class _IssuedQueries(NamedTuple):
    """The queries that LoadGen has issued, and their responses.

    Attributes:
        issued_ns: When LoadGen issued each query, on the monotonic clock, in the order of issue.
        completions: The response to each query, in the same order; None if it did not complete.
        probe: What the first request to the endpoint showed about it.
        reproduction_options: The options of the command line that create the same prompts again.
    """

    issued_ns: list[int]
    completions: list[Completion | None]
    probe: ProbeResult
    reproduction_options: str


class OfficialRun(NamedTuple):
    """What a run of the official LoadGen returns.

    Attributes:
        result: Its result by the rules of MLPerf, from the timestamps of this program.
        gpus: The number of GPUs behind the endpoint, or None if it is not known.
    """

    result: MlperfResult
    gpus: int | None


def run_official_test(
    test: Test,
    data: DatasetRequests,
    settings: Settings,
    *,
    output_dir: Path,
    qps: float,
    concurrency: int | None = None,
) -> OfficialRun:
    """Run a test with the official LoadGen as the issuer of queries, and return the result.

    LoadGen decides when each query is sent, this program sends it, and both measure its latency.
    The result follows from the timestamps of this program; its notes compare them with LoadGen's.
    LoadGen's logs are written into the output directory, and those of this program into its
    subdirectory `own`.

    Args:
        test: The requirements of the rules.
        data: The requests.
        settings: The endpoint, and how requests are sent.
        output_dir: The directory of the logs and results.
        qps: The rate in queries/s, in Offline the expected rate in samples/s.
        concurrency: The limit on requests in flight in Offline, or None for the default.

    Raises:
        LoadgenError: LoadGen is not installed, or the endpoint cannot be reached or used.
    """
    loadgen = import_loadgen()
    if settings.virtual:
        raise UserError(
            "unsupported",
            "the official LoadGen waits in real time and does not support virtual time",
            "--harness loadgen",
            "start loadgen sim --preset NAME and give its URL; or use --harness own",
        )

    output_dir.mkdir(parents=True, exist_ok=True)

    # Starts the simulated server, if the settings ask for one, and yields them with its URL.
    with running_server(settings) as server_settings:
        official = _OfficialTest(test, data, server_settings, qps, concurrency, output_dir)
        queries = _issue_queries(loadgen, official)
        simulated = settings.backend.simulated or queries.probe.simulated
        result = _write_result(official, queries, simulated=simulated)

    return OfficialRun(result, server_settings.gpus)


def _issue_queries(loadgen: LoadGenModule, official: _OfficialTest) -> _IssuedQueries:
    """Probe the endpoint, let LoadGen issue all queries, and return them with their responses.

    The probe is one request that shows what the endpoint supports. Requests are sent by an event
    loop in its own thread, because LoadGen blocks the calling thread until its test ends.
    """
    settings = official.settings
    workload = official.workload

    # Seed and salt decide the texts of the prompts.
    seed = workload.seed if workload.seed is not None else seeds.random_seed()
    salt = seeds.resolve_salt(seed, workload.salt)
    with _loop_thread() as thread:
        lengths = planned_output_lengths(workload)
        probe = thread.run(probe_url(settings, workload.timeout_ns / NS_PER_S, lengths))
        prompts = _build_test_prompts(official, probe, seed, salt)
        sender = QuerySender(loadgen, official.test, prompts, official.max_in_flight, thread.loop)
        thread.run(sender.open(settings, probe, official.query_count))

        try:
            _run_loadgen_test(loadgen, official, sender)  # returns when every query has completed
        finally:
            thread.post(sender.close)

    return _IssuedQueries(
        issued_ns=sender.issued_ns,
        completions=sender.completions,
        probe=probe,
        reproduction_options=seeds.reproduction_options(seed, salt),
    )


def _build_test_prompts(
    official: _OfficialTest, probe: ProbeResult, seed: int, salt: str
) -> Prompts:
    """Return the prompts that an ordinary run of this program sends with a seed and a salt.

    The chat template of the server adds tokens to a prompt, so that a prompt of a given length
    needs fewer tokens of text. The probe has measured how many. If their number is not known, it
    counts as 0.
    """
    target = PromptTarget(probe.template_tokens or 0)
    tokenizer = load_tokenizer(official.settings.tokenizer)
    return build_prompts(official.workload, seed, seeds.salt_number(salt), tokenizer, target)


def _run_loadgen_test(loadgen: LoadGenModule, official: _OfficialTest, sender: QuerySender) -> None:
    """Run LoadGen's test, which calls `sender.issue`, until every query has completed.

    LoadGen writes its logs into the output directory. It needs two objects: the "system under test"
    (SUT), to which it issues queries, and the "query sample library" (QSL), which has to load
    samples into memory. The requests are built elsewhere, so the library only knows its size.
    """
    total_samples = official.test.samples
    samples_in_memory = official.test.samples
    system_under_test = loadgen.ConstructSUT(sender.issue, _do_nothing)
    sample_library = loadgen.ConstructQSL(
        total_samples, samples_in_memory, _do_nothing, _do_nothing
    )
    log_output = loadgen.LogOutputSettings()
    log_output.outdir = str(official.output_dir)
    log_settings = loadgen.LogSettings()
    log_settings.log_output = log_output
    test_settings = create_test_settings(official.test, official.qps)
    loadgen.StartTestWithLogSettings(system_under_test, sample_library, test_settings, log_settings)
    loadgen.DestroyQSL(sample_library)
    loadgen.DestroySUT(system_under_test)


def _do_nothing(*_: object) -> None:
    """Ignore LoadGen's requests to load samples, unload samples and flush queries."""


def _write_result(
    official: _OfficialTest, queries: _IssuedQueries, *, simulated: bool
) -> MlperfResult:
    """Judge the queries by the timestamps of this program, write the result and return it.

    `mlperf.json` is written into the output directory. The logs of this program are written into
    its subdirectory OWN_DIR, because LoadGen's logs have the same names.

    Args:
        official: The test and its output directory, which has LoadGen's logs.
        queries: The queries that LoadGen issued, and their responses.
        simulated: Whether a performance model responded.
    """
    timing = _measure_queries(queries, official.schedule_offsets_ns)
    loadgen_log = read_log(official.output_dir)
    result = _judge_queries(official, queries, timing, loadgen_log, simulated=simulated)
    context = LogContext(
        sut=queries.probe.target.redacted,
        version=loadgen_version(),
        started=_test_start(loadgen_log),
    )
    _write_files(official, result, timing.trace, context)

    return result


def _write_files(
    official: _OfficialTest, result: MlperfResult, trace: QueryTrace, context: LogContext
) -> None:
    """Write the queries, the result and the logs of this program, and then the checksums.

    Args:
        official: The test and its output directory.
        result: The result by the timestamps of this program.
        trace: The queries with these timestamps, from which the result can be computed again.
        context: The facts about the run that the logs name.
    """
    output_dir = official.output_dir
    own_dir = output_dir / OWN_DIR
    own_dir.mkdir(exist_ok=True)
    run.write_queries(own_dir, trace, context)
    run.write_result(own_dir, result, official.test, context)
    result_bytes = (own_dir / run.RESULT).read_bytes()
    (output_dir / run.RESULT).write_bytes(result_bytes)
    checksums.write(output_dir)  # last, because it covers all other files


def _test_start(log: LoadGenLog) -> datetime:
    """Return when LoadGen started its test, for example from "2025-06-01T12:00:00Z"."""
    start = datetime.strptime(log.detail["test_datetime"], "%Y-%m-%dT%H:%M:%SZ")
    return start.replace(tzinfo=UTC)


def _judge_queries(
    official: _OfficialTest,
    queries: _IssuedQueries,
    timing: _QueryTiming,
    log: LoadGenLog,
    *,
    simulated: bool,
) -> MlperfResult:
    """Return the result of the queries by the rules of MLPerf, with warnings and notes.

    Args:
        official: The test.
        queries: The queries that LoadGen issued, and their responses.
        timing: The latencies that this program has measured. They are compared with the limits.
        log: LoadGen's log, whose metrics the notes compare with those of this program.
        simulated: Whether a performance model responded.
    """
    test = official.test
    warnings = [*run.deviation_warnings(test), *_token_count_warnings(queries.completions)]

    # The notes repeat the warnings, because reports show the notes in full.
    facts = MlperfRunFacts(
        dataset=f"{official.data.name}; queries by the official LoadGen",
        target_qps=official.qps,
        notes=_result_notes(official, queries, timing, log, warnings),
        warnings=warnings,
        simulated=simulated,
    )
    return judge_trace(timing.trace, test, facts)


class _QueryTiming(NamedTuple):
    """The times of the queries, and how late LoadGen issued them.

    Attributes:
        trace: The queries by the timestamps of this program.
        p99_lateness_ns: How long after their scheduled time queries were issued, at p99.
    """

    trace: QueryTrace
    p99_lateness_ns: int


def _result_notes(
    official: _OfficialTest,
    queries: _IssuedQueries,
    timing: _QueryTiming,
    log: LoadGenLog,
    warnings: Sequence[str],
) -> list[str]:
    """Return the notes of a result: the endpoint, the prompts, warnings, and LoadGen's metrics."""
    target = queries.probe.target.redacted
    notes = [f"served by {target} ({queries.probe.model}); MLPerf LoadGen issued the queries"]

    has_generated_prompts = not isinstance(official.data.requests, FromFile)
    if has_generated_prompts:
        notes.append(f"prompts: {queries.reproduction_options}")

    notes += warnings
    notes += _loadgen_notes(log, judge_trace(timing.trace, official.test))
    notes.append(
        "LoadGen issued queries "
        f"{timing.p99_lateness_ns / NS_PER_MS:.3f} ms after their scheduled time (p99)"
    )

    return notes


def _measure_queries(
    queries: _IssuedQueries, schedule_offsets_ns: NDArray[np.int64] | None
) -> _QueryTiming:
    """Return the latencies of the queries, and how late LoadGen issued them.

    By MLPerf's rules, a latency counts from the time at which a query was scheduled, not from when
    it was issued. LoadGen does not report when its schedule started, so that is estimated from the
    times at which it issued the queries.

    Args:
        queries: The queries and their responses.
        schedule_offsets_ns: The scheduled time of each query from the start of the schedule. None
            in Offline, where all queries are scheduled at the start.
    """
    issued_ns = np.array(queries.issued_ns, np.int64)
    query_count = len(issued_ns)
    if schedule_offsets_ns is None:
        offsets_ns = np.zeros(query_count, np.int64)
    else:
        offsets_ns = schedule_offsets_ns[:query_count]

    schedule_start_ns = _estimate_schedule_start_ns(issued_ns, offsets_ns)
    scheduled_ns = schedule_start_ns + offsets_ns
    lateness_ns = issued_ns - scheduled_ns
    p99_lateness_ns = int(np.quantile(lateness_ns, 0.99)) if query_count else 0
    trace = _build_trace(queries.completions, scheduled_ns, offsets_ns)

    return _QueryTiming(trace, p99_lateness_ns)


def _estimate_schedule_start_ns(issued_ns: NDArray[np.int64], offsets_ns: NDArray[np.int64]) -> int:
    """Return when LoadGen's schedule started on the monotonic clock, which it does not report.

    LoadGen never issues a query early, but often a little late. So the time of issue minus the
    offset in the schedule is the start plus the lateness of the query. The smallest of these
    values, that of the most punctual query, is nearest to the start. For example, queries with
    offsets 0 and 10 that were issued at 103 and 111 give min(103, 101) = 101.
    """
    if len(issued_ns) == 0:
        return 0
    return int((issued_ns - offsets_ns).min())


def _build_trace(
    completions: Sequence[Completion | None],
    scheduled_ns: NDArray[np.int64],
    offsets_ns: NDArray[np.int64],
) -> QueryTrace:
    """Return the latencies and tokens of the responses to the queries.

    Args:
        completions: The response to each query.
        scheduled_ns: The scheduled time of each query on the monotonic clock.
        offsets_ns: The same time from the start of the schedule.
    """
    responses = [_ResponseTimes.of_completion(completion) for completion in completions]
    end_ns = np.array([response.end_ns for response in responses], np.int64)
    first_token_ns = np.array([response.first_token_ns for response in responses], np.int64)
    tokens = np.array([response.tokens for response in responses], np.int64)

    # A query that did not complete gets the latency UNRESOLVED, which is above every limit.
    is_completed = end_ns != NEVER
    latency_ns = np.where(is_completed, end_ns - scheduled_ns, UNRESOLVED)

    # If the time of the first token is not known, the latency of the whole response stands for it.
    has_first_token = first_token_ns != NEVER
    ttft_ns = np.where(has_first_token, first_token_ns - scheduled_ns, latency_ns)
    return QueryTrace(due_ns=offsets_ns, ttft_ns=ttft_ns, latency_ns=latency_ns, tokens=tokens)


class _ResponseTimes(NamedTuple):
    """When a response came, on the monotonic clock, and its number of output tokens.

    Both times are NEVER for a query that failed or did not complete. Only the first one is if the
    client did not see the first token.
    """

    first_token_ns: int
    end_ns: int
    tokens: int

    @classmethod
    def of_completion(cls, completion: Completion | None) -> _ResponseTimes:
        """Return the times of a completion, or those of a failure."""
        if completion is None or completion.failure is not None:
            return cls(first_token_ns=NEVER, end_ns=NEVER, tokens=0)
        return cls(
            first_token_ns=completion.first_token,
            end_ns=completion.end,
            tokens=max(_output_tokens(completion), 0),
        )


def _token_count_warnings(completions: list[Completion | None]) -> list[str]:
    """Return a warning if the server reported no token count for responses, or an empty list.

    For such a response, the events of its stream are counted as its tokens.
    """
    succeeded = [
        completion
        for completion in completions
        if completion is not None and completion.failure is None
    ]
    counted_by_events = sum(completion.usage.output is None for completion in succeeded)
    return run.token_count_warnings({"events": counted_by_events}, len(succeeded))


def _loadgen_notes(log: LoadGenLog, result: MlperfResult) -> list[str]:
    """Return notes that compare the metrics of the official LoadGen with those of this program.

    Both measured the same queries. LoadGen's latencies are longer, because it takes the time when
    Python code reports a response to it, and not the time when the response arrived.

    Args:
        log: The log of the official LoadGen.
        result: The result by the timestamps of this program.
    """
    validity = "VALID" if log.valid else "INVALID"
    notes = [f"LoadGen's own result: {validity}"]
    notes += [f"LoadGen: {reason}" for reason in log.reasons]

    # Offline has no TTFT and no TPOT.
    if log.ttft is not None and result.ttft is not None:
        notes += _compare_p99("TTFT", log.ttft, result.ttft)

    if log.tpot is not None and result.tpot is not None:
        notes += _compare_p99("TPOT", log.tpot, result.tpot)

    if log.tokens_per_s is not None and result.completed_tokens_per_s is not None:
        notes.append(
            f"completed tokens/s: {log.tokens_per_s:,.2f} by LoadGen's timestamps, "
            f"{result.completed_tokens_per_s:,.2f} by ours"
        )

    return notes


def _compare_p99(
    metric: str, official_distribution: LoadGenSpread, own_distribution: LoadGenSpread
) -> list[str]:
    """Return a note that compares the p99 of a metric by two sets of timestamps.

    The list is empty if a p99 is not known, because it is that of a query that never completed.

    Args:
        metric: The metric, as the note names it.
        official_distribution: Its values by the timestamps of the official LoadGen.
        own_distribution: Its values by the timestamps of this program.
    """
    p99_index = PERCENTILES.index(0.99)
    official_p99_ns = official_distribution.percentiles[p99_index]
    own_p99_ns = own_distribution.percentiles[p99_index]
    if official_p99_ns is None or own_p99_ns is None:
        return []

    difference_ms = (official_p99_ns - own_p99_ns) / NS_PER_MS
    return [
        f"{metric} p99: {official_p99_ns / NS_PER_MS:.3f} ms by LoadGen's timestamps, "
        f"{own_p99_ns / NS_PER_MS:.3f} ms by ours: {difference_ms:+.3f} ms"
    ]
