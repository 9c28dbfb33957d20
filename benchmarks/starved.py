"""Does the verdict notice a client that is starved of CPU time?

    python benchmarks/starved.py [--every 5] [--verbose]
    python benchmarks/starved.py --alone --family --servers 5   # 180 runs

There are 60 ways to take the core from the client (12 of them with --every 5): it is stopped and
continued (SIGSTOP) in duty cycles, shares its core with busy processes, has a lower priority, or
is left alone; tokens are 5 or 20 ms apart. With --alone, only the ways that stop it are used. With
--family, each way runs on a server drawn from a seed (drawn.py), with --servers on so many of them.
For each metric (TTFT, ITL, TPOT, largest gap) the mean, the p50 and the highest supported quantile
are compared with what the endpoint sent: TTFT since the arrival of the request, gaps and TPOT from
its sends. A run takes about 8 s.

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
from collections.abc import Sequence
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
from loadgen.core.run_summary import summarize
from loadgen.core.stats.intervals import wilson_interval
from loadgen.core.stats.quantiles import Distribution, deciding_quantile, distribution_of
from loadgen.sim.server.send_log import SentRequests, parse_log

MAX_FALSE_VALID, MAX_FALSE_INVALID = 1 / 60, 3 / 60
LOG_UNCERTAINTY_MS = 0.5
RATE, TTFT_MS = 40.0, 100
DEFAULTS = ValidityLimits()
METRIC_LIMITS = {
    "ttft": DEFAULTS.stamp_error_share,
    "itl": DEFAULTS.event_error_share,
    "tpot": DEFAULTS.tpot_error_share,
    "max_gap": DEFAULTS.event_error_share,
}
BUSY_LOOP = "while True: pass"


class Starvation(NamedTuple):
    """One way to starve the client of CPU time.

    The client is stopped for `stop_ms` of every `every_ms`, shares its core with `hogs` busy
    processes, or runs with niceness `nice`.
    """

    itl_ms: int
    stop_ms: float = 0
    every_ms: float = 0
    hogs: int = 0
    hog_nice: int = 0
    nice: int = 0

    def __str__(self) -> str:
        parts = [f"gaps {self.itl_ms} ms"]
        if self.stop_ms:
            parts.append(f"stopped {self.stop_ms:g} of {self.every_ms:g} ms")

        if self.hogs:
            parts.append(
                f"{self.hogs} busy beside it"
                + (f" (nice {self.hog_nice})" if self.hog_nice else "")
            )

        if self.nice:
            parts.append(f"nice {self.nice}")

        return ", ".join(parts) if len(parts) > 1 else f"{parts[0]}, left alone"


STOPS = (
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
SHARED_CORE = (
    {"hogs": 1},
    {"hogs": 1, "hog_nice": 5},
    {"hogs": 1, "hog_nice": 19},
    {"hogs": 2},
    {"hogs": 3},
    {"hogs": 4},
    {"hogs": 1, "nice": 5},
    {"hogs": 1, "nice": 19},
    {"hogs": 2, "nice": 10},
    {"nice": 19},
    {"hogs": 1, "stop_ms": 20, "every_ms": 200},
    {"hogs": 1, "hog_nice": 10, "stop_ms": 5, "every_ms": 100},
)
UNDISTURBED_RUNS = 4


def list_starvations(every: int) -> list[Starvation]:
    """Return every nth way to starve a client."""
    starvations = [
        starvation
        for itl_ms in (5, 20)
        for starvation in (
            *(Starvation(itl_ms, stop_ms, every_ms) for stop_ms, every_ms in STOPS),
            *(Starvation(itl_ms=itl_ms, **shared) for shared in SHARED_CORE),
            *([Starvation(itl_ms)] * UNDISTURBED_RUNS),
        )
    ]
    return starvations[::every]


def start_on_client_core(command: list[str], nice: int) -> subprocess.Popen[str]:
    """Start a process on the client's core with a niceness."""
    core = ",".join(map(str, sorted(rig.assign_cores().client)))
    return subprocess.Popen(
        ["taskset", "-c", core, "nice", "-n", str(nice), *command],
        stdout=subprocess.PIPE,
        text=True,
    )


