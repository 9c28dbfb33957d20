"""Where the time of a request goes: TTFT and E2E in parts, for typical and for slow requests; and the slowest of them.

Pure. Quantiles of parts do not add up to the quantile of the whole. So a split is the mean over the requests whose
value is near the quantile, of the whole and of each part: these do add up. What the client cannot see is taken from
the server's own account of each request (`server_queue_ns` and so on in the records), where it gives one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from loadgen.core.limits import STALL_NS
from loadgen.core.metrics.columns import (
    UNDEFINED,
    Columns,
    JoinedColumns,
    as_selection,
    class_indices,
)
from loadgen.core.metrics.request_metrics import sendable_ns
from loadgen.core.metrics.sections import E2eSplit, Near, SlowRequest, SplitGroup, Splits, TtftSplit
from loadgen.core.results.record import ROW
from loadgen.core.stats.quantiles import milliseconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from loadgen.core.results.manifest import RunManifest

BANDS: dict[Near, tuple[float, float, int]] = {
    "p50": (0.45, 0.55, 11),
    "p99": (0.985, 0.995, 100),
    "slowest": (0.99, 1.0, 100),
}
"""Which requests stand for a quantile, by their rank as shares; and how many there must be to speak of it."""
CLASSES = (0.25, 0.5, 0.75)  # of the prompt lengths, where classes of them end
SHOWN = 5  # slowest requests that are listed, by TTFT and by E2E each


def of_rows(measured: Sequence[Columns], manifest: RunManifest) -> Splits:
    """The splits of the measured rows of a run."""
    for columns in measured:
        columns.forget()  # here a run of millions would hold most
    requests = JoinedColumns(measured, ok=True, keep=False)
    has_account, queue_known = (
        requests["server_prefill_ns"] >= 0,
        bool((requests["server_queue_ns"] >= 0).any()),
    )
    if not len(has_account):
        return Splits(why="no request ended ok")
    found = list(_groups(requests, manifest))
    due = requests["due_ns"]
    near = {}
    for metric in ("ttft", "e2e"):
        values = requests.measure(metric)
        for i, (_, _, own) in enumerate(found):
            if metric == "ttft":
                own = (
                    own
                    & (values != UNDEFINED)
                    & (has_account if (own & has_account).any() else True)
                )
            near[metric, i] = list(_near(values, due, own))
    del due, values
    of_ttft = _gathered(
        requests, _OF_TTFT, [each for i in range(len(found)) for each in near["ttft", i]]
    )
    of_e2e = _gathered(
        requests, _OF_E2E, [each for i in range(len(found)) for each in near["e2e", i]]
    )
    groups = tuple(
        SplitGroup(
            by=by,
            name=name,
            requests=int(np.count_nonzero(own)),
            ttft=tuple(_ttft(next(of_ttft), at) for at, _ in near["ttft", i]),
            e2e=tuple(_e2e(next(of_e2e), at) for at, _ in near["e2e", i]),
        )
        for i, (by, name, own) in enumerate(found)
    )
    return Splits(
        accounted=int(has_account.sum()),
        groups=groups,
        why=_why(bool(has_account.any()), queue_known, manifest),
    )


_ACCOUNT = ("queue", "prefill", "transfer")
_OF_TTFT = (
    "due_ns",
    "sent_ns",
    "ready_ns",
    "reused",
    "ttft",
    *(f"server_{name}_ns" for name in _ACCOUNT),
)
_OF_E2E = ("ttft", "e2e", "max_gap_ns")

Gathered = dict[str, "NDArray[np.int64]"]
"""Columns and figures of some requests, by name."""


def _gathered(
    requests: JoinedColumns, names: Sequence[str], near: Sequence[tuple[Near, NDArray[np.int64]]]
) -> Iterator[Gathered]:
    """These columns of the requests near each quantile. Of the run's columns one is in memory at a time."""
    found: list[Gathered] = [{} for _ in near]
    for name in names:
        whole = requests[name] if name in (ROW.names or ()) else requests.measure(name)
        for columns, (_, places) in zip(found, near, strict=True):
            columns[name] = whole[places]
    return iter(found)


