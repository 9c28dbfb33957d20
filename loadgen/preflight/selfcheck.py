"""How much one worker can carry on this host before its numbers stop being sound, and how far they are from the truth.

Two halves: arithmetic over the rows of a run and the endpoint's own log (pure), and the steps that make them (IO: the
embedded endpoint in a child process, one worker here, loopback only). What is sound is the verdict of every run.
"""

from __future__ import annotations

import asyncio
import gc
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from loadgen.metrics.summary import Summary, summarize
from loadgen.stats.quantiles import index

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.sim.server.send_log import SentRequests
    from loadgen.workload import Workload

Kind = Literal["spread", "lockstep", "requests"]

TOLERANCE_NS = 100_000  # between the endpoint's look at its clock and the kernel's stamp: one send, or a preemption
AIM = 0.85  # CPU share that a further step aims at; the verdict's limit is 0.9
CLOSE = 1.25  # a broken level this near above a sound one ends the search
SERVER_SHARE = 0.9  # of a core: an endpoint busier than this may be what the client waits for
SERVER_LATE_MS = 10.0  # behind its own plan at the median: an endpoint that does not keep up
TOKENS, ITL_MS, TTFT_MS = 100, 10, 100  # streams of the event steps: a second long each
DRAIN_S = 0.8  # of a step: nothing new is started in it
SHORT_TOKENS, SHORT_ITL_MS = 4, 2  # of the request steps
FIRST: dict[Kind, float] = {"spread": 10_000.0, "lockstep": 10_000.0, "requests": 1_000.0}
STEPS: dict[Kind, int] = {"spread": 4, "lockstep": 3, "requests": 4}
NAMES: dict[Kind, str] = {
    "spread": "events/s, streams apart",
    "lockstep": "events/s, streams in lockstep",
    "requests": f"requests/s of {SHORT_TOKENS} tokens",
}


# -- truth: rows against the endpoint's log -----------------------------------------------------------------------


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """What a run reported, less what the endpoint's log says. `*_error` of a quantile: reported - true quantile."""

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
    bounded_share: float  # of requests whose error is within their own stamp error + TOLERANCE_NS
    explained_share: float  # the same, the truth being anywhere up to the endpoint's next look at its clock


def truth(rows: NDArray[np.void], log: SentRequests, run_id: str, start_ns: int) -> Truth | None:
    """Compare the ok rows of a run with the log of the endpoint that served it; None when they share no request.

    The log's instant is read just before each send, so that the truth lies between it and the next one in the log,
    which the endpoint reads after the send has returned.
    """
    prefix = run_id + "-"
    slots = np.full(max((request.number for request in log.requests), default=-1) + 1, -1, np.int64)
    for request in log.requests:
        if request.id.startswith(prefix) and request.status == 200:
            slots[request.number] = int(request.id.removeprefix(prefix))
    known = np.flatnonzero((rows["status"] == 0) & (rows["first_token_ns"] >= 0))
    place = np.full(int(max(slots.max(initial=-1), rows["slot"].max(initial=-1))) + 1, -1, np.int64)
    place[rows["slot"][known]] = known
    order = np.arange(len(log.request))
    first = np.full(len(slots), -1, np.int64)
    last = first.copy()
    first[log.request[::-1]] = order[::-1]
    last[log.request] = order
    number = np.flatnonzero((slots >= 0) & (first >= 0))
    row = place[slots[number]]
    number, row = number[row >= 0], row[row >= 0]
    if not len(row):
        return None
    sent = log.sent_ns - start_ns
    true_first, true_last = sent[first[number]], sent[last[number]]
    later = sent[np.minimum(first[number] + 1, len(sent) - 1)]
    due, reported, stamp_error = (rows[name][row] for name in ("due_ns", "first_token_ns", "stamp_error_ns"))
    error = reported - true_first
    beyond, early = error - stamp_error, error < -TOLERANCE_NS
    slack = np.maximum(later - true_first, 0)
    several = rows["output_tokens"][row] > 1
    gaps = rows["output_tokens"][row][several] - 1
    true_tpot = (true_last - true_first)[several] / gaps
    tpot = (rows["last_token_ns"][row] - reported)[several] / gaps
    return Truth(
        count=len(row),
        ttft_p50_ms=_ms(true_first - due, 0.5),
        ttft_p99_ms=_ms(true_first - due, 0.99),
        ttft_p50_error_ms=_ms(reported - due, 0.5) - _ms(true_first - due, 0.5),
        ttft_p99_error_ms=_ms(reported - due, 0.99) - _ms(true_first - due, 0.99),
        tpot_p50_error_share=_at(tpot, 0.5) / _at(true_tpot, 0.5) - 1 if len(gaps) else None,
        error_p50_ms=_ms(np.abs(error), 0.5),
        error_p99_ms=_ms(np.abs(error), 0.99),
        error_max_ms=_ms(np.abs(error), 1.0),
        stamp_error_p50_ms=_ms(stamp_error, 0.5),
        stamp_error_p99_ms=_ms(stamp_error, 0.99),
        bounded_share=float(np.mean((beyond <= TOLERANCE_NS) & ~early)),
        explained_share=float(np.mean((beyond <= slack + TOLERANCE_NS) & ~early)),
    )


