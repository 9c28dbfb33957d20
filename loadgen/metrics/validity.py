"""Whether a measurement can be trusted: reasons that make it INVALID, warnings that do not, and the exit code.

Pure. The limits come from `loadgen.limits` and `columns`. Every sentence gives the value, the limit and what to do
about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import loadgen.errors as codes
from loadgen.limits import UNFINISHED_SHARE, ValidityLimits
from loadgen.metrics import columns, outcomes
from loadgen.stats.quantiles import SUPPORT, deciding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from loadgen.metrics.goodput import Goodput
    from loadgen.metrics.load import Load
    from loadgen.metrics.windows import Window
    from loadgen.results.manifest import Second
    from loadgen.stats.quantiles import Distribution

FEWEST = SUPPORT["p50"]  # requests of a valid run
IDLE_SHARE = 0.5  # of a core: a worker that never used more was late because of something else on the host
WAITED_SHARE = 0.1  # of a second spent ready to run without a core: enough to explain lateness
FULL_SECOND_S = 0.9  # a sample this long counts as a full second


def exit_code(
    *, interrupted: bool, valid: bool, slo_met: bool | None, undecided: bool = False, strict: bool = False
) -> int:
    """The exit code, first match: 130 (interrupted), 3 (not valid), 1 (SLO missed), 3 (`strict`, SLO undecided), 0."""
    if interrupted:
        return codes.INTERRUPTED
    if not valid:
        return codes.UNSOUND
    if slo_met is False:
        return codes.SLO_MISSED
    return codes.UNSOUND if undecided and strict else codes.OK


def share(value: float) -> str:
    """A share as a percentage: 0.0312 is "3.1 %". A share above zero is never printed as 0."""
    percent = value * 100
    return f"{percent:.1f} %" if percent >= 0.1 or percent == 0 else f"{percent:.2g} %"


def busiest(seconds: Sequence[Second], window: Window) -> Second | None:
    """The full second inside the measured window in which a worker used most CPU; None without one."""
    return max(_inside(seconds, window), key=lambda second: second.cpu_share, default=None)


def most_waited(seconds: Sequence[Second], window: Window) -> Second | None:
    """The full second inside the measured window in which a worker waited longest for a core; None when not known."""
    known = (second for second in _inside(seconds, window) if second.waited_share is not None)
    return max(known, key=lambda second: second.waited_share or 0.0, default=None)


def _inside(seconds: Sequence[Second], window: Window) -> list[Second]:
    if window.start_s is None or window.end_s is None:
        return []
    low, high = window.start_s, window.end_s
    return [s for s in seconds if s.span_s >= FULL_SECOND_S and s.t_s - s.span_s >= low and s.t_s <= high]


def reasons(
    limits: ValidityLimits,
    *,
    ttft: Distribution,
    e2e: Distribution,
    send_lag: Distribution,
    stamp_error: Distribution,
    busiest: Second | None,
    most_waited: Second | None,
    counted: int,
    ok: int,
    unsound: int,
    unfinished: int,
    cancelled: int,
    dead_workers: Sequence[int],
) -> Iterator[str]:
    """Why a run is INVALID: a sentence per reason.

    `counted`: requests with an outcome of their own, without cancelled and unfinished ones. `unsound`: failed + lost.
    Lateness is measured against TTFT p50, or against E2E p50 where answers are not streamed and there is no TTFT.
    """
    if counted == 0 and unfinished:
        yield (
            f"all {unfinished} measured requests were unfinished when the drain ended: give a longer --grace, or none"
        )
    elif counted == 0 and cancelled:
        yield f"all {cancelled} measured requests were cancelled: nothing was measured"
    elif counted == 0:
        yield "no measured request was due: nothing was measured"
    elif ok == 0:
        yield f"not one of {counted} requests succeeded"
    elif counted < FEWEST:
        yield f"too few: {counted} measured requests support no quantile, not even p50; {FEWEST} are needed"
    scale, basis = (ttft.p50, "TTFT p50") if ttft.p50 is not None else (e2e.p50, "E2E p50")
    remedy = _remedy(busiest, most_waited)
    for late, finding, limit in (
        (send_lag, "requests were sent late: {} send lag", limits.send_lag_share),
        (stamp_error, "arrival times are unsure: {} stamp error", limits.stamp_error_share),
    ):
        if scale is not None and (decides := deciding(late)) and decides[1] > limit * scale:
            value = decides[1]
            ratio = f"{share(value / scale)} of" if scale > 0 else "against a"
            what = finding.format(decides[0])
            yield f"{what} {value:.3g} ms is {ratio} {basis} ({scale:.3g} ms), limit {share(limit)}: {remedy}"
    if busiest is not None and busiest.cpu_share > limits.cpu_share:
        yield (
            f"the load generator was busy: worker {busiest.worker} used {share(busiest.cpu_share)} of a core "
            f"in the second up to {busiest.t_s:.0f} s, limit {share(limits.cpu_share)}: add workers"
        )
    if counted and unsound / counted > limits.failure_share:
        yield (
            f"{unsound} of {counted} requests failed or were lost ({share(unsound / counted)}), "
            f"limit {share(limits.failure_share)}"
        )
    for worker in dead_workers:
        yield f"worker {worker} died: the rest of its requests are lost"


def _remedy(busiest: Second | None, most_waited: Second | None) -> str:
    """What to do about a client that was late."""
    remedy = "lower the load or add workers"
    if most_waited is not None and (waited := most_waited.waited_share or 0.0) > WAITED_SHARE:
        remedy = (
            f"other processes kept worker {most_waited.worker} off its core for {share(waited)} of the second up to "
            f"{most_waited.t_s:.0f} s: stop them, or use a host of its own"
        )
    elif busiest is not None and busiest.cpu_share < IDLE_SHARE:
        remedy = (
            f"this process used at most {share(busiest.cpu_share)} of a core, so something else on this host kept it "
            "waiting: stop that, or use a host of its own"
        )
    return remedy


def withheld(
    limits: ValidityLimits,
    *,
    inter_chunk: Distribution,
    event_error: Distribution,
    unsure_share: float | None,
    tpot: Distribution,
    tpot_error: Distribution,
    max_gap: Distribution,
    max_gap_error: Distribution,
    busiest: Second | None,
    most_waited: Second | None,
) -> dict[str, str]:
    """Metrics whose figures rest on arrival times that are too unsure -> why. Empty for runs without stamp errors.

    Each family has its own guard, so TTFT may be sound where the gaps are not. Stamps that came late as a whole (one
    packet a read) are the kernel's and exact; unsure are those of several packets in one read.
    """
    remedy = _remedy(busiest, most_waited)
    spoilt: dict[str, str] = {}

    def judge(
        metrics: Sequence[str], error: Distribution, what: str, of: Distribution, basis: str, limit: float
    ) -> None:
        decides = deciding(error)
        if decides is None or of.p50 is None or decides[1] <= limit * of.p50:
            return
        name, value = decides
        ratio = f"{share(value / of.p50)} of" if of.p50 > 0 else "against a"
        reason = f"{name} {what} {value:.3g} ms is {ratio} {basis} ({of.p50:.3g} ms), limit {share(limit)}"
        for metric in metrics:
            spoilt.setdefault(metric, reason)

    packets = f" ({share(unsure_share)} of them came with others in one read)" if unsure_share is not None else ""
    event_limit = limits.event_error_share
    events = f"stamp error of output events{packets}:"
    gap = "the gaps' p50"
    judge(("itl", "inter_chunk", "max_gap", "stalls"), event_error, events, inter_chunk, gap, event_limit)
    judge(("max_gap",), max_gap_error, "error of the largest gap", max_gap, "its p50", event_limit)
    judge(("tpot", "tpot_mlperf"), tpot_error, "error of TPOT", tpot, "TPOT p50", limits.tpot_error_share)
    return {metric: f"{reason}: {remedy}" for metric, reason in spoilt.items()}


_FAMILIES = {
    "itl": "ITL", "inter_chunk": "gaps between events", "max_gap": "largest gap", "stalls": "stalls", "tpot": "TPOT",
    "tpot_mlperf": "TPOT (MLPerf)",
}  # fmt: skip


def withheld_caveats(unsound: Mapping[str, str]) -> Iterator[str]:
    """What is withheld and why: a sentence per reason."""
    for reason in dict.fromkeys(unsound.values()):
        names = [_FAMILIES[metric] for metric in unsound if unsound[metric] == reason]
        yield f"{', '.join(names)} withheld, arrival times are unsure: {reason}"


def shortened(*, asked: int, got: int) -> str:
    """That the answers are shorter than asked, so this is another load; "" when they are not.

    `asked`, `got`: output tokens of the ok requests where both are known.
    """
    if got >= asked * (1 - columns.SHORTENED):
        return ""
    return (
        f"not the load that was asked for: the answers have {got:,} of {asked:,} output tokens asked "
        f"({share(got / asked)}): the server ends them early, so its figures are for shorter answers"
    )


STATE_REASONS = {
    "interrupted": "the run was interrupted: it shows a part of the load that was planned",
    "stopped": "the run ended early, as asked for when a target stops answering (--on-target-failure stop)",
}
"""State of a run -> why a run that ended so is not valid."""


def state_reasons(state: str) -> tuple[str, ...]:
    """Why a run that ended in this state is INVALID; empty when it is not."""
    return (STATE_REASONS[state],) if state in STATE_REASONS else ()


def unfinished_warning(unfinished: int, counted: int, drain_s: float | None, timeout_s: float | None) -> Iterator[str]:
    """A warning about requests that the end of the drain cut, and what it means for the SLO.

    `counted`: all requests but cancelled ones.
    """
    if not unfinished:
        return
    drain = "" if drain_s is None else f", {drain_s:g} s after the end of the load"
    words = (
        f"{unfinished} of {counted} requests ({share(unfinished / counted)}) were unfinished when the drain "
        f"ended{drain}: they are neither ok nor failed, and no latency holds them"
    )
    if outcomes.is_undecided(unfinished, counted):
        as_long = "" if timeout_s is None else f", {timeout_s:g} s"
        words += (
            f"; above {share(UNFINISHED_SHARE)} no SLO term can be called met: give a longer --grace (`grace:` in a "
            f"file), or none: then the drain lasts as long as a request may (--timeout{as_long})"
        )
    yield words


def changed(limits: ValidityLimits) -> Iterator[str]:
    """A warning for each validity limit that differs from its default."""
    defaults = ValidityLimits()
    for field in defaults.__struct_fields__:
        value, default = getattr(limits, field), getattr(defaults, field)
        if value != default:
            yield f"validity limit {field} was changed to {share(value)} (default {share(default)})"


def slo_warnings(goodput: Goodput) -> Iterator[str]:
    """A warning for each term whose quantile rests on too few samples."""
    for term in goodput.slo:
        if not term.supported and not term.undecided:
            yield (
                f"SLO term {term.metric} at p{term.quantile * 100:g} rests on {term.count} samples; "
                f"{term.needed} are needed to support it"
            )


def steady_warning(window: Window, load: Load, sends: int, lanes: int) -> Iterator[str]:
    """Warning of a load that never ran alone and in full: there was no time over which its steady rates could be.

    `lanes`: of the measured closed loop, 0 without one.
    """
    if 0 < sends < lanes:
        few = f"{sends:,} requests for {lanes:,} lanes: so many were never in flight"
        yield f"{few}; give at least {5 * lanes:,} requests"
        return
    lasted = load.achieved_rps is not None and sends > lanes if lanes else load.offered_rps is not None
    if lasted and window.steady.duration_s is None:
        why = "lanes were beginning or ending" if lanes else "requests of the warm-up were in flight"
        yield f"no steady figures: {why} as long as measured requests were due; give a longer load"


def gap_warning(load: Load, gaps: int) -> Iterator[str]:
    """A warning when the gaps between arrivals vary more, or less, than planned. `gaps`: number of gaps."""
    real, planned = load.gap_variation, load.gap_variation_planned
    if real is None or planned is None or gaps < columns.GAPS_NEEDED:
        return
    if abs(real - planned) > columns.GAP_VARIATION:
        yield f"send gaps vary by {real:.2f} where the timetable has {planned:.2f}: the arrivals were not as planned"


def count_warnings(
    *,
    ok: int,
    without_usage: int,
    estimates: int,
    disagreement: float | None,
    template_known: bool,
    cached_share: float | None,
    shares_prompts: bool,
    mismatch_share: float | None,
    unknown_first: bool,
    repeated: int,
) -> Iterator[str]:
    """Warnings about token counts: missing, estimated, contradictory, or of tokens that a cache served.

    `disagreement`: the server's prompt token count against ours, relative. `repeated`: requests whose prompt was sent
    before.
    """
    if without_usage:
        yield f"usage is missing in {without_usage} of {ok} ok answers: their tokens are counted another way"
    if estimates:
        yield f"token counts of {estimates} of {ok} ok requests are estimates by the packaged vocabulary"
    if disagreement is not None and abs(disagreement) > columns.COUNT_DISAGREEMENT:
        hint = "" if template_known else " (the chat template's share is not known)"
        yield (
            f"prompt token counts disagree: the server's differ from ours by {disagreement * 100:+.1f} %, "
            f"limit {share(columns.COUNT_DISAGREEMENT)}{hint}"
        )
    if cached_share is not None and cached_share > columns.CACHED_SHARE and not shares_prompts:
        yield (
            f"{share(cached_share)} of the prompt tokens came from the server's cache though the workload asks for no "
            "sharing: a repeated seed or salt makes TTFT look better than it is; give another --seed, or --salt fresh"
        )
    if mismatch_share is not None and mismatch_share > columns.LENGTH_MISMATCH:
        yield (
            f"{share(mismatch_share)} of the answers are not as long as asked, "
            f"limit {share(columns.LENGTH_MISMATCH)}: the server does not honour the forced length"
        )
    if unknown_first:
        yield "events carry several tokens and the server does not say how many the first one has: TPOT takes it as one"
    if repeated:
        yield f"{repeated} requests repeat a prompt that was sent before: a prefix cache may have served them"