def starve_client(client: subprocess.Popen[str], starvation: Starvation, seconds: float) -> None:
    """Starve the client until it ends, or for `seconds` and a little more; then let it run freely.

    The client is stopped and continued, shares its core with busy processes, or both.
    """
    os.setpriority(os.PRIO_PROCESS, client.pid, starvation.nice)
    client_cores = rig.assign_cores().client
    if rig.RealtimePriority.is_enabled:
        rig.pin_process(client.pid, client_cores)

    busy_processes = [
        start_on_client_core([sys.executable, "-c", BUSY_LOOP], starvation.hog_nice)
        for _ in range(starvation.hogs)
    ]
    end_s = time.monotonic() + seconds + 2
    try:
        while client.poll() is None and time.monotonic() < end_s:
            if starvation.stop_ms:
                stop_for_a_while(client, starvation)
            else:
                time.sleep(0.1)
    finally:
        for process in busy_processes:
            process.kill()
            process.wait()
        if client.poll() is None:
            client.send_signal(signal.SIGCONT)
            os.setpriority(os.PRIO_PROCESS, client.pid, 0)


def run_starved_load(
    url: str, folder: str, starvation: Starvation, seconds: float
) -> dict[str, Any]:
    """Run one load that is starved while it is sent, and return its result."""
    tokens = 100 if starvation.itl_ms < 10 else 40
    arguments = {
        "url": url,
        "folder": folder,
        "requests": {"input_tokens": 20, "output_tokens": tokens},
        "request_rate": RATE,
        "duration": seconds,
        "seed": "1",
        "warmup": "0",
    }
    command = [sys.executable, str(rig.BENCHMARKS_DIR / "ours.py"), "load", json.dumps(arguments)]

    record_log = Path(folder) / "spool" / "w0.rows"  # written when the load is about to begin
    with start_on_client_core(command, 0) as client:
        try:
            while not record_log.exists() and client.poll() is None:
                time.sleep(0.01)
            starve_client(client, starvation, seconds)
            output = client.communicate(timeout=120)[0]
        finally:
            client.kill()

    if client.returncode:
        raise SystemExit(f"{starvation}: the client ended with {client.returncode}")

    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result


class RequestTimes(NamedTuple):
    """What the endpoint sent for one request, in ns: TTFT since its arrival, TPOT, largest gap."""

    ttft_ns: int
    tpot_ns: int
    max_gap_ns: int


class SentEvents(NamedTuple):
    """What the endpoint sent in one run, by its own log.

    `by_slot` has the times of each request by its slot, which is its number in the schedule. `gaps`
    holds the ns between two sends of a response, of all responses together.
    """

    by_slot: dict[int, RequestTimes]
    gaps: NDArray[np.int64]


def read_sent_events(log: SentRequests, run_id: str, start_ns: int) -> SentEvents:
    """Return what the endpoint sent in one run, from its log.

    Left out are requests of other runs, those that arrived before the load started at `start_ns`
    (such as the first request to a target), and responses with fewer than two sends, which have no
    gap. The id of a request is "RUN_ID-SLOT".
    """
    sends_by_request: dict[int, list[int]] = {}
    for number, sent_ns in zip(log.request.tolist(), log.sent_ns.tolist(), strict=True):
        sends_by_request.setdefault(number, []).append(sent_ns)

    by_slot = {}
    all_gaps = []
    for request in log.requests:
        sends = sends_by_request.get(request.number, [])
        is_of_run = request.id.startswith(f"{run_id}-")
        is_before_load = request.arrival_ns < start_ns
        if not is_of_run or is_before_load or len(sends) < 2:
            continue

        gaps = np.diff(sends)
        all_gaps.append(gaps)
        slot = int(request.id.removeprefix(f"{run_id}-"))
        by_slot[slot] = RequestTimes(
            ttft_ns=sends[0] - request.arrival_ns,
            tpot_ns=(sends[-1] - sends[0]) // len(gaps),
            max_gap_ns=int(gaps.max()),
        )

    return SentEvents(by_slot, np.concatenate(all_gaps))


