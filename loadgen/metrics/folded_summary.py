"""The summary of a run whose rows went into an `Accumulator` instead of being kept.

Pure. It has the same blocks, by the same definitions, as `summary.summarize`. Sums are exact. Quantiles are read from
histograms, within 0.1 %. Rates over the steady window are read from curves of 4,096 bins. What needs all rows at once
(variation of send gaps, repeated prompts) is not known. The largest number in flight is that of the samples that each
worker takes of itself about once a second.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from loadgen.metrics import blocks, columns, drift, validity
from loadgen.metrics.accumulator import Accumulator, Cell
from loadgen.metrics.blocks import Bytes, ErrorKind, RequestCounts, Sessions, Sources, Stalls, Tokens, with_gpus
from loadgen.metrics.columns import Goodput, Load, Span, Window, per_second, span
from loadgen.metrics.summary import (
    NO_GAPS_BY_TARGET,
    SCHEMA,
    StageSummary,
    Summary,
    TargetSummary,
    by_region,
    judged,
    pooled_of,
    rack_of,
    run_of,
    slo_undecided,
    unsure_share,
    whole_target,
    withhold,
)
from loadgen.metrics.sustainable import Sustainable
from loadgen.metrics.validity import Families, Signs, Verdict
from loadgen.results.record import SCHEMA_MINOR, SOURCES
from loadgen.stats.quantiles import Distribution, Histogram, index, milliseconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from loadgen.results.manifest import Header, Second, TargetFacts


def summarize(
    header: Header,
    accumulator: Accumulator,
    gaps: Sequence[Histogram] = (),
    timeline: Sequence[NDArray[np.int64]] = (),
    seconds: Sequence[Second] = (),
    event_errors: Sequence[Histogram] = (),
) -> Summary:
    """Compute the summary of a run from its accumulator. The other arguments are those of `summary.summarize`."""
    stage_measured = [stage.measured for stage in header.stages] or [True]
    measured, warmup = accumulator.measured(), accumulator.measured(False)
    everything = (measured, warmup)
    first_measured = stage_measured.index(True) if True in stage_measured else 0
    last_measured = max((i for i, is_measured in enumerate(stage_measured) if is_measured), default=0)
    inside = window(measured, everything, _full_load(accumulator, first_measured, last_measured))
    own_timeline = [counts for i, counts in enumerate(timeline) if i < len(stage_measured) and stage_measured[i]]
    missing = [_unrecorded(header, accumulator, i) for i in range(len(stage_measured))]
    lost = sum(count for count, is_measured in zip(missing, stage_measured, strict=True) if is_measured)
    pooled = pooled_of(gaps[i] for i in range(min(len(gaps), len(stage_measured))) if stage_measured[i])
    arrivals = [stage.arrival for stage in header.stages if stage.measured and stage.arrival]
    target = whole_target(header.targets)
    tokens = _tokens(measured, everything, inside, columns.steady_events(own_timeline, inside.steady))
    tokens = with_gpus(tokens, target.gpus)
    errors = pooled_of(event_errors[i] for i in range(min(len(event_errors), len(stage_measured))) if stage_measured[i])
    families = Families(
        inter_chunk=pooled.distribution(),
        event_error=errors.distribution(),
        unsure_share=unsure_share(errors),
        tpot=_distribution(measured, "tpot"),
        tpot_error=_distribution(measured, "tpot_error"),
        max_gap=_distribution(measured, "max_gap"),
        max_gap_error=_distribution(measured, "max_gap_error"),
    )
    unsound = validity.withheld(header.limits, families, seconds, inside)
    itl_absent = _itl_absent(measured, families.inter_chunk)
    undecided = slo_undecided(unsound, itl_absent)
    targets = tuple(_targets(header, accumulator, inside, undecided))
    ok = measured.sums.get("ok", 0)
    stalled = measured.sums.get("stalled", 0)
    summary = Summary(
        schema=SCHEMA,
        schema_minor=SCHEMA_MINOR,
        run=run_of(header),
        target=target,
        rtt_ms=header.rtt_ms,
        window=inside,
        bytes=_bytes(measured),
        fingerprints=header.fingerprints,
        verdict=Verdict(valid=True, limits=header.limits),
        requests=_requests(measured, lost),
        warmup=_requests(warmup, sum(missing) - lost),
        load=_load(measured, everything, inside, ", then ".join(arrivals), seconds),
        tokens=tokens,
        ttft_ms=_distribution(measured, "ttft"),
        ttft_from_sent_ms=_distribution(measured, "ttft_from_sent"),
        first_answer_ms=_distribution(measured, "first_answer"),
        tpot_ms=families.tpot,
        tpot_undefined=measured.sums.get("tpot_undefined", 0),
        tpot_mlperf_ms=_distribution(measured, "tpot_mlperf"),
        inter_chunk_ms=families.inter_chunk,
        itl_ms=None if itl_absent else families.inter_chunk,
        itl_absent=itl_absent,
        unsound=unsound,
        e2e_ms=_distribution(measured, "e2e"),
        max_gap_ms=families.max_gap,
        stalls=Stalls(over_ms=milliseconds(columns.STALL_NS), requests=stalled, share=stalled / ok if ok else None),
        connect_ms=_distribution(measured, "connect"),
        send_lag_ms=_distribution(measured, "send_lag"),
        client_lag_ms=_distribution(measured, "client_lag"),
        stamp_error_ms=_distribution(measured, "stamp_error"),
        event_error_ms=families.event_error,
        event_unsure_share=families.unsure_share,
        tpot_error_ms=families.tpot_error,
        max_gap_error_ms=families.max_gap_error,
        goodput=_goodput(header, measured, inside, pooled, lost, undecided),
        sessions=_sessions(accumulator, measured, inside),
        client=_client(measured, header, inside, seconds),
        stages=tuple(_stages(header, accumulator, everything, gaps, timeline, missing, seconds, undecided)),
        targets=targets,
        regions=tuple(_regions(header, accumulator, inside, undecided)),
        rack=rack_of(targets, tokens.output_per_s),
        drift=_drift(accumulator, measured, inside, own_timeline),
        sustainable=Sustainable(why="the records were not kept (--keep): growth of one target cannot be told"),
        kept=header.keep,
    )
    signs = Signs(
        dead_workers=sorted(
            {int(key.removeprefix("dead_")) for part in everything for key in part.sums if key.startswith("dead_")}
        ),
        unsaid=measured.sums.get("unsaid", 0) > 0,
        sends=measured.sums.get("sent", 0),
        disagreement=_disagreement(measured, header.template_tokens),
        repeated=0,
        asked=measured.sums.get("asked", 0),
        asked_got=measured.sums.get("asked_got", 0),
    )
    return judged(header, withhold(summary), signs, seconds)


def _distribution(cell: Cell, metric: str) -> Distribution:
    histogram = cell.histograms.get(metric)
    return histogram.distribution() if histogram is not None else Distribution()


def _unrecorded(header: Header, accumulator: Accumulator, stage: int) -> int:
    planned = header.stages[stage].slots if header.stages else None
    return 0 if planned is None else max(0, planned - accumulator.stages[stage].sums.get("rows", 0))


def _full_load(accumulator: Accumulator, first: int, last: int) -> columns.FullLoad:
    """When the load of the stages from `first` to `last`, and nothing else, is in flight, as `columns.full_load`."""
    earlier = [cell.most.get("done_ns", -1) for cell in accumulator.stages[:first]]
    start_ns = max((*earlier, -1, accumulator.stages[first].most.get("lane_due", -1)))
    ends = accumulator.stages[last].histograms.get("lane_end")
    if ends is None or not ends.count:
        return columns.FullLoad(start_ns)
    return columns.FullLoad(start_ns, round(ends.quantile(columns.LANES_ENDED)))


def window(cell: Cell, everything: Sequence[Cell], full: columns.FullLoad | None = None) -> Window:
    """The windows of a cell, as `columns.window` defines them."""
    full = full or columns.FullLoad()
    whole = span(0, max(part.most.get("done_ns", -1) for part in everything))
    if not cell.sums.get("due"):
        return Window(whole=whole)
    first, last, end = cell.least["due"], cell.most["due"], cell.most["last_token_ns"]
    inside = span(first, end if end >= 0 else cell.most["done_ns"])
    issued = cell.most.get("issued_end", -1)
    if issued < 0:
        issued = cell.most.get("issued_done", -1)
    return Window(
        start_s=inside.start_s,
        end_s=inside.end_s,
        duration_s=inside.duration_s,
        steady=span(max(first, full.start_ns), min(last, full.end_ns)),
        last_issued=span(first, issued),
        whole=whole,
    )


def _rate(cell: Cell, instants: str) -> float | None:
    count = cell.sums.get(instants, 0)
    if count < 2 or cell.most[instants] <= cell.least[instants]:
        return None
    return (count - 1) / ((cell.most[instants] - cell.least[instants]) / 1e9)


def _amount_in(everything: Sequence[Cell], curve: str, stretch: Span | Window) -> float:
    """How much of one curve came in an interval, all cells together."""
    curves = (part.curves.get(curve) for part in everything)
    return sum(time_curve.between(stretch.start_s, stretch.end_s) for time_curve in curves if time_curve is not None)


def _load(cell: Cell, everything: Sequence[Cell], inside: Window, arrival: str, seconds: Sequence[Second]) -> Load:
    mean = None if inside.duration_s is None else _amount_in(everything, "flying", inside) / inside.duration_s
    return Load(
        arrival=arrival,
        offered_rps=_rate(cell, "open_due"),
        achieved_rps=_rate(cell, "sent"),
        completed_rps=per_second(cell.sums.get("ok", 0), inside),
        steady_completed_rps=per_second(_amount_in([cell], "ok", inside.steady), inside.steady),
        in_flight_mean=mean,
        in_flight_max=_most_in_flight(seconds, inside),
    )


def _most_in_flight(seconds: Sequence[Second], inside: Window) -> int | None:
    """The largest number of requests in flight in one second, all workers together; None without samples."""
    if inside.start_s is None or inside.end_s is None:
        return None
    in_flight_by_second: dict[int, dict[int, int]] = defaultdict(dict)
    for second in seconds:
        if inside.start_s <= second.t_s <= inside.end_s:
            in_flight_by_second[int(second.t_s)][second.worker] = second.in_flight
    return max((sum(workers.values()) for workers in in_flight_by_second.values()), default=None)


def _requests(cell: Cell, unrecorded: int) -> RequestCounts:
    sums = cell.sums
    errors = {kind: ErrorKind(count=count, first_text=words) for kind, (count, _, words) in cell.errors.items()}
    if unrecorded:
        errors["no_record"] = ErrorKind(count=unrecorded, first_text="planned, but no record of it was found")
    return RequestCounts(
        scheduled=sums.get("rows", 0) + unrecorded,
        ok=sums.get("ok", 0),
        failed=sums.get("failed", 0),
        dropped=sums.get("dropped", 0),
        cancelled=sums.get("cancelled", 0),
        unfinished=sums.get("unfinished", 0),
        lost=sums.get("lost", 0) + unrecorded,
        resent=sums.get("resent", 0),
        by_error=dict(sorted(errors.items(), key=lambda item: (-item[1].count, item[0]))),
    )


def _bytes(cell: Cell) -> Bytes:
    return Bytes(sent=cell.sums.get("bytes_sent", 0), received=cell.sums.get("bytes_received", 0))


def _sum(cell: Cell, field: str) -> int | None:
    return cell.sums[field] if cell.sums.get(field + "_known") else None


def _tokens(cell: Cell, everything: Sequence[Cell], inside: Window, events: float | None) -> Tokens:
    sums = cell.sums
    output, prompt, cached = (_sum(cell, f"{side}_tokens") for side in ("output", "input", "cached"))
    base, event_count, comparable = _sum(cell, "cached_base"), sums.get("events", 0), sums.get("comparable", 0)
    spread = events * sums["billed"] / event_count if events is not None and event_count else None
    steady_output = per_second(_amount_in([cell], "output", inside.steady) if spread is None else spread, inside.steady)
    steady_input = per_second(_amount_in([cell], "input", inside.steady), inside.steady)
    part_sums = [part_sum for part in everything if (part_sum := _sum(part, "output_tokens")) is not None]
    total = None if output is None or prompt is None else output + prompt
    steady_total = (
        None if steady_output is None or steady_input is None or total is None else steady_output + steady_input
    )
    return Tokens(
        input=prompt,
        output=output,
        cached=cached,
        reasoning=_sum(cell, "reasoning_tokens"),
        asked_output=_sum(cell, "asked_output"),
        cached_share=cached / base if cached is not None and base else None,
        length_mismatch_share=sums["unequal"] / comparable if comparable else None,
        per_event=sums["streamed"] / event_count if event_count else None,
        output_per_s=per_second(output, inside),
        total_per_s=per_second(total, inside),
        input_per_s=per_second(prompt, inside),
        steady_output_per_s=steady_output if output is not None else None,
        steady_total_per_s=steady_total,
        steady_input_per_s=steady_input if prompt is not None else None,
        last_issued_output_per_s=per_second(output, inside.last_issued),
        whole_output_per_s=per_second(sum(part_sums) if part_sums else None, inside.whole),
        failed_input=sums.get("failed_input", 0),
        failed_output=sums.get("failed_output", 0),
        sources=Sources(input=_sources(cell, "input"), output=_sources(cell, "output")),
    )


def _sources(cell: Cell, side: str) -> dict[str, int]:
    tags = [tag or "none" for tag in SOURCES]
    return {tag: count for tag in tags if (count := cell.sums.get(f"{side}_source_{tag}", 0))}


def _itl_absent(cell: Cell, inter_chunk: Distribution) -> str:
    """Why the summary has no ITL, as in `blocks.itl_absent`."""
    sums = cell.sums
    if inter_chunk.count == 0:
        return "no answer had two output events"
    if not sums.get("told_events"):
        return "nobody counted the tokens, so how many an event carries is not known"
    if sums["surplus"] > columns.ITL_TOKENS_PER_EVENT * sums["told_events"]:
        return f"events carry {sums['told_streamed'] / sums['told_events']:.2f} tokens on average"
    return ""


def _disagreement(cell: Cell, template_tokens: int | None) -> float | None:
    """How far the prompt counts differ, as in `blocks.prompt_disagreement`."""
    count = cell.sums.get("both", 0)
    if not count:
        return None
    ours = cell.sums["both_built"] + (template_tokens or 0) * count
    return (cell.sums["both_said"] - ours) / ours


def _goodput(
    header: Header,
    cell: Cell,
    inside: Window,
    gaps: Histogram,
    unrecorded: int,
    unsound: Mapping[str, str],
) -> Goodput:
    """As `columns.goodput`. The counts, and whether a term is met, are exact; quantiles are those of histograms."""
    slo = header.slo
    if slo is None:
        return Goodput()
    unfinished = cell.sums.get("unfinished", 0)
    everyone = cell.sums.get("rows", 0) - cell.sums.get("cancelled", 0) + unrecorded
    undecided = columns.is_undecided(unfinished, everyone)
    left_out = unfinished - cell.sums.get("unfinished_over", 0)
    counted = everyone - left_out
    good = cell.sums.get("good", 0)
    results = []
    for i, term in enumerate(slo.terms):
        if term.metric in columns.POOLED:
            histogram, over, without_value, term_left_out = gaps, gaps.over(term.limit_ns), 0, 0
            ok = 1
        else:
            histogram = cell.histograms.get(term.metric) or Histogram()
            ok = cell.sums.get("ok", 0)
            term_left_out = unfinished - cell.sums.get(f"term{i}_unfinished_over", 0)
            without_value = everyone - term_left_out - ok
            over = cell.sums.get(f"term{i}_over", 0) + without_value
        count = histogram.count + without_value
        place = index(count, term.quantile) if count else 0
        value = None
        if place < histogram.count:
            value = histogram.middle(int(np.searchsorted(np.cumsum(histogram.counts), place, side="right")))
        reason = columns.undecided_reason(term.metric, histogram.count, ok, count, unsound)
        met = value is not None and place < count - over
        results.append(
            columns.term_result(
                term, count, over, value, met=met, undecided=reason, left_out=term_left_out, cut=undecided
            )
        )
    return columns.judged_goodput(
        slo,
        tuple(results),
        counted=counted,
        left_out=left_out,
        cut=undecided,
        good=good,
        rps=per_second(good, inside),
        steady_rps=per_second(_amount_in([cell], "good", inside.steady), inside.steady),
        unsound=unsound,
    )


def _sessions(accumulator: Accumulator, cell: Cell, inside: Window) -> Sessions | None:
    cut, cancelled = accumulator.cut()
    whole, drained = cell.sums.get("sessions", 0), cell.sums.get("sessions_cut", 0)
    if not whole and not cut and not cancelled:
        return None
    good = cell.sums.get("sessions_ok", 0)
    return Sessions(
        count=whole - cell.sums.get("sessions_cancelled", 0) - drained,
        cut=cut + drained,
        ok=good,
        ok_per_s=per_second(good, inside),
        steady_ok_per_s=per_second(_amount_in([cell], "session", inside.steady), inside.steady),
        duration_ms=_distribution(cell, "session"),
    )


def _client(cell: Cell, header: Header, inside: Window, seconds: Sequence[Second]) -> blocks.ClientUse:
    answered = cell.sums.get("answered", 0)
    stamped = cell.sums["kernel_stamps"] / answered if answered else None
    return blocks.used(seconds, inside, header.workers, stamped)


def _stages(
    header: Header,
    accumulator: Accumulator,
    everything: tuple[Cell, Cell],
    gaps: Sequence[Histogram],
    timeline: Sequence[NDArray[np.int64]],
    missing: Sequence[int],
    seconds: Sequence[Second],
    undecided: Mapping[str, str],
) -> Iterator[StageSummary]:
    for i, stage in enumerate(header.stages):
        cell = accumulator.stages[i]
        inside = window(cell, [cell], _full_load(accumulator, i, i))
        pooled = gaps[i] if i < len(gaps) else Histogram()
        yield StageSummary(
            name=stage.name,
            arrival=stage.arrival,
            measured=stage.measured,
            concurrency=stage.concurrency,
            ramp_s=stage.ramp_s,
            ramp_from=stage.ramp_from,
            window=inside,
            requests=_requests(cell, missing[i]),
            load=_load(cell, everything, inside, stage.arrival, seconds),
            tokens=with_gpus(
                _tokens(cell, everything, inside, columns.steady_events(timeline[i : i + 1], inside.steady)),
                whole_target(header.targets).gpus,
            ),
            ttft_ms=_distribution(cell, "ttft"),
            tpot_ms=_distribution(cell, "tpot"),
            inter_chunk_ms=pooled.distribution(),
            e2e_ms=_distribution(cell, "e2e"),
            goodput=_goodput(header, cell, inside, pooled, missing[i], undecided),
        )


def _targets(
    header: Header, accumulator: Accumulator, inside: Window, undecided: Mapping[str, str]
) -> Iterator[TargetSummary]:
    for target, cell, other in zip(header.targets, accumulator.targets, accumulator.other_targets, strict=False):
        yield _part_of(header, target, cell, other, inside, undecided)


def _regions(
    header: Header, accumulator: Accumulator, inside: Window, undecided: Mapping[str, str]
) -> Iterator[TargetSummary]:
    for region, numbers in by_region(header.targets):
        merged = Cell(), Cell()
        for cell, cells in zip(merged, (accumulator.targets, accumulator.other_targets), strict=True):
            for number in numbers:
                cell.merge(cells[number])
        yield _part_of(header, region, *merged, inside, undecided)


def _part_of(
    header: Header, target: TargetFacts, cell: Cell, other: Cell, inside: Window, undecided: Mapping[str, str]
) -> TargetSummary:
    everything = (cell, other)
    own = _tokens(cell, everything, window(cell, everything), None)
    return TargetSummary(
        target=target,
        requests=_requests(cell, 0),
        bytes=_bytes(cell),
        load=_load(cell, everything, inside, "", ()),
        tokens=with_gpus(_tokens(cell, everything, inside, None), target.gpus),
        ttft_ms=_distribution(cell, "ttft"),
        tpot_ms=_distribution(cell, "tpot"),
        e2e_ms=_distribution(cell, "e2e"),
        goodput=_goodput(header, cell, inside, Histogram(), 0, {**NO_GAPS_BY_TARGET, **undecided}),
        own_output_per_s=own.output_per_s,
    )


def _drift(
    accumulator: Accumulator,
    measured: Cell,
    inside: Window,
    timeline: Sequence[NDArray[np.int64]],
) -> drift.Drift:
    if not accumulator.blocks:
        return drift.Drift()
    events, billed = measured.sums.get("events", 0), measured.sums.get("billed", 0)
    sums = columns.event_sums(timeline)

    def tokens_in(stretch: Span) -> float | None:
        if not events:
            return None
        if sums is None:
            return _amount_in([measured], "output", stretch)
        return columns.events_between(sums, stretch) * billed / events

    figures_by_block = [
        (
            block.requests,
            {part: block.of[part[0]].quantile(part[1]) for part in drift.PARTS if block.of[part[0]].count},
        )
        for block in accumulator.blocks
    ]
    return drift.made(accumulator.block_ns, figures_by_block, inside.steady, tokens_in)
