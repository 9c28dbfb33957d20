"""Counting blocks of the summary: requests, errors, tokens, conversations, bytes, use of the load generator itself.

Pure, on columns only. The types are blocks of `summary.json`; `docs/summary.md` defines their fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.metrics import columns as metrics
from loadgen.metrics import validity
from loadgen.metrics.accumulator import TimeCurve
from loadgen.metrics.columns import CANCELLED, DROPPED, FAILED, LOST, OK, UNFINISHED, Columns, Span, Window
from loadgen.results.record import KINDS, SOURCES
from loadgen.stats.quantiles import Distribution, exact, milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from loadgen.results.manifest import Second


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

    @property
    def decided(self) -> int:
        """Requests with an outcome of their own: all but those that the user or the end of the drain cut."""
        return self.scheduled - self.cancelled - self.unfinished


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


class Sessions(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations (agentic tasks) of measured stages.

    `ok`: conversations whose turns are all ok. `duration_ms`: from the due instant of the first turn to the end of the
    last one, of ok conversations. `count` leaves out conversations with a turn that the user cancelled, and those that
    the end of their stage or of the drain cut short (`cut`).
    """

    count: int
    cut: int = 0
    ok: int
    ok_per_s: float | None
    steady_ok_per_s: float | None
    duration_ms: Distribution


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


def bytes(columns: Columns) -> Bytes:
    """Bytes sent and received, of requests of any status."""
    return Bytes(sent=int(columns["bytes_sent"].sum()), received=int(columns["bytes_received"].sum()))


def requests(columns: Columns, texts: Sequence[str], unrecorded: int) -> RequestCounts:
    """Counts by status and by error kind, most frequent kind first. `unrecorded`: planned slots without a row; they are
    lost.
    """
    ok, failed, dropped, cancelled, lost, unfinished = (
        int(columns.where(code).sum()) for code in (OK, FAILED, DROPPED, CANCELLED, LOST, UNFINISHED)
    )
    kinds = np.flatnonzero(np.bincount(columns["kind"])).tolist()
    errors = {KINDS[kind]: _error(columns, kind, texts) for kind in kinds if kind and KINDS[kind] != "unfinished"}
    if unrecorded:
        errors["no_record"] = ErrorKind(count=unrecorded, first_text="planned, but no record of it was found")
    return RequestCounts(
        scheduled=len(columns) + unrecorded,
        ok=ok,
        failed=failed,
        dropped=dropped,
        cancelled=cancelled,
        unfinished=unfinished,
        lost=lost + unrecorded,
        resent=int(columns["resent"].sum()),
        by_error=dict(sorted(errors.items(), key=lambda item: (-item[1].count, item[0]))),
    )


def _error(columns: Columns, kind: int, texts: Sequence[str]) -> ErrorKind:
    places = np.flatnonzero(columns["kind"] == kind)
    with_text = places[columns["text"][places] >= 0]
    candidates = with_text if len(with_text) else places
    first = candidates[np.argmin(columns["due_ns"][candidates])]
    text, status = int(columns["text"][first]), int(columns["http_status"][first])
    words = texts[text] if 0 <= text < len(texts) else ""
    if not words and status:
        words = f"HTTP {status}"
    return ErrorKind(count=len(places), first_text=words)


def _sum(values: NDArray[np.int64]) -> int | None:
    known = values[values >= 0]
    return int(known.sum(dtype=np.int64)) if len(known) else None


def _plus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def tokens(measured: Columns, everything: Sequence[Columns], inside: Window, events: float | None) -> Tokens:
    """The block `tokens`.

    `events`: output events in the steady window. None when there is no timeline: then the tokens of a request are
    spread evenly from its first to its last token.
    """
    ok = measured.where(OK)
    output_column, input_column, cached_column = (
        measured[f"{side}_tokens"][ok] for side in ("output", "input", "cached")
    )
    output, prompt, cached = _sum(output_column), _sum(input_column), _sum(cached_column)
    counted = ok & (measured["output_tokens"] >= 0) & (measured["output_events"] > 0)
    event_count = int(measured["output_events"][counted].sum(dtype=np.int64))
    streamed = int(metrics.streamed_tokens(measured)[counted].sum(dtype=np.int64))
    billed = int(measured["output_tokens"][counted].sum(dtype=np.int64))
    steady_output: float | None
    if events is not None and event_count:
        steady_output = metrics.per_second(events * billed / event_count, inside.steady)
    else:
        steady_output = metrics.per_second(metrics.spread_tokens(measured, inside.steady), inside.steady)
    steady_input = metrics.per_second(_prompt_tokens(measured, inside.steady), inside.steady)
    asked = ok & (measured["asked_output"] >= 0)
    comparable = asked & (measured["output_tokens"] >= 0)
    unequal = int((measured["asked_output"] != measured["output_tokens"])[comparable].sum())
    cached_known = cached_column >= 0
    base = _sum(input_column[cached_known])
    failed = measured.where(FAILED)
    return Tokens(
        input=prompt,
        output=output,
        cached=cached,
        reasoning=_sum(measured["reasoning_tokens"][ok]),
        asked_output=_sum(measured["asked_output"][ok]),
        cached_share=cached / base if cached is not None and base else None,
        length_mismatch_share=unequal / int(comparable.sum()) if comparable.any() else None,
        per_event=streamed / event_count if event_count else None,
        output_per_s=metrics.per_second(output, inside),
        total_per_s=metrics.per_second(_plus(output, prompt), inside),
        input_per_s=metrics.per_second(prompt, inside),
        steady_output_per_s=steady_output if output is not None else None,
        steady_total_per_s=_plus(steady_output, steady_input) if output is not None and prompt is not None else None,
        steady_input_per_s=steady_input if prompt is not None else None,
        last_issued_output_per_s=metrics.per_second(output, inside.last_issued),
        whole_output_per_s=metrics.per_second(_whole_output(everything), inside.whole),
        failed_input=_sum(measured["input_tokens"][failed]) or 0,
        failed_output=_sum(measured["output_tokens"][failed]) or 0,
        sources=Sources(input=_sources(measured["input_source"][ok]), output=_sources(measured["output_source"][ok])),
    )