class Outcome(NamedTuple):
    """One metric of one run: printed, or refused by its own validity check.

    Neither means that the run is INVALID for another reason. The largest error is given in ms and
    as a fraction of the true value.
    """

    printed: bool
    refused: bool
    error_ms: float
    error_fraction: float

    def is_false_valid(self, limit: float) -> bool:
        """Return whether a wrong value was printed."""
        return (
            self.printed and self.error_fraction > 2 * limit and self.error_ms > LOG_UNCERTAINTY_MS
        )

    def is_false_invalid(self, limit: float) -> bool:
        """Return whether a right value was refused."""
        return self.refused and self.error_fraction <= limit / 2


def usual_latencies(starvation: Starvation) -> dict[str, str]:
    """Return the latencies of the server that every starvation meets."""
    return {"ttft": f"normal:{TTFT_MS}ms,{TTFT_MS / 10}ms", "itl": f"{starvation.itl_ms}ms"}


def drawn_latencies(starvation: Starvation, seed: int) -> dict[str, str]:
    """Return the latency options of an endpoint that behaves like a server drawn from a seed.

    A run takes some seconds, so a server whose speed changes over minutes has one level, that of a
    random time within ten minutes. A server with a tail keeps its distribution, and of one with
    replicas a fraction of the requests meets the slow replica.
    """
    member = drawn.FAMILY_MEMBERS[seed % len(drawn.FAMILY_MEMBERS)]
    server = drawn.draw_server(member, seed)
    if server.member == "tails":
        return {
            "ttft": f"lognormal:{TTFT_MS}ms,{server.size:.2f}",
            "itl": f"lognormal:{starvation.itl_ms}ms,{server.size:.2f}",
        }

    if server.member == "replicas":
        slow_fraction = 1 / server.parts
        return usual_latencies(starvation) | {
            "faults": f"slow_first_byte@{server.size * TTFT_MS:.0f}ms:{slow_fraction:.2f}"
        }

    rng = np.random.default_rng([seed, 11])
    levels_of_ten_minutes = drawn.draw_slowness(server, np.arange(0, 600.0), rng, long_run=False)
    level = float(rng.choice(levels_of_ten_minutes))

    return {
        "ttft": f"normal:{level * TTFT_MS:.1f}ms,{TTFT_MS / 10}ms",
        "itl": f"{level * starvation.itl_ms:.3f}ms",
    }


class StarvedRun(NamedTuple):
    """A starved run: its stored records, its summary, and what the endpoint sent meanwhile."""

    stored: store.Stored
    summary: Summary
    sent: SentEvents


def measure_outcomes(
    starvation: Starvation, seconds: float, latencies: dict[str, str]
) -> dict[str, Outcome]:
    """Starve the client in one run, and compare each metric with what the endpoint sent."""
    starved_run = run_on_logged_endpoint(starvation, seconds, latencies)
    rows = select_compared_rows(starved_run)
    true_distributions = find_true_distributions(starved_run.sent, rows)

    outcomes = {}
    for metric, true_distribution in true_distributions.items():
        assert true_distribution.p50, f"{starvation}: the endpoint sent nothing"
        if metric == "itl":
            measured = starved_run.stored.gaps[0].distribution()
        else:
            measured = distribution_of(Columns(rows).measure(metric))
        outcomes[metric] = judge_metric(metric, measured, true_distribution, starved_run.summary)

    return outcomes


def has_no_effect(starvation: Starvation) -> bool:
    """Return whether a starvation cannot affect a client with real-time priority."""
    return rig.RealtimePriority.is_enabled and bool(starvation.hogs or starvation.nice)


