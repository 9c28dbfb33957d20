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
from loadgen.core.results import store
from loadgen.core.run_summary import summarize
from loadgen.core.stats.intervals import wilson
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
    core = ",".join(map(str, sorted(rig.client_and_server_cores()[0])))
    return subprocess.Popen(
        ["taskset", "-c", core, "nice", "-n", str(nice), *command],
        stdout=subprocess.PIPE,
        text=True,
    )


def starve_client(client: subprocess.Popen[str], starvation: Starvation, seconds: float) -> None:
    """Starve the client during a run, or until it ends; then let it run freely."""
    os.setpriority(os.PRIO_PROCESS, client.pid, starvation.nice)
    if rig.RealtimePriority.is_enabled:
        rig.pin_process(client.pid, rig.client_and_server_cores()[0])
    hogs = [
        start_on_client_core([sys.executable, "-c", BUSY_LOOP], starvation.hog_nice)
        for _ in range(starvation.hogs)
    ]
    end_s = time.monotonic() + seconds + 2
    try:
        while client.poll() is None and time.monotonic() < end_s:
            if not starvation.stop_ms:
                time.sleep(0.1)
                continue
            client.send_signal(signal.SIGSTOP)
            time.sleep(starvation.stop_ms / 1e3)
            client.send_signal(signal.SIGCONT)
            time.sleep((starvation.every_ms - starvation.stop_ms) / 1e3)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
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
    command = [sys.executable, str(rig.BENCHMARKS_DIR / "ours.py"), "drive", json.dumps(arguments)]
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


class SentEvents(NamedTuple):
    """What the endpoint sent, in ns.

    `by_slot` holds TTFT, TPOT and the largest gap of each request; `gaps` all gaps together.
    """

    by_slot: dict[int, tuple[int, int, int]]
    gaps: NDArray[np.int64]


