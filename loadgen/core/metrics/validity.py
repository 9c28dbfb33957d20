"""Whether a measurement can be trusted: the reasons that make it INVALID, what to know beside it, and the exit code.

Pure. Every finding is a code with its values; `reasons.py` has the words. The limits come from
`loadgen.core.limits`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from loadgen.core import limits
from loadgen.core.format import SYSTEM
from loadgen.core.limits import ValidityLimits
from loadgen.core.metrics import guards, outcomes
from loadgen.core.metrics.guards import WithheldStatistics
from loadgen.core.metrics.reasons import sentence
from loadgen.core.results.manifest import ReasonCode
from loadgen.core.stats.quantiles import SUPPORT, deciding
from loadgen.figures import guarded

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.metrics.blocks import RequestCounts
    from loadgen.core.metrics.sections import Recovery
    from loadgen.core.metrics.windows import Window
    from loadgen.core.results.manifest import RunManifest, WorkerSample
    from loadgen.core.server_metrics.hardware import SeenHardware
    from loadgen.core.stats.quantiles import Distribution

FEWEST = SUPPORT["p50"]  # requests of a valid run
OF_THE_CLIENT = frozenset(("sent_late", "arrivals_unsure", "generator_busy"))
"""Reasons that say that the load generator, not the server, may have determined the figures."""
IDLE_SHARE = (
    0.5  # of a core: a worker that never used more was late because of something else on the host
)
HELD_BACK = 0.5  # share of the events that came with others in one read, beyond which something holds them back...
READ_AT_ONCE = 0.5  # ... where the client read what came within so much of the error
WAITED_SHARE = 0.1  # of a second spent ready to run without a core, or writing records: enough to explain lateness
FULL_SECOND_S = 0.9  # a sample this long counts as a full second


class LatenessScale(NamedTuple):
    """The latency by which the lateness of the client is judged, also where it is not shown.

    It is the p50 of TTFT, or of E2E where responses are not streamed. None: no request has one.
    """

    name: str
    p50_ms: float | None

    @classmethod
    def of_samples(cls, ttft: Distribution, e2e: Distribution) -> LatenessScale:
        """Return the scale of the distributions of TTFT and E2E, before anything is withheld."""
        if ttft.p50 is not None:
            return cls("TTFT p50", ttft.p50)
        return cls("E2E p50", e2e.p50)


class VerdictInputs(msgspec.Struct, frozen=True):
    """What the verdict needs beside the summary."""

    scale: LatenessScale
    dead_workers: list[int]
    sends: int
    disagreement: float | None  # of prompt token counts: `blocks.prompt_disagreement`
    repeated: int
    asked: int  # output tokens asked for, of ok requests whose answers were counted too
    asked_got: int  # output tokens of the same requests
    missed: bool | None = (
        None  # whether the SLO is missed also without the starts that the client dropped
    )
    remarks: dict[str, int] = {}  # what is unusual about ok responses -> how many have it


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the measurement can be trusted. This does not judge the SLO: a run that missed a limit can be valid.

    The sentences are for people. `codes` says the same as `reasons` for programs, one for one; likewise the others.
    """

    valid: bool
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    limits: ValidityLimits
    caveats: tuple[
        str, ...
    ] = ()  # what belongs beside VALID: figures withheld, a load that is not the one asked for
    codes: tuple[ReasonCode, ...] = ()
    warning_codes: tuple[ReasonCode, ...] = ()
    caveat_codes: tuple[ReasonCode, ...] = ()


class TimingEvidence(NamedTuple):
    """What is known of the cause of uncertain timestamps."""

    unsure_share: float | None  # of the output events: came with later ones in one read
    is_read_at_once: bool  # the client read them soon after they had arrived
    is_local: bool  # client and server share a host
    seconds: Sequence[WorkerSample]
    window: Window


