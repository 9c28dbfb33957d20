"""Break TTFT and end-to-end latency into parts, and list the slowest requests.

Pure. Percentiles of parts do not add up to the percentile of their sum. A split is therefore the
mean over the requests whose value is near a percentile, of the total and of each part, and these
means add up. What the client cannot see comes from the server's timing breakdown of each request,
if there is one.
"""

from __future__ import annotations

from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import numpy as np

from loadgen.core import format
from loadgen.core.limits import STALL_NS
from loadgen.core.metrics.columns import (
    UNDEFINED,
    Columns,
    JoinedColumns,
    as_selection,
    class_indices,
)
from loadgen.core.metrics.request_metrics import earliest_send_ns
from loadgen.core.metrics.sections import (
    E2eSplit,
    PercentileName,
    SlowRequest,
    SplitGroup,
    Splits,
    TtftSplit,
)
from loadgen.core.stats.quantiles import milliseconds

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from loadgen.core.results.manifest import RunManifest

    Ints: TypeAlias = NDArray[np.int64]
    Mask: TypeAlias = NDArray[np.bool_]
    ColumnsByName: TypeAlias = dict[str, Ints]


class Band(NamedTuple):
    """The requests that stand for a percentile: those with ranks from `low` to `high`."""

    low: float
    high: float
    min_requests: int


