"""Whether `loadgen search` confirms a load that the server does not sustain, in virtual time.

Servers, workloads and SLOs are drawn by seed: batch size, cache and speed of one or two replicas,
lengths of prompts and responses, and objectives on TPOT, TTFT, E2E, both, or attainment (the share
of requests that meet all objectives), tight ones and ones that hardly limit anything. Each search
is the command itself. A confirmed load is checked by runs of an hour at fixed loads, six times the
length of a trial: if most of the runs at the load divided by 1.05 miss the SLO or fall behind, the
load is more than 1.05 times the true capacity. The rates are of a few requests per second and more,
so that the number of requests in a trial differs from its mean by less than that. With --bounds, a
run at 1.25 times the load says whether the result is much too low.

    nice -n 10 python benchmarks/search_drawn.py --seeds 300 --bounds
    nice -n 10 python benchmarks/search_drawn.py --seeds 300 --minutes 25

Everything here is SIMULATED.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import rig
from numpy.typing import NDArray

from loadgen.cli.app import run_command_line
from loadgen.core.execution import run
from loadgen.core.execution.plan import Settings
from loadgen.core.results import store
from loadgen.core.results.record import STATUS
from loadgen.core.slo import Slo
from loadgen.core.workload import load
from loadgen.core.workload.flags import read_flags
from loadgen.repeated.capacity import Capacity, load_capacity
from loadgen.search.goal import Goal

MAX_RATIO_TO_CAPACITY = 1.05  # a confirmed load may be this much higher than the true capacity
TOO_LOW_RATIO = 1.25  # if this many times the confirmed load is sustained, the result is too low
TRIAL_S = 600  # the default of a search
LONG_RUN_S = 6 * TRIAL_S
MIN_COMPLETION_RATIO = 0.98  # completed requests per arrival of a server that keeps up
TIMEOUT = "7200s"


class SearchCase(NamedTuple):
    """A server, a workload and an SLO, as the files and options of a search."""

    preset_yaml: str
    workload_yaml: str
    slo_terms: tuple[str, ...]

    @property
    def title(self) -> str:
        """The lengths of the requests and the SLO, in one line."""
        requests_line = self.workload_yaml.splitlines()[1]
        lengths = requests_line.removeprefix("requests: ")
        return f"{lengths} {', '.join(self.slo_terms)}"


def draw_case(seed: int) -> SearchCase:
    """Draw a server, a workload and an SLO; the same seed gives the same case."""
    rng = np.random.default_rng([seed, 56])
    server = _draw_server(rng)
    lengths = _draw_lengths(rng, server.max_batch_size)
    workload_yaml = (
        f"name: drawn\nrequests: {lengths.to_yaml()}\n"
        "stages:\n  - {name: load, arrival: {poisson: 1/s}, duration: 60s}\n"
    )
    slo_terms = _draw_slo(rng, lengths.max_output_tokens)
    return SearchCase(server.to_yaml(), workload_yaml, slo_terms)


class DrawnServer(NamedTuple):
    """A simulated server: how it differs from the preset gb300-vm."""

    max_batch_size: int
    speed: float  # relative to the preset
    replica_count: int
    kv_cache_share: float

    def to_yaml(self) -> str:
        """Return the server as a preset file."""
        speeds = [round(self.speed, 3)] * self.replica_count
        return (
            f"extends: gb300-vm\nvms: {self.replica_count}\ngpus_per_vm: 1\n"
            f"vm_speeds: {speeds}\n"
            f"server: {{max_batch_size: {self.max_batch_size}, "
            f"kv_cache_share: {self.kv_cache_share}}}\n"
        )


def _draw_server(rng: np.random.Generator) -> DrawnServer:
    """Draw a server. One in three has two replicas, and two in three have a small KV cache."""
    return DrawnServer(
        max_batch_size=int(rng.choice([8, 16, 32, 64, 128])),
        speed=float(rng.uniform(0.6, 1.4)),
        replica_count=int(rng.choice([1, 1, 2])),
        kv_cache_share=float(rng.choice([0.02, 0.05, 0.95])),
    )


class DrawnLengths(NamedTuple):
    """The lengths of the requests of a workload.

    The output has always `max_output_tokens` or, if `is_output_variable`, uniformly distributed
    lengths from a third of that on.
    """

    input_tokens: int
    max_output_tokens: int
    is_output_variable: bool

    def to_yaml(self) -> str:
        """Return the block `requests` of a workload file."""
        output_tokens = str(self.max_output_tokens)
        if self.is_output_variable:
            min_output_tokens = max(self.max_output_tokens // 3, 1)
            limits = f"min: {min_output_tokens}, max: {self.max_output_tokens}"
            output_tokens = f"{{uniform: {{{limits}}}}}"
        return f"{{input_tokens: {self.input_tokens}, output_tokens: {output_tokens}}}"


def _draw_lengths(rng: np.random.Generator, max_batch_size: int) -> DrawnLengths:
    """Draw the lengths of requests, short ones more often than long ones.

    A server with a small batch gets short responses, so that it serves a few requests per second.
    """
    longest_output_tokens = min(1200, 20 * max_batch_size)
    return DrawnLengths(
        input_tokens=_draw_log_uniform(rng, 50, 2500),
        max_output_tokens=_draw_log_uniform(rng, 20, longest_output_tokens),
        is_output_variable=bool(rng.random() < 0.5),
    )


def _draw_log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    """Draw an integer between two limits whose logarithm is about uniformly distributed."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


