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


class _BandValues(NamedTuple):
    """Columns and metrics of the requests near a percentile, by name."""

    percentile: Near
    values: Values


def split_latencies(measured: Sequence[Columns], manifest: RunManifest) -> Splits:
    """Return how the latencies of a run divide into parts, near several percentiles.

    This is done for all requests and for groups of them, such as those of one target.

    Args:
        measured: The measured records, by stage.
        manifest: The manifest of the run.
    """
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
    ttft_values = _gather(requests, _TTFT_COLUMNS, ttft_bands)
    e2e_values = _gather(requests, _E2E_COLUMNS, e2e_bands)
    split_groups = tuple(
        SplitGroup(
            by=group.by,
            name=group.name,
            requests=int(np.count_nonzero(group.is_member)),
            ttft=tuple(_split_ttft(band.values, band.percentile) for band in ttft_values[index]),
            e2e=tuple(_split_e2e(band.values, band.percentile) for band in e2e_values[index]),
        )
        for index, group in enumerate(groups)
    )
    return Splits(
        accounted=int(has_timing.sum()),
        groups=split_groups,
        why=_why_incomplete(manifest, has_timing=bool(has_timing.any()), has_queue=has_queue_time),
    )


def _why_incomplete(manifest: RunManifest, *, has_timing: bool, has_queue: bool) -> str:
    """Return why parts of the server are missing in the splits, or "" if none is."""
    if has_timing and has_queue:
        return ""
    if has_timing:
        return "the server does not report queueing time, so the unattributed time includes it"
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
    are sorted: a partition first puts the values at the ends of each band into their places.

    Args:
        values: The latency of each request.
        due_ns: The scheduled time of each request.
        is_used: Which requests are used.
    """
    used = values[is_used]
    ranks_by_percentile = _ranks_of_bands(len(used))
    if not ranks_by_percentile:
        return
    end_ranks = {rank for ranks in ranks_by_percentile.values() for rank in (ranks[0], ranks[-1])}
    used.partition(sorted(end_ranks))
    for percentile, ranks in ranks_by_percentile.items():
        smallest = used[ranks[0]]
        largest = used[ranks[-1]]
        near = np.flatnonzero(is_used & (values >= smallest) & (values <= largest))
        ordered = near[np.lexsort((due_ns[near], values[near]))]
        # `ordered` begins with the first of all values equal to the smallest one of the band.
        first_rank = int((used < smallest).sum())
        first = ranks[0] - first_rank
        yield _NearPercentile(percentile, ordered[first : first + len(ranks)])


def _ranks_of_bands(count: int) -> dict[Near, range]:
    """Return the ranks of the values near each percentile that so many values support."""
    ranks: dict[Near, range] = {}
    for percentile, band in BANDS.items():
        if count >= band.min_requests:
            first = min(int(count * band.low), count - 1)
            ranks[percentile] = range(first, max(int(count * band.high), first + 1))
    return ranks


def _gather(
    requests: JoinedColumns, names: Sequence[str], bands_of_groups: Sequence[list[_NearPercentile]]
) -> list[list[_BandValues]]:
    """Return the values of the requests near each percentile, for each group.

    Only one column of the run is in memory at a time, so the loop over columns is the outer one.

    Args:
        requests: All ok requests.
        names: The fields and metrics whose values are returned.
        bands_of_groups: For each group, the requests near each percentile.
    """
    gathered = [[_BandValues(band.percentile, {}) for band in bands] for bands in bands_of_groups]
    for name in names:
        column = requests[name] if name in (ROW.names or ()) else requests.measure(name)
        for bands, bands_values in zip(bands_of_groups, gathered, strict=True):
            for band, band_values in zip(bands, bands_values, strict=True):
                band_values.values[name] = column[band.indexes]
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

    Args:
        measured: The measured records, by stage.
        not_measured: The records of the other stages, whose requests may be in flight too.
        manifest: The manifest of the run.
    """
    requests = JoinedColumns(measured, only_ok=True, keeps_columns=False)
    metrics: list[str] = []
    indexes: list[int] = []
    for metric in ("ttft", "e2e"):
        slowest_indexes = _slowest_indexes(requests, metric)
        indexes += slowest_indexes
        metrics += [metric] * len(slowest_indexes)
    slowest = JoinedColumns(measured, only_ok=True, order=np.array(indexes, np.int64))
    surroundings = _find_surroundings(slowest, len(indexes), (*measured, *not_measured))
    return tuple(
        _describe_request(metric, slowest, row, surroundings[row], manifest)
        for row, metric in enumerate(metrics)
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
    """Return what else was in flight when each request was sent.

    All records are read once, in blocks, and each block is searched for every request.

    Args:
        requests: The requests, which are few.
        count: Their number.
        records: The records of all stages.
    """
    in_flight = np.zeros(count, np.int64)
    waiting_tokens = np.zeros(count, np.int64)
    for columns in records:
        for block in columns.blocks():
            for row in range(count):
                in_block = _count_in_flight_with(
                    block,
                    sent_ns=int(requests["sent_ns"][row]),
                    target=int(requests["target"][row]),
                    slot=int(requests["slot"][row]),
                )
                in_flight[row] += in_block.in_flight
                waiting_tokens[row] += in_block.waiting_input_tokens
    return list(map(_Surroundings, in_flight.tolist(), waiting_tokens.tolist()))


def _count_in_flight_with(columns: Columns, sent_ns: int, target: int, slot: int) -> _Surroundings:
    """Return how many of some records were in flight at a target when a request was sent.

    Args:
        columns: The records, which may contain the request.
        sent_ns: When the request was sent.
        target: Its target.
        slot: Its slot, by which it is left out.
    """
    other_sent_ns = columns["sent_ns"]
    other_done_ns = columns["done_ns"]
    was_sent = (other_sent_ns >= 0) & (other_sent_ns <= sent_ns)
    was_not_done = (other_done_ns < 0) | (other_done_ns > sent_ns)
    rows = np.flatnonzero(was_sent & was_not_done)
    is_same_target = columns.take("target", rows) == target
    is_another_request = columns.take("slot", rows) != slot
    rows = rows[is_same_target & is_another_request]
    prompt_tokens = columns.take("input_tokens", rows)
    first_token_ns = columns.take("first_token_ns", rows)
    is_waiting = (first_token_ns < 0) | (first_token_ns > sent_ns)
    waiting_tokens = prompt_tokens[is_waiting & (prompt_tokens >= 0)].sum(dtype=np.int64)
    return _Surroundings(len(rows), int(waiting_tokens))


def _describe_request(
    metric: str,
    requests: JoinedColumns,
    row: int,
    surroundings: _Surroundings,
    manifest: RunManifest,
) -> SlowRequest:
    """Return one of the slowest requests for the summary. Values that are not known are None.

    Args:
        metric: The metric by which the request is among the slowest.
        requests: The slowest requests.
        row: The index of the request among them.
        surroundings: What else was in flight when it was sent.
        manifest: The manifest of the run.
    """

    def value(field: str) -> int:
        return int(requests[field][row])

    def known(field: str) -> int | None:
        return value(field) if value(field) >= 0 else None

    def known_ms(field: str) -> float | None:
        return milliseconds(value(field)) if value(field) >= 0 else None

    due_ns = value("due_ns")
    first_token_ns = value("first_token_ns")
    has_token = first_token_ns >= 0
    sendable = int(sendable_ns(requests)[row])
    decode_ns = value("last_token_ns") - first_token_ns
    is_in_session = value("session") >= 0
    # Requests of a simulation are not sent over HTTP, so they have no id in the logs of a server.
    has_request_id = manifest.client != "virtual"
    target = manifest.targets[value("target")] if len(manifest.targets) > 1 else None
    return SlowRequest(
        by=metric,
        slot=value("slot"),
        id=f"{manifest.run}-{value('slot')}" if has_request_id else "",
        session=known("session"),
        turn=value("turn") if is_in_session else None,
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
