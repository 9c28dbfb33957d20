"""Whether `loadgen search` confirms a load that the server does not sustain, in virtual time.

Servers, workloads and SLOs are drawn by seed: batch size, cache and speed of one or two replicas,
lengths of prompts and responses, and objectives on TPOT, TTFT, E2E, both, or the joint share, tight
ones and ones that hardly limit anything. Each search is the command itself. A confirmed load is
judged by long runs at fixed loads, LONG times the length of a trial: if most of the runs at the
load divided by ALLOWED miss the SLO or fall behind, then the load is more than ALLOWED times the
true capacity. Loads are of a few requests per second and more, so that the number of requests in a
trial differs from its mean by less than that. With --bounds a run at TOO_LOW times the load says
whether the answer is much too low.

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
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import rig

from loadgen.cli.app import run_command_line
from loadgen.core.execution import run
from loadgen.core.execution.plan import Settings
from loadgen.core.results import store
from loadgen.core.results.record import STATUS
from loadgen.core.workload import load
from loadgen.core.workload.flags import read_flags
from loadgen.repeated.capacity import Capacity, load_capacity
from loadgen.search.goal import Goal

ALLOWED = 1.05  # times the true capacity: no confirmed load may be higher
TOO_LOW = 1.25  # times the confirmed load: an answer below that is called much too low
LONG = 6.0  # times the length of a trial: the length of the runs that give the truth
RUNS = 3  # of which most decide, where the first one fails
BEHIND = 0.98  # share of the arrivals that a server that keeps up completes in half of a long run
TRIAL_S = 600  # the default of a search
TIMEOUT = "7200s"


class Case(NamedTuple):
    """A server, a workload and an SLO, as the files and options of a search."""

    preset: str
    workload: str
    slo: tuple[str, ...]

    @property
    def title(self) -> str:
        """The case in a few words."""
        lengths = self.workload.splitlines()[1].removeprefix("requests: ")
        return f"{lengths} {', '.join(self.slo)}"


def draw_case(seed: int) -> Case:
    """Draw a server, a workload and an SLO by a seed."""
    rng = np.random.default_rng([seed, 56])
    batch = int(rng.choice([8, 16, 32, 64, 128]))
    speed = float(rng.uniform(0.6, 1.4))
    replicas = int(rng.choice([1, 1, 2]))
    cache_share = float(rng.choice([0.02, 0.05, 0.95]))
    preset = (
        f"extends: gb300-vm\nvms: {replicas}\ngpus_per_vm: 1\n"
        f"vm_speeds: {[round(speed, 3)] * replicas}\n"
        f"server: {{max_batch_size: {batch}, kv_cache_share: {cache_share}}}\n"
    )
    prompt = round(math.exp(rng.uniform(math.log(50), math.log(2500))))
    longest = min(1200, 20 * batch)  # so that a server serves a few requests per second
    response = round(math.exp(rng.uniform(math.log(20), math.log(longest))))

    lengths = f"{{input_tokens: {prompt}, output_tokens: {response}}}"
    if rng.random() < 0.5:
        spread = f"{{uniform: {{min: {max(response // 3, 1)}, max: {response}}}}}"
        lengths = f"{{input_tokens: {prompt}, output_tokens: {spread}}}"

    workload = (
        f"name: drawn\nrequests: {lengths}\n"
        "stages:\n  - {name: load, arrival: {poisson: 1/s}, duration: 60s}\n"
    )
    return Case(preset, workload, _draw_slo(rng, response))


OBJECTIVE_KINDS = ("tpot", "tpot", "ttft", "e2e", "both", "attainment")  # TPOT twice as often


def _draw_slo(rng: np.random.Generator, response: int) -> tuple[str, ...]:
    """Draw the objectives of a case whose responses have up to `response` tokens.

    Some are tight and some hardly limit anything, such as a TPOT of 200 or 500 ms, so that the
    search also meets servers that are limited by something else. E2E fits to TTFT and TPOT.
    """
    percentile = str(rng.choice(["p50", "p90", "p95", "p99"]))
    tpot_ms = float(rng.choice([30, 60, 200, 500]))
    ttft_s = float(rng.choice([0.5, 2, 30, 300]))
    e2e_s = ttft_s + response * tpot_ms / 1000
    tpot = f"tpot:{tpot_ms:g}ms:{percentile}"

    ttft = f"ttft:{ttft_s:g}s:{percentile}"
    match str(rng.choice(OBJECTIVE_KINDS)):
        case "tpot":
            return (tpot,)
        case "ttft":
            return (ttft,)
        case "e2e":
            return (f"e2e:{e2e_s:.3f}s:{percentile}",)
        case "both":
            return (ttft, tpot)
        case _:  # attainment: the share of requests that meet all objectives
            return (f"tpot:{tpot_ms:g}ms:p99", "attainment:90%")


def search(case: Case, seed: int, folder: Path) -> Capacity:
    """Run the search of a case and return the capacity that it wrote."""
    (folder / "server.yaml").write_text(case.preset)
    (folder / "work.yaml").write_text(case.workload)
    objectives = [word for term in case.slo for word in ("--slo", term)]
    command = ["search", str(folder / "work.yaml"), "--url", f"sim:{folder / 'server.yaml'}"]

    options = ["-d", f"{TRIAL_S}s", "--timeout", TIMEOUT, "--precision", "5%", "--gpus", "1"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run_command_line(
            [*command, *objectives, *options, "--seed", str(seed), "-o", str(folder / "search")]
        )

    return load_capacity((folder / "search" / "capacity.json").read_bytes())


def is_sustained(case: Case, rate_per_s: float, seed: int, folder: Path) -> bool:
    """Return whether a load is sustained: by one long run that is, or by most of RUNS."""
    if sustains(case, rate_per_s, seed, folder, number=0):
        return True
    further_results = [sustains(case, rate_per_s, seed, folder, number=n) for n in range(1, RUNS)]
    return sum(further_results) > RUNS // 2


def sustains(case: Case, rate_per_s: float, seed: int, folder: Path, *, number: int) -> bool:
    """Return whether a long run at a load meets the SLO and keeps up in its second half."""
    length_ns = round(LONG * TRIAL_S * 1e9)
    flags = read_flags(
        slo=case.slo,
        timeout=TIMEOUT,
        request_rate=rate_per_s,
        duration=f"{length_ns / 1e9:g}s",
        seed=10_000 * (1 + number) + seed,
    )
    workload = load(str(folder / "work.yaml"), flags)
    assert workload.slo is not None
    out = folder / f"truth-{rate_per_s:.4g}-{number}"
    settings = Settings(url=f"sim:{folder / 'server.yaml'}", out=out)
    _, run_folder = run.execute(workload, settings)
    rows = store.read_run(run_folder).rows
    second_half = rows[rows["due_ns"] >= length_ns / 2]
    goal = Goal(slo=workload.slo)
    misses = goal.find_misses(second_half).sum(axis=1)
    allowed = goal.allowed_misses(len(second_half))
    meets_slo = all(count <= most for count, most in zip(misses, allowed, strict=True))
    is_completed = (
        (rows["status"] == STATUS["ok"])
        & (rows["end_ns"] > length_ns / 2)
        & (rows["end_ns"] <= length_ns)
    )

    return meets_slo and int(is_completed.sum()) >= BEHIND * len(second_half)


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


def check_search(seed: int, *, checks_lower_bound: bool) -> CheckedSearch:
    """Search a case drawn from a seed, and check its capacity by long runs.

    A confirmed load must not be more than ALLOWED times too high. With `checks_lower_bound`, it is
    also checked that TOO_LOW times the load is not sustained.
    """
    case = draw_case(seed)
    start_s = time.process_time()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        capacity = search(case, seed, folder)
        rate = capacity.rate_per_s
        is_confirmed = capacity.state in ("sustained", "confirmed")
        is_too_high = is_confirmed and not is_sustained(case, rate / ALLOWED, seed, folder)

        is_too_low = None
        if checks_lower_bound and is_confirmed and not is_too_high:
            is_too_low = is_sustained(case, rate * TOO_LOW, seed, folder)

    spent_s = time.process_time() - start_s
    state = capacity.state or ""
    return CheckedSearch(seed, case.title, state, rate, is_too_high, is_too_low, spent_s)


def print_totals(results: Sequence[CheckedSearch]) -> None:
    """Print how many searches confirmed a load, and how many of these loads are wrong.

    A load is wrong if it is above ALLOWED times the load that the server sustains, or, where that
    was checked, below it by the factor TOO_LOW.
    """
    states = Counter(result.state for result in results)
    confirmed = states["sustained"] + states["confirmed"]
    too_high = sum(result.is_too_high for result in results)
    lower_checks = [result.is_too_low for result in results if result.is_too_low is not None]
    print(f"\n{len(results)} searches: {dict(states)}")
    print(
        f"{too_high} of {confirmed} confirmed loads are above {ALLOWED:g} of the truth (limit: 0)"
    )

    if lower_checks:
        print(f"{sum(lower_checks)} of {len(lower_checks)} are below 1/{TOO_LOW:g} of the truth")


def main() -> int:
    """Run the searches and return 1 if one confirmed a load that is too high."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--bounds", action="store_true", help="also look for loads too low")
    args = rig.parse_arguments(parser, seeds=1)
    end_s = time.monotonic() + 60 * args.minutes

    results: list[CheckedSearch] = []
    for seed in range(args.first, args.first + args.seeds):
        if time.monotonic() > end_s:
            break
        result = check_search(seed, checks_lower_bound=args.bounds)
        results.append(result)
        print(json.dumps(msgspec.to_builtins(result)), flush=True)

    print_totals(results)
    return int(any(result.is_too_high for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