def read_sent_events(log: SentRequests, run_id: str, start_ns: int) -> SentEvents:
    """Return what the endpoint's log shows of one run."""
    by_request: dict[int, list[int]] = {}
    for number, sent_ns in zip(log.request.tolist(), log.sent_ns.tolist(), strict=True):
        by_request.setdefault(number, []).append(sent_ns)
    by_slot, all_gaps = {}, []
    for request in log.requests:
        instants = by_request.get(request.number, [])
        if (
            not request.id.startswith(run_id + "-")
            or len(instants) < 2
            or request.arrival_ns < start_ns
        ):
            continue
        gaps = np.diff(instants)
        all_gaps.append(gaps)
        tpot = (instants[-1] - instants[0]) // len(gaps)
        by_slot[int(request.id.removeprefix(run_id + "-"))] = (
            instants[0] - request.arrival_ns,
            tpot,
            int(gaps.max()),
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
    """Return the latencies of a server drawn from a seed, for the seconds of one run.

    They are its level at some time within ten minutes, the tail of its requests, or the fraction of
    them that a slow replica serves.
    """
    server, rng = (
        drawn.draw_server(drawn.FAMILY_MEMBERS[seed % len(drawn.FAMILY_MEMBERS)], seed),
        np.random.default_rng([seed, 11]),
    )
    level = float(rng.choice(drawn.draw_slowness(server, np.arange(0, 600.0), rng, steady=False)))
    if server.member == "tails":
        return {
            "ttft": f"lognormal:{TTFT_MS}ms,{server.size:.2f}",
            "itl": f"lognormal:{starvation.itl_ms}ms,{server.size:.2f}",
        }
    if server.member == "replicas":
        return usual_latencies(starvation) | {
            "faults": f"slow_first_byte@{server.size * TTFT_MS:.0f}ms:{1 / server.parts:.2f}"
        }
    return {
        "ttft": f"normal:{level * TTFT_MS:.1f}ms,{TTFT_MS / 10}ms",
        "itl": f"{level * starvation.itl_ms:.3f}ms",
    }


def measure_outcomes(
    starvation: Starvation, seconds: float, latencies: dict[str, str]
) -> dict[str, Outcome]:
    """Starve one run and compare each metric with the endpoint's log."""
    with tempfile.TemporaryDirectory(prefix="loadgen-starved-") as scratch:
        log_file = f"{scratch}/sends"
        with rig.serve_endpoint(**latencies, log_events="all", log=log_file) as server:
            result = run_starved_load(server.url, scratch, starvation, seconds)
        truth = read_sent_events(
            parse_log(Path(log_file).read_bytes()), result["run_id"], result["start_ns"]
        )
        stored = store.read_run(Path(scratch))
        summary = summarize(*stored)
    rows = stored.rows[
        (stored.rows["status"] == 0) & np.isin(stored.rows["slot"], list(truth.by_slot))
    ]
    columns = Columns(rows)
    by_row = np.array([truth.by_slot[slot] for slot in rows["slot"].tolist()], np.int64)
    true_values = dict(zip(("ttft", "tpot", "max_gap"), by_row.T, strict=True)) | {
        "itl": truth.gaps
    }
    outcomes = {}
    for metric in METRIC_LIMITS:
        expected = distribution_of(true_values[metric])
        assert expected.p50, f"{starvation}: the endpoint sent nothing"
        if metric == "itl":
            reported = stored.gaps[0].distribution()
        else:
            reported = distribution_of(columns.measure(metric))
        printed_values = getattr(summary, f"{metric}_ms") or Distribution()
        highest = quantiles[0] if (quantiles := deciding_quantile(reported)) else "p50"
        errors = {
            name: abs(getattr(reported, name) - getattr(expected, name))
            for name in ("mean", "p50", highest)
        }
        printed = [name for name in errors if getattr(printed_values, name) is not None]
        is_invalid = not summary.verdict.valid
        is_refused = not printed or (is_invalid and metric == "ttft")
        worst_name = max(printed or errors, key=lambda name: errors[name] / getattr(expected, name))
        error_fraction = errors[worst_name] / getattr(expected, worst_name)
        outcomes[metric] = Outcome(
            not is_refused and not is_invalid, is_refused, errors[worst_name], error_fraction
        )
    return outcomes


class FamilyResult(NamedTuple):
    """The result of one metric over all starvations."""

    family: str
    ways: int
    printed: int
    is_false_valid: int
    is_false_invalid: int

    @property
    def is_met(self) -> bool:
        """Return whether both counts are within their limits.

        A short series may have one false answer of each kind.
        """
        return self.is_false_valid <= max(
            1, MAX_FALSE_VALID * self.ways
        ) and self.is_false_invalid <= max(1, MAX_FALSE_INVALID * self.ways)


def has_no_effect(starvation: Starvation) -> bool:
    """Return whether a starvation cannot affect a client with real-time priority."""
    return rig.RealtimePriority.is_enabled and bool(starvation.hogs or starvation.nice)


def count_false_answers(
    every: int,
    seconds: float = 4.0,
    verbose: bool = False,
    on_drawn_servers: bool = False,
    servers: int = 1,
) -> list[FamilyResult]:
    """Starve the client in every nth way and count the false answers per metric.

    A run takes about 8 s. `family` runs each on a server drawn from a seed, on so many `servers`.
    """
    results: list[tuple[Starvation, dict[str, Outcome]]] = []
    for seed, starvation in enumerate(list_starvations(every) * servers):
        if has_no_effect(starvation):
            continue
        results.append(
            (
                starvation,
                measure_outcomes(
                    starvation,
                    seconds,
                    drawn_latencies(starvation, seed)
                    if on_drawn_servers
                    else usual_latencies(starvation),
                ),
            )
        )
        if verbose:
            print(f"{starvation}: {describe_outcomes(results[-1][1])}", file=sys.stderr, flush=True)
    return [
        FamilyResult(
            on_drawn_servers,
            len(results),
            sum(outcomes[on_drawn_servers].printed for _, outcomes in results),
            sum(outcomes[on_drawn_servers].is_false_valid(limit) for _, outcomes in results),
            sum(outcomes[on_drawn_servers].is_false_invalid(limit) for _, outcomes in results),
        )
        for on_drawn_servers, limit in METRIC_LIMITS.items()
    ]


def describe_outcomes(outcomes: dict[str, Outcome]) -> str:
    """Return the outcomes of one run in a line."""

    def describe_metric(metric: str, limit: float) -> str:
        """Return the outcome of one metric."""
        outcome = outcomes[metric]
        mistake = " FALSE VALID" if outcome.is_false_valid(limit) else ""
        mistake += " FALSE INVALID" if outcome.is_false_invalid(limit) else ""
        state = "printed" if outcome.printed else "refused" if outcome.refused else "not judged"
        return f"{metric} {state}, off {outcome.error_fraction:.1%}{mistake}"

    return "; ".join(describe_metric(family, limit) for family, limit in METRIC_LIMITS.items())


def format_count(count: int, ways: int) -> str:
    """Return a count of false answers with the 95 % interval of their fraction."""
    low, high = wilson(count / ways, ways)
    return f"{count} of {ways} ({low:.1%} to {high:.1%})"


def format_results(results: Sequence[FamilyResult]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        [
            row.family,
            str(row.ways),
            str(row.printed),
            format_count(row.is_false_valid, row.ways),
            format_count(row.is_false_invalid, row.ways),
            "met" if row.is_met else "**missed**",
        ]
        for row in results
    ]
    return rig.format_table(
        ["family", "ways", "printed", "false VALID", "false INVALID", ""], lines
    )


def main() -> None:
    """Print the counts of false answers by metric."""
    parser = rig.create_parser(__doc__, alone=True)
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
    print(
        format_results(
            count_false_answers(args.every, args.seconds, args.verbose, args.family, args.servers)
        )
    )


if __name__ == "__main__":
    main()