def _why(has_account: bool, queue_known: bool, manifest: RunManifest) -> str:
    if has_account:
        return (
            ""
            if queue_known
            else "the server does not say how long a request waits: its queue is in the rest"
        )
    if manifest.server_timing:
        return "the server was asked for an account of its time (--server-timing) and gave none: docs/reference/servers.md"
    return "the server gives no account of its time; some do with --server-timing: docs/reference/servers.md"


def _groups(
    requests: JoinedColumns, manifest: RunManifest
) -> Iterator[tuple[str, str, NDArray[np.bool_]]]:
    """All requests, and where there are several: those of each target, class of requests, class of prompt length."""
    target, tokens = requests["target"], requests["input_tokens"]
    yield "all", "", np.ones(len(target), bool)
    if len(manifest.targets) > 1:
        for number, facts in enumerate(manifest.targets):
            yield "target", facts.name or facts.url or str(number), target == number
    if manifest.classes:
        drawn = class_indices(manifest, requests["request"] // manifest.turns_per_session)
        for number, plan in enumerate(manifest.classes):
            yield "class", plan.name, drawn == number
    known = tokens[as_selection(tokens >= 0)]
    edges = sorted(set(np.quantile(known, CLASSES, method="lower").tolist())) if len(known) else []
    low = -1
    edges = [edge for edge in edges if edge < known.max()]
    for high in [*edges, None] if edges else ():  # all prompts of one length are no classes
        of_class = (tokens > low) & (tokens <= (tokens.max() if high is None else high))
        if not of_class.all() and of_class.sum() >= BANDS["p99"][2]:
            name = f"over {low:,} tokens" if high is None else f"{low + 1:,} to {high:,} tokens"
            yield "prompt", f"up to {high:,} tokens" if low < 0 else name, of_class
        low = high or low


def _near(
    values: NDArray[np.int64], due: NDArray[np.int64], own: NDArray[np.bool_]
) -> Iterator[tuple[Near, NDArray[np.int64]]]:
    """The requests near each quantile, of the requests `own`; equal values in the order in which they were due.

    Of millions, only those near a quantile are put in order.
    """
    parted = values[own]
    n = len(parted)
    places = {
        at: (first := min(int(n * low), n - 1), max(int(n * high), first + 1))
        for at, (low, high, fewest) in BANDS.items()
        if n >= fewest
    }
    if not places:
        return
    parted.partition(
        sorted({place for first, end in places.values() for place in (first, end - 1)})
    )
    for at, (first, end) in places.items():
        least, largest = parted[first], parted[end - 1]
        before = int((parted < least).sum())
        near = np.flatnonzero(own & (values >= least) & (values <= largest))
        ordered = near[np.lexsort((due[near], values[near]))]
        yield at, ordered[first - before : end - before]


def _ttft(near: Gathered, at: Near) -> TtftSplit:
    able, whole = sendable_ns(near), float(near["ttft"].mean())
    parts = {
        "client": float((near["sent_ns"] - able).mean()),
        "connect": float((able - near["due_ns"]).mean()),
    }
    for name in _ACCOUNT:
        values = near[f"server_{name}_ns"]
        if (values >= 0).all():
            parts[name] = float(values.mean())
    parts["rest"] = whole - sum(parts.values())
    in_ms = {f"{name}_ms": milliseconds(value) for name, value in parts.items()}
    return TtftSplit(at=at, requests=len(able), ttft_ms=milliseconds(whole), **in_ms)


def _e2e(near: Gathered, at: Near) -> E2eSplit:
    gap, ttft, e2e = near["max_gap_ns"], near["ttft"], near["e2e"]
    whole, stall = float(e2e.mean()), float(np.where(gap > STALL_NS, gap, 0).mean())
    first = float(np.where(ttft == UNDEFINED, e2e, ttft).mean())  # not streamed: the whole answer
    return E2eSplit(
        at=at,
        requests=len(e2e),
        e2e_ms=milliseconds(whole),
        ttft_ms=milliseconds(first),
        decode_ms=milliseconds(whole - first - stall),
        stall_ms=milliseconds(stall),
    )


def slowest(
    measured: Sequence[Columns], others: Sequence[Columns], manifest: RunManifest
) -> tuple[SlowRequest, ...]:
    """The slowest measured requests by TTFT, then those by E2E, the slowest first. `others`: the other stages' rows."""
    requests = JoinedColumns(measured, ok=True, keep=False)
    listed: list[tuple[str, int]] = []
    for by in ("ttft", "e2e"):
        values = requests.measure(by)
        least = np.partition(values, -SHOWN)[-SHOWN] if len(values) > SHOWN else UNDEFINED
        known = np.flatnonzero(
            (values >= least) & (values != UNDEFINED)
        )  # of millions, only these are put in order
        places = known[np.lexsort((requests["due_ns"][known], -values[known]))][:SHOWN]
        listed += [(by, place) for place in places.tolist()]
    of_them = JoinedColumns(
        measured, ok=True, order=np.array([place for _, place in listed], np.int64)
    )
    found = np.stack([of_them[name] for name in ("sent_ns", "target", "slot")], axis=1).tolist()
    counts = np.zeros((len(found), 2), np.int64)
    for block in (block for part in (*measured, *others) for block in part.blocks()):
        counts += np.array([_beside(block, *one) for one in found], np.int64).reshape(counts.shape)
    return tuple(
        _slow(by, place, of_them, flying, waiting, manifest)
        for place, ((by, _), (flying, waiting)) in enumerate(
            zip(listed, counts.tolist(), strict=True)
        )
    )


def _beside(columns: Columns, sent_ns: int, target: int, slot: int) -> tuple[int, int]:
    """Of some rows, those in flight at a target at an instant but one, and the prompt tokens of those that waited."""
    start, done = columns["sent_ns"], columns["done_ns"]
    flying = np.flatnonzero((start >= 0) & (start <= sent_ns) & ((done < 0) | (done > sent_ns)))
    flying = flying[
        (columns.take("target", flying) == target) & (columns.take("slot", flying) != slot)
    ]
    prompts, first = columns.take("input_tokens", flying), columns.take("first_token_ns", flying)
    return len(flying), int(
        prompts[((first < 0) | (first > sent_ns)) & (prompts >= 0)].sum(dtype=np.int64)
    )


def _slow(
    by: str,
    place: int,
    requests: JoinedColumns,
    in_flight: int,
    waiting: int,
    manifest: RunManifest,
) -> SlowRequest:
    def of(name: str) -> int:
        return int(requests[name][place])

    def ms(value_ns: int) -> float | None:
        return milliseconds(value_ns) if value_ns >= 0 else None

    def count(name: str) -> int | None:
        return of(name) if of(name) >= 0 else None

    due, sent, first, last = of("due_ns"), of("sent_ns"), of("first_token_ns"), of("last_token_ns")
    able = int(sendable_ns(requests)[place])
    facts = manifest.targets[of("target")] if len(manifest.targets) > 1 else None
    return SlowRequest(
        by=by,
        slot=of("slot"),
        id=f"{manifest.run}-{of('slot')}" if manifest.client != "virtual" else "",
        session=count("session"),
        turn=of("turn") if of("session") >= 0 else None,
        target="" if facts is None else facts.name or facts.url,
        due_s=due / 1e9,
        ttft_ms=ms(first - due) if first >= 0 else None,
        e2e_ms=milliseconds(of("end_ns") - due),
        client_ms=milliseconds(sent - able),
        connect_ms=milliseconds(able - due),
        queue_ms=ms(of("server_queue_ns")),
        prefill_ms=ms(of("server_prefill_ns")),
        decode_ms=ms(last - first) if first >= 0 else None,
        max_gap_ms=milliseconds(of("max_gap_ns")),
        input_tokens=count("input_tokens"),
        cached_tokens=count("cached_tokens"),
        output_tokens=count("output_tokens"),
        in_flight=in_flight,
        waiting_input_tokens=waiting,
    )