def _at(values: NDArray[np.generic], p: float) -> float:
    return float(np.sort(values)[index(len(values), p)])


def _ms(values_ns: NDArray[np.generic], p: float) -> float:
    return round(_at(values_ns, p) / 1e6, 4)


# -- the search ---------------------------------------------------------------------------------------------------


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One level, tried. Rates per second, of events or (kind `requests`) of requests."""

    kind: Kind
    offered: float
    achieved: float
    cpu_share: float  # of the worker, of one core, in its busiest full second
    server_share: float  # of the endpoint, mean over the step
    server_late_p50_ms: float  # real send - planned send, from the endpoint's log
    send_lag_p99_ms: float | None
    truth: Truth | None
    sound: bool  # the verdict of the run
    reasons: tuple[str, ...] = ()
    server_limited: bool = False


class SoundLevel(msgspec.Struct, frozen=True, kw_only=True):
    """The last sound level of a kind; `per_s` null when none was. `limit`: what ended the search above it: the
    client, the server (then the client can do more than this) or nothing (the steps were used up)."""

    kind: Kind
    per_s: float | None
    limit: Literal["client", "server", "steps"]


class SelfcheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a self-check."""

    seconds: float
    cpus: int
    steps: tuple[Step, ...]
    levels: tuple[SoundLevel, ...]

    @property
    def sound(self) -> bool:
        """Whether at least one level of every kind was sound."""
        return all(level.per_s is not None for level in self.levels)


def following(steps: Sequence[Step], first: float, most: int) -> float | None:
    """The level to try after these (all of one kind); None: enough is known. At most `most` steps.

    A level that was unsound though the worker had time to spare is tried a second time: on a shared machine somebody
    else may have had the core.
    """
    if not steps:
        return first
    if len(steps) >= most or steps[-1].server_limited:
        return None
    last = steps[-1]
    if not last.sound and last.cpu_share < AIM and sum(step.offered == last.offered for step in steps) == 1:
        return last.offered
    good = max((step.offered for step in steps if step.sound), default=None)
    bad = _broken(steps)
    if bad is None:
        return last.offered * min(5.0, max(CLOSE, AIM / max(last.cpu_share, 0.01)))
    if good is None:
        return bad / 2
    return math.sqrt(good * bad) if bad > good * CLOSE else None


def _broken(steps: Sequence[Step]) -> float | None:
    """The lowest level that was never sound, and not because of the endpoint."""
    sound = {step.offered for step in steps if step.sound or step.server_limited}
    return min((step.offered for step in steps if step.offered not in sound), default=None)


def level(kind: Kind, steps: Sequence[Step]) -> SoundLevel:
    """What the steps of one kind say: the highest sound one below every level that the client broke at."""
    broken = _broken(steps)
    sound = [step for step in steps if step.sound and (broken is None or step.offered < broken)]
    best = max((step.achieved for step in sound), default=None)
    limit: Literal["client", "server", "steps"] = "steps"
    if broken is not None:
        limit = "client"
    elif any(step.server_limited for step in steps):
        limit = "server"
    return SoundLevel(kind=kind, per_s=best, limit=limit)


