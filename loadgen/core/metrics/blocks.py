"""The blocks of a summary from the cells of an accumulator: windows, requests, tokens, conversations, bytes, and use of
the load generator itself.

Pure. The types are blocks of `summary.json`; `docs/summary.md` defines their fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from loadgen.core.limits import ITL_TOKENS_PER_EVENT, STALL_NS
from loadgen.core.metrics import validity, windows
from loadgen.core.metrics.accumulator import FINISH_PREFIX, CutConversations, MetricAccumulator
from loadgen.core.metrics.windows import Span, Window, per_second, span
from loadgen.core.results.record import SOURCES, STATUSES
from loadgen.core.stats.quantiles import Distribution, index, milliseconds
from loadgen.core.units import LONGEST_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from loadgen.core.results.manifest import WorkerSample


class Bytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the wire, heads and bodies, of measured requests of any status."""

    sent: int
    received: int


class ErrorKind(msgspec.Struct, frozen=True, kw_only=True):
    """How often a kind of failure happened, and the text of the failed request that was due first."""

    count: int
    first_text: str


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by status: ok + failed + dropped + cancelled + unfinished + lost = scheduled, always."""

    scheduled: int
    ok: int
    failed: int
    dropped: int
    cancelled: int
    unfinished: int = 0
    lost: int
    resent: int
    by_error: dict[str, ErrorKind]
    by_finish: dict[
        str, int
    ] = {}  # ok requests by the reason that the server gave for the end, most frequent first

    @property
    def decided(self) -> int:
        """Requests with an outcome of their own: all but those that the user or the end of the drain cut."""
        return self.scheduled - self.cancelled - self.unfinished

    @property
    def failed_by_client(self) -> int:
        """Requests lost with a worker, or failed because this host ran out of a resource."""
        out_of_resources = self.by_error.get("client_resource")
        return self.lost + (out_of_resources.count if out_of_resources else 0)

    @property
    def failed_by_server(self) -> int:
        """Requests that failed at the server or on the path to it."""
        return self.failed + self.lost - self.failed_by_client

    @property
    def dropped_share(self) -> float:
        """Of the starts that were asked for: those that the client dropped at a cap; none where each followed a turn
        that failed.
        """
        starts, followed = (
            self.scheduled - self.cancelled,
            self.by_error.get("previous_turn_failed"),
        )
        return (
            self.dropped / starts
            if starts and self.dropped > (followed.count if followed else 0)
            else 0.0
        )


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """Ok requests by the source of their token counts: server, tokenizer, estimate, events, or none."""

    input: dict[str, int]
    output: dict[str, int]


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of ok requests, and their rates. A sum covers the requests with a known count; null without any."""

    input: int | None
    output: int | None
    cached: int | None
    reasoning: int | None
    asked_output: int | None
    cached_share: float | None
    length_mismatch_share: float | None
    per_event: float | None
    output_per_s: float | None
    total_per_s: float | None
    input_per_s: float | None
    steady_output_per_s: float | None
    steady_total_per_s: float | None
    steady_input_per_s: float | None
    last_issued_output_per_s: float | None
    whole_output_per_s: float | None
    failed_input: int
    failed_output: int
    sources: Sources
    output_per_s_per_gpu: float | None = None  # null where the number of GPUs is not known
    total_per_s_per_gpu: float | None = None
    steady_output_per_s_per_gpu: float | None = None
    steady_total_per_s_per_gpu: float | None = None
    cache_written: int | None = (
        None  # of the prompts, by servers that bill it; null where none says it
    )