def verdict(
    limits: ValidityLimits,
    reasons: Iterable[ReasonCode] = (),
    warnings: Iterable[ReasonCode] = (),
    caveats: Iterable[ReasonCode] = (),
) -> Verdict:
    """The verdict that these codes make, with their sentences."""
    reasons, warnings, caveats = tuple(reasons), tuple(warnings), tuple(caveats)
    return Verdict(
        valid=not reasons,
        reasons=tuple(map(sentence, reasons)),
        warnings=tuple(map(sentence, warnings)),
        limits=limits,
        caveats=tuple(map(sentence, caveats)),
        codes=reasons,
        warning_codes=warnings,
        caveat_codes=caveats,
    )


def answered_share(verdict: Verdict) -> float:
    """The share of the output tokens asked for that the answers have, where so few are missing that it is the same work
    1. Runs of unlike shares did different work, under one recipe.
    """
    shares = (
        caveat.values.get("share") for caveat in verdict.caveat_codes if caveat.code == "shortened"
    )
    return next((float(share) for share in shares if share is not None), 1.0)


def warned(verdict: Verdict, code: str, values: dict[str, Any]) -> Verdict:
    """The verdict with one more warning."""
    reason = ReasonCode(code=code, values=values)
    return msgspec.structs.replace(
        verdict,
        warnings=(*verdict.warnings, sentence(reason)),
        warning_codes=(*verdict.warning_codes, reason),
    )


def without(verdict: Verdict, code: str) -> Verdict:
    """The verdict without a warning that other figures have answered."""
    words = {sentence(one) for one in verdict.warning_codes if one.code == code}
    return msgspec.structs.replace(
        verdict,
        warnings=tuple(text for text in verdict.warnings if text not in words),
        warning_codes=tuple(one for one in verdict.warning_codes if one.code != code),
    )


def worst(seconds: Sequence[WorkerSample], window: Window, share: str) -> WorkerSample | None:
    """The full second inside the measured window in which this share was largest; None without one."""
    return max(
        inside(seconds, window), key=lambda second: getattr(second, share) or 0.0, default=None
    )


def inside(seconds: Sequence[WorkerSample], window: Window) -> list[WorkerSample]:
    """The full seconds inside the measured window."""
    if window.start_s is None or window.end_s is None:
        return []
    low, high = window.start_s, window.end_s
    return [
        s
        for s in seconds
        if s.span_s >= FULL_SECOND_S and s.t_s - s.span_s >= low and s.t_s <= high
    ]


def of(
    header: RunManifest, summary: Any, signs: VerdictInputs, seconds: Sequence[WorkerSample]
) -> Verdict:
    """The verdict on a run. `summary`: its `Summary` (which imports this module), complete but for the verdict."""
    caveats = list(_caveats(header, summary, signs))
    return verdict(
        header.limits,
        _reasons(header, summary, signs, seconds),
        _warnings(
            header, summary, signs, shortened=any(caveat.code == "shortened" for caveat in caveats)
        ),
        caveats,
    )


def _reasons(
    header: RunManifest, summary: Any, signs: VerdictInputs, seconds: Sequence[WorkerSample]
) -> Iterator[ReasonCode]:
    """Why a run is INVALID.

    Lateness is measured against TTFT p50, or against E2E p50 where answers are not streamed and there is no TTFT.
    """
    limits, requests, counted = header.limits, summary.requests, summary.requests.decided
    if counted == 0 and requests.unfinished:
        yield _code("all_unfinished", unfinished=requests.unfinished)
    elif counted == 0 and requests.cancelled:
        yield _code("all_cancelled", cancelled=requests.cancelled)
    elif counted == 0:
        yield _code("none_due")
    elif counted < FEWEST:
        yield _code("too_few", requests=counted, needed=FEWEST)
    remedy = _remedy(seconds, summary.window, is_local=is_local(header))
    for code, late, limit in (
        ("sent_late", summary.send_lag_ms, limits.send_lag_share),
        ("arrivals_unsure", summary.stamp_error_ms, limits.stamp_error_share),
    ):
        if over := _over(late, signs.scale, limit):
            yield _code(code, **over, **remedy)
    second = worst(seconds, summary.window, "cpu_share")
    if second is not None and second.cpu_share > limits.cpu_share:
        values = {"worker": second.worker, "cpu_share": second.cpu_share, "at_s": second.t_s}
        yield _code("generator_busy", **values, limit=limits.cpu_share)
    if requests.dropped_share > limits.not_offered_share and not signs.missed:
        yield _code("dropped", **_dropped(requests), limit=limits.not_offered_share)
    yield from _above_failure_share("client_failures", requests.failed_by_client, header, summary)
    nodes = (
        {one.worker: f"{one.node} ({one.address})" for one in header.cluster.workers}
        if header.cluster
        else {}
    )
    for worker in signs.dead_workers:
        yield _code("worker_died", worker=worker, node=nodes.get(worker))
    yield from (
        state_reasons(summary.run.state) if header.stopped_by is None else (header.stopped_by,)
    )


