"""Measures how much load one worker carries on this host with sound results, and how accurate these results are.

Two halves. Pure: arithmetic over the rows of a run and the log of the endpoint. IO: the steps that produce them, with
the embedded endpoint in a child process and one worker in this process, over loopback. A step is sound when the
validity verdict of its run says so.
"""

from __future__ import annotations

import asyncio
import gc
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np
from loadgen_sdk.probe.fetch import Fetcher
from loadgen_sdk.transport.target import Target

from loadgen.core import format
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import ReasonCode
from loadgen.core.run_summary import summarize
from loadgen.core.stats.quantiles import element
from loadgen.present.section import Bullets, Report, section

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.core.workload import Workload
    from loadgen.sim.server.send_log import SentRequests

Kind = Literal["spread", "lockstep", "requests"]

TOLERANCE_NS = (
    100_000  # between the endpoint's clock reading and the kernel stamp: one send, or a preemption
)
AIM = 0.85  # CPU share that the next step aims at; the validity limit is 0.9
CLOSE = 1.25  # the search ends when broken / sound level is at most this
SERVER_SHARE = 0.9  # share of a core: the client may be waiting for an endpoint busier than this
SERVER_LATE_MS = 10.0  # median lateness of an endpoint that does not keep up with its plan
TOKENS, ITL_MS, TTFT_MS = 100, 10, 100  # the streams of event steps: about a second each
DRAIN_S = 0.8  # end of a step, in which no request starts
SHORT_TOKENS, SHORT_ITL_MS = 4, 2  # the streams of request steps
FIRST: dict[Kind, float] = {"spread": 10_000.0, "lockstep": 10_000.0, "requests": 1_000.0}
STEPS: dict[Kind, int] = {"spread": 4, "lockstep": 3, "requests": 4}
NAMES: dict[Kind, str] = {
    "spread": "events/s, streams apart",
    "lockstep": "events/s, streams in lockstep",
    "requests": f"requests/s of {SHORT_TOKENS} tokens",
}


# -- truth: rows against the endpoint's log -----------------------------------------------------------------------


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracy of a run against the endpoint's log. `*_error` of a quantile: reported - true quantile."""

    count: int  # ok requests found in both
    ttft_p50_ms: float  # true: first token sent - due
    ttft_p99_ms: float
    ttft_p50_error_ms: float
    ttft_p99_error_ms: float
    tpot_p50_error_share: float | None  # relative; null when no answer has two tokens
    error_p50_ms: float  # of |reported - true first token| per request
    error_p99_ms: float
    error_max_ms: float
    stamp_error_p50_ms: float
    stamp_error_p99_ms: float
    bounded_share: (
        float  # share of requests with an error within their own stamp error + TOLERANCE_NS
    )
    explained_share: (
        float  # the same, with the true instant anywhere up to the endpoint's next clock reading
    )


def truth(rows: NDArray[np.void], log: SentRequests, run_id: str, start_ns: int) -> Truth | None:
    """Compare the ok rows of a run with the log of the endpoint that served it; None when they share no request.

    The endpoint reads its clock just before each send. The true instant lies between that reading and the next one in
    the log, which follows the return of the send.
    """
    prefix = run_id + "-"
    slots = np.full(max((request.number for request in log.requests), default=-1) + 1, -1, np.int64)
    for request in log.requests:
        if request.id.startswith(prefix) and request.status == 200:
            slots[request.number] = int(request.id.removeprefix(prefix))
    answered_rows = np.flatnonzero((rows["status"] == 0) & (rows["first_token_ns"] >= 0))
    row_of_slot = np.full(
        int(max(slots.max(initial=-1), rows["slot"].max(initial=-1))) + 1, -1, np.int64
    )
    row_of_slot[rows["slot"][answered_rows]] = answered_rows
    log_order = np.arange(len(log.request))
    first_send = np.full(len(slots), -1, np.int64)
    last_send = first_send.copy()
    first_send[log.request[::-1]] = log_order[::-1]
    last_send[log.request] = log_order
    request_numbers = np.flatnonzero((slots >= 0) & (first_send >= 0))
    matched_rows = row_of_slot[slots[request_numbers]]
    request_numbers, matched_rows = (
        request_numbers[matched_rows >= 0],
        matched_rows[matched_rows >= 0],
    )
    if not len(matched_rows):
        return None
    sent = log.sent_ns - start_ns
    true_first, true_last = sent[first_send[request_numbers]], sent[last_send[request_numbers]]
    next_send = sent[np.minimum(first_send[request_numbers] + 1, len(sent) - 1)]
    due, reported, stamp_error = (
        rows[name][matched_rows] for name in ("due_ns", "first_token_ns", "stamp_error_ns")
    )
    error = reported - true_first
    over_stamp_error, is_early = error - stamp_error, error < -TOLERANCE_NS
    slack = np.maximum(next_send - true_first, 0)
    multi_token = rows["output_tokens"][matched_rows] > 1
    gaps = rows["output_tokens"][matched_rows][multi_token] - 1
    true_tpot = (true_last - true_first)[multi_token] / gaps
    tpot = (rows["last_token_ns"][matched_rows] - reported)[multi_token] / gaps
    return Truth(
        count=len(matched_rows),
        ttft_p50_ms=_quantile_ms(true_first - due, 0.5),
        ttft_p99_ms=_quantile_ms(true_first - due, 0.99),
        ttft_p50_error_ms=_quantile_ms(reported - due, 0.5) - _quantile_ms(true_first - due, 0.5),
        ttft_p99_error_ms=_quantile_ms(reported - due, 0.99) - _quantile_ms(true_first - due, 0.99),
        tpot_p50_error_share=element(tpot, 0.5) / element(true_tpot, 0.5) - 1
        if len(gaps)
        else None,
        error_p50_ms=_quantile_ms(np.abs(error), 0.5),
        error_p99_ms=_quantile_ms(np.abs(error), 0.99),
        error_max_ms=_quantile_ms(np.abs(error), 1.0),
        stamp_error_p50_ms=_quantile_ms(stamp_error, 0.5),
        stamp_error_p99_ms=_quantile_ms(stamp_error, 0.99),
        bounded_share=float(np.mean((over_stamp_error <= TOLERANCE_NS) & ~is_early)),
        explained_share=float(np.mean((over_stamp_error <= slack + TOLERANCE_NS) & ~is_early)),
    )