BANDS: dict[PercentileName, Band] = {
    "p50": Band(0.45, 0.55, 11),
    "p99": Band(0.985, 0.995, 100),
    "slowest": Band(0.99, 1.0, 100),
}
PROMPT_QUARTILES = (0.25, 0.5, 0.75)
"""The quantiles of the prompt lengths between which groups of prompts are formed."""
SLOWEST_COUNT = 5
"""The number of slowest requests that are listed by TTFT, and by end-to-end latency."""
_FIELDS_OF_SLOW_REQUEST = (
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


class _RequestsNearPercentile(NamedTuple):
    """The requests of a group whose latency is near a percentile of the group.

    Attributes:
        group_index: The index of the group in the list of groups.
        percentile: The percentile, such as "p99".
        indexes: The indexes of the requests among all ok requests.
    """

    group_index: int
    percentile: PercentileName
    indexes: Ints


_Split = TypeVar("_Split", TtftSplit, E2eSplit)


def split_latencies(measured_stages: Sequence[Columns], manifest: RunManifest) -> Splits:
    """Return how TTFT and end-to-end latency divide into parts, for all requests and for groups.

    A group is, for example, the requests of one target. A split has the mean of each part over the
    requests near one percentile, such as p99.

    Args:
        measured_stages: The records of each measured stage.
        manifest: The manifest of the run.
    """
    # There may be millions of requests. So columns that are in memory are freed first, and those
    # that are read now are not kept.
    for columns in measured_stages:
        columns.clear_cache()
    requests = JoinedColumns(measured_stages, only_ok=True, keeps_columns=False)

    has_server_timing = requests.is_known("server_prefill_ns")
    if not len(has_server_timing):
        return Splits(reason="no request succeeded")

    groups = _split_groups(requests, manifest, has_server_timing)
    reason = _why_server_times_are_missing(
        manifest,
        has_timing=bool(has_server_timing.any()),
        has_queue=bool(requests.is_known("server_queue_ns").any()),
    )
    return Splits(accounted=int(has_server_timing.sum()), groups=tuple(groups), reason=reason)


def _split_groups(
    requests: JoinedColumns, manifest: RunManifest, has_server_timing: Mask
) -> list[SplitGroup]:
    """Return each group of requests with its splits of TTFT and of end-to-end latency.

    Args:
        requests: All ok requests.
        manifest: The manifest of the run.
        has_server_timing: Which requests have a timing breakdown of the server.
    """
    groups = list(_form_groups(requests, manifest))
    ttft_splits_of_groups = _split_ttft_of_groups(requests, groups, has_server_timing)
    e2e_splits_of_groups = _split_e2e_of_groups(requests, groups)
    return [
        SplitGroup(
            by=group.by,
            name=group.name,
            requests=int(np.count_nonzero(group.is_member)),
            ttft=tuple(ttft_splits),
            e2e=tuple(e2e_splits),
        )
        for group, ttft_splits, e2e_splits in zip(
            groups, ttft_splits_of_groups, e2e_splits_of_groups, strict=True
        )
    ]


def _why_server_times_are_missing(
    manifest: RunManifest, *, has_timing: bool, has_queue: bool
) -> str:
    """Return why times that only the server knows are missing, or "" if none is missing.

    Args:
        manifest: The manifest of the run.
        has_timing: Whether the server reported the timing of any request.
        has_queue: Whether the server reported the queueing time of any request.
    """
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
    """Yield the group of all requests, and one of each target, class and range of prompt lengths.

    A run with a single target has no groups by target, and a run without classes none by class.
    """
    target_of_request = requests["target"]
    yield _Group(by="all", name="", is_member=np.ones(len(target_of_request), bool))

    if len(manifest.targets) > 1:
        for index, target in enumerate(manifest.targets):
            name = target.name or target.url or str(index)
            yield _Group(by="target", name=name, is_member=target_of_request == index)

    if manifest.classes:
        class_of_request = _find_classes(requests, manifest)
        for index, request_class in enumerate(manifest.classes):
            is_member = class_of_request == index
            yield _Group(by="class", name=request_class.name, is_member=is_member)

    yield from _form_prompt_groups(requests["input_tokens"])


def _find_classes(requests: JoinedColumns, manifest: RunManifest) -> Ints:
    """Return the class of each request as an index of `manifest.classes`.

    All requests of a task have the class of the task. With 3 turns in each task, task 1 has the
    request ids 3, 4 and 5.
    """
    task_ids = requests["request"] // manifest.turns_per_session
    return class_indices(manifest, task_ids)


class _LengthRange(NamedTuple):
    """Prompt lengths in tokens above `low` and up to `high`, with a name for reports."""

    low: int
    high: int
    name: str


def _form_prompt_groups(tokens: Ints) -> Iterator[_Group]:
    """Yield a group of requests for each range of prompt lengths, such as "101 to 400 tokens".

    A range with too few requests for a p99 is left out. So is a range with all requests, which
    would be the same group as that of all requests.

    Args:
        tokens: The prompt tokens of each request, negative if they are not known.
    """
    is_known = tokens >= 0
    known_tokens = tokens[as_selection(is_known)]
    if not len(known_tokens):
        return

    min_requests = BANDS["p99"].min_requests
    for length_range in _divide_lengths(known_tokens):
        is_member = (tokens > length_range.low) & (tokens <= length_range.high)
        member_count = np.count_nonzero(is_member)
        if min_requests <= member_count < len(tokens):
            yield _Group(by="prompt", name=length_range.name, is_member=is_member)


def _divide_lengths(tokens: Ints) -> Iterator[_LengthRange]:
    """Yield ranges of prompt lengths, each of which has about a quarter of the requests.

    With quartiles of 100, 200 and 400 tokens, the ranges are up to 100 tokens, 101 to 200, 201 to
    400, and over 400. Equal quartiles make fewer ranges.
    """
    longest = int(tokens.max())
    quartiles = np.quantile(tokens, PROMPT_QUARTILES, method="lower").tolist()
    inner_edges = sorted({edge for edge in quartiles if edge < longest})
    if not inner_edges:
        return

    first_edge = inner_edges[0]
    last_edge = inner_edges[-1]
    yield _LengthRange(low=-1, high=first_edge, name=f"up to {first_edge:,} tokens")
    for low, high in pairwise(inner_edges):
        yield _LengthRange(
            low, high, name=f"{format.value_range(f'{low + 1:,}', f'{high:,}')} tokens"
        )

    yield _LengthRange(low=last_edge, high=longest, name=f"over {last_edge:,} tokens")


def _split_ttft_of_groups(
    requests: JoinedColumns, groups: Sequence[_Group], has_server_timing: Mask
) -> list[list[TtftSplit]]:
    """Return, for each group, how the mean TTFT near each percentile divides into parts.

    A percentile such as p99 is left out for a group with too few requests. If the server reported
    its timing for any request of a group, only such requests of the group are used.

    Args:
        requests: All ok requests.
        groups: The groups of requests.
        has_server_timing: For which requests the server reported its timing.
    """
    ttft_ns = requests.measure("ttft")
    has_ttft = ttft_ns != UNDEFINED

    # A generator, so that only one of these masks of all requests is in memory at a time.
    used_of_groups = (
        _prefer_server_timing(group.is_member, has_server_timing) & has_ttft for group in groups
    )
    near_percentiles = _select_near_percentiles(ttft_ns, requests["due_ns"], used_of_groups)

    columns_near_percentiles = _read_columns(requests, near_percentiles, _TTFT_COLUMNS)
    splits = [
        _split_ttft(columns, near.percentile)
        for near, columns in zip(near_percentiles, columns_near_percentiles, strict=True)
    ]
    return _sort_into_groups(splits, near_percentiles, len(groups))


def _prefer_server_timing(is_member: Mask, has_server_timing: Mask) -> Mask:
    """Return the members of a group with a server timing, or all members if none has one."""
    is_member_with_timing = is_member & has_server_timing
    return is_member_with_timing if is_member_with_timing.any() else is_member


def _split_e2e_of_groups(requests: JoinedColumns, groups: Sequence[_Group]) -> list[list[E2eSplit]]:
    """Return, for each group, how the mean end-to-end latency near each percentile divides.

    A percentile such as p99 is left out for a group with too few requests.

    Args:
        requests: All ok requests.
        groups: The groups of requests.
    """
    e2e_ns = requests.measure("e2e")
    members_of_groups = [group.is_member for group in groups]
    near_percentiles = _select_near_percentiles(e2e_ns, requests["due_ns"], members_of_groups)

    columns_near_percentiles = _read_columns(requests, near_percentiles, _E2E_COLUMNS)
    splits = [
        _split_e2e(columns, near.percentile)
        for near, columns in zip(near_percentiles, columns_near_percentiles, strict=True)
    ]
    return _sort_into_groups(splits, near_percentiles, len(groups))


def _sort_into_groups(
    splits: Sequence[_Split], near_percentiles: Sequence[_RequestsNearPercentile], group_count: int
) -> list[list[_Split]]:
    """Return the splits of each group, in their order.

    Args:
        splits: The splits of all groups.
        near_percentiles: For each split, its requests, which belong to one group.
        group_count: The number of groups.
    """
    splits_of_groups: list[list[_Split]] = [[] for _ in range(group_count)]
    for split, near in zip(splits, near_percentiles, strict=True):
        splits_of_groups[near.group_index].append(split)

    return splits_of_groups


def _select_near_percentiles(
    latencies_ns: Ints, due_ns: Ints, used_of_groups: Iterable[Mask]
) -> list[_RequestsNearPercentile]:
    """Return the requests near each percentile of each group, group by group.

    Args:
        latencies_ns: The latency of each request.
        due_ns: The scheduled time of each request.
        used_of_groups: For each group, which of all requests are used.
    """
    return [
        _RequestsNearPercentile(group_index, percentile, indexes)
        for group_index, is_used in enumerate(used_of_groups)
        for percentile, indexes in _find_near_percentiles(latencies_ns, due_ns, is_used)
    ]


def _find_near_percentiles(
    latencies_ns: Ints, due_ns: Ints, is_used: Mask
) -> Iterator[tuple[PercentileName, Ints]]:
    """Yield each percentile with the indexes of the requests near it, such as from p98.5 to p99.5.

    The used requests are ranked by latency, and by scheduled time if latencies are equal. To save
    time, only the requests whose latency is near the percentile are sorted.

    Args:
        latencies_ns: The latency of each request.
        due_ns: The scheduled time of each request.
        is_used: Which requests are ranked.
    """
    ranks_by_percentile = _ranks_near_percentiles(int(np.count_nonzero(is_used)))
    end_ranks: set[int] = set()
    for ranks in ranks_by_percentile.values():
        end_ranks.update((ranks[0], ranks[-1]))
    latency_of_rank_ns = _find_latencies_of_ranks(latencies_ns, is_used, end_ranks)

    for percentile, ranks in ranks_by_percentile.items():
        shortest_ns = latency_of_rank_ns[ranks[0]]
        longest_ns = latency_of_rank_ns[ranks[-1]]

        # The candidates, in the order of their ranks. Several may have the shortest or the longest
        # latency, so some candidates can be ranked before or after those near the percentile.
        is_candidate = is_used & (latencies_ns >= shortest_ns) & (latencies_ns <= longest_ns)
        candidates = _sort_indexes(np.flatnonzero(is_candidate), latencies_ns, due_ns)

        # Ranks begin with 0, so the first candidate has as its rank the number of shorter ones.
        rank_of_first = int(np.count_nonzero(is_used & (latencies_ns < shortest_ns)))
        yield percentile, candidates[ranks.start - rank_of_first : ranks.stop - rank_of_first]


def _find_latencies_of_ranks(
    latencies_ns: Ints, is_used: Mask, ranks: Collection[int]
) -> dict[int, int]:
    """Return the latency of each rank, which is an index of the sorted latencies.

    If the used latencies are 30, 10 and 20, rank 0 has the latency 10.

    Args:
        latencies_ns: The latency of each request.
        is_used: Which requests are ranked.
        ranks: The ranks.
    """
    if not ranks:
        return {}

    # A partition puts the right latency at each of these ranks, and is faster than a sort.
    used_latencies_ns = latencies_ns[is_used]
    used_latencies_ns.partition(sorted(ranks))
    return {rank: int(used_latencies_ns[rank]) for rank in ranks}


def _sort_indexes(indexes: Ints, values: Ints, due_ns: Ints) -> Ints:
    """Return indexes of requests sorted by value, and by scheduled time for equal values."""
    # `lexsort` sorts by its last key first.
    order = np.lexsort((due_ns[indexes], values[indexes]))
    return indexes[order]


def _ranks_near_percentiles(count: int) -> dict[PercentileName, range]:
    """Return the ranks of the values near each percentile, for a number of values.

    Ranks begin with 0. For example, 100 values have the ranks 45 to 54 near p50, and rank 98 near
    p99. A percentile that needs more values is left out.
    """
    ranks_by_percentile: dict[PercentileName, range] = {}
    for percentile, band in BANDS.items():
        if count < band.min_requests:
            continue

        # A band is the fractions of the values near a percentile, such as 0.45 to 0.55.
        last_rank = count - 1
        first_rank = min(int(count * band.low), last_rank)
        end_rank = max(int(count * band.high), first_rank + 1)  # at least one rank
        ranks_by_percentile[percentile] = range(first_rank, end_rank)

    return ranks_by_percentile


def _read_columns(
    requests: JoinedColumns,
    selections: Sequence[_RequestsNearPercentile],
    names: Sequence[str],
) -> list[ColumnsByName]:
    """Return, for each selection of requests, the values of these requests in each column.

    Args:
        requests: All ok requests.
        selections: The selected requests, such as those near the p99 of a group.
        names: The names of the columns: metrics, such as "ttft", or fields of the records.
    """
    columns_of_selections: list[ColumnsByName] = [{} for _ in selections]

    # A column of all requests is large, so only one of them is in memory at a time.
    for name in names:
        is_metric = name in _METRICS
        values_of_all = requests.measure(name) if is_metric else requests[name]
        for selection, selected_columns in zip(selections, columns_of_selections, strict=True):
            selected_columns[name] = values_of_all[selection.indexes]

    return columns_of_selections


class _MeanParts(NamedTuple):
    """The mean duration of each part of TTFT over some requests, in ns.

    A part that the server reports is None unless it is reported for all of these requests.

    Attributes:
        client_ns: The delay of the client, from when it could send a request until it did.
        connect_ns: The wait for a connection.
        queue_ns: The wait in the server's queue.
        prefill_ns: The prefill in the server.
        transfer_ns: The transfer of the KV cache between servers.
    """

    client_ns: float
    connect_ns: float
    queue_ns: float | None
    prefill_ns: float | None
    transfer_ns: float | None


def _mean_parts(columns: ColumnsByName) -> _MeanParts:
    """Return the mean of each part of TTFT. `columns` has the columns of the requests by name."""
    could_send_ns = earliest_send_ns(columns)
    client_delay_ns = columns["sent_ns"] - could_send_ns
    connect_wait_ns = could_send_ns - columns["due_ns"]
    return _MeanParts(
        client_ns=float(client_delay_ns.mean()),
        connect_ns=float(connect_wait_ns.mean()),
        queue_ns=_mean_if_reported(columns["server_queue_ns"]),
        prefill_ns=_mean_if_reported(columns["server_prefill_ns"]),
        transfer_ns=_mean_if_reported(columns["server_transfer_ns"]),
    )


def _split_ttft(columns: ColumnsByName, percentile: PercentileName) -> TtftSplit:
    """Return the mean TTFT of the requests near a percentile, and the means of its parts.

    The last part is the rest: the time that belongs to no other part.

    Args:
        columns: The columns of the requests near the percentile, by name.
        percentile: The percentile.
    """
    ttft_ns = float(columns["ttft"].mean())
    parts = _mean_parts(columns)
    sum_of_parts_ns = sum(part_ns for part_ns in parts if part_ns is not None)

    return TtftSplit(
        at=percentile,
        requests=len(columns["ttft"]),
        ttft_ms=milliseconds(ttft_ns),
        client_ms=milliseconds(parts.client_ns),
        connect_ms=milliseconds(parts.connect_ns),
        queue_ms=_optional_milliseconds(parts.queue_ns),
        prefill_ms=_optional_milliseconds(parts.prefill_ns),
        transfer_ms=_optional_milliseconds(parts.transfer_ns),
        rest_ms=milliseconds(ttft_ns - sum_of_parts_ns),
    )


def _mean_if_reported(durations_ns: Ints) -> float | None:
    """Return the mean of durations, or None if one is negative, which means not reported."""
    is_reported = durations_ns >= 0
    return float(durations_ns.mean()) if is_reported.all() else None


def _optional_milliseconds(ns: float | None) -> float | None:
    """Return nanoseconds as milliseconds, and None if the duration is not known."""
    return None if ns is None else milliseconds(ns)


def _split_e2e(columns: ColumnsByName, percentile: PercentileName) -> E2eSplit:
    """Return the mean end-to-end latency of the requests near a percentile, and its parts.

    - TTFT is the time to the first token, or the whole latency of a response that is not streamed.
    - The stall is the largest gap between tokens, if that gap is longer than STALL_NS, else 0.
    - Decode is all other time after the first token.

    Args:
        columns: The columns of the requests near the percentile, by name.
        percentile: The percentile.
    """
    e2e_ns = columns["e2e"]
    is_streamed = columns["ttft"] != UNDEFINED
    ttft_ns = np.where(is_streamed, columns["ttft"], e2e_ns)

    has_stalled = columns["max_gap_ns"] > STALL_NS
    stall_ns = np.where(has_stalled, columns["max_gap_ns"], 0)

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

    def plus(self, other: _ConcurrentLoad) -> _ConcurrentLoad:
        """Return the load of this one and the other one together."""
        return _ConcurrentLoad(
            in_flight=self.in_flight + other.in_flight,
            waiting_input_tokens=self.waiting_input_tokens + other.waiting_input_tokens,
        )


class _SlowestRequest(NamedTuple):
    """One of the slowest requests.

    Attributes:
        metric: The latency by which it is one of them.
        request_index: Its index among all ok requests.
    """

    metric: str
    request_index: int


def list_slowest_requests(
    measured_stages: Sequence[Columns], other_stages: Sequence[Columns], manifest: RunManifest
) -> tuple[SlowRequest, ...]:
    """Return the slowest measured requests by TTFT, then those by end-to-end latency.

    Args:
        measured_stages: The records of each measured stage.
        other_stages: The records of each other stage, whose requests may be in flight too.
        manifest: The manifest of the run.
    """
    slowest = _find_slowest(measured_stages)
    request_indexes = [request.request_index for request in slowest]
    fields_of_requests = _read_fields(measured_stages, request_indexes)

    # Requests of all stages may be in flight when one of the slowest requests is sent.
    all_stages = (*measured_stages, *other_stages)
    loads = _measure_concurrent_loads(fields_of_requests, all_stages)

    return tuple(
        _describe_request(request.metric, fields, load, manifest)
        for request, fields, load in zip(slowest, fields_of_requests, loads, strict=True)
    )


def _find_slowest(measured_stages: Sequence[Columns]) -> list[_SlowestRequest]:
    """Return the slowest requests by TTFT, then those by end-to-end latency."""
    ok_requests = JoinedColumns(measured_stages, only_ok=True, keeps_columns=False)
    return [
        _SlowestRequest(metric, index)
        for metric in ("ttft", "e2e")
        for index in _slowest_indexes(ok_requests, metric)
    ]


def _slowest_indexes(requests: JoinedColumns, metric: str) -> list[int]:
    """Return the indexes of the SLOWEST_COUNT requests with the largest values of a metric.

    Requests with equal values are in the order of their scheduled times.
    """
    values = requests.measure(metric)

    # Find the smallest of the largest values. A partition is faster than a sort of all values: it
    # moves the SLOWEST_COUNT largest values to the end of the array, with the smallest one first.
    smallest_listed = UNDEFINED
    if len(values) > SLOWEST_COUNT:
        smallest_listed = np.partition(values, -SLOWEST_COUNT)[-SLOWEST_COUNT]

    # Because of equal values, there may be more than SLOWEST_COUNT candidates.
    is_candidate = (values >= smallest_listed) & (values != UNDEFINED)
    candidates = np.flatnonzero(is_candidate)

    # Sort the candidates by descending value, and equal values by scheduled time. The last key of
    # `lexsort` counts first.
    due_ns = requests["due_ns"][candidates]
    slowest_first = np.lexsort((due_ns, -values[candidates]))
    sorted_candidates = candidates[slowest_first]
    indexes: list[int] = sorted_candidates[:SLOWEST_COUNT].tolist()
    return indexes


def _measure_concurrent_loads(
    requests: Sequence[Mapping[str, int]], records: Sequence[Columns]
) -> list[_ConcurrentLoad]:
    """Return the load at the target of each request at the moment when the request was sent.

    The records may be large, so each block of them is read only once, for all requests.

    Args:
        requests: The fields of each request, by name.
        records: The records of all requests of the run, by stage.
    """
    loads = [_ConcurrentLoad(in_flight=0, waiting_input_tokens=0) for _ in requests]

    all_blocks = chain.from_iterable(columns.blocks() for columns in records)
    for block in all_blocks:
        loads_in_block = [_measure_load_in_block(block, request) for request in requests]
        loads = [
            load.plus(load_in_block)
            for load, load_in_block in zip(loads, loads_in_block, strict=True)
        ]

    return loads


def _measure_load_in_block(block: Columns, request: Mapping[str, int]) -> _ConcurrentLoad:
    """Return the load at the target of a request at the moment when the request was sent.

    The load is the number of other requests in flight, and the total length of the prompts for
    which no token had arrived yet.

    Args:
        block: Records of requests. One of them may be the request itself, which is not counted.
        request: The fields of the request by name.
    """
    rows_in_flight = _find_in_flight(block, request)
    first_token_ns = block.take("first_token_ns", rows_in_flight)
    prompt_tokens = block.take("input_tokens", rows_in_flight)

    # A negative time means that no token ever arrived, a negative length that it is not known.
    got_no_token = first_token_ns < 0
    got_token_later = first_token_ns > request["sent_ns"]
    is_waiting = got_no_token | got_token_later
    is_length_known = prompt_tokens >= 0

    waiting_tokens = prompt_tokens[is_waiting & is_length_known]
    return _ConcurrentLoad(
        in_flight=len(rows_in_flight),
        waiting_input_tokens=int(waiting_tokens.sum(dtype=np.int64)),
    )


def _find_in_flight(block: Columns, request: Mapping[str, int]) -> Ints:
    """Return the rows of other requests in flight at the same target when a request was sent.

    A request is in flight from its send until its response is complete. A slot is the unique
    number of a request.
    """
    now_ns = request["sent_ns"]
    sent_ns = block["sent_ns"]
    done_ns = block["done_ns"]

    # A negative time means that the request was never sent, or its response never complete.
    was_sent = (sent_ns >= 0) & (sent_ns <= now_ns)
    was_not_done = (done_ns < 0) | (done_ns > now_ns)
    rows_in_flight = np.flatnonzero(was_sent & was_not_done)

    is_same_target = block.take("target", rows_in_flight) == request["target"]
    is_another_request = block.take("slot", rows_in_flight) != request["slot"]
    other_rows: Ints = rows_in_flight[is_same_target & is_another_request]
    return other_rows


def _read_fields(
    measured_stages: Sequence[Columns], request_indexes: Sequence[int]
) -> list[dict[str, int]]:
    """Return what the records say about some of the ok requests, as a dictionary for each request.

    The keys are the names of the fields, _FIELDS_OF_SLOW_REQUEST. There is one more key,
    "earliest_send_ns": when the request was due and its connection was open.

    Args:
        measured_stages: The records of each measured stage.
        request_indexes: The indexes of the requests among all ok requests.
    """
    order = np.array(request_indexes, np.int64)
    requests = JoinedColumns(measured_stages, only_ok=True, order=order)
    columns_by_name = {name: requests[name] for name in _FIELDS_OF_SLOW_REQUEST}
    columns_by_name["earliest_send_ns"] = earliest_send_ns(requests)

    return [
        {name: int(column[position]) for name, column in columns_by_name.items()}
        for position in range(len(request_indexes))
    ]


def _describe_request(
    metric: str, fields: Mapping[str, int], load: _ConcurrentLoad, manifest: RunManifest
) -> SlowRequest:
    """Return one of the slowest requests as the summary lists it.

    A field that is not known is negative in the records, and becomes None.

    Args:
        metric: "ttft" or "e2e": the request is one of the slowest by this latency.
        fields: The fields of its record by name, and "earliest_send_ns": when it was due and its
            connection was open.
        load: The other requests in flight when the request was sent.
        manifest: The manifest of the run.
    """
    # From the scheduled time, the request waits for its connection, and then for the client.
    due_ns = fields["due_ns"]
    connect_wait_ns = fields["earliest_send_ns"] - due_ns
    client_delay_ns = fields["sent_ns"] - fields["earliest_send_ns"]
    e2e_ns = fields["end_ns"] - due_ns
    is_in_session = fields["session"] >= 0

    return SlowRequest(
        by=metric,
        # Which request it is.
        slot=fields["slot"],
        id=_request_id(fields["slot"], manifest),
        session=fields["session"] if is_in_session else None,
        turn=fields["turn"] if is_in_session else None,
        target=_target_name(fields["target"], manifest),
        due_s=due_ns / 1e9,
        # Its latencies and their parts.
        ttft_ms=_time_between_ms(due_ns, fields["first_token_ns"]),
        e2e_ms=milliseconds(e2e_ns),
        client_ms=milliseconds(client_delay_ns),
        connect_ms=milliseconds(connect_wait_ns),
        queue_ms=_duration_ms(fields["server_queue_ns"]),
        prefill_ms=_duration_ms(fields["server_prefill_ns"]),
        decode_ms=_time_between_ms(fields["first_token_ns"], fields["last_token_ns"]),
        max_gap_ms=milliseconds(fields["max_gap_ns"]),
        # Its size, and the load that it met.
        input_tokens=_tokens_if_known(fields["input_tokens"]),
        cached_tokens=_tokens_if_known(fields["cached_tokens"]),
        output_tokens=_tokens_if_known(fields["output_tokens"]),
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


def _tokens_if_known(tokens: int) -> int | None:
    """Return a number of tokens of a record, or None if it is negative, which means not known."""
    return tokens if tokens >= 0 else None


def _duration_ms(duration_ns: int) -> float | None:
    """Return a duration of a record in ms, or None if it is negative, which means not known."""
    return milliseconds(duration_ns) if duration_ns >= 0 else None


def _time_between_ms(start_ns: int, end_ns: int) -> float | None:
    """Return the time from one event to another in ms, or None if either is negative (unknown)."""
    is_known = start_ns >= 0 and end_ns >= 0
    return milliseconds(end_ns - start_ns) if is_known else None