def has_high_error_rate(summary: Any) -> bool:
    """Return True if the server failed a larger share of the requests than `failure_share`."""
    requests: RequestCounts = summary.requests
    limit = summary.verdict.limits.failure_share
    return requests.decided > 0 and requests.failed_by_server > limit * requests.decided


def _above_failure_share(
    code: str, failed: int, header: RunManifest, summary: Any
) -> Iterator[ReasonCode]:
    """Yield the code if `failed` is a larger share of the requests than `failure_share`."""
    requests, limit = summary.requests.decided, header.limits.failure_share
    if requests and failed > limit * requests:
        share = failed / requests
        yield _code(code, failed=failed, requests=requests, share=share, limit=limit)


def _code(code: str, **values: Any) -> ReasonCode:
    return ReasonCode(code=code, values=values)


def _dropped(requests: Any) -> dict[str, Any]:
    starts = requests.scheduled - requests.cancelled
    return {"dropped": requests.dropped, "requests": starts, "share": requests.dropped_share}


def _over(error: Distribution, scale: LatenessScale, limit: float) -> dict[str, Any] | None:
    """Return how an error of the client compares with the scale; None if it is within the limit."""
    decides = deciding(error)
    p50_ms = scale.p50_ms
    if decides is None or p50_ms is None or decides[1] <= limit * p50_ms:
        return None
    name, value = decides
    share = value / p50_ms if p50_ms > 0 else None
    return {
        "quantile": name,
        "value_ms": value,
        "share": share,
        "basis": scale.name,
        "basis_ms": p50_ms,
        "limit": limit,
    }


def _remedy(seconds: Sequence[WorkerSample], window: Window, *, is_local: bool) -> dict[str, Any]:
    """Return the cause of a late client and what to do about it, as values of a code.

    On the host of the server, the other process that keeps the client waiting is the server.
    """
    waited, written, busy = (
        worst(seconds, window, name) for name in ("waited_share", "write_share", "cpu_share")
    )
    waited_share = 0.0 if waited is None else waited.waited_share or 0.0
    if written is not None and written.write_share > max(WAITED_SHARE, waited_share):
        return {"remedy": "disk", "write_share": written.write_share, "at_s": written.t_s}
    if is_local:
        return {"remedy": "shared_host"}
    if waited is not None and waited_share > WAITED_SHARE:
        return {
            "remedy": "other_processes",
            "worker": waited.worker,
            "waited_share": waited_share,
            "at_s": waited.t_s,
        }
    if busy is not None and busy.cpu_share < IDLE_SHARE:
        return {"remedy": "host", "cpu_share": busy.cpu_share}
    return {"remedy": "lower_load"}


def contradicted(cell: MetricAccumulator) -> dict[str, str]:
    """Metrics that rest on token counts -> why, where more answers than `CONTRADICTING_SHARE` contradict their stream
    (`columns.understates`, `columns.overstates`).
    """
    counted, contradicting = cell.sum("counted"), cell.sum("contradicting")
    if contradicting <= limits.CONTRADICTING_SHARE * counted:
        return {}
    under = cell.sum("understated")
    values = {"contradicting": contradicting, "answers": counted, "share": contradicting / counted}
    values |= {
        "understated": under,
        "overstated": contradicting - under,
        "limit": limits.CONTRADICTING_SHARE,
    }
    return dict.fromkeys(
        ("tokens", *guarded("counts_contradict")), sentence(_code("counts_contradict", **values))
    )


