"""Does the verdict notice a client that is starved? Held against the endpoint's own log of every send.

    python benchmarks/starved.py [--every 5] [--verbose]
    python benchmarks/starved.py --alone --family --servers 5   # 180 runs: 36 cannot tell 1.8 of them from 2

60 ways to take the core from the client (--every 5: 12 of them): it is stopped and continued
(SIGSTOP) in duty cycles, shares its core with busy processes, is given a lower priority, or is left
alone; gaps between tokens of 5 and of 20 ms. With --alone only the ways that stop it. With --family
each way meets a server of its own, drawn from a seed (drawn.py), with --servers so many of them.

For each family of figures (TTFT, ITL, TPOT, largest gap) mean, p50 and the highest supported
quantile are compared with what the endpoint sent: TTFT from the arrival of the request there, gaps
and TPOT from the instants of its sends.

- *false VALID*: a statistic that is printed is wrong by more than twice the family's limit, as a share of its true
  value, and by more than 0.5 ms, which is what the endpoint's own log can be wrong by on a shared machine.
- *false INVALID*: none of the three is printed although all are right within half the limit: the run is INVALID for
  TTFT, or they are withheld (that an INVALID run prints nothing else either is not counted again).

In between, either answer is right. Limits: false VALID at most 1 of 60, false INVALID at most 3 of
60, in each family; the share is the limit, and its 95 % interval is printed.
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

FALSE_VALID, FALSE_INVALID = 1 / 60, 3 / 60
LOG_MS = 0.5
RATE, TTFT_MS = 40.0, 100
DEFAULTS = ValidityLimits()
FAMILIES = {
    "ttft": DEFAULTS.stamp_error_share,
    "itl": DEFAULTS.event_error_share,
    "tpot": DEFAULTS.tpot_error_share,
    "max_gap": DEFAULTS.event_error_share,
}
HOG = "while True: pass"


class Way(NamedTuple):
    """One way to starve the client: stopped for `stop_ms` of every `every_ms`, `hogs` beside it, niceness of both."""

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
SHARED = (
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
ALONE = 4


def ways(every: int) -> list[Way]:
    """Every nth of all ways."""
    found = [
        way
        for itl_ms in (5, 20)
        for way in (
            *(Way(itl_ms, stop_ms, every_ms) for stop_ms, every_ms in STOPS),
            *(Way(itl_ms=itl_ms, **shared) for shared in SHARED),
            *([Way(itl_ms)] * ALONE),
        )
    ]
    return found[::every]


def placed(command: list[str], nice: int) -> subprocess.Popen[str]:
    """A process on the client's core, at this niceness."""
    core = ",".join(map(str, sorted(rig.client_and_server_cores()[0])))
    return subprocess.Popen(
        ["taskset", "-c", core, "nice", "-n", str(nice), *command],
        stdout=subprocess.PIPE,
        text=True,
    )


def starve(client: subprocess.Popen[str], way: Way, seconds: float) -> None:
    """Starve the client for the length of a run, or until it has ended; then let it go on."""
    os.setpriority(os.PRIO_PROCESS, client.pid, way.nice)
    if rig.RealtimePriority.is_enabled:
        rig.pin_process(client.pid, rig.client_and_server_cores()[0])
    hogs = [placed([sys.executable, "-c", HOG], way.hog_nice) for _ in range(way.hogs)]
    ends = time.monotonic() + seconds + 2
    try:
        while client.poll() is None and time.monotonic() < ends:
            if not way.stop_ms:
                time.sleep(0.1)
                continue
            client.send_signal(signal.SIGSTOP)
            time.sleep(way.stop_ms / 1e3)
            client.send_signal(signal.SIGCONT)
            time.sleep((way.every_ms - way.stop_ms) / 1e3)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
        if client.poll() is None:
            client.send_signal(signal.SIGCONT)
            os.setpriority(os.PRIO_PROCESS, client.pid, 0)


def drive(url: str, folder: str, way: Way, seconds: float) -> dict[str, Any]:
    """One run that is starved while its load goes; what `ours.py` says of it."""
    tokens = 100 if way.itl_ms < 10 else 40
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
    spool = Path(folder) / "spool" / "w0.rows"  # written when the load is about to begin
    with placed(command, 0) as client:
        try:
            while not spool.exists() and client.poll() is None:
                time.sleep(0.01)
            starve(client, way, seconds)
            said = client.communicate(timeout=120)[0]
        finally:
            client.kill()
    if client.returncode:
        raise SystemExit(f"{way}: the client ended with {client.returncode}")
    found: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    return found