def _quantile_ms(values_ns: NDArray[np.generic], p: float) -> float:
    return round(element(values_ns, p) / 1e6, 4)


# -- the search ---------------------------------------------------------------------------------------------------


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One tried load level. Rates are per second: of events, or of requests for kind `requests`."""

    kind: Kind
    offered: float
    achieved: float
    cpu_share: float  # of one core, by the worker in its busiest full second
    server_share: float  # of one core, by the endpoint, mean over the step
    server_late_p50_ms: float  # real send - planned send, from the endpoint's log
    send_lag_p99_ms: float | None
    truth: Truth | None
    sound: bool  # validity verdict of the run
    reasons: tuple[str, ...] = ()
    codes: tuple[ReasonCode, ...] = ()  # of `reasons`, one for one
    server_limited: bool = False


class SoundLevel(msgspec.Struct, frozen=True, kw_only=True):
    """The highest sound level of a kind; `per_s` is null when no level was sound.

    `limit` is what ended the search: the client, the server (the client could do more), or the number of steps.
    """

    kind: Kind
    per_s: float | None
    limit: Literal["client", "server", "steps"]


class SelfcheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a self-check."""

    seconds: float
    cpus: int
    steps: tuple[Step, ...]
    levels: tuple[SoundLevel, ...]
    hot_path: str = ""  # what read the sockets: "compiled" (C) or "python"

    @property
    def sound(self) -> bool:
        """Whether at least one level of every kind was sound."""
        return all(level.per_s is not None for level in self.levels)


def following(steps: Sequence[Step], first: float, most: int) -> float | None:
    """The next level to try after `steps` (all of one kind); None: the search is done. At most `most` steps.

    A level that was unsound although the worker had CPU time left is tried once more: on a shared machine another
    process may have used the core.
    """
    if not steps:
        return first
    if len(steps) >= most or steps[-1].server_limited:
        return None
    last = steps[-1]
    if (
        not last.sound
        and last.cpu_share < AIM
        and sum(step.offered == last.offered for step in steps) == 1
    ):
        return last.offered
    highest_sound = max((step.offered for step in steps if step.sound), default=None)
    lowest_broken = _lowest_broken(steps)
    if lowest_broken is None:
        return last.offered * min(5.0, max(CLOSE, AIM / max(last.cpu_share, 0.01)))
    if highest_sound is None:
        return lowest_broken / 2
    return (
        math.sqrt(highest_sound * lowest_broken) if lowest_broken > highest_sound * CLOSE else None
    )


def _lowest_broken(steps: Sequence[Step]) -> float | None:
    """The lowest level that was never sound, levels limited by the endpoint excluded; None without one."""
    sound = {step.offered for step in steps if step.sound or step.server_limited}
    return min((step.offered for step in steps if step.offered not in sound), default=None)