OBJECTIVE_KINDS = ("tpot", "tpot", "ttft", "e2e", "both", "attainment")  # TPOT twice as often


def _draw_slo(rng: np.random.Generator, max_output_tokens: int) -> tuple[str, ...]:
    """Draw the objectives of an SLO, in the form of the option `--slo`.

    Some are tight and some hardly limit anything, such as a TPOT of 200 or 500 ms, so that the
    search also meets servers that are limited by something else. A limit on E2E is what the longest
    response takes at the limits on TTFT and TPOT.
    """
    percentile = str(rng.choice(["p50", "p90", "p95", "p99"]))
    tpot_ms = float(rng.choice([30, 60, 200, 500]))
    ttft_s = float(rng.choice([0.5, 2, 30, 300]))
    e2e_s = ttft_s + max_output_tokens * tpot_ms / 1000
    tpot_term = f"tpot:{tpot_ms:g}ms:{percentile}"
    ttft_term = f"ttft:{ttft_s:g}s:{percentile}"

    match str(rng.choice(OBJECTIVE_KINDS)):
        case "tpot":
            return (tpot_term,)
        case "ttft":
            return (ttft_term,)
        case "e2e":
            return (f"e2e:{e2e_s:.3f}s:{percentile}",)
        case "both":
            return (ttft_term, tpot_term)
        case _:  # attainment: the share of requests that meet all objectives
            return (f"tpot:{tpot_ms:g}ms:p99", "attainment:90%")


@dataclass(frozen=True)
class SearchChecker:
    """Runs the search of a case, and long runs at fixed loads that check its result.

    All files are written to `work_dir`.
    """

    case: SearchCase
    seed: int
    work_dir: Path

    @property
    def _workload_path(self) -> Path:
        """The file of the workload, which `write_inputs` writes."""
        return self.work_dir / "work.yaml"

    @property
    def _preset_path(self) -> Path:
        """The file of the simulated server, which `write_inputs` writes."""
        return self.work_dir / "server.yaml"

    def write_inputs(self) -> None:
        """Write the files that the search and the long runs read."""
        self._preset_path.write_text(self.case.preset_yaml)
        self._workload_path.write_text(self.case.workload_yaml)

    def run_search(self) -> Capacity:
        """Run the command `loadgen search` without its output, and return the stored capacity."""
        output_dir = self.work_dir / "search"
        command = ["search", str(self._workload_path), "--url", f"sim:{self._preset_path}"]
        for term in self.case.slo_terms:
            command += ["--slo", term]
        command += ["--duration", f"{TRIAL_S}s", "--timeout", TIMEOUT, "--precision", "5%"]
        command += ["--gpus", "1", "--seed", str(self.seed), "--out", str(output_dir)]

        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run_command_line(command)
        return load_capacity((output_dir / "capacity.json").read_bytes())

    def is_sustained(self, rate_per_s: float) -> bool:
        """Return whether the server sustains a load.

        One long run that passes is enough. A run at a load close to the capacity can also fail by
        chance. So if it fails, there are two further runs, and the load is sustained if both pass.
        """
        if self._long_run_passes(rate_per_s, run_number=0):
            return True
        return all(self._long_run_passes(rate_per_s, run_number) for run_number in (1, 2))

    def _long_run_passes(self, rate_per_s: float, run_number: int) -> bool:
        """Simulate a long run at a load; return whether it meets the SLO and keeps up with it.

        Only the second half of the run counts, when the server has settled.
        """
        flags = read_flags(
            slo=self.case.slo_terms,
            timeout=TIMEOUT,
            request_rate=rate_per_s,
            duration=f"{LONG_RUN_S}s",
            seed=10_000 * (1 + run_number) + self.seed,
        )
        workload = load(str(self._workload_path), flags)
        assert workload.slo is not None
        run_dir = self.work_dir / f"truth-{rate_per_s:.4g}-{run_number}"
        settings = Settings(url=f"sim:{self._preset_path}", out=run_dir)
        _, stored_dir = run.execute(workload, settings)

        records = store.read_run(stored_dir).rows
        return meets_slo(records, workload.slo) and keeps_up(records)