def run_on_logged_endpoint(
    starvation: Starvation, seconds: float, latencies: dict[str, str]
) -> StarvedRun:
    """Starve one run against an endpoint that logs each of its sends."""
    with tempfile.TemporaryDirectory(prefix="loadgen-starved-") as scratch:
        log_path = f"{scratch}/sends"
        with rig.serve_endpoint(**latencies, log_events="all", log=log_path) as server:
            result = run_starved_load(server.url, scratch, starvation, seconds)
        log = parse_log(Path(log_path).read_bytes())
        sent = read_sent_events(log, result["run_id"], result["start_ns"])
        stored = store.read_run(Path(scratch))
        return StarvedRun(stored, summarize(*stored), sent)


def select_compared_rows(starved_run: StarvedRun) -> NDArray[np.void]:
    """Return the records of the ok requests that the endpoint's log has too."""
    rows = starved_run.stored.rows
    is_ok = rows["status"] == 0
    is_in_log = np.isin(rows["slot"], list(starved_run.sent.by_slot))
    compared_rows: NDArray[np.void] = rows[is_ok & is_in_log]
    return compared_rows


def find_true_distributions(sent: SentEvents, rows: NDArray[np.void]) -> dict[str, Distribution]:
    """Return the true distribution of each metric over these requests."""
    times = [sent.by_slot[slot] for slot in rows["slot"].tolist()]
    return {
        "ttft": distribution_of(np.array([request.ttft_ns for request in times], np.int64)),
        "itl": distribution_of(sent.gaps),
        "tpot": distribution_of(np.array([request.tpot_ns for request in times], np.int64)),
        "max_gap": distribution_of(np.array([request.max_gap_ns for request in times], np.int64)),
    }


def judge_metric(
    metric: str, measured: Distribution, true_distribution: Distribution, summary: Summary
) -> Outcome:
    """Compare the statistics of one metric with the truth.

    Compared are the mean, the p50 and the highest quantile that has enough samples. If the summary
    prints some of them, the largest relative error of those counts, and of all three otherwise.
    """
    deciding_quantiles = deciding_quantile(measured)
    highest = deciding_quantiles[0] if deciding_quantiles else "p50"
    errors_ms = {
        name: abs(getattr(measured, name) - getattr(true_distribution, name))
        for name in ("mean", "p50", highest)
    }
    reported = getattr(summary, f"{metric}_ms") or Distribution()
    reported_names = [name for name in errors_ms if getattr(reported, name) is not None]

    def relative_error(name: str) -> float:
        error_fraction: float = errors_ms[name] / getattr(true_distribution, name)
        return error_fraction

    worst_name = max(reported_names or errors_ms, key=relative_error)
    is_valid = summary.verdict.valid

    # An INVALID run refuses all metrics; that of TTFT alone counts as its refusal.
    is_refused = not reported_names or (not is_valid and metric == "ttft")
    return Outcome(
        printed=is_valid and not is_refused,
        refused=is_refused,
        error_ms=errors_ms[worst_name],
        error_fraction=relative_error(worst_name),
    )


class MetricResult(NamedTuple):
    """The result of one metric over all runs."""

    metric: str
    ways: int  # the number of runs: each starves the client in another way
    printed: int
    false_valid: int
    false_invalid: int

    @property
    def is_met(self) -> bool:
        """Return whether both counts are within their limits.

        A short series may have one false answer of each kind.
        """
        max_false_valid = max(1, MAX_FALSE_VALID * self.ways)
        max_false_invalid = max(1, MAX_FALSE_INVALID * self.ways)
        return self.false_valid <= max_false_valid and self.false_invalid <= max_false_invalid