def server_limited(*, cpu_share: float, server_share: float, server_late_p50_ms: float) -> bool:
    """Whether a step says something of the endpoint rather than of the client: it was busy, or fell behind its own
    plan, while the client still had time to spare."""
    return cpu_share < AIM and (server_share > SERVER_SHARE or server_late_p50_ms > SERVER_LATE_MS)


# -- what it says --------------------------------------------------------------------------------------------------

_COLUMNS = ("offered", "achieved", "CPU", "endpoint", "TTFT error p50", "p99", "stamp error p99", "send lag p99")
_WIDTH = 9


def line(step: Step) -> str:
    """One step on a line of the table."""
    seen = step.truth
    cells = [f"{step.offered:,.0f}", f"{step.achieved:,.0f}", f"{step.cpu_share:.0%}", f"{step.server_share:.0%}"]
    values = (seen.error_p50_ms, seen.error_p99_ms, seen.stamp_error_p99_ms) if seen is not None else (None,) * 3
    cells += ["-" if value is None else f"{value:.3f} ms" for value in (*values, step.send_lag_p99_ms)]
    text = "".join(f"{cell:>{max(len(name), _WIDTH) + 2}}" for cell, name in zip(cells, _COLUMNS, strict=True))
    said = "sound" if step.sound else "; ".join(reason.partition(":")[0] for reason in step.reasons)
    return f"{text}   {said}{'; the endpoint was the limit' if step.server_limited else ''}"


def heading(kind: Kind) -> str:
    """The lines above the steps of a kind."""
    return f"{NAMES[kind]}\n" + "".join(f"{name:>{max(len(name), _WIDTH) + 2}}" for name in _COLUMNS)


def sentence(found: SoundLevel) -> str:
    """The answer of one kind in words."""
    if found.per_s is None:
        return f"{NAMES[found.kind]}: no level was sound, the lightest one included"
    rounded = float(f"{found.per_s:.2g}")
    said = f"{NAMES[found.kind]}: about {rounded:,.0f}"
    if found.limit == "server":
        return f"{said} or more: the endpoint was at its limit there, not the worker"
    return f"{said} or more: the search ended there" if found.limit == "steps" else said


def render(found: SelfcheckResult) -> str:
    """The answer for people."""
    lines = [f"One worker on this host ({found.cpus} cores, shared with the endpoint in these steps) can carry:"]
    return "\n".join([*lines, *(f"  {sentence(each)}" for each in found.levels)])


