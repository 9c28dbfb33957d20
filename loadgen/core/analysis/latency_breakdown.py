"""Break TTFT and end-to-end latency into parts, and list the slowest requests.

Pure. Percentiles of parts do not add up to the percentile of their sum. A split is therefore the
mean over the requests whose value is near a percentile, of the total and of each part, and these
means add up. What the client cannot see comes from the server's timing breakdown of each request,
if there is one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

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

    Ints: TypeAlias = NDArray[np.int64]
    Mask: TypeAlias = NDArray[np.bool_]
    Values: TypeAlias = dict[str, Ints]


class Band(NamedTuple):
    """The requests that stand for a percentile: those with ranks from `low` to `high`."""

    low: float
    high: float
    min_requests: int


BANDS: dict[Near, Band] = {
    "p50": Band(0.45, 0.55, 11),
    "p99": Band(0.985, 0.995, 100),
    "slowest": Band(0.99, 1.0, 100),
}
PROMPT_QUARTILES = (0.25, 0.5, 0.75)
"""The quantiles of the prompt lengths between which groups of prompts are formed."""
SLOWEST_COUNT = 5
"""The number of slowest requests that are listed by TTFT, and by end-to-end latency."""

_SERVER_PARTS = ("queue", "prefill", "transfer")
_TTFT_COLUMNS = (
    "due_ns",
    "sent_ns",
    "ready_ns",
    "reused",
    "ttft",
    *(f"server_{name}_ns" for name in _SERVER_PARTS),
)
_E2E_COLUMNS = ("ttft", "e2e", "max_gap_ns")


class _Group(NamedTuple):
    """Requests that are split together, such as those of one target."""

    by: str
    name: str
    is_member: Mask


class _NearPercentile(NamedTuple):
    """The indexes of the requests near a percentile."""

    percentile: Near
    indexes: Ints


def split_latencies(measured: Sequence[Columns], manifest: RunManifest) -> Splits:
    """Return the parts of the latencies of the measured records of a run."""
    for columns in measured:
        columns.forget()  # A run of millions of requests would hold most memory here.
    requests = JoinedColumns(measured, only_ok=True, keeps_columns=False)
    has_timing = requests["server_prefill_ns"] >= 0
    if not len(has_timing):
        return Splits(why="no request succeeded")
    has_queue_time = bool((requests["server_queue_ns"] >= 0).any())
    groups = list(_form_groups(requests, manifest))
    ttft_bands = _find_ttft_bands(requests, groups, has_timing)
    e2e_bands = _find_e2e_bands(requests, groups)
    ttft_values = iter(_gather(requests, _TTFT_COLUMNS, ttft_bands))
    e2e_values = iter(_gather(requests, _E2E_COLUMNS, e2e_bands))
    split_groups = []
    for group, of_ttft, of_e2e in zip(groups, ttft_bands, e2e_bands, strict=True):
        split_group = SplitGroup(
            by=group.by,
            name=group.name,
            requests=int(np.count_nonzero(group.is_member)),
            ttft=tuple(_split_ttft(next(ttft_values), band.percentile) for band in of_ttft),
            e2e=tuple(_split_e2e(next(e2e_values), band.percentile) for band in of_e2e),
        )
        split_groups.append(split_group)
    return Splits(
        accounted=int(has_timing.sum()),
        groups=tuple(split_groups),
        why=_why_incomplete(manifest, has_timing=bool(has_timing.any()), has_queue=has_queue_time),
    )


def _why_incomplete(manifest: RunManifest, *, has_timing: bool, has_queue: bool) -> str:
    """Return why parts of the server are missing in the splits, or "" if none is."""
    if has_timing and has_queue:
        return ""
    if has_timing:
        return "the server does not report queueing time, so it is part of the unattributed time"
    if manifest.server_timing:
        return (
            "the server sent no timing breakdown although --server-timing requested it, see "
            "docs/reference/servers.md"
        )
    return (
        "the server reports no timing breakdown; some servers do with --server-timing, see "
        "docs/reference/servers.md"
    )


def _form_groups(requests: JoinedColumns, manifest: RunManifest) -> Iterator[_Group]:
    """Yield all requests, and those of each target, request class and range of prompt lengths."""
    target = requests["target"]
    yield _Group("all", "", np.ones(len(target), bool))
    if len(manifest.targets) > 1:
        for index, facts in enumerate(manifest.targets):
            yield _Group("target", facts.name or facts.url or str(index), target == index)
    if manifest.classes:
        class_index = class_indices(manifest, requests["request"] // manifest.turns_per_session)
        for index, plan in enumerate(manifest.classes):
            yield _Group("class", plan.name, class_index == index)
    yield from _form_prompt_groups(requests["input_tokens"])


def _form_prompt_groups(tokens: Ints) -> Iterator[_Group]:
    """Yield the requests of each range of prompt lengths, if prompts differ in length.

    A range without enough requests for a p99 is left out.
    """
    known = tokens[as_selection(tokens >= 0)]
    if not len(known):
        return
    longest = int(known.max())
    quartiles = sorted(set(np.quantile(known, PROMPT_QUARTILES, method="lower").tolist()))
    inner_edges = [edge for edge in quartiles if edge < longest]
    if not inner_edges:
        return
    for low, high in pairwise([-1, *inner_edges, longest]):
        is_member = (tokens > low) & (tokens <= high)
        if is_member.all() or is_member.sum() < BANDS["p99"].min_requests:
            continue
        if low < 0:
            name = f"up to {high:,} tokens"
        elif high == longest:
            name = f"over {low:,} tokens"
        else:
            name = f"{low + 1:,} to {high:,} tokens"
        yield _Group("prompt", name, is_member)


def _find_ttft_bands(
    requests: JoinedColumns, groups: Sequence[_Group], has_timing: Mask
) -> list[list[_NearPercentile]]:
    """Return the requests near each percentile of TTFT, by group.

    If some requests of a group have a timing breakdown of the server, only these are used.
    """
    ttft_ns = requests.measure("ttft")
    due_ns = requests["due_ns"]
    bands = []
    for group in groups:
        is_used = group.is_member & (ttft_ns != UNDEFINED)
        if (group.is_member & has_timing).any():
            is_used &= has_timing
        bands.append(list(_find_bands(ttft_ns, due_ns, is_used)))
    return bands


def _find_e2e_bands(
    requests: JoinedColumns, groups: Sequence[_Group]
) -> list[list[_NearPercentile]]:
    """Return the requests near each percentile of the end-to-end latency, by group."""
    e2e_ns = requests.measure("e2e")
    due_ns = requests["due_ns"]
    return [list(_find_bands(e2e_ns, due_ns, group.is_member)) for group in groups]


def _find_bands(values: Ints, due_ns: Ints, is_used: Mask) -> Iterator[_NearPercentile]:
    """Yield the requests near each percentile of the values that are used.

    Equal values are ordered by scheduled time. Of millions of values, only those near a percentile
    are sorted.
    """
    used = values[is_used]
    count = len(used)
    ranks: dict[Near, tuple[int, int]] = {}
    for percentile, band in BANDS.items():
        if count >= band.min_requests:
            first = min(int(count * band.low), count - 1)
            ranks[percentile] = (first, max(int(count * band.high), first + 1))
    if not ranks:
        return
    used.partition(sorted({rank for first, end in ranks.values() for rank in (first, end - 1)}))
    for percentile, (first, end) in ranks.items():
        smallest = used[first]
        largest = used[end - 1]
        smaller_count = int((used < smallest).sum())
        near = np.flatnonzero(is_used & (values >= smallest) & (values <= largest))
        ordered = near[np.lexsort((due_ns[near], values[near]))]
        yield _NearPercentile(percentile, ordered[first - smaller_count : end - smaller_count])


def _gather(
    requests: JoinedColumns, names: Sequence[str], bands: Sequence[Sequence[_NearPercentile]]
) -> list[Values]:
    """Return columns and metrics of the requests of each band, band by band.

    Only one column of the run is in memory at a time.
    """
    indexes_of_bands = [band.indexes for bands_of_group in bands for band in bands_of_group]
    gathered: list[Values] = [{} for _ in indexes_of_bands]
    for name in names:
        column = requests[name] if name in (ROW.names or ()) else requests.measure(name)
        for values, indexes in zip(gathered, indexes_of_bands, strict=True):
            values[name] = column[indexes]
    return gathered


def _split_ttft(values: Values, percentile: Near) -> TtftSplit:
    """Return the mean TTFT of some requests and its parts.

    A part of the server is only known if the server reports it for all of these requests.
    """
    sendable = sendable_ns(values)
    ttft_ns = float(values["ttft"].mean())
    parts_ns = {
        "client": float((values["sent_ns"] - sendable).mean()),
        "connect": float((sendable - values["due_ns"]).mean()),
    }
    for name in _SERVER_PARTS:
        duration_ns = values[f"server_{name}_ns"]
        if (duration_ns >= 0).all():
            parts_ns[name] = float(duration_ns.mean())
    parts_ns["rest"] = ttft_ns - sum(parts_ns.values())
    parts_ms = {f"{name}_ms": milliseconds(part_ns) for name, part_ns in parts_ns.items()}
    return TtftSplit(
        at=percentile, requests=len(sendable), ttft_ms=milliseconds(ttft_ns), **parts_ms
    )


def _split_e2e(values: Values, percentile: Near) -> E2eSplit:
    """Return the mean end-to-end latency of some requests and its parts.

    A response that is not streamed has no TTFT, so that its whole latency counts as TTFT.
    """
    e2e_ns = values["e2e"]
    ttft_ns = values["ttft"]
    max_gap_ns = values["max_gap_ns"]
    mean_e2e_ns = float(e2e_ns.mean())
    mean_stall_ns = float(np.where(max_gap_ns > STALL_NS, max_gap_ns, 0).mean())
    mean_ttft_ns = float(np.where(ttft_ns == UNDEFINED, e2e_ns, ttft_ns).mean())
    return E2eSplit(
        at=percentile,
        requests=len(e2e_ns),
        e2e_ms=milliseconds(mean_e2e_ns),
        ttft_ms=milliseconds(mean_ttft_ns),
        decode_ms=milliseconds(mean_e2e_ns - mean_ttft_ns - mean_stall_ns),
        stall_ms=milliseconds(mean_stall_ns),
    )


class _Surroundings(NamedTuple):
    """What was at the target of a request when it was sent, without the request itself."""

    in_flight: int
    waiting_input_tokens: int
    """The prompt tokens of the requests that had no first token yet."""


def list_slowest_requests(
    measured: Sequence[Columns], not_measured: Sequence[Columns], manifest: RunManifest
) -> tuple[SlowRequest, ...]:
    """Return the slowest measured requests by TTFT, then those by end-to-end latency.

    `not_measured` has the records of the other stages, whose requests may be in flight too.
    """
    requests = JoinedColumns(measured, only_ok=True, keeps_columns=False)
    listed = [
        (metric, index)
        for metric in ("ttft", "e2e")
        for index in _slowest_indexes(requests, metric)
    ]
    order = np.array([index for _, index in listed], np.int64)
    slowest = JoinedColumns(measured, only_ok=True, order=order)
    surroundings = _find_surroundings(slowest, len(listed), (*measured, *not_measured))
    return tuple(
        _describe_request(metric, slowest, row, surroundings[row], manifest)
        for row, (metric, _) in enumerate(listed)
    )


def _slowest_indexes(requests: JoinedColumns, metric: str) -> list[int]:
    """Return the indexes of the SLOWEST_COUNT requests with the largest values of a metric.

    Of millions of requests, only those that may be listed are sorted.
    """
    values = requests.measure(metric)
    threshold = UNDEFINED
    if len(values) > SLOWEST_COUNT:
        threshold = np.partition(values, -SLOWEST_COUNT)[-SLOWEST_COUNT]
    candidates = np.flatnonzero((values >= threshold) & (values != UNDEFINED))
    order = np.lexsort((requests["due_ns"][candidates], -values[candidates]))
    indexes: list[int] = candidates[order][:SLOWEST_COUNT].tolist()
    return indexes


def _find_surroundings(
    requests: JoinedColumns, count: int, records: Sequence[Columns]
) -> list[_Surroundings]:
    """Return the surroundings of each request, counted in blocks of the records."""
    totals = np.zeros((count, 2), np.int64)
    for columns in records:
        for block in columns.blocks():
            for row in range(count):
                totals[row] += _count_others(
                    block,
                    sent_ns=int(requests["sent_ns"][row]),
                    target=int(requests["target"][row]),
                    slot=int(requests["slot"][row]),
                )
    return [_Surroundings(in_flight, tokens) for in_flight, tokens in totals.tolist()]


def _count_others(columns: Columns, sent_ns: int, target: int, slot: int) -> _Surroundings:
    """Return what some records contribute to the surroundings of one request."""
    start_ns = columns["sent_ns"]
    done_ns = columns["done_ns"]
    is_in_flight = (start_ns >= 0) & (start_ns <= sent_ns) & ((done_ns < 0) | (done_ns > sent_ns))
    others = np.flatnonzero(is_in_flight)
    is_same_target = columns.take("target", others) == target
    others = others[is_same_target & (columns.take("slot", others) != slot)]
    prompt_tokens = columns.take("input_tokens", others)
    first_token_ns = columns.take("first_token_ns", others)
    is_waiting = (first_token_ns < 0) | (first_token_ns > sent_ns)
    waiting_tokens = prompt_tokens[is_waiting & (prompt_tokens >= 0)].sum(dtype=np.int64)
    return _Surroundings(len(others), int(waiting_tokens))


def _describe_request(
    metric: str,
    requests: JoinedColumns,
    row: int,
    surroundings: _Surroundings,
    manifest: RunManifest,
) -> SlowRequest:
    """Return one of the slowest requests. Values that are not known are None."""

    def value(name: str) -> int:
        return int(requests[name][row])

    def known(name: str) -> int | None:
        return value(name) if value(name) >= 0 else None

    def known_ms(name: str) -> float | None:
        return milliseconds(value(name)) if value(name) >= 0 else None

    due_ns = value("due_ns")
    first_token_ns = value("first_token_ns")
    has_token = first_token_ns >= 0
    sendable = int(sendable_ns(requests)[row])
    decode_ns = value("last_token_ns") - first_token_ns
    target = manifest.targets[value("target")] if len(manifest.targets) > 1 else None
    return SlowRequest(
        by=metric,
        slot=value("slot"),
        id=f"{manifest.run}-{value('slot')}" if manifest.client != "virtual" else "",
        session=known("session"),
        turn=value("turn") if value("session") >= 0 else None,
        target="" if target is None else target.name or target.url,
        due_s=due_ns / 1e9,
        ttft_ms=milliseconds(first_token_ns - due_ns) if has_token else None,
        e2e_ms=milliseconds(value("end_ns") - due_ns),
        client_ms=milliseconds(value("sent_ns") - sendable),
        connect_ms=milliseconds(sendable - due_ns),
        queue_ms=known_ms("server_queue_ns"),
        prefill_ms=known_ms("server_prefill_ns"),
        decode_ms=milliseconds(decode_ns) if has_token and decode_ns >= 0 else None,
        max_gap_ms=milliseconds(value("max_gap_ns")),
        input_tokens=known("input_tokens"),
        cached_tokens=known("cached_tokens"),
        output_tokens=known("output_tokens"),
        in_flight=surroundings.in_flight,
        waiting_input_tokens=surroundings.waiting_input_tokens,
    )