class TaskGoodput(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations and tasks that keep what the SLO promises of them as a whole.

    `within_ms`: from the due instant of the first request to the end of the last one; `wait_ms`: for each first token.
    `share` is of all that `Sessions.count` counts; failed ones keep no promise. `met`: whether that is at least
    `share_limit`; null where none is counted.
    """

    within_ms: float | None
    wait_ms: float | None
    good: int
    rps: float | None  # per second of the measurement window
    steady_rps: float | None = None  # those that ended in the steady-state window, per second of it
    share: float | None
    share_limit: float
    met: bool | None


class Sessions(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations and agentic tasks of measured stages.

    `ok`: those whose requests are all ok; the figures from `duration_ms` on are of them. `count` leaves out those with
    a request that was cancelled, and those that the end of their stage or of the drain cut short (`cut`).
    """

    count: int
    cut: int = 0
    abandoned: int = 0  # their user went away in the middle of an answer
    ok: int
    ok_per_s: float | None
    steady_ok_per_s: float | None
    duration_ms: (
        Distribution  # from the due instant of the first request to the end of the last one
    )
    wait_ms: Distribution = Distribution()  # for first tokens, all requests of a task together
    longest_wait_ms: Distribution = Distribution()  # for a first token
    requests: float | None = None  # mean of a task, as the next three
    input_tokens: float | None = None
    cached_tokens: float | None = None  # null when the server does not say
    output_tokens: float | None = None
    goodput: TaskGoodput | None = None  # null where nothing was promised of tasks as a whole


class Stalls(msgspec.Struct, frozen=True, kw_only=True):
    """Ok requests with a gap between output events of more than `over_ms`; null where the gaps are withheld."""

    over_ms: float
    requests: int | None
    share: float | None


class ClientUse(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that the load generator itself used, all workers together.

    `cpu_share_max` and `waited_share_max` are shares of one core, for the one worker with the largest share.
    """

    cpu_s: float | None
    peak_rss_bytes: int | None
    workers: int
    cpu_share_max: float | None
    waited_share_max: float | None = None
    kernel_stamp_share: float | None


def window(
    cell: MetricAccumulator,
    everything: Sequence[MetricAccumulator],
    full: tuple[int, int] = (-1, LONGEST_NS),
) -> Window:
    """The intervals that the rates of a cell are divided by, as `Window` defines them. `everything`: the cells of all
    stages. `full`: the time in which the load of the cell runs alone and in full, as `full_load`.
    """
    whole = span(0, max(part.latest("done_ns") for part in everything))
    if not cell.sum("due"):
        return Window(whole=whole)
    first, end = cell.least["due"], cell.most["last_token_ns"]
    # later turns of conversations and tasks start at the pace of the server, so only starts bound the steady state
    last = cell.most["start"]
    issued = cell.latest("issued_end")
    inside = span(first, end if end >= 0 else cell.most["done_ns"])
    return Window(
        **msgspec.structs.asdict(inside),
        steady=span(max(first, full[0]), min(last, full[1])),
        last_issued=span(first, issued if issued >= 0 else cell.latest("issued_done")),
        whole=whole,
    )


def full_load(stages: Sequence[MetricAccumulator], first: int, last: int) -> tuple[int, int]:
    """The time, in ns, in which the load of the stages from `first` to `last` runs alone and in full.

    From when no request of an earlier stage is in flight and, in a closed loop, every lane has sent its first request;
    until, in a closed loop with a count, some lanes have nothing more to send.
    """
    start_ns = max(cell.latest("done_ns") for cell in (MetricAccumulator(), *stages[:first]))
    ends = stages[last].sample("lane_end")
    end_ns = round(ends.nth(index(ends.count, windows.LANES_ENDED))) if ends.count else LONGEST_NS
    return max(start_ns, stages[first].latest("lane_due")), end_ns


def amount_in(
    cells: Sequence[MetricAccumulator],
    name: str,
    stretch: Span | Window,
    *,
    includes_start: bool = False,
) -> float:
    """Return how much of an amount came in an interval, all cells together.

    What came in the first nanosecond of the interval counts with `includes_start` only.
    """
    return sum(
        cell.amount(name).between(stretch.start_s, stretch.end_s, includes_start=includes_start)
        for cell in cells
    )


def bytes(cell: MetricAccumulator) -> Bytes:
    """Bytes sent and received, of requests of any status."""
    return Bytes(sent=cell.sum("bytes_sent"), received=cell.sum("bytes_received"))


def requests(cell: MetricAccumulator, unrecorded: int) -> RequestCounts:
    """Counts by status and by error kind, most frequent kind first. `unrecorded`: lost slots, which have no row."""
    errors = {
        kind: ErrorKind(count=count, first_text=words)
        for kind, (count, _, words) in cell.errors.items()
    }
    if unrecorded:
        errors["no_record"] = ErrorKind(
            count=unrecorded, first_text="planned or sent, but no record of it was found"
        )
    counts = {name: cell.sum(name) for name in (*STATUSES, "resent")}
    return RequestCounts(
        scheduled=cell.sum("rows") + unrecorded,
        **counts | {"lost": counts["lost"] + unrecorded},
        by_error=dict(sorted(errors.items(), key=lambda item: (-item[1].count, item[0]))),
        by_finish=cell.sums_with_prefix(FINISH_PREFIX),
    )


def _plus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def tokens(
    cell: MetricAccumulator,
    everything: Sequence[MetricAccumulator],
    inside: Window,
    timeline: Sequence[NDArray[np.int64]],
    gpus: int | None,
) -> Tokens:
    """The block `tokens`.

    `timeline`: per stage, output events per bin of time. Without any, the tokens of a request are spread evenly from
    its first to its last token.
    """
    output, prompt, cached = (
        cell.sum_known(f"{side}_tokens") for side in ("output", "input", "cached")
    )
    base, event_count, comparable = (
        cell.sum_known("cached_base"),
        cell.sum("events"),
        cell.sum("comparable"),
    )
    steady = inside.steady
    events = windows.steady_events(timeline, steady) if event_count else None
    in_steady = (
        amount_in([cell], "output", steady)
        if events is None
        else events * cell.sums["billed"] / event_count
    )
    steady_output = per_second(in_steady, steady) if output is not None else None
    steady_input = (
        per_second(amount_in([cell], "input", steady, includes_start=True), steady)
        if prompt is not None
        else None
    )
    rates = {
        "output_per_s": per_second(output, inside),
        "total_per_s": per_second(_plus(output, prompt), inside),
        "steady_output_per_s": steady_output,
        "steady_total_per_s": _plus(steady_output, steady_input),
    }
    return Tokens(
        input=prompt,
        output=output,
        cached=cached,
        cache_written=cell.sum_known("cache_written_tokens"),
        reasoning=cell.sum_known("reasoning_tokens"),
        asked_output=cell.sum_known("asked_output"),
        cached_share=cached / base if cached is not None and base else None,
        length_mismatch_share=cell.sums["unequal"] / comparable if comparable else None,
        per_event=cell.sums["streamed"] / event_count if event_count else None,
        input_per_s=per_second(prompt, inside),
        steady_input_per_s=steady_input,
        last_issued_output_per_s=per_second(output, inside.last_issued),
        whole_output_per_s=whole_output_per_s(everything, inside),
        failed_input=cell.sum("failed_input"),
        failed_output=cell.sum("failed_output"),
        sources=Sources(input=_sources(cell, "input"), output=_sources(cell, "output")),
        **rates,
        **{f"{name}_per_gpu": per_gpu(rate, gpus) for name, rate in rates.items()},
    )


_REST_ON_OUTPUT = (
    *(name for name in Tokens.__struct_fields__ if "output_per" in name or "total_per" in name),
    *("output", "reasoning", "length_mismatch_share", "per_event"),
)


def without_output(known: Tokens) -> Tokens:
    """The block without what rests on the counts of output tokens, where these are withheld."""
    return msgspec.structs.replace(known, **dict.fromkeys(_REST_ON_OUTPUT))


def whole_output_per_s(everything: Sequence[MetricAccumulator], inside: Window) -> float | None:
    """Output tokens of all stages, per second of the whole run."""
    known = [total for part in everything if (total := part.sum_known("output_tokens")) is not None]
    return per_second(sum(known) if known else None, inside.whole)


def per_gpu(rate: float | None, gpus: int | None) -> float | None:
    """A rate of the whole target divided by its GPUs; None where one of the two is not known."""
    return rate / gpus if rate is not None and gpus else None


def _sources(cell: MetricAccumulator, side: str) -> dict[str, int]:
    tags = (*(tag or "none" for tag in SOURCES), "unasked")
    return {tag: count for tag in tags if (count := cell.sum(f"{side}_source_{tag}"))}


def tokens_over_time(
    measured: MetricAccumulator, timeline: Sequence[NDArray[np.int64]]
) -> Callable[[Span], float | None]:
    """A function from an interval to the output tokens of measured requests that came in it.

    With a timeline, each output event counts as many tokens as the measured events carry on average. Without one, the
    tokens of each answer are spread evenly over it. The function returns None when no tokens were counted.
    """
    events, billed, sums = (
        measured.sum("events"),
        measured.sum("billed"),
        windows.event_sums(timeline),
    )
    curve = measured.amount("output").curve() if sums is None and events else None

    def tokens_in(stretch: Span) -> float | None:
        if curve is not None:
            return curve.between(stretch.start_s, stretch.end_s)
        return (
            windows.events_between(sums, stretch) * billed / events
            if sums is not None and events
            else None
        )

    return tokens_in


def itl_absent(cell: MetricAccumulator, inter_chunk: Distribution) -> str:
    """Why the gaps between events are not gaps between tokens; "" when they are.

    A request may have one token more than events: the token that ends an answer often has no text. Not so a short
    answer that ended at its length: it has no end token, and one of three tokens is no trifle.
    """
    if inter_chunk.count == 0:
        return "no answer had two output events"
    events = cell.sum("counted_events")
    if not events:
        return "nobody counted the tokens, so how many an event carries is not known"
    if cell.sums["surplus_tokens"] > ITL_TOKENS_PER_EVENT * events:
        return f"events carry {cell.sums['counted_tokens'] / events:.2f} tokens on average"
    return ""


def stalls(cell: MetricAccumulator) -> Stalls:
    """Ok requests with a gap between output events of more than `limits.STALL_NS`."""
    stalled, ok = cell.sum("stalled"), cell.sum("ok")
    return Stalls(
        over_ms=milliseconds(STALL_NS), requests=stalled, share=stalled / ok if ok else None
    )


def sessions(cell: MetricAccumulator, cut: CutConversations, inside: Window) -> Sessions | None:
    """Return the block `sessions` of the conversations of measured stages, or None if there are none."""
    whole, drained, good = cell.sum("sessions"), cell.sum("sessions_cut"), cell.sum("sessions_ok")
    if not whole and not any(cut):
        return None

    def mean(name: str) -> float | None:
        return cell.sum(f"session_{name}") / good if good else None

    count = whole - cell.sum("sessions_cancelled") - drained
    return Sessions(
        count=count,
        cut=cut.by_end_of_load + drained,
        abandoned=cell.sum("sessions_abandoned"),
        ok=good,
        ok_per_s=per_second(good, inside),
        steady_ok_per_s=per_second(amount_in([cell], "session", inside.steady), inside.steady),
        duration_ms=cell.distribution("session"),
        wait_ms=cell.distribution("session_wait"),
        longest_wait_ms=cell.distribution("session_longest_wait"),
        requests=mean("requests"),
        input_tokens=mean("input"),
        cached_tokens=mean("cached") if cell.sum("cached_tokens_known") else None,
        output_tokens=mean("output"),
        goodput=_task_goodput(cell, count, inside),
    )


def _task_goodput(cell: MetricAccumulator, count: int, inside: Window) -> TaskGoodput | None:
    term = cell.slo.task if cell.slo is not None else None
    if term is None:
        return None
    good = cell.sum("sessions_good")
    return TaskGoodput(
        within_ms=None if term.within_ns is None else milliseconds(term.within_ns),
        wait_ms=None if term.wait_ns is None else milliseconds(term.wait_ns),
        good=good,
        rps=per_second(good, inside),
        steady_rps=per_second(amount_in([cell], "good_session", inside.steady), inside.steady),
        share=good / count if count else None,
        share_limit=term.share,
        met=good >= term.share * count if count else None,
    )


def client(
    cell: MetricAccumulator, seconds: Sequence[WorkerSample], inside: Window, workers: int
) -> ClientUse:
    """The block `client`, from the samples that each worker took of itself: CPU seconds and peak memory of all workers
    together, and the largest share of one; None without samples.
    """
    cpu_s: dict[int, float] = {}
    peak: dict[int, int] = {}
    for second in seconds:
        cpu_s[second.worker] = max(cpu_s.get(second.worker, 0.0), second.cpu_s)
        peak[second.worker] = max(peak.get(second.worker, 0), second.peak_rss_bytes)
    busiest, waited = (
        validity.worst(seconds, inside, share) for share in ("cpu_share", "waited_share")
    )
    answered = cell.sum("answered")
    return ClientUse(
        cpu_s=sum(cpu_s.values()) if seconds else None,
        peak_rss_bytes=sum(peak.values()) if seconds else None,
        workers=workers,
        cpu_share_max=None if busiest is None else busiest.cpu_share,
        waited_share_max=None if waited is None else waited.waited_share,
        kernel_stamp_share=cell.sums["kernel_stamps"] / answered if answered else None,
    )


def prompt_disagreement(cell: MetricAccumulator, template_tokens: int | None) -> float | None:
    """How far the server's prompt token counts differ from ours, relative; None when no request has both counts.

    Ours is the content as built plus the share of the chat template.
    """
    count = cell.sum("prompts_compared")
    if not count:
        return None
    ours = cell.sums["prompt_tokens_built"] + (template_tokens or 0) * count
    return (cell.sums["prompt_tokens_of_server"] - ours) / ours


def repeated(cell: MetricAccumulator) -> int:
    """Return the number of requests with a prompt that an earlier request had sent already."""
    numbers = [
        np.zeros(0, np.int64),
        *(part["request"][part["sent_ns"] >= 0] for part in cell.columns),
    ]
    sent = np.concatenate(numbers)
    if (
        len(sent) and int(sent.max()) - int(sent.min()) < 4 * len(sent) + 1000
    ):  # as they are numbered: without a sort
        seen = np.zeros(int(sent.max()) - int(sent.min()) + 1, bool)
        seen[sent - sent.min()] = True
        return len(sent) - int(np.count_nonzero(seen))
    return int((np.diff(np.sort(sent)) == 0).sum())
