"""Does the verdict notice a client that is starved of CPU time?

    python benchmarks/starved.py [--every 5] [--verbose]
    python benchmarks/starved.py --alone --family --servers 5   # 180 runs

There are 60 cases (12 of them with --every 5): the client is stopped and continued (SIGSTOP,
SIGCONT) periodically, shares its core with busy processes, has a lower priority, or is left
undisturbed; tokens are 5 or 20 ms apart. With --alone, only the cases that stop it, and the
undisturbed ones, are used. With --family, each case runs on a server drawn from a seed (drawn.py),
with --servers on so many of them. For each metric (TTFT, ITL, TPOT, max ITL) the mean, the p50 and
the highest supported quantile are compared with what the endpoint sent: TTFT since the arrival of
the request, ITL and TPOT from its sends. A run takes about 8 s.

- *false VALID*: a printed statistic is wrong by more than twice the limit of its metric, as a
  fraction of its true value, and by more than 0.5 ms, which is the possible error of the endpoint's
  log on a shared machine.
- *false INVALID*: none of the three is printed although all are right within half the limit. The
  run is INVALID for TTFT, or they are not reported. That an INVALID run prints nothing else is not
  counted again.

In between, either answer is right. The limits are at most 1 of 60 false VALID and at most 3 of 60
false INVALID for each metric. The limit is the fraction, and its 95 % interval is printed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import drawn
import numpy as np
import rig
from numpy.typing import NDArray

from loadgen.core.limits import ValidityLimits
from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.summary import Summary
from loadgen.core.results import store
from loadgen.core.results.record import STATUS
from loadgen.core.run_summary import summarize
from loadgen.core.stats.intervals import wilson_interval
from loadgen.core.stats.quantiles import Distribution, deciding_quantile, distribution_of
from loadgen.sim.server.send_log import SentRequests, parse_log

MAX_FALSE_VALID_FRACTION = 1 / 60
MAX_FALSE_INVALID_FRACTION = 3 / 60
LOG_UNCERTAINTY_MS = 0.5  # the possible error of the endpoint's log on a shared machine
REQUEST_RATE_PER_S = 40.0
MEAN_TTFT_MS = 100

# The error that loadgen allows for each metric, as a fraction of the true value
DEFAULT_LIMITS = ValidityLimits()
MAX_ERROR_FRACTIONS = {
    "ttft": DEFAULT_LIMITS.stamp_error_share,
    "itl": DEFAULT_LIMITS.event_error_share,
    "tpot": DEFAULT_LIMITS.tpot_error_share,
    "max_gap": DEFAULT_LIMITS.event_error_share,
}


class StarvationCase(NamedTuple):
    """One way to starve the client of CPU time, and the time between the tokens that it receives.

    The client is stopped for `stop_ms` of every `stop_period_ms`, shares its core with busy
    processes, or has a lower priority (a higher nice value). Several of these can be combined.
    """

    itl_ms: int
    stop_ms: float = 0
    stop_period_ms: float = 0
    busy_processes: int = 0
    busy_nice: int = 0
    client_nice: int = 0

    def describe(self) -> str:
        """Return the case as text, for example "ITL 5 ms, client stopped 1 of 20 ms"."""
        parts = [f"ITL {self.itl_ms} ms"]
        if self.stop_ms:
            parts.append(f"client stopped {self.stop_ms:g} of {self.stop_period_ms:g} ms")
        if self.busy_processes:
            parts.append(f"busy processes: {self.busy_processes} (nice {self.busy_nice})")
        if self.client_nice:
            parts.append(f"client with nice {self.client_nice}")

        if len(parts) == 1:
            parts.append("undisturbed")
        return ", ".join(parts)

    def is_without_effect(self) -> bool:
        """Return whether the case cannot affect the client because it has real-time priority.

        A process with real-time priority (option `--alone`) always runs before busy processes, and
        its nice value does not count.
        """
        shares_core = self.busy_processes > 0 or self.client_nice > 0
        return rig.RealtimePriority.is_enabled and shares_core


STOPS_MS = (  # how long the client is stopped, and in which period
    (100, 300),
    (1, 20),
    (2, 50),
    (5, 50),
    (5, 500),
    (10, 100),
    (10, 1000),
    (20, 100),
    (20, 2000),
    (50, 200),
    (50, 1000),
    (100, 1000),
    (200, 600),
    (300, 2000),
)
SHARED_CORES = (
    {"busy_processes": 1},
    {"busy_processes": 1, "busy_nice": 5},
    {"busy_processes": 1, "busy_nice": 19},
    {"busy_processes": 2},
    {"busy_processes": 3},
    {"busy_processes": 4},
    {"busy_processes": 1, "client_nice": 5},
    {"busy_processes": 1, "client_nice": 19},
    {"busy_processes": 2, "client_nice": 10},
    {"client_nice": 19},
    {"busy_processes": 1, "stop_ms": 20, "stop_period_ms": 200},
    {"busy_processes": 1, "busy_nice": 10, "stop_ms": 5, "stop_period_ms": 100},
)
UNDISTURBED_RUNS = 4


def list_cases(step: int) -> list[StarvationCase]:
    """Return every `step`-th case: the client is stopped, shares its core, or is undisturbed.

    The cases come in the same order for each of the two times between tokens.
    """
    cases: list[StarvationCase] = []
    for itl_ms in (5, 20):
        cases += [StarvationCase(itl_ms, stop_ms, period_ms) for stop_ms, period_ms in STOPS_MS]
        cases += [StarvationCase(itl_ms=itl_ms, **shared_core) for shared_core in SHARED_CORES]
        cases += [StarvationCase(itl_ms)] * UNDISTURBED_RUNS

    return cases[::step]


def start_on_client_core(command: list[str], nice: int) -> subprocess.Popen[str]:
    """Start a process on the client's core with a nice value; its output can be read."""
    client_cores = rig.assign_cores().client
    core_list = ",".join(str(core) for core in sorted(client_cores))
    return subprocess.Popen(
        ["taskset", "-c", core_list, "nice", "-n", str(nice), *command],
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def keep_client_core_busy(process_count: int, nice: int) -> Iterator[None]:
    """Run endless loops on the client's core inside the `with` block."""
    endless_loop = [sys.executable, "-c", "while True: pass"]
    processes = [start_on_client_core(endless_loop, nice) for _ in range(process_count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def starve_client(client: subprocess.Popen[str], case: StarvationCase, load_s: float) -> None:
    """Starve the client until it ends or its load of `load_s` seconds is over.

    Afterwards a client that is still running is continued with its usual priority, so that it can
    write its results.
    """
    os.setpriority(os.PRIO_PROCESS, client.pid, case.client_nice)
    if rig.RealtimePriority.is_enabled:
        rig.pin_process(client.pid, rig.assign_cores().client)

    end_s = time.monotonic() + load_s + 2  # the last responses take up to 2 s
    try:
        with keep_client_core_busy(case.busy_processes, case.busy_nice):
            while client.poll() is None and time.monotonic() < end_s:
                if case.stop_ms:
                    stop_for_one_period(client, case)
                else:
                    time.sleep(0.1)
    finally:
        if client.poll() is None:
            client.send_signal(signal.SIGCONT)
            os.setpriority(os.PRIO_PROCESS, client.pid, 0)


def stop_for_one_period(client: subprocess.Popen[str], case: StarvationCase) -> None:
    """Stop the client for `stop_ms`, then let it run for the rest of `stop_period_ms`."""
    client.send_signal(signal.SIGSTOP)
    time.sleep(case.stop_ms / 1e3)
    client.send_signal(signal.SIGCONT)
    time.sleep((case.stop_period_ms - case.stop_ms) / 1e3)


class LoadStart(NamedTuple):
    """The id of a run, and when its load started on the monotonic clock."""

    run_id: str
    start_ns: int


def run_starved_load(url: str, run_dir: Path, case: StarvationCase, load_s: float) -> LoadStart:
    """Run a load in a client process and starve the client while requests are sent.

    The files of the run are written to `run_dir`. Raises SystemExit if the client fails.
    """
    # The client creates this file when the load is about to begin.
    record_log = run_dir / "spool" / "w0.rows"

    command = client_command(url, run_dir, case.itl_ms, load_s)
    with start_on_client_core(command, nice=0) as client:
        try:
            while not record_log.exists() and client.poll() is None:
                time.sleep(0.01)
            starve_client(client, case, load_s)
            output, _ = client.communicate(timeout=120)
        finally:
            client.kill()

    if client.returncode:
        raise SystemExit(f"{case.describe()}: the client ended with {client.returncode}")
    result = json.loads(output.strip().splitlines()[-1])
    return LoadStart(result["run_id"], result["start_ns"])


def client_command(url: str, run_dir: Path, itl_ms: int, load_s: float) -> list[str]:
    """Return the command of a client process that runs one load and prints its result as JSON.

    Responses take about 0.5 to 0.8 s, whatever the time between tokens.
    """
    output_tokens = 100 if itl_ms < 10 else 40
    load: dict[str, Any] = {
        "url": url,
        "folder": str(run_dir),
        "requests": {"input_tokens": 20, "output_tokens": output_tokens},
        "request_rate": REQUEST_RATE_PER_S,
        "duration": load_s,
        "seed": "1",
        "warmup": "0",
    }
    return [sys.executable, str(rig.BENCHMARKS_DIR / "ours.py"), "drive", json.dumps(load)]


class SentTimes(NamedTuple):
    """The true metrics of one request, from the times at which the endpoint sent its response."""

    ttft_ns: int  # since the arrival of the request
    tpot_ns: int
    max_gap_ns: int


class SentResponses(NamedTuple):
    """What the endpoint sent in one run, by its own log.

    `times_by_slot` has the metrics of each request by its slot, which is its number in the
    schedule. `gaps_ns` has the times between two sends of a response, of all responses together.
    """

    times_by_slot: dict[int, SentTimes]
    gaps_ns: NDArray[np.int64]


def read_sent_responses(log: SentRequests, load_start: LoadStart) -> SentResponses:
    """Return what the endpoint sent in one run, from its log.

    Left out are requests of other runs, requests that arrived before the load started (such as the
    first request to a target), and responses with fewer than two sends, which have no gap.
    """
    id_prefix = f"{load_start.run_id}-"  # the id of a request is "RUN_ID-SLOT"
    send_times = group_send_times(log)

    times_by_slot = {}
    gaps_of_responses = []
    for request in log.requests:
        sent_ns = send_times.get(request.number, [])
        is_of_this_load = (
            request.id.startswith(id_prefix) and request.arrival_ns >= load_start.start_ns
        )
        if not is_of_this_load or len(sent_ns) < 2:
            continue

        gaps_ns = np.diff(sent_ns)
        gaps_of_responses.append(gaps_ns)
        slot = int(request.id.removeprefix(id_prefix))
        times_by_slot[slot] = SentTimes(
            ttft_ns=sent_ns[0] - request.arrival_ns,
            tpot_ns=(sent_ns[-1] - sent_ns[0]) // len(gaps_ns),
            max_gap_ns=int(gaps_ns.max()),
        )

    return SentResponses(times_by_slot, np.concatenate(gaps_of_responses))


def group_send_times(log: SentRequests) -> dict[int, list[int]]:
    """Return the times at which the endpoint sent something, in ns, by the request's number."""
    send_times: dict[int, list[int]] = {}
    for number, sent_ns in zip(log.request.tolist(), log.sent_ns.tolist(), strict=True):
        send_times.setdefault(number, []).append(sent_ns)
    return send_times


class MetricOutcome(NamedTuple):
    """What loadgen did with one metric of one run, and how wrong its values were.

    A metric is printed, or it is refused by its own validity check. It is neither if the run is
    INVALID for another reason. The error is the largest one of the compared statistics, in ms and
    as a fraction of the true value.
    """

    is_printed: bool
    is_refused: bool
    error_ms: float
    error_fraction: float

    def is_false_valid(self, max_error_fraction: float) -> bool:
        """Return whether a value was printed that is wrong by more than twice the allowed error.

        An error that the log of the endpoint could have itself does not count.
        """
        is_wrong = self.error_fraction > 2 * max_error_fraction
        return self.is_printed and is_wrong and self.error_ms > LOG_UNCERTAINTY_MS

    def is_false_invalid(self, max_error_fraction: float) -> bool:
        """Return whether values were refused that are right within half the allowed error."""
        return self.is_refused and self.error_fraction <= max_error_fraction / 2

    def describe(self, max_error_fraction: float) -> str:
        """Return the outcome as text, for example "printed, off by 1.3% FALSE VALID"."""
        if self.is_printed:
            state = "printed"
        elif self.is_refused:
            state = "refused"
        else:
            state = "not judged"

        text = f"{state}, off by {self.error_fraction:.1%}"
        if self.is_false_valid(max_error_fraction):
            text += " FALSE VALID"
        if self.is_false_invalid(max_error_fraction):
            text += " FALSE INVALID"
        return text


def create_usual_server(itl_ms: int) -> dict[str, str]:
    """Return the latency options of an endpoint with a nearly constant speed."""
    return {"ttft": f"normal:{MEAN_TTFT_MS}ms,{MEAN_TTFT_MS / 10}ms", "itl": f"{itl_ms}ms"}


def create_drawn_server(itl_ms: int, seed: int) -> dict[str, str]:
    """Return the latency options of an endpoint that behaves like a server drawn from a seed.

    A run takes only some seconds. So a server whose speed changes within minutes has a constant
    speed here, that of a random second of its first ten minutes.
    """
    kind = drawn.FAMILY_MEMBERS[seed % len(drawn.FAMILY_MEMBERS)]
    server = drawn.draw_server(kind, seed)

    if isinstance(server, drawn.TailServer):
        return {
            "ttft": f"lognormal:{MEAN_TTFT_MS}ms,{server.sigma:.2f}",
            "itl": f"lognormal:{itl_ms}ms,{server.sigma:.2f}",
        }

    if isinstance(server, drawn.SlowReplicaServer):
        # Requests that meet the slow replica wait longer for their first token.
        extra_ttft_ms = server.slowdown * MEAN_TTFT_MS
        slow_fraction = 1 / server.replica_count
        slow_requests = f"slow_first_byte@{extra_ttft_ms:.0f}ms:{slow_fraction:.2f}"
        return create_usual_server(itl_ms) | {"faults": slow_requests}

    rng = np.random.default_rng([seed, 11])
    seconds = np.arange(0, 600.0)
    slowdown_factors = server.draw_run_factors(seconds, rng)
    slowdown_factor = float(rng.choice(slowdown_factors))
    return {
        "ttft": f"normal:{slowdown_factor * MEAN_TTFT_MS:.1f}ms,{MEAN_TTFT_MS / 10}ms",
        "itl": f"{slowdown_factor * itl_ms:.3f}ms",
    }


class StarvedRun(NamedTuple):
    """A starved run: its stored records, its summary, and what the endpoint sent meanwhile."""

    stored: store.Stored
    summary: Summary
    sent: SentResponses


def run_on_logged_endpoint(
    case: StarvationCase, load_s: float, server_options: dict[str, str]
) -> StarvedRun:
    """Starve one run against an endpoint that logs each of its sends."""
    with tempfile.TemporaryDirectory(prefix="loadgen-starved-") as scratch:
        run_dir = Path(scratch)
        log_path = run_dir / "sends"
        with rig.serve_endpoint(**server_options, log_events="all", log=str(log_path)) as server:
            load_start = run_starved_load(server.url, run_dir, case, load_s)

        sent = read_sent_responses(parse_log(log_path.read_bytes()), load_start)
        stored = store.read_run(run_dir)
        return StarvedRun(stored, summarize(*stored), sent)


def measure_outcomes(
    case: StarvationCase, load_s: float, server_options: dict[str, str]
) -> dict[str, MetricOutcome]:
    """Starve the client in one run, and compare each metric with what the endpoint sent."""
    run = run_on_logged_endpoint(case, load_s, server_options)
    rows = select_compared_rows(run)
    true_distributions = compute_true_distributions(run.sent, rows)

    outcomes = {}
    for metric, true_distribution in true_distributions.items():
        assert true_distribution.p50, f"{case.describe()}: the endpoint sent nothing"
        if metric == "itl":
            measured = run.stored.gaps[0].distribution()
        else:
            measured = distribution_of(Columns(rows).measure(metric))
        outcomes[metric] = judge_metric(metric, measured, true_distribution, run.summary)

    return outcomes


def select_compared_rows(run: StarvedRun) -> NDArray[np.void]:
    """Return the records of the successful requests that the endpoint's log has too."""
    rows = run.stored.rows
    is_ok = rows["status"] == STATUS["ok"]
    is_in_log = np.isin(rows["slot"], list(run.sent.times_by_slot))
    compared_rows: NDArray[np.void] = rows[is_ok & is_in_log]
    return compared_rows


def compute_true_distributions(
    sent: SentResponses, rows: NDArray[np.void]
) -> dict[str, Distribution]:
    """Return the distribution of each metric by the endpoint's log, for the requests in `rows`.

    That of the ITL has all responses of the log, because its gaps are not kept by request.
    """
    times = [sent.times_by_slot[slot] for slot in rows["slot"].tolist()]
    ttft_ns = np.array([request.ttft_ns for request in times], np.int64)
    tpot_ns = np.array([request.tpot_ns for request in times], np.int64)
    max_gap_ns = np.array([request.max_gap_ns for request in times], np.int64)
    return {
        "ttft": distribution_of(ttft_ns),
        "itl": distribution_of(sent.gaps_ns),
        "tpot": distribution_of(tpot_ns),
        "max_gap": distribution_of(max_gap_ns),
    }


class StatisticError(NamedTuple):
    """How far a measured statistic, such as the p50, is from its true value."""

    error_ms: float
    error_fraction: float  # of the true value


def compare_statistic(name: str, measured: Distribution, true: Distribution) -> StatisticError:
    """Return how far a statistic of the measured distribution is from that of the true one."""
    true_ms: float = getattr(true, name)
    error_ms = abs(getattr(measured, name) - true_ms)
    return StatisticError(error_ms, error_ms / true_ms)


def judge_metric(
    metric: str, measured: Distribution, true: Distribution, summary: Summary
) -> MetricOutcome:
    """Compare a metric with the truth, and return what the summary of the run did with it.

    The mean, the p50 and the highest quantile that has enough samples are compared. The summary may
    leave out some of them. Then only the others count; if it leaves out all, all three count.
    """
    highest_quantile = deciding_quantile(measured)
    names = ["mean", "p50"]
    if highest_quantile is not None:
        names.append(highest_quantile.name)

    reported = getattr(summary, f"{metric}_ms") or Distribution()
    reported_names = [name for name in names if getattr(reported, name) is not None]
    counted_names = reported_names or names
    errors = [compare_statistic(name, measured, true) for name in counted_names]
    largest_error = max(errors, key=lambda error: error.error_fraction)

    # An INVALID run prints no metric at all. This is counted once, as a refusal of TTFT.
    is_valid = summary.verdict.valid
    is_refused = not reported_names or (metric == "ttft" and not is_valid)
    return MetricOutcome(
        is_printed=is_valid and not is_refused,
        is_refused=is_refused,
        error_ms=largest_error.error_ms,
        error_fraction=largest_error.error_fraction,
    )


class MetricCounts(NamedTuple):
    """How often one metric was printed in a series of runs, and how often that was wrong."""

    metric: str
    runs: int
    printed: int
    false_valid: int
    false_invalid: int

    @property
    def is_met(self) -> bool:
        """Whether both counts of false results are within their limits.

        A short series may have one false result of each kind.
        """
        max_false_valid = max(1, MAX_FALSE_VALID_FRACTION * self.runs)
        max_false_invalid = max(1, MAX_FALSE_INVALID_FRACTION * self.runs)
        return self.false_valid <= max_false_valid and self.false_invalid <= max_false_invalid


def count_false_answers(
    every: int,
    load_s: float = 4.0,
    *,
    verbose: bool = False,
    on_drawn_servers: bool = False,
    servers: int = 1,
) -> list[MetricCounts]:
    """Starve the client in many runs, and count the false results of each metric.

    A run takes about 8 s.

    Args:
        every: Use only every nth case.
        load_s: Length of each load.
        verbose: Print a line for each run on stderr.
        on_drawn_servers: Use an endpoint of its own for each run, drawn from a seed.
        servers: How often each case is repeated, which gives it so many drawn servers.
    """
    outcomes_of_runs: list[dict[str, MetricOutcome]] = []
    for seed, case in enumerate(list_cases(every) * servers):
        if case.is_without_effect():
            continue

        if on_drawn_servers:
            server_options = create_drawn_server(case.itl_ms, seed)
        else:
            server_options = create_usual_server(case.itl_ms)
        outcomes = measure_outcomes(case, load_s, server_options)
        outcomes_of_runs.append(outcomes)

        if verbose:
            text = f"{case.describe()}: {describe_outcomes(outcomes)}"
            print(text, file=sys.stderr, flush=True)

    return [
        count_outcomes(metric, [outcomes[metric] for outcomes in outcomes_of_runs])
        for metric in MAX_ERROR_FRACTIONS
    ]


def count_outcomes(metric: str, outcomes: Sequence[MetricOutcome]) -> MetricCounts:
    """Count the outcomes of one metric over all runs."""
    max_error_fraction = MAX_ERROR_FRACTIONS[metric]
    return MetricCounts(
        metric=metric,
        runs=len(outcomes),
        printed=sum(outcome.is_printed for outcome in outcomes),
        false_valid=sum(outcome.is_false_valid(max_error_fraction) for outcome in outcomes),
        false_invalid=sum(outcome.is_false_invalid(max_error_fraction) for outcome in outcomes),
    )


def describe_outcomes(outcomes: dict[str, MetricOutcome]) -> str:
    """Return the outcome of each metric of one run, in one line."""
    return "; ".join(
        f"{metric} {outcomes[metric].describe(max_error_fraction)}"
        for metric, max_error_fraction in MAX_ERROR_FRACTIONS.items()
    )


def format_results(results: Sequence[MetricCounts]) -> str:
    """Return the counts of all metrics as a Markdown table, with a row for each metric."""
    columns = ["metric", "runs", "printed", "false VALID", "false INVALID", "limits"]
    rows = [
        [
            result.metric,
            str(result.runs),
            str(result.printed),
            format_count(result.false_valid, result.runs),
            format_count(result.false_invalid, result.runs),
            "met" if result.is_met else "**missed**",
        ]
        for result in results
    ]
    return rig.format_table(columns, rows)


def format_count(count: int, run_count: int) -> str:
    """Return a count with the 95 % interval of its fraction: "1 of 60 (0.3% to 8.9%)"."""
    low, high = wilson_interval(count / run_count, run_count)
    return f"{count} of {run_count} ({low:.1%} to {high:.1%})"


def main() -> None:
    """Print for each metric how often a wrong value was printed, or a right one refused."""
    parser = rig.create_parser(__doc__, offers_realtime_priority=True)
    parser.add_argument("--verbose", action="store_true", help="a line for each run, on stderr")
    parser.add_argument("--every", type=int, default=1, help="every nth case only")
    parser.add_argument(
        "--family", action="store_true", help="a server of its own for each run, drawn from a seed"
    )
    parser.add_argument(
        "--servers", type=int, default=1, help="how many servers each case meets, with --family"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load")
    args = rig.parse_arguments(parser, every=60, seconds=1.0)

    case_count = sum(not case.is_without_effect() for case in list_cases(args.every))
    servers_text = f" on {args.servers} servers each" if args.servers > 1 else ""
    load_text = f"{args.seconds:g} s at {REQUEST_RATE_PER_S:g} requests/s each"
    print(f"{case_count} cases{servers_text}, {load_text}.\n")

    results = count_false_answers(
        args.every,
        args.seconds,
        verbose=args.verbose,
        on_drawn_servers=args.family,
        servers=args.servers,
    )
    print(format_results(results))


if __name__ == "__main__":
    main()
