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
from loadgen.core.metrics.request_metrics import earliest_send_ns
from loadgen.core.metrics.sections import E2eSplit, Near, SlowRequest, SplitGroup, Splits, TtftSplit
from loadgen.core.stats.quantiles import milliseconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

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
_LISTED_FIELDS = (
    "slot",
    "session",
    "turn",
    "target",
    "due_ns",
    "sent_ns",
    "first_token_ns",
    "last_token_ns",
    "end_ns",
    "max_gap_ns",
    "server_queue_ns",
    "server_prefill_ns",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
)
"""The fields of the records that describe one of the slowest requests."""

_TTFT_COLUMNS = (
    "due_ns",
    "sent_ns",
    "ready_ns",
    "reused",
    "server_queue_ns",
    "server_prefill_ns",
    "server_transfer_ns",
    "ttft",
)
_E2E_COLUMNS = ("ttft", "e2e", "max_gap_ns")
_METRICS = frozenset(("ttft", "e2e"))
"""Those of the columns above that are computed. The others are fields of the records."""


class _Group(NamedTuple):
    """Requests that are split together, such as those of one target."""

    by: str
    name: str
    is_member: Mask


class _NearPercentile(NamedTuple):
    """The indexes of the requests near a percentile."""

    percentile: Near
    indexes: Ints


class _GroupBand(NamedTuple):
    """The requests of one group near a percentile.

    Attributes:
        group_index: The index of the group among all groups.
        near: The percentile, and the indexes of the requests.
    """

    group_index: int
    near: _NearPercentile


def split_latencies(measured: Sequence[Columns], manifest: RunManifest) -> Splits:
    """Return how TTFT and end-to-end latency divide into parts, for all requests and for groups.

    A group is, for example, the requests of one target. Each of its splits is the mean over the
    requests near one percentile, such as p99.

    Args:
        measured: The measured records, by stage. Columns that they keep in memory are freed,
            because a run of millions of requests would hold most memory here.
        manifest: The manifest of the run.
    """
    for columns in measured:
        columns.forget()
    requests = JoinedColumns(measured, only_ok=True, keeps_columns=False)
    has_timing = requests["server_prefill_ns"] >= 0
    if not len(has_timing):
        return Splits(reason="no request succeeded")
    has_queue_time = bool((requests["server_queue_ns"] >= 0).any())
    groups = list(_form_groups(requests, manifest))
    ttft_splits = _split_ttft_of_groups(requests, groups, has_timing)
    e2e_splits = _split_e2e_of_groups(requests, groups)
    return Splits(
        accounted=int(has_timing.sum()),
        groups=tuple(map(_describe_group, groups, ttft_splits, e2e_splits)),
        reason=_why_incomplete(
            manifest, has_timing=bool(has_timing.any()), has_queue=has_queue_time
        ),
    )