def without_first_token(cell: MetricAccumulator) -> dict[str, str]:
    """Return the metrics that need the time of the first token, with the reason to withhold them.

    They are withheld if too many responses do not show that time. Such a response has several
    tokens by the server's count, but no output event that could be timed: its output is in fields
    that are not known, or it came as one JSON object although a stream was requested.
    """
    ok, unseen = cell.sum("ok"), cell.sum("tpot_no_output")
    if unseen <= limits.UNSEEN_OUTPUT * ok:
        return {}
    values = {"unseen": unseen, "answers": ok, "share": unseen / ok, "limit": limits.UNSEEN_OUTPUT}
    return dict.fromkeys(guarded("output_unseen"), sentence(_code("output_unseen", **values)))


def explain_withheld(
    ranges: Mapping[str, guards.Ranges],
    *,
    by_first_event: Collection[str],
    evidence: TimingEvidence,
) -> dict[str, WithheldStatistics]:
    """Return the statistics that are withheld, each metric with its ranges and the reason.

    Args:
        ranges: The range of each withheld statistic, by metric.
        by_first_event: The metrics that would be shown if the size of the first event were known.
        evidence: What is known of the cause of uncertain timestamps.
    """
    return {
        metric: WithheldStatistics(
            ranges=found,
            why=sentence(_code("first_event_uncertain"))
            if metric in by_first_event
            else why_times_are_uncertain(evidence),
        )
        for metric, found in ranges.items()
    }


def why_times_are_uncertain(evidence: TimingEvidence) -> str:
    """Return why timestamps are uncertain and what to do about it."""
    share = evidence.unsure_share
    if (share or 0.0) > HELD_BACK and evidence.is_read_at_once:
        return sentence(_code("times_uncertain", unsure_share=share, remedy="held_back"))
    remedy = _remedy(evidence.seconds, evidence.window, is_local=evidence.is_local)
    return sentence(_code("times_uncertain", unsure_share=share, **remedy))


def is_read_at_once(client_lag: Distribution, event_error: Distribution) -> bool:
    """Return True if the client read events much sooner than their timestamps are uncertain.

    Events that it did not keep waiting, and that came with others in one read, came together.
    """
    lag = deciding(client_lag)
    error = deciding(event_error)
    return lag is not None and error is not None and lag[1] <= READ_AT_ONCE * error[1]


def is_local(header: RunManifest) -> bool:
    """Return True if a target runs on the host of the client."""
    hosts = {urlsplit(target.url).hostname or "" for target in header.targets}
    own = {"localhost", "::1", header.host.name} - {""}
    return any(host in own or host.startswith("127.") for host in hosts)


def _caveats(header: RunManifest, summary: Any, signs: VerdictInputs) -> Iterator[ReasonCode]:
    """Yield what belongs beside VALID: withheld statistics, and what makes this another load."""
    yield from _above_failure_share("failures", summary.requests.failed_by_server, header, summary)
    by_reason: dict[str, list[str]] = {}
    for metric, why in summary.unsound.items():
        by_reason.setdefault(why, []).append(metric)
    for why, metrics in by_reason.items():
        yield _code("withheld", statistics={metric: [] for metric in metrics}, why=why)
    partly: dict[str, dict[str, list[str]]] = {}
    for metric, found in summary.withheld.items():
        if metric != "inter_chunk" or summary.itl_ms is None:  # else the same as those of ITL
            partly.setdefault(found.why, {})[metric] = list(found.ranges)
    for why, statistics in partly.items():
        yield _code("withheld", statistics=statistics, why=why)
    dropped = summary.requests.dropped_share
    if dropped > limits.NOT_OFFERED and (
        signs.missed or dropped <= header.limits.not_offered_share
    ):
        yield _code("not_offered", **_dropped(summary.requests))
    asked, got = signs.asked, signs.asked_got
    if got < asked * (1 - limits.SHORTENED):
        yield _code("shortened", asked=asked, got=got, share=got / asked)
    if _have_prompts_another_length(header, signs):
        yield _code("prompt_lengths", share=signs.disagreement, limit=limits.PROMPT_LENGTHS)
    yield from _unfilled_concurrency(header, signs.sends)