HALF_RUN_NS = LONG_RUN_S * 1_000_000_000 / 2


def meets_slo(records: NDArray[np.void], slo: Slo) -> bool:
    """Return whether the requests of the second half of a long run meet the SLO."""
    second_half = records[records["due_ns"] >= HALF_RUN_NS]
    goal = Goal(slo=slo)
    misses = goal.find_misses(second_half).sum(axis=1)
    allowed_misses = np.array(goal.allowed_misses(len(second_half)))
    return bool(np.all(misses <= allowed_misses))


def keeps_up(records: NDArray[np.void]) -> bool:
    """Return whether about as many requests end in the second half of a long run as arrive in it.

    If fewer end, requests accumulate on the server.
    """
    end_ns = records["end_ns"]
    is_in_second_half = (end_ns > HALF_RUN_NS) & (end_ns <= 2 * HALF_RUN_NS)
    completed = np.sum((records["status"] == STATUS["ok"]) & is_in_second_half)
    arrived = np.sum(records["due_ns"] >= HALF_RUN_NS)
    return bool(completed >= MIN_COMPLETION_RATIO * arrived)


CONFIRMED_STATES = ("sustained", "confirmed")  # of a capacity


class CheckedSearch(msgspec.Struct, frozen=True):
    """What a search found, and whether long runs agree.

    `is_too_low` is None if it was not checked.
    """

    seed: int
    case: str
    state: str
    rate_per_s: float
    is_too_high: bool
    is_too_low: bool | None
    cpu_s: float

    @property
    def is_confirmed(self) -> bool:
        """Whether the search confirmed a load."""
        return self.state in CONFIRMED_STATES


def check_search(seed: int, *, checks_lower_bound: bool) -> CheckedSearch:
    """Search the capacity of a case drawn from a seed, and check a confirmed load by long runs.

    The load is too high if the server does not even sustain a slightly lower one, that is the load
    divided by MAX_RATIO_TO_CAPACITY. With `checks_lower_bound`, it is too low if the server
    sustains TOO_LOW_RATIO times the load.
    """
    case = draw_case(seed)
    cpu_start_s = time.process_time()
    is_too_high = False
    is_too_low = None

    with tempfile.TemporaryDirectory() as work_dir:
        checker = SearchChecker(case, seed, Path(work_dir))
        checker.write_inputs()
        capacity = checker.run_search()
        rate_per_s = capacity.rate_per_s

        state = capacity.state or ""
        if state in CONFIRMED_STATES:
            is_too_high = not checker.is_sustained(rate_per_s / MAX_RATIO_TO_CAPACITY)
            if checks_lower_bound and not is_too_high:
                is_too_low = checker.is_sustained(rate_per_s * TOO_LOW_RATIO)

    return CheckedSearch(
        seed=seed,
        case=case.title,
        state=state,
        rate_per_s=rate_per_s,
        is_too_high=is_too_high,
        is_too_low=is_too_low,
        cpu_s=time.process_time() - cpu_start_s,
    )


def print_totals(results: Sequence[CheckedSearch]) -> None:
    """Print how many searches confirmed a load, and how many of these loads are wrong.

    Whether a load is too low was not checked in every search.
    """
    states = Counter(result.state for result in results)
    print(f"\n{len(results)} searches: {dict(states)}")

    confirmed = sum(result.is_confirmed for result in results)
    too_high = sum(result.is_too_high for result in results)
    print(
        f"{too_high} of {confirmed} confirmed loads are above {MAX_RATIO_TO_CAPACITY:g} of the "
        "true capacity (limit: 0)"
    )

    is_too_low = [result.is_too_low for result in results if result.is_too_low is not None]
    if is_too_low:
        print(
            f"{sum(is_too_low)} of {len(is_too_low)} confirmed loads are below "
            f"1/{TOO_LOW_RATIO:g} of the true capacity"
        )


def main() -> int:
    """Run the searches and return 1 if one confirmed a load that is too high."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="the number of searches")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--bounds", action="store_true", help="also look for loads too low")
    args = rig.parse_arguments(parser, seeds=1)
    deadline_s = time.monotonic() + 60 * args.minutes

    results: list[CheckedSearch] = []
    for seed in range(args.first, args.first + args.seeds):
        if time.monotonic() > deadline_s:
            break
        result = check_search(seed, checks_lower_bound=args.bounds)
        results.append(result)
        print(json.dumps(msgspec.to_builtins(result)), flush=True)

    print_totals(results)
    return int(any(result.is_too_high for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