class Sent(NamedTuple):
    """What the endpoint sent: per slot of the run TTFT, TPOT and the largest gap, and all gaps together, ns."""

    by_slot: dict[int, tuple[int, int, int]]
    gaps: NDArray[np.int64]


def sent(log: SentRequests, run_id: str, start_ns: int) -> Sent:
    """The endpoint's log of one run."""
    by_request: dict[int, list[int]] = {}
    for number, at in zip(log.request.tolist(), log.sent_ns.tolist(), strict=True):
        by_request.setdefault(number, []).append(at)
    by_slot, pooled = {}, []
    for request in log.requests:
        instants = by_request.get(request.number, [])
        if (
            not request.id.startswith(run_id + "-")
            or len(instants) < 2
            or request.arrival_ns < start_ns
        ):
            continue
        gaps = np.diff(instants)
        pooled.append(gaps)
        tpot = (instants[-1] - instants[0]) // len(gaps)
        by_slot[int(request.id.removeprefix(run_id + "-"))] = (
            instants[0] - request.arrival_ns,
            tpot,
            int(gaps.max()),
        )
    return Sent(by_slot, np.concatenate(pooled))


class Outcome(NamedTuple):
    """One family of one run: printed, or refused by its guard (neither: the run is INVALID for another reason).

    With its largest error, in ms and as a share of the true value.
    """

    printed: bool
    refused: bool
    error_ms: float
    share: float

    def false_valid(self, limit: float) -> bool:
        return self.printed and self.share > 2 * limit and self.error_ms > LOG_MS

    def false_invalid(self, limit: float) -> bool:
        return self.refused and self.share <= limit / 2


def usual(way: Way) -> dict[str, str]:
    """The latencies of the server that every way meets."""
    return {"ttft": f"normal:{TTFT_MS}ms,{TTFT_MS / 10}ms", "itl": f"{way.itl_ms}ms"}


def of_family(way: Way, seed: int) -> dict[str, str]:
    """The latencies of a server of drawn.py for the seconds of a run: its level at some instant of ten minutes, the
    tail of its requests, or the share of them that a slow replica answers.
    """
    one, draw = (
        drawn.draw_server(drawn.FAMILY_MEMBERS[seed % len(drawn.FAMILY_MEMBERS)], seed),
        np.random.default_rng([seed, 11]),
    )
    level = float(draw.choice(drawn.draw_slowness(one, np.arange(0, 600.0), draw, steady=False)))
    if one.member == "tails":
        return {
            "ttft": f"lognormal:{TTFT_MS}ms,{one.size:.2f}",
            "itl": f"lognormal:{way.itl_ms}ms,{one.size:.2f}",
        }
    if one.member == "replicas":
        return usual(way) | {
            "faults": f"slow_first_byte@{one.size * TTFT_MS:.0f}ms:{1 / one.parts:.2f}"
        }
    return {
        "ttft": f"normal:{level * TTFT_MS:.1f}ms,{TTFT_MS / 10}ms",
        "itl": f"{level * way.itl_ms:.3f}ms",
    }