def count_false_answers(
    every: int,
    seconds: float = 4.0,
    *,
    verbose: bool = False,
    on_drawn_servers: bool = False,
    servers: int = 1,
) -> list[MetricResult]:
    """Starve the client in many runs, and count the false answers of each metric.

    A run takes about 8 s.

    Args:
        every: Only every nth way to starve the client is used.
        seconds: Length of each load.
        verbose: Print a line for each run on stderr.
        on_drawn_servers: Each run meets a server of its own, drawn from a seed.
        servers: How often each way is repeated, which gives it so many drawn servers.
    """
    outcomes_of_runs: list[dict[str, Outcome]] = []
    for seed, starvation in enumerate(list_starvations(every) * servers):
        if has_no_effect(starvation):
            continue

        if on_drawn_servers:
            latencies = drawn_latencies(starvation, seed)
        else:
            latencies = usual_latencies(starvation)

        outcomes = measure_outcomes(starvation, seconds, latencies)
        outcomes_of_runs.append(outcomes)

        if verbose:
            print(f"{starvation}: {describe_outcomes(outcomes)}", file=sys.stderr, flush=True)

    return [
        summarize_metric(metric, [outcomes[metric] for outcomes in outcomes_of_runs])
        for metric in METRIC_LIMITS
    ]


def summarize_metric(metric: str, outcomes: Sequence[Outcome]) -> MetricResult:
    """Count the outcomes of one metric over all runs."""
    limit = METRIC_LIMITS[metric]
    return MetricResult(
        metric=metric,
        ways=len(outcomes),
        printed=sum(outcome.printed for outcome in outcomes),
        false_valid=sum(outcome.is_false_valid(limit) for outcome in outcomes),
        false_invalid=sum(outcome.is_false_invalid(limit) for outcome in outcomes),
    )


def describe_outcomes(outcomes: dict[str, Outcome]) -> str:
    """Return the outcome of each metric of one run, in one line."""
    return "; ".join(
        f"{metric} {describe_outcome(outcomes[metric], limit)}"
        for metric, limit in METRIC_LIMITS.items()
    )


def format_count(count: int, ways: int) -> str:
    """Return a count of false answers with the 95 % interval of their fraction."""
    low, high = wilson_interval(count / ways, ways)
    return f"{count} of {ways} ({low:.1%} to {high:.1%})"


def describe_outcome(outcome: Outcome, limit: float) -> str:
    """Return what was printed of one metric and its error: "printed, off 1.3% FALSE VALID"."""
    if outcome.printed:
        state = "printed"
    elif outcome.refused:
        state = "refused"
    else:
        state = "not judged"

    text = f"{state}, off {outcome.error_fraction:.1%}"
    if outcome.is_false_valid(limit):
        text += " FALSE VALID"

    if outcome.is_false_invalid(limit):
        text += " FALSE INVALID"

    return text


def format_results(results: Sequence[MetricResult]) -> str:
    """Return the results of all metrics as a Markdown table."""
    lines = [
        [
            result.metric,
            str(result.ways),
            str(result.printed),
            format_count(result.false_valid, result.ways),
            format_count(result.false_invalid, result.ways),
            "met" if result.is_met else "**missed**",
        ]
        for result in results
    ]
    return rig.format_table(
        ["family", "ways", "printed", "false VALID", "false INVALID", ""], lines
    )


def stop_for_a_while(client: subprocess.Popen[str], starvation: Starvation) -> None:
    """Stop the client for `stop_ms`, then let it run for the rest of `every_ms`."""
    client.send_signal(signal.SIGSTOP)
    time.sleep(starvation.stop_ms / 1e3)
    client.send_signal(signal.SIGCONT)
    time.sleep((starvation.every_ms - starvation.stop_ms) / 1e3)


def main() -> None:
    """Print the counts of false answers by metric."""
    parser = rig.create_parser(__doc__, offers_realtime_priority=True)
    parser.add_argument("--verbose", action="store_true", help="a line for each way, on stderr")
    parser.add_argument("--every", type=int, default=1, help="every nth way only")
    parser.add_argument(
        "--family", action="store_true", help="a server of its own for each way, drawn from a seed"
    )
    parser.add_argument("--servers", type=int, default=1, help="that each way meets, with --family")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    args = rig.parse_arguments(parser, every=60, seconds=1.0)
    servers = f" on {args.servers} servers each" if args.servers > 1 else ""
    run_count = sum(not has_no_effect(starvation) for starvation in list_starvations(args.every))
    print(f"{run_count} ways{servers}, {args.seconds:g} s at {RATE:g} requests/s each.\n")
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