def level(kind: Kind, steps: Sequence[Step]) -> SoundLevel:
    """The result of the steps of one kind: the highest sound level below the lowest one that the client failed."""
    broken = _lowest_broken(steps)
    sound = [step for step in steps if step.sound and (broken is None or step.offered < broken)]
    highest_rate = max((step.achieved for step in sound), default=None)
    limit: Literal["client", "server", "steps"] = "steps"
    if broken is not None:
        limit = "client"
    elif any(step.server_limited for step in steps):
        limit = "server"
    return SoundLevel(kind=kind, per_s=highest_rate, limit=limit)


def server_limited(*, cpu_share: float, server_share: float, server_late_p50_ms: float) -> bool:
    """Whether the endpoint limited a step: it was busy or late while the client still had CPU time left."""
    return cpu_share < AIM and (server_share > SERVER_SHARE or server_late_p50_ms > SERVER_LATE_MS)


# -- output --------------------------------------------------------------------------------------------------------

_COLUMNS = (
    "offered",
    "achieved",
    "CPU",
    "endpoint",
    "TTFT error p50",
    "p99",
    "stamp error p99",
    "send lag p99",
)
_WIDTH = 9


def line(step: Step) -> str:
    """The line of the table for one step."""
    cells = [
        f"{step.offered:,.0f}",
        f"{step.achieved:,.0f}",
        f"{step.cpu_share:.0%}",
        f"{step.server_share:.0%}",
    ]
    names = ("error_p50_ms", "error_p99_ms", "stamp_error_p99_ms")
    values = [getattr(step.truth, name, None) for name in names]  # None where there is no truth
    cells += [
        "-" if value is None else f"{value:.3f} ms" for value in (*values, step.send_lag_p99_ms)
    ]
    text = "".join(
        f"{cell:>{max(len(name), _WIDTH) + 2}}" for cell, name in zip(cells, _COLUMNS, strict=True)
    )
    outcome = (
        "sound" if step.sound else "; ".join(reason.code.replace("_", " ") for reason in step.codes)
    )
    return f"{text}   {outcome}{'; the endpoint was the limit' if step.server_limited else ''}"


def heading(kind: Kind) -> str:
    """The heading of the table for one kind."""
    return f"{NAMES[kind]}\n" + "".join(
        f"{name:>{max(len(name), _WIDTH) + 2}}" for name in _COLUMNS
    )


def sentence(sound_level: SoundLevel) -> str:
    """The result of one kind in words."""
    if sound_level.per_s is None:
        return f"{NAMES[sound_level.kind]}: no level was sound, the lightest one included"
    rounded = float(f"{sound_level.per_s:.2g}")
    answer = f"{NAMES[sound_level.kind]}: about {rounded:,.0f}"
    if sound_level.limit == "server":
        return f"{answer} or more: the endpoint was at its limit there, not the worker"
    return f"{answer} or more: the search ended there" if sound_level.limit == "steps" else answer


def report(result: SelfcheckResult) -> Report:
    """What one worker of this host can carry."""
    read_by = {
        "python": "Sockets are read by Python: installed with a C compiler, a worker carries more (docs/scale.md).",
        "compiled": "Sockets are read by compiled code.",
    }
    cores = format.counted(result.cpus, "core")
    return Report(
        title=f"One worker on this host ({cores}, shared with the endpoint in these steps) can carry:",
        made_by="loadgen doctor",
        sections=[
            section("", Bullets([*map(sentence, result.levels)]), read_by.get(result.hot_path, ""))
        ],
    )


# -- the steps themselves ------------------------------------------------------------------------------------------


def run(seconds: float = 3.0, say: Callable[[str], None] = print) -> SelfcheckResult:
    """Search each kind of level. `say` gets a line per step; every step takes a little more than `seconds`."""
    from loadgen_sdk import compiled

    from loadgen.core.execution import resource_limits

    steps: list[Step] = []
    levels = []
    for kind, first in FIRST.items():
        steps_of_kind: list[Step] = []
        say(heading(kind))
        while (offered := following(steps_of_kind, first, STEPS[kind])) is not None:
            steps_of_kind.append(step(kind, offered, seconds))
            say(line(steps_of_kind[-1]))
        steps += steps_of_kind
        levels.append(level(kind, steps_of_kind))
    return SelfcheckResult(
        seconds=seconds,
        cpus=resource_limits.cpus(),
        steps=tuple(steps),
        levels=tuple(levels),
        hot_path=compiled.RUNS,
    )