def once(way: Way, seconds: float, latencies: dict[str, str]) -> dict[str, Outcome]:
    """Starve one run, and hold each family against the log."""
    with tempfile.TemporaryDirectory(prefix="loadgen-starved-") as scratch:
        log_file = f"{scratch}/sends"
        with rig.serve_endpoint(**latencies, log_events="all", log=log_file) as server:
            found = drive(server.url, scratch, way, seconds)
        truth = sent(parse_log(Path(log_file).read_bytes()), found["run_id"], found["start_ns"])
        stored = store.read_run(Path(scratch))
        summary = summarize(*stored)
    rows = stored.rows[
        (stored.rows["status"] == 0) & np.isin(stored.rows["slot"], list(truth.by_slot))
    ]
    columns = Columns(rows)
    by_row = np.array([truth.by_slot[slot] for slot in rows["slot"].tolist()], np.int64)
    true = dict(zip(("ttft", "tpot", "max_gap"), by_row.T, strict=True)) | {"itl": truth.gaps}
    outcomes = {}
    for family in FAMILIES:
        expected = distribution_of(true[family])
        assert expected.p50, f"{way}: the endpoint sent nothing"
        if family == "itl":
            reported = stored.gaps[0].distribution()
        else:
            reported = distribution_of(columns.measure(family))
        shown = getattr(summary, f"{family}_ms") or Distribution()
        highest = decides[0] if (decides := deciding_quantile(reported)) else "p50"
        errors = {
            name: abs(getattr(reported, name) - getattr(expected, name))
            for name in ("mean", "p50", highest)
        }
        printed = [name for name in errors if getattr(shown, name) is not None]
        is_invalid = not summary.verdict.valid
        is_refused = not printed or (is_invalid and family == "ttft")
        worst = max(printed or errors, key=lambda name: errors[name] / getattr(expected, name))
        share = errors[worst] / getattr(expected, worst)
        outcomes[family] = Outcome(
            not is_refused and not is_invalid, is_refused, errors[worst], share
        )
    return outcomes


class Row(NamedTuple):
    """The result of one family over all ways."""

    family: str
    ways: int
    printed: int
    false_valid: int
    false_invalid: int

    @property
    def met(self) -> bool:
        """Whether both counts are within their limits; at least one false answer is allowed in a short series."""
        return self.false_valid <= max(1, FALSE_VALID * self.ways) and self.false_invalid <= max(
            1, FALSE_INVALID * self.ways
        )


def cannot(way: Way) -> bool:
    """Whether it could not take the core from a client with real-time priority."""
    return rig.RealtimePriority.is_enabled and bool(way.hogs or way.nice)


def rows(
    every: int, seconds: float = 4.0, verbose: bool = False, family: bool = False, servers: int = 1
) -> list[Row]:
    """Starve the client in every nth way (about 8 s each) and count the false answers per family of figures.

    family: each way on a server drawn from a seed; on so many `servers`.
    """
    results: list[tuple[Way, dict[str, Outcome]]] = []
    for seed, way in enumerate(ways(every) * servers):
        if cannot(way):
            continue
        results.append((way, once(way, seconds, of_family(way, seed) if family else usual(way))))
        if verbose:
            print(f"{way}: {describe(results[-1][1])}", file=sys.stderr, flush=True)
    return [
        Row(
            family,
            len(results),
            sum(outcomes[family].printed for _, outcomes in results),
            sum(outcomes[family].false_valid(limit) for _, outcomes in results),
            sum(outcomes[family].false_invalid(limit) for _, outcomes in results),
        )
        for family, limit in FAMILIES.items()
    ]


def describe(outcomes: dict[str, Outcome]) -> str:
    """The outcomes of one run in a line."""

    def one(family: str, limit: float) -> str:
        outcome = outcomes[family]
        wrong = " FALSE VALID" if outcome.false_valid(limit) else ""
        wrong += " FALSE INVALID" if outcome.false_invalid(limit) else ""
        state = "printed" if outcome.printed else "refused" if outcome.refused else "not judged"
        return f"{family} {state}, off {outcome.share:.1%}{wrong}"

    return "; ".join(one(family, limit) for family, limit in FAMILIES.items())


def counted(wrong: int, ways: int) -> str:
    """A count of false answers, with the 95 % interval of their share."""
    low, high = wilson(wrong / ways, ways)
    return f"{wrong} of {ways} ({low:.1%} to {high:.1%})"


def table(results: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        [
            row.family,
            str(row.ways),
            str(row.printed),
            counted(row.false_valid, row.ways),
            counted(row.false_invalid, row.ways),
            "met" if row.met else "**missed**",
        ]
        for row in results
    ]
    return rig.format_table(
        ["family", "ways", "printed", "false VALID", "false INVALID", ""], lines
    )


def main() -> None:
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
    tried = sum(not cannot(way) for way in ways(args.every))
    print(f"{tried} ways{servers}, {args.seconds:g} s at {RATE:g} requests/s each.\n")
    print(table(rows(args.every, args.seconds, args.verbose, args.family, args.servers)))


if __name__ == "__main__":
    main()