def per_gpu(rate: float | None, gpus: int | None) -> float | None:
    """A rate of the whole target divided by its GPUs; None where one of the two is not known."""
    return rate / gpus if rate is not None and gpus else None


def with_gpus(tokens: Tokens, gpus: int | None) -> Tokens:
    """The block with its rates per GPU."""
    return msgspec.structs.replace(
        tokens,
        output_per_s_per_gpu=per_gpu(tokens.output_per_s, gpus),
        total_per_s_per_gpu=per_gpu(tokens.total_per_s, gpus),
        steady_output_per_s_per_gpu=per_gpu(tokens.steady_output_per_s, gpus),
        steady_total_per_s_per_gpu=per_gpu(tokens.steady_total_per_s, gpus),
    )


def tokens_over_time(measured: Columns, timeline: Sequence[NDArray[np.int64]]) -> Callable[[Span], float | None]:
    """A function from an interval to the output tokens of measured requests that came in it.

    With a timeline, each output event counts as many tokens as the measured events carry on average. Without one, the
    tokens of each answer are spread evenly over it. The function returns None when no tokens were counted.
    """
    counted = measured.where(OK) & (measured["output_tokens"] >= 0) & (measured["output_events"] > 0)
    events = int(measured["output_events"][counted].sum(dtype=np.int64))
    billed = int(measured["output_tokens"][counted].sum(dtype=np.int64))
    sums = metrics.event_sums(timeline)
    curve = TimeCurve()
    if sums is None and events:
        curve.add(*metrics.token_spans(measured))

    def tokens_in(stretch: Span) -> float | None:
        if not events:
            return None
        if sums is None:
            return curve.between(stretch.start_s, stretch.end_s)
        return metrics.events_between(sums, stretch) * billed / events

    return tokens_in


def _prompt_tokens(columns: Columns, stretch: Span) -> int:
    """Prompt tokens of ok requests whose first token came in an interval: by then the prompt has been processed."""
    first_ns = np.where(columns["first_token_ns"] < 0, columns["end_ns"], columns["first_token_ns"])
    selected = columns.where(OK) & metrics.ended_within(first_ns, stretch)
    return _sum(columns["input_tokens"][selected]) or 0


def _whole_output(everything: Sequence[Columns]) -> int | None:
    sums = [_sum(part["output_tokens"][part.where(OK)]) for part in everything]
    known = [total for total in sums if total is not None]
    return sum(known) if known else None


def _sources(codes: NDArray[np.int64]) -> dict[str, int]:
    counts = np.bincount(codes, minlength=len(SOURCES))
    return {tag or "none": int(count) for tag, count in zip(SOURCES, counts, strict=False) if count}


def asked_and_got(columns: Columns) -> tuple[int, int]:
    """Output tokens asked for, and those that came, of ok requests where both are known."""
    known = columns.where(OK) & (columns["asked_output"] >= 0) & (columns["output_tokens"] >= 0)
    asked, got = (int(columns[name][known].sum(dtype=np.int64)) for name in ("asked_output", "output_tokens"))
    return asked, got


def itl_absent(columns: Columns, inter_chunk: Distribution) -> str:
    """Why the gaps between events are not gaps between tokens; "" when they are.

    Each request may have one token more than events: the token that ends an answer often has no text.
    """
    if inter_chunk.count == 0:
        return "no answer had two output events"
    ok = columns.where(OK) & (columns["output_events"] > 0)
    events = columns["output_events"][ok].astype(np.int64)
    counted = np.isin(columns["output_source"][ok], [SOURCES.index("server"), SOURCES.index("tokenizer")])
    if not counted.any():
        return "nobody counted the tokens, so how many an event carries is not known"
    surplus = np.maximum(metrics.streamed_tokens(columns)[ok] - events - 1, 0)[counted].sum()
    if surplus > metrics.ITL_TOKENS_PER_EVENT * events[counted].sum():
        carried = metrics.streamed_tokens(columns)[ok][counted].sum() / events[counted].sum()
        return f"events carry {carried:.2f} tokens on average"
    return ""