def step(kind: Kind, offered: float, seconds: float) -> Step:
    """Run one level with Poisson arrivals against its own endpoint, and compare the rows with its log."""
    import json

    from loadgen.sim.server import embedded
    from loadgen.sim.server.options import Options
    from loadgen.sim.server.send_log import parse_log

    is_requests = kind == "requests"
    tokens, itl_ms = (SHORT_TOKENS, SHORT_ITL_MS) if is_requests else (TOKENS, ITL_MS)
    options = Options(
        ttft=f"normal:{TTFT_MS}ms,{TTFT_MS / 5}ms",
        itl=f"{itl_ms}ms",
        lockstep=kind == "lockstep",
        log_events="ends",
        idle_close="60s",
    )
    rate = offered if is_requests else offered / tokens

    def get(path: str) -> bytes:
        fetcher = Fetcher(Target.parse(server.url), timeout_s=30, most_bytes=sys.maxsize)
        return asyncio.run(fetcher.exchange("GET", path, (), b"")).body

    with (
        tempfile.TemporaryDirectory(prefix="loadgen-selfcheck-") as scratch,
        embedded.start(options) as server,
    ):
        folder = Path(scratch)
        workload = _workload(tokens, rate, seconds - DRAIN_S)
        stats_before = json.loads(get("/_stats"))
        driven = _drive(server.url, workload, folder)
        stats_after = json.loads(get("/_stats"))
        log = parse_log(get("/_log"))
    rows, summary = driven.rows, driven.summary
    wall_s = max((driven.end_ns - driven.start_ns) / 1e9, 1e-9)
    length_s = (TTFT_MS + itl_ms * tokens) / 1e3
    achieved = _achieved(rows, is_requests, min(length_s, seconds / 3), seconds - DRAIN_S)
    cpu_share = summary.client.cpu_share_max or (summary.client.cpu_s or 0.0) / wall_s
    server_share = (stats_after["cpu_s"] - stats_before["cpu_s"]) / wall_s
    late_ms = _quantile_ms(log.sent_ns - log.planned_ns, 0.5) if len(log.sent_ns) else 0.0
    return Step(
        kind=kind,
        offered=round(offered, 1),
        achieved=round(achieved, 1),
        cpu_share=round(cpu_share, 3),
        server_share=round(server_share, 3),
        server_late_p50_ms=late_ms,
        send_lag_p99_ms=summary.send_lag_ms.p99,
        truth=truth(rows, log, driven.run_id, driven.start_ns),
        sound=summary.verdict.valid,
        reasons=summary.verdict.reasons,
        codes=summary.verdict.codes,
        server_limited=server_limited(
            cpu_share=cpu_share, server_share=server_share, server_late_p50_ms=late_ms
        ),
    )


def _achieved(rows: NDArray[np.void], requests: bool, low_s: float, high_s: float) -> float:
    """Rate per second in [low_s, high_s) of the run: completed requests, or events spread evenly over each stream."""
    low_ns, high_ns = low_s * 1e9, high_s * 1e9
    first, last = rows["first_token_ns"].astype(float), rows["last_token_ns"].astype(float)
    if requests:
        return float(np.sum((last >= low_ns) & (last < high_ns)) / (high_s - low_s))
    spans = np.maximum(last - first, 1.0)
    inside = np.clip(np.minimum(last, high_ns) - np.maximum(first, low_ns), 0, None) / spans
    return float(np.sum(inside * rows["output_events"]) / (high_s - low_s))


class _DrivenRun(NamedTuple):
    rows: NDArray[np.void]
    summary: Summary
    run_id: str
    start_ns: int
    end_ns: int


def _workload(tokens: int, rate: float, seconds: float) -> Workload:
    from loadgen.core.workload import read_flags
    from loadgen.core.workload.loading import of_mapping

    requests = {"input_tokens": 20, "output_tokens": tokens}
    load = read_flags(request_rate=rate, duration=seconds, grace=5, timeout=20)
    return of_mapping({"name": "selfcheck", "requests": requests}, load)


def _drive(url: str, workload: Workload, folder: Path) -> _DrivenRun:
    """An ordinary run, without the process that writes its rows as Parquet."""
    import uvloop

    from loadgen.core.execution import run_header
    from loadgen.core.execution.driver import SETTLE_NS, work
    from loadgen.core.execution.plan import Settings, prepare
    from loadgen.core.execution.probing import find
    from loadgen.core.results import manifest, store

    starts: list[int] = []

    async def gate() -> int:
        gc.freeze()  # exclude objects of earlier steps from garbage collection, which could delay the start
        starts.append(monotonic_ns() + SETTLE_NS)
        return starts[0]

    settings = Settings(url=url)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        probe_result = runner.run(find(settings, workload.timeout_ns / 1e9))
        plan, begins = prepare(workload, settings, (probe_result,), simulated=True, folder=folder)
        store.replace(
            folder / "run.json", manifest.encode(run_header.header(plan, workload, begins))
        )
        runner.run(work(plan, 0, 1, gate, lambda driver: None))
    end_ns = monotonic_ns()
    stored = store.read_lightly(folder, by_stage=False)
    return _DrivenRun(stored.rows, summarize(*stored), plan.job.run_id, starts[0], end_ns)