def _unfilled_concurrency(header: RunManifest, sends: int) -> Iterator[ReasonCode]:
    """Yield a code if a closed loop sent fewer requests than its concurrency."""
    lanes = _largest_concurrency(header)
    if 0 < sends < lanes:
        yield _code("lanes_unfilled", requests=sends, lanes=lanes, needed=5 * lanes)


def _largest_concurrency(header: RunManifest) -> int:
    """Return the concurrency of the largest measured closed loop, or 0 without one."""
    return max((stage.concurrency or 0 for stage in header.stages if stage.measured), default=0)


def _have_prompts_another_length(header: RunManifest, signs: VerdictInputs) -> bool:
    """Return True if generated prompts are not as long as requested, by the server's count.

    Without the size of the chat template, the difference may be the template.
    """
    is_known = signs.disagreement is not None and header.template_tokens is not None
    # A manifest without the newer field may still say that the prompts are random words.
    lengths_requested = header.prompt_lengths_requested or header.random_words
    if not is_known or not lengths_requested:
        return False
    return abs(signs.disagreement or 0.0) > limits.PROMPT_LENGTHS


def _undisclosed(
    missing: Mapping[str, list[str]], seen: SeenHardware | None
) -> dict[str, list[str]]:
    """What nobody has said of the system, without what the metrics pages of the hardware say."""
    told = set() if seen is None else seen.told
    return {
        who: left
        for who, keys in missing.items()
        if (left := [key for key in keys if key not in told])
    }


def _other_hardware(metadata: Mapping[str, str], seen: SeenHardware | None) -> Iterator[ReasonCode]:
    """Where the description of the system and the hardware's own page do not agree."""
    if seen is None:
        return
    watts = None if seen.power_limit_w is None else f"{seen.power_limit_w:g}"
    for key, of_page in (("driver", seen.driver), ("power_limit_w", watts)):
        said = metadata.get(f"{SYSTEM}accelerator.{key}")
        if said and of_page and said != of_page and not of_page.startswith(f"{said}."):
            yield _code("hardware_differs", key=f"accelerator.{key}", said=said, seen=of_page)


def state_reasons(state: str) -> tuple[ReasonCode, ...]:
    """Why a run that ended in this state is INVALID; empty when it is not."""
    return (_code(state),) if state in ("interrupted", "stopped") else ()


def _replica_changes(recovery: Sequence[Recovery]) -> list[tuple[str, str, float]]:
    """Return the changes of the number of replicas: what it was, what it became, and when."""
    return [
        (change.spike, change.after, change.at_s)
        for change in recovery
        if change.event in ("loss", "scale_up")
    ]


def _warnings(
    header: RunManifest, summary: Any, signs: VerdictInputs, *, shortened: bool
) -> Iterator[ReasonCode]:
    for text in header.notes:
        code = header.note_codes.get(text) or _code("note", text=text)
        if code.code != "undisclosed":
            yield code
        elif missing := _undisclosed(code.values["missing"], summary.hardware):
            yield _code("undisclosed", missing=missing)
    yield from _other_hardware(header.metadata, summary.hardware)
    if summary.run.state == "cut_off":
        yield _code("cut_off")
    yield from _unfinished(header, summary)
    defaults = ValidityLimits()
    for field in defaults.__struct_fields__:
        value, default = getattr(header.limits, field), getattr(defaults, field)
        if value != default:
            yield _code("limit_changed", limit=field, value=value, default=default)
    yield from _of_token_counts(header, summary, signs, shortened=shortened)
    yield from _remarks(signs.remarks, summary.requests.ok)
    told = any(
        code.code == "server_timing_missing" for code in header.note_codes.values()
    )  # by the probe
    no_account = summary.requests.ok and not summary.splits.accounted
    if header.server_timing and no_account and not told:
        yield _code("server_timing_missing", server=summary.target.server or "it")
    if summary.speculation is not None and header.random_words:
        yield _code("drafts_random")
    for term in summary.goodput.slo:
        if not term.supported and not term.undecided:
            values = {
                "metric": term.metric,
                "percentile": term.quantile * 100,
                "samples": term.count,
            }
            yield _code("slo_samples", **values, needed=term.needed)
    variation, planned = summary.load.gap_variation, summary.load.gap_variation_planned
    enough = signs.sends > limits.GAPS_NEEDED
    if (
        enough
        and variation is not None
        and planned is not None
        and abs(variation - planned) > limits.GAP_VARIATION
    ):
        yield _code("gaps_differ", variation=variation, planned=planned)
    yield from _not_steady(header, summary, signs.sends)