def stalls(columns: Columns) -> Stalls:
    """Ok requests with a gap between output events of more than `columns.STALL_NS`."""
    ok = columns.where(OK)
    stalled = int((columns.measure("max_gap")[ok] > metrics.STALL_NS).sum())
    total = int(ok.sum())
    return Stalls(over_ms=milliseconds(metrics.STALL_NS), requests=stalled, share=stalled / total if total else None)


class _Conversations(NamedTuple):
    """Arrays with an element per conversation, in the order of the conversation numbers."""

    good: NDArray[np.bool_]  # every turn is ok
    cancelled: NDArray[np.bool_]  # the user cancelled one of its turns
    cut: NDArray[np.bool_]  # its stage ended before its last turn was scheduled, or the drain cut one of its turns
    due_ns: NDArray[np.int64]  # of the first turn
    end_ns: NDArray[np.int64]  # of the last output


def _conversations(columns: Columns, turns: int) -> _Conversations:
    inside = np.flatnonzero(columns["session"] >= 0)
    order = inside[np.argsort(columns["session"][inside], kind="stable")]
    numbers = columns["session"][order]
    if len(numbers) == 0:
        none = np.zeros(0, np.int64)
        return _Conversations(none.astype(bool), none.astype(bool), none.astype(bool), none, none)
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1))
    cancelled = np.logical_or.reduceat(columns.where(CANCELLED)[order], starts)
    unfinished = np.logical_or.reduceat(columns.where(UNFINISHED)[order], starts)
    cut = ((np.maximum.reduceat(columns["turn"][order], starts) < turns - 1) | unfinished) & ~cancelled
    return _Conversations(
        good=np.logical_and.reduceat(columns.where(OK)[order], starts) & ~cut,
        cancelled=cancelled,
        cut=cut,
        due_ns=np.minimum.reduceat(columns["due_ns"][order], starts),
        end_ns=np.maximum.reduceat(columns["end_ns"][order], starts),
    )


def sessions(measured: Columns, inside: Window, turns: int) -> Sessions | None:
    """The block `sessions` for conversations of `turns` turns in measured stages; None when there are none."""
    conversations = _conversations(measured, turns)
    if len(conversations.good) == 0:
        return None
    good = int(conversations.good.sum())
    steady = int((conversations.good & metrics.ended_within(conversations.end_ns, inside.steady)).sum())
    return Sessions(
        count=len(conversations.good) - int(conversations.cancelled.sum()) - int(conversations.cut.sum()),
        cut=int(conversations.cut.sum()),
        ok=good,
        ok_per_s=metrics.per_second(good, inside),
        steady_ok_per_s=metrics.per_second(steady, inside.steady),
        duration_ms=exact((conversations.end_ns - conversations.due_ns)[conversations.good]),
    )


def client(measured: Columns, seconds: Sequence[Second], inside: Window, workers: int) -> ClientUse:
    """The block `client`, from the samples that each worker took of itself."""
    arrived = measured["first_token_ns"] >= 0
    return used(seconds, inside, workers, float(measured["kernel_stamp"][arrived].mean()) if arrived.any() else None)


def used(seconds: Sequence[Second], inside: Window, workers: int, kernel_stamp_share: float | None) -> ClientUse:
    """CPU seconds and peak memory of all workers together, and the largest share of one; None without samples."""
    cpu_s: dict[int, float] = {}
    peak: dict[int, int] = {}
    for second in seconds:
        cpu_s[second.worker] = max(cpu_s.get(second.worker, 0.0), second.cpu_s)
        peak[second.worker] = max(peak.get(second.worker, 0), second.peak_rss_bytes)
    busiest, most_waited = validity.busiest(seconds, inside), validity.most_waited(seconds, inside)
    return ClientUse(
        cpu_s=sum(cpu_s.values()) if seconds else None,
        peak_rss_bytes=sum(peak.values()) if seconds else None,
        workers=workers,
        cpu_share_max=None if busiest is None else busiest.cpu_share,
        waited_share_max=None if most_waited is None else most_waited.waited_share,
        kernel_stamp_share=kernel_stamp_share,
    )


def prompt_disagreement(columns: Columns, template_tokens: int | None) -> float | None:
    """How far the server's prompt token counts differ from ours, relative; None when no request has both counts.

    Ours is the content as built plus the share of the chat template.
    """
    both_counted = (
        columns.where(OK) & (columns["input_source"] == SOURCES.index("server")) & (columns["built_tokens"] > 0)
    )
    both_counted &= columns["input_tokens"] >= 0
    if not both_counted.any():
        return None
    ours = int(columns["built_tokens"][both_counted].sum(dtype=np.int64)) + (template_tokens or 0) * int(
        both_counted.sum()
    )
    return (int(columns["input_tokens"][both_counted].sum(dtype=np.int64)) - ours) / ours


def repeated(columns: Columns) -> int:
    """Requests that were sent with a prompt that an earlier one had sent already."""
    numbers = columns["request"][columns["sent_ns"] >= 0]
    return int((np.diff(np.sort(numbers)) == 0).sum())