def _describe_group(
    group: _Group, ttft_splits: Sequence[TtftSplit], e2e_splits: Sequence[E2eSplit]
) -> SplitGroup:
    """Return a group of requests with its splits, as the summary lists it."""
    return SplitGroup(
        by=group.by,
        name=group.name,
        requests=int(np.count_nonzero(group.is_member)),
        ttft=tuple(ttft_splits),
        e2e=tuple(e2e_splits),
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
    target_index = requests["target"]
    yield _Group("all", "", np.ones(len(target_index), bool))
    if len(manifest.targets) > 1:
        for index, target in enumerate(manifest.targets):
            name = target.name or target.url or str(index)
            yield _Group("target", name, target_index == index)
    if manifest.classes:
        start_ids = requests["request"] // manifest.turns_per_session
        class_index = class_indices(manifest, start_ids)
        for index, request_class in enumerate(manifest.classes):
            yield _Group("class", request_class.name, class_index == index)
    yield from _form_prompt_groups(requests["input_tokens"])


class _LengthRange(NamedTuple):
    """Prompt lengths in tokens above `low` and up to `high`, with a name for reports."""

    low: int
    high: int
    name: str


def _form_prompt_groups(tokens: Ints) -> Iterator[_Group]:
    """Yield the requests of each range of prompt lengths, if prompts differ in length.

    A range without enough requests for a p99 is left out, and so is one that has all requests.

    Args:
        tokens: The prompt tokens of each request, negative if they are not known.
    """
    known_tokens = tokens[as_selection(tokens >= 0)]
    if not len(known_tokens):
        return
    for length_range in _divide_lengths(known_tokens):
        is_member = (tokens > length_range.low) & (tokens <= length_range.high)
        has_enough = is_member.sum() >= BANDS["p99"].min_requests
        if has_enough and not is_member.all():
            yield _Group("prompt", length_range.name, is_member)


def _divide_lengths(tokens: Ints) -> Iterator[_LengthRange]:
    """Yield ranges of prompt lengths, each of which has about a quarter of the requests.

    If many prompts have the same length, quartiles are equal and there are fewer ranges. With
    quartiles of 100, 100 and 400 tokens and a longest prompt of 900, the ranges are up to 100
    tokens, 101 to 400, and over 400. There is no range if all prompts are equally long.
    """
    longest = int(tokens.max())
    quartiles = np.quantile(tokens, PROMPT_QUARTILES, method="lower").tolist()
    inner_edges = sorted({edge for edge in quartiles if edge < longest})
    if not inner_edges:
        return
    yield _LengthRange(-1, inner_edges[0], f"up to {inner_edges[0]:,} tokens")
    for low, high in pairwise(inner_edges):
        yield _LengthRange(low, high, f"{low + 1:,} to {high:,} tokens")
    yield _LengthRange(inner_edges[-1], longest, f"over {inner_edges[-1]:,} tokens")


def _split_ttft_of_groups(
    requests: JoinedColumns, groups: Sequence[_Group], has_timing: Mask
) -> list[list[TtftSplit]]:
    """Return the splits of TTFT of each group, one for each percentile that the group supports.

    If some requests of a group have a timing breakdown of the server, only these are used.

    Args:
        requests: All ok requests.
        groups: Which of them belong to each group.
        has_timing: Which of them have a timing breakdown of the server.
    """
    ttft_ns = requests.measure("ttft")
    due_ns = requests["due_ns"]
    bands: list[_GroupBand] = []
    for index, group in enumerate(groups):
        is_used = group.is_member & (ttft_ns != UNDEFINED)
        if (group.is_member & has_timing).any():
            is_used &= has_timing
        bands += [_GroupBand(index, near) for near in _find_bands(ttft_ns, due_ns, is_used)]
    values_of_bands = _read_columns(requests, _TTFT_COLUMNS, bands)
    splits_of_groups: list[list[TtftSplit]] = [[] for _ in groups]
    for band, values in zip(bands, values_of_bands, strict=True):
        splits_of_groups[band.group_index].append(_split_ttft(values, band.near.percentile))
    return splits_of_groups


def _split_e2e_of_groups(requests: JoinedColumns, groups: Sequence[_Group]) -> list[list[E2eSplit]]:
    """Return the splits of end-to-end latency of each group, one for each supported percentile.

    Args:
        requests: All ok requests.
        groups: Which of them belong to each group.
    """
    e2e_ns = requests.measure("e2e")
    due_ns = requests["due_ns"]
    bands: list[_GroupBand] = []
    for index, group in enumerate(groups):
        bands += [_GroupBand(index, near) for near in _find_bands(e2e_ns, due_ns, group.is_member)]
    values_of_bands = _read_columns(requests, _E2E_COLUMNS, bands)
    splits_of_groups: list[list[E2eSplit]] = [[] for _ in groups]
    for band, values in zip(bands, values_of_bands, strict=True):
        splits_of_groups[band.group_index].append(_split_e2e(values, band.near.percentile))
    return splits_of_groups


def _find_bands(values: Ints, due_ns: Ints, is_used: Mask) -> Iterator[_NearPercentile]:
    """Yield the requests near each percentile of a latency, such as those from p98.5 to p99.5.

    The requests are ranked by latency, and by scheduled time if that is equal. Of millions of
    requests, only those near a percentile are sorted. Suppose that ranks 2 and 3 of the latencies
    5, 7, 7, 7 and 9 are near a percentile. Both latencies are 7, so the candidates are the three
    requests with 7. The first of them has rank 1 and is left out.

    Args:
        values: The latency of each request.
        due_ns: The scheduled time of each request.
        is_used: Which requests are ranked.
    """
    ranked_values = values[is_used]
    ranks_by_percentile = _ranks_of_bands(len(ranked_values))
    _put_ends_in_place(ranked_values, ranks_by_percentile.values())
    for percentile, ranks in ranks_by_percentile.items():
        smallest = ranked_values[ranks[0]]
        largest = ranked_values[ranks[-1]]
        candidates = np.flatnonzero(is_used & (values >= smallest) & (values <= largest))
        ordered = _sort_indexes(candidates, values, due_ns)
        first_rank = int((ranked_values < smallest).sum())  # that of `ordered[0]`
        first = ranks.start - first_rank
        end = ranks.stop - first_rank
        yield _NearPercentile(percentile, ordered[first:end])


def _put_ends_in_place(values: Ints, rank_ranges: Iterable[range]) -> None:
    """Move the values with the first and the last rank of each range to the index of their rank.

    All smaller values come before them, and all larger ones after them, in any order. That is a
    partition, which is faster than a sort.
    """
    end_ranks: set[int] = set()
    for ranks in rank_ranges:
        end_ranks.update((ranks[0], ranks[-1]))
    if end_ranks:
        values.partition(sorted(end_ranks))


def _sort_indexes(indexes: Ints, values: Ints, due_ns: Ints) -> Ints:
    """Return indexes of requests sorted by value, those with equal values by scheduled time."""
    # `lexsort` sorts by its last key first.
    order = np.lexsort((due_ns[indexes], values[indexes]))
    return indexes[order]


def _ranks_of_bands(count: int) -> dict[Near, range]:
    """Return the ranks, from 0, of the values near each percentile that so many values support.

    For example, 100 values have the ranks 45 to 54 near p50, and rank 98 near p99.
    """
    ranks: dict[Near, range] = {}
    for percentile, band in BANDS.items():
        if count >= band.min_requests:
            first = min(int(count * band.low), count - 1)
            end = max(int(count * band.high), first + 1)
            ranks[percentile] = range(first, end)
    return ranks


def _read_columns(
    requests: JoinedColumns, names: Sequence[str], bands: Sequence[_GroupBand]
) -> list[Values]:
    """Return the values of these columns, by name, for the requests of each band.

    A column of all requests is large. Each is read once and freed before the next one, so the loop
    over columns is the outer one.

    Args:
        requests: All ok requests.
        names: The fields and metrics whose values are returned.
        bands: The requests near each percentile of each group.
    """
    values_of_bands: list[Values] = [{} for _ in bands]
    for name in names:
        column = requests.measure(name) if name in _METRICS else requests[name]
        for band, values in zip(bands, values_of_bands, strict=True):
            values[name] = column[band.near.indexes]
    return values_of_bands


def _split_ttft(values: Values, percentile: Near) -> TtftSplit:
    """Return the mean TTFT of the requests near a percentile, and the means of its parts.

    The parts are: the wait for a connection, until the request could be sent; the delay of the
    client, until it was sent; what the server reports; and the rest. A part of the server is None
    unless the server reports it for all of these requests.

    Args:
        values: The columns of these requests, by name.
        percentile: The percentile.
    """
    could_send_ns = earliest_send_ns(values)
    ttft_ns = float(values["ttft"].mean())
    client_ns = float((values["sent_ns"] - could_send_ns).mean())
    connect_ns = float((could_send_ns - values["due_ns"]).mean())
    queue_ns = _mean_if_reported(values["server_queue_ns"])
    prefill_ns = _mean_if_reported(values["server_prefill_ns"])
    transfer_ns = _mean_if_reported(values["server_transfer_ns"])
    server_ns = [part for part in (queue_ns, prefill_ns, transfer_ns) if part is not None]
    rest_ns = ttft_ns - sum((client_ns, connect_ns, *server_ns))
    return TtftSplit(
        at=percentile,
        requests=len(could_send_ns),
        ttft_ms=milliseconds(ttft_ns),
        client_ms=milliseconds(client_ns),
        connect_ms=milliseconds(connect_ns),
        queue_ms=_optional_milliseconds(queue_ns),
        prefill_ms=_optional_milliseconds(prefill_ns),
        transfer_ms=_optional_milliseconds(transfer_ns),
        rest_ms=milliseconds(rest_ns),
    )


def _mean_if_reported(durations_ns: Ints) -> float | None:
    """Return the mean of durations, or None if one is negative, which means not reported."""
    is_reported = durations_ns >= 0
    return float(durations_ns.mean()) if is_reported.all() else None


def _optional_milliseconds(ns: float | None) -> float | None:
    """Return nanoseconds as milliseconds, and None if the duration is not known."""
    return None if ns is None else milliseconds(ns)


def _split_e2e(values: Values, percentile: Near) -> E2eSplit:
    """Return the mean end-to-end latency of the requests near a percentile, and its parts.

    The parts are TTFT, the stall, which is the largest gap between output events of a response if a
    reader notices it (more than STALL_NS), and decode, which is all other time after the first
    token. A response that is not streamed has no TTFT, so that its whole latency counts as TTFT.

    Args:
        values: The columns of these requests, by name.
        percentile: The percentile.
    """
    e2e_ns = values["e2e"]
    ttft_ns = np.where(values["ttft"] == UNDEFINED, e2e_ns, values["ttft"])
    stall_ns = np.where(values["max_gap_ns"] > STALL_NS, values["max_gap_ns"], 0)
    mean_e2e_ns = float(e2e_ns.mean())
    mean_ttft_ns = float(ttft_ns.mean())
    mean_stall_ns = float(stall_ns.mean())
    return E2eSplit(
        at=percentile,
        requests=len(e2e_ns),
        e2e_ms=milliseconds(mean_e2e_ns),
        ttft_ms=milliseconds(mean_ttft_ns),
        decode_ms=milliseconds(mean_e2e_ns - mean_ttft_ns - mean_stall_ns),
        stall_ms=milliseconds(mean_stall_ns),
    )


class _ConcurrentLoad(NamedTuple):
    """The other requests at the target of a request when it was sent.

    Attributes:
        in_flight: How many there were.
        waiting_input_tokens: The prompt tokens of those that had no first token yet.
    """

    in_flight: int
    waiting_input_tokens: int


class _ListedRequest(NamedTuple):
    """One of the slowest requests.

    Attributes:
        metric: The latency by which it is one of them.
        request_index: Its index among all ok requests.
    """

    metric: str
    request_index: int


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
    listed = [
        _ListedRequest(metric, index)
        for metric in ("ttft", "e2e")
        for index in _slowest_indexes(requests, metric)
    ]
    # Reads only the listed requests, in this order.
    indexes = np.array([request.request_index for request in listed], np.int64)
    slowest = JoinedColumns(measured, only_ok=True, order=indexes)
    loads = _measure_concurrent_loads(slowest, len(listed), (*measured, *not_measured))
    could_send_ns = earliest_send_ns(slowest).tolist()
    return tuple(
        _describe_request(
            request.metric, _read_fields(slowest, row), could_send_ns[row], loads[row], manifest
        )
        for row, request in enumerate(listed)
    )


def _slowest_indexes(requests: JoinedColumns, metric: str) -> list[int]:
    """Return the indexes of the SLOWEST_COUNT requests with the largest values of a metric.

    Requests with equal values are in the order of their scheduled times. Of millions of requests,
    only those that may be listed are sorted: a partition finds the smallest value of the list.
    """
    values = requests.measure(metric)
    smallest_listed = UNDEFINED
    if len(values) > SLOWEST_COUNT:
        smallest_listed = np.partition(values, -SLOWEST_COUNT)[-SLOWEST_COUNT]
    candidates = np.flatnonzero((values >= smallest_listed) & (values != UNDEFINED))
    # `lexsort` sorts by its last key first: by descending value, then by scheduled time.
    slowest_first = np.lexsort((requests["due_ns"][candidates], -values[candidates]))
    indexes: list[int] = candidates[slowest_first][:SLOWEST_COUNT].tolist()
    return indexes


def _measure_concurrent_loads(
    requests: JoinedColumns, count: int, records: Sequence[Columns]
) -> list[_ConcurrentLoad]:
    """Return which load each of a few requests met at its target when it was sent.

    All records are read once, in blocks, and each block is searched for every request.

    Args:
        requests: The few requests.
        count: The number of `requests`.
        records: The records of all stages, by stage.
    """
    in_flight = [0] * count
    waiting_tokens = [0] * count
    requests_sent = [_read_fields(requests, row) for row in range(count)]
    blocks = (block for columns in records for block in columns.blocks())
    for block in blocks:
        for row, request in enumerate(requests_sent):
            load = _load_in_block(block, request)
            in_flight[row] += load.in_flight
            waiting_tokens[row] += load.waiting_input_tokens
    return list(map(_ConcurrentLoad, in_flight, waiting_tokens))


def _load_in_block(block: Columns, request: Mapping[str, int]) -> _ConcurrentLoad:
    """Return how many requests of a block were in flight at a target when a request was sent.

    A request is in flight from its send until its response is complete. One that was never sent has
    a negative time, and so has one whose response was never complete.

    Args:
        block: Records, which may contain the request itself. It is left out, recognized by its
            slot, its unique number in the schedule.
        request: The fields of the request by name.
    """
    now_ns = request["sent_ns"]
    other_sent_ns = block["sent_ns"]
    other_done_ns = block["done_ns"]
    was_sent = (other_sent_ns >= 0) & (other_sent_ns <= now_ns)
    was_not_done = (other_done_ns < 0) | (other_done_ns > now_ns)
    rows = np.flatnonzero(was_sent & was_not_done)
    is_same_target = block.take("target", rows) == request["target"]
    is_another_request = block.take("slot", rows) != request["slot"]
    rows = rows[is_same_target & is_another_request]
    prompt_tokens = block.take("input_tokens", rows)
    first_token_ns = block.take("first_token_ns", rows)
    has_no_token_yet = (first_token_ns < 0) | (first_token_ns > now_ns)
    is_length_known = prompt_tokens >= 0
    waiting_tokens = prompt_tokens[has_no_token_yet & is_length_known].sum(dtype=np.int64)
    return _ConcurrentLoad(len(rows), int(waiting_tokens))


def _read_fields(requests: JoinedColumns, row: int) -> dict[str, int]:
    """Return the fields of one request that describe it in a list of the slowest requests."""
    return {name: int(requests[name][row]) for name in _LISTED_FIELDS}


def _describe_request(
    metric: str,
    fields: Mapping[str, int],
    could_send_ns: int,
    load: _ConcurrentLoad,
    manifest: RunManifest,
) -> SlowRequest:
    """Return one of the slowest requests as the summary lists it. Unknown values are None.

    Args:
        metric: The latency by which the request is among the slowest.
        fields: Its fields by name. A negative value is not known.
        could_send_ns: When it could be sent: at its due time, or when its connection was open.
        load: The other requests in flight when it was sent.
        manifest: The manifest of the run.
    """
    due_ns = fields["due_ns"]
    return SlowRequest(
        by=metric,
        slot=fields["slot"],
        id=_request_id(fields["slot"], manifest),
        session=_known(fields["session"]),
        turn=fields["turn"] if fields["session"] >= 0 else None,
        target=_target_name(fields["target"], manifest),
        due_s=due_ns / 1e9,
        ttft_ms=_ttft_ms(due_ns, fields["first_token_ns"]),
        e2e_ms=milliseconds(fields["end_ns"] - due_ns),
        client_ms=milliseconds(fields["sent_ns"] - could_send_ns),
        connect_ms=milliseconds(could_send_ns - due_ns),
        queue_ms=_optional_milliseconds(_known(fields["server_queue_ns"])),
        prefill_ms=_optional_milliseconds(_known(fields["server_prefill_ns"])),
        decode_ms=_decode_ms(fields["first_token_ns"], fields["last_token_ns"]),
        max_gap_ms=milliseconds(fields["max_gap_ns"]),
        input_tokens=_known(fields["input_tokens"]),
        cached_tokens=_known(fields["cached_tokens"]),
        output_tokens=_known(fields["output_tokens"]),
        in_flight=load.in_flight,
        waiting_input_tokens=load.waiting_input_tokens,
    )


def _request_id(slot: int, manifest: RunManifest) -> str:
    """Return what a request was sent with as X-Request-Id, which finds it in a server's log.

    The requests of a simulation are not sent over HTTP, so they have none: "".
    """
    return "" if manifest.client == "virtual" else f"{manifest.run}-{slot}"


def _target_name(target_index: int, manifest: RunManifest) -> str:
    """Return the name of a target, or its URL without one, or "" for the only target of a run."""
    if len(manifest.targets) < 2:
        return ""
    target = manifest.targets[target_index]
    return target.name or target.url


def _known(value: int) -> int | None:
    """Return a field of a record, or None if it is negative, which means not known."""
    return value if value >= 0 else None


def _ttft_ms(due_ns: int, first_token_ns: int) -> float | None:
    """Return the time from the due time to the first token, or None without a first token."""
    return milliseconds(first_token_ns - due_ns) if first_token_ns >= 0 else None


def _decode_ms(first_token_ns: int, last_token_ns: int) -> float | None:
    """Return the time from the first token to the last one, or None if one is not known."""
    is_known = first_token_ns >= 0 and last_token_ns >= first_token_ns
    return milliseconds(last_token_ns - first_token_ns) if is_known else None