def to_json(found: SelfcheckResult) -> str:
    """The answer for machines: `Found`, as JSON."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()


# -- the steps themselves ------------------------------------------------------------------------------------------


def run(seconds: float = 3.0, say: Callable[[str], None] = print) -> SelfcheckResult:
    """Try levels of each kind, telling `say` of every step: at most ten, each `seconds` long and a little more."""
    import os

    steps: list[Step] = []
    levels = []
    for kind, first in FIRST.items():
        own: list[Step] = []
        say(heading(kind))
        while (offered := following(own, first, STEPS[kind])) is not None:
            own.append(step(kind, offered, seconds))
            say(line(own[-1]))
        steps += own
        levels.append(level(kind, own))
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return SelfcheckResult(seconds=seconds, cpus=cpus, steps=tuple(steps), levels=tuple(levels))


def step(kind: Kind, offered: float, seconds: float) -> Step:
    """Drive one level at an endpoint of its own, Poisson arrivals, and hold the rows against its log."""
    import json
    import urllib.request

    from loadgen.sim.server import embedded
    from loadgen.sim.server.options import Options
    from loadgen.sim.server.send_log import parse_log

    short = kind == "requests"
    tokens, itl_ms = (SHORT_TOKENS, SHORT_ITL_MS) if short else (TOKENS, ITL_MS)
    options = Options(
        ttft=f"normal:{TTFT_MS}ms,{TTFT_MS / 5}ms",
        itl=f"{itl_ms}ms",
        lockstep=kind == "lockstep",
        log_events="ends",
        idle_close="60s",
    )
    rate = offered if short else offered / tokens

    def get(path: str) -> bytes:
        with urllib.request.urlopen(server.url + path, timeout=30) as answer:
            data: bytes = answer.read()
        return data

    with tempfile.TemporaryDirectory(prefix="loadgen-selfcheck-") as scratch, embedded.start(options) as server:
        folder = Path(scratch)
        workload = _workload(folder, tokens, rate, seconds - DRAIN_S)
        before = json.loads(get("/_stats"))
        drove = _drive(server.url, workload, folder)
        after = json.loads(get("/_stats"))
        log = parse_log(get("/_log"))
    rows, summary = drove.rows, drove.summary
    wall_s = max((drove.end_ns - drove.start_ns) / 1e9, 1e-9)
    length_s = (TTFT_MS + itl_ms * tokens) / 1e3
    achieved = _achieved(rows, short, min(length_s, seconds / 3), seconds - DRAIN_S)
    share = summary.client.cpu_share_max or (summary.client.cpu_s or 0.0) / wall_s
    server_share = (after["cpu_s"] - before["cpu_s"]) / wall_s
    late = _ms(log.sent_ns - log.planned_ns, 0.5) if len(log.sent_ns) else 0.0
    return Step(
        kind=kind,
        offered=round(offered, 1),
        achieved=round(achieved, 1),
        cpu_share=round(share, 3),
        server_share=round(server_share, 3),
        server_late_p50_ms=late,
        send_lag_p99_ms=summary.send_lag_ms.p99,
        truth=truth(rows, log, drove.run_id, drove.start_ns),
        sound=summary.verdict.valid,
        reasons=tuple(summary.verdict.reasons),
        server_limited=server_limited(cpu_share=share, server_share=server_share, server_late_p50_ms=late),
    )


def _achieved(rows: NDArray[np.void], requests: bool, low_s: float, high_s: float) -> float:
    """Rate over [low, high) seconds of the run: requests ended, or events, each request's evenly over its stream."""
    low, high = low_s * 1e9, high_s * 1e9
    first, last = rows["first_token_ns"].astype(float), rows["last_token_ns"].astype(float)
    if requests:
        return float(np.sum((last >= low) & (last < high)) / (high_s - low_s))
    spans = np.maximum(last - first, 1.0)
    inside = np.clip(np.minimum(last, high) - np.maximum(first, low), 0, None) / spans
    return float(np.sum(inside * rows["output_events"]) / (high_s - low_s))


class _Drove(msgspec.Struct, frozen=True, kw_only=True):
    rows: NDArray[np.void]
    summary: Summary
    run_id: str
    start_ns: int
    end_ns: int


def _workload(folder: Path, tokens: int, rate: float, seconds: float) -> Workload:
    from loadgen.workload import Overrides, load

    file = folder / "selfcheck.yaml"
    file.write_text(f"name: selfcheck\nrequests: {{input_tokens: 20, output_tokens: {tokens}}}\n")
    return load(str(file), Overrides(request_rate=rate, duration=seconds, grace=5, timeout=20))


def _drive(url: str, workload: Workload, folder: Path) -> _Drove:
    """A run as every other, without the process that makes Parquet of its rows."""
    import uvloop

    from loadgen.execution import run as runs
    from loadgen.execution.backends.single import work
    from loadgen.execution.plan import Settings, prepare
    from loadgen.execution.probing import find
    from loadgen.results import manifest, store

    starts: list[int] = []

    async def gate() -> int:
        gc.freeze()  # of earlier steps: the collector's pass before the start must not make it late
        starts.append(monotonic_ns() + runs.SETTLE_NS)
        return starts[0]

    settings = Settings(url=url)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(find(settings))
        job, header, _ = prepare(workload, settings, (found,), simulated=True, folder=folder)
        store.replace(folder / "run.json", manifest.encode(header))
        runner.run(work(job, 0, 1, gate))
    end_ns = monotonic_ns()
    stored = store.read_run(folder)
    return _Drove(rows=stored.rows, summary=summarize(*stored), run_id=job.run_id, start_ns=starts[0], end_ns=end_ns)