def _unfinished(header: RunManifest, summary: Any) -> Iterator[ReasonCode]:
    """That the end of the drain cut requests; and that no SLO term can be called met, where they are many."""
    unfinished, everyone = (
        summary.requests.unfinished,
        summary.requests.scheduled - summary.requests.cancelled,
    )
    if unfinished:
        cut = {"unfinished": unfinished, "requests": everyone, "share": unfinished / everyone}
        values = {**cut, "drain_s": header.grace_s}
        if outcomes.is_undecided(unfinished, everyone):
            yield _code(
                "unfinished_undecided",
                **values,
                limit=limits.UNFINISHED_SHARE,
                timeout_s=header.timeout_s,
            )
        else:
            yield _code("unfinished", **values)


def _not_steady(header: RunManifest, summary: Any, sends: int) -> Iterator[ReasonCode]:
    """That the load never ran alone and in full: there was no time over which its steady rates could be."""
    lanes = _largest_concurrency(header)
    if 0 < sends < lanes:  # said as a caveat
        return
    load = summary.load
    lasted = (
        load.achieved_rps is not None and sends > lanes if lanes else load.offered_rps is not None
    )
    if lasted and summary.window.steady.duration_s is None:
        yield _code("never_steady", because="lanes" if lanes else "warmup")


def _remarks(remarks: Mapping[str, int], ok: int) -> Iterator[ReasonCode]:
    """Yield a warning for everything unusual about responses that are ok."""
    for remark, count in remarks.items():
        yield _code("responses_remarked", responses=count, ok=ok, remark=remark)


def _of_token_counts(
    header: RunManifest, summary: Any, signs: VerdictInputs, *, shortened: bool
) -> Iterator[ReasonCode]:
    """Token counts that are missing, estimated or contradictory, or of tokens that a cache served."""
    tokens, ok, sources = summary.tokens, summary.requests.ok, summary.tokens.sources
    if header.usage_asked and (
        missing := ok - sources.output.get("unasked", 0) - sources.output.get("server", 0)
    ):
        yield _code("usage_missing", missing=missing, ok=ok)
    if estimated := max(sources.input.get("estimate", 0), sources.output.get("estimate", 0)):
        yield _code("counts_estimated", estimated=estimated, ok=ok)
    differs = abs(signs.disagreement or 0.0) > limits.COUNT_DISAGREEMENT
    if differs and not _have_prompts_another_length(header, signs):
        values = {"share": signs.disagreement, "limit": limits.COUNT_DISAGREEMENT}
        yield _code(
            "prompt_counts_differ", **values, template_known=header.template_tokens is not None
        )
    asked_share = header.cache_asked
    if asked_share is not None and tokens.cached_share is None:
        yield _code("cache_unsaid", asked=asked_share)
    elif asked_share is not None and abs(tokens.cached_share - asked_share) > limits.CACHED_SHARE:
        yield _code(
            "cache_differs", asked=asked_share, share=tokens.cached_share, limit=limits.CACHED_SHARE
        )
    elif (
        tokens.cached_share is not None
        and tokens.cached_share > limits.CACHED_SHARE
        and not header.shares_prompts
    ):
        yield _code("cached", share=tokens.cached_share)
    differ = None if shortened else tokens.length_mismatch_share
    if differ is not None and differ > limits.LENGTH_MISMATCH:
        yield _code("lengths_differ", share=differ, limit=limits.LENGTH_MISMATCH)
    if signs.repeated:
        yield _code("prompts_repeated", requests=signs.repeated)
    if changes := _replica_changes(summary.recovery):
        yield _code("replicas_changed", changes=changes)
