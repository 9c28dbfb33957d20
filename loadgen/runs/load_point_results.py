"""The metrics of one load point: what a run at that load has measured. Pure.

`sweep_curve.py` puts the load points of a sweep side by side.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import msgspec

from loadgen.core.metrics.answer_comparison import merge_scores
from loadgen.core.metrics.answer_scores import AnswerScores
from loadgen.core.metrics.interactivity import compute_interactivity
from loadgen.core.metrics.summary import fails_by_errors
from loadgen.core.metrics.token_usage import per_gpu
from loadgen.runs.load_points import PointGroup
from loadgen.runs.rates import has_steady_rates, select_headline_rates
from loadgen.runs.run_title import short_arrival
from loadgen.runs.slo_text import is_slo_undecided, list_undecided_reasons

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.core.metrics.part_summaries import StageSummary
    from loadgen.core.metrics.summary import Summary
    from loadgen.runs.load_points import LoadPoint


RAMP_OF_PREVIOUS_STAGE = "stage"
"""The value of `ramp_from` of a stage that continues with the virtual users of the one before."""

LATENCY_QUANTILES = ("p50", "p99")
"""The percentiles of TTFT, TPOT and E2E latency that are checked for enough samples."""


STEADY_STATE_RATES = ("requests_per_s", "output_per_s")
"""The rates that are too low if they include ramp-up and drain, as others computed from them."""


class LoadPointResult(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "load_label": "load",
        "load_value": "amount",
        "slo_attainment": "goodput",
        "is_closed_loop": "closed",
        "on_pareto_front": "front",
        "started_at_once": "at_once",
        "reached_concurrency": "full",
    },
):
    """The metrics of a run at one load.

    Rates are per second, over the steady-state window if there is one. Latencies are in ms. A
    metric is None if it is not known.

    Attributes:
        name: The name of the directory of the run, for example "c8" or "isl500-osl100-r2.5".
        isl: The prompt length in tokens, if the sweep has several.
        osl: The output length in tokens, if the sweep has several.
        target: The target, if the sweep has several.
        load_label: The load as text, for example "8 in flight".
        load_value: The number of virtual users, or the offered requests per second.
        ok: The number of requests that succeeded.
        failed: The number of requests that failed or were dropped.
        per_gpu: Output tokens per second and GPU. Null if the number of GPUs is not known.
        per_user: The tokens per second that one user sees: 1 / TPOT p50.
        per_user_endpoints: The same by the definition of MLPerf Endpoints: 1 / TPOT p90.
        per_user_agentx: The same by the definition of InferenceX AgentX: 1 / p90 of E2E latency per
            output token.
        unsupported: The names of the metrics above that are not reliable: latencies with too few
            samples, and the rates of a load without a steady state.
        slo_attainment: The fraction of requests that met every objective of the SLO.
        slo_met: Whether the run met the SLO. Null without an SLO, and if it is undecided.
        undecided_reasons: The reasons why it is undecided whether the run met the SLO.
        state: How the run ended, for example "finished" or "interrupted".
        is_closed_loop: Whether virtual users sent the load.
        on_pareto_front: Whether no other load point has both a higher throughput per GPU and a
            higher throughput per user.
        started_at_once: Whether all virtual users started at the same time.
        reached_concurrency: Whether all virtual users were active at the same time for a while.
            Always true in an open loop.
        total_per_gpu: Input and output tokens per second and GPU.
        sustained: Whether TTFT and concurrency did not grow. Null if it is not known.
        many_errors: Whether there is no SLO, and too many requests failed.
        answers: The scores of the requests with known answers. Null without such requests.
    """

    name: str
    isl: int | None = None
    osl: int | None = None
    target: str = ""
    load_label: str
    load_value: float | None
    ok: int
    failed: int
    requests_per_s: float | None
    output_per_s: float | None
    per_gpu: float | None
    per_user: float | None = None
    per_user_endpoints: float | None = None
    per_user_agentx: float | None = None
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    tpot_p50: float | None = None
    tpot_p99: float | None = None
    e2e_p50: float | None = None
    unsupported: tuple[str, ...] = ()
    slo_attainment: float | None
    slo_met: bool | None
    slo_undecided: bool = False
    undecided_reasons: tuple[str, ...] = ()
    valid: bool
    state: str
    simulated: bool
    is_closed_loop: bool = False
    on_pareto_front: bool = False
    started_at_once: bool = False
    reached_concurrency: bool = True
    total_per_gpu: float | None = None
    sustained: bool | None = None
    many_errors: bool = False
    answers: AnswerScores | None = None

    @property
    def is_usable(self) -> bool:
        """Whether the metrics describe a server that served its load."""
        return self.valid and not self.many_errors

    @property
    def has_steady_state(self) -> bool:
        """Whether the rates are those of a steady-state window.

        Without one, the load was too short for its requests, and the rates include its ramp-up and
        drain.
        """
        return not any(rate in self.unsupported for rate in STEADY_STATE_RATES)

    @property
    def latencies_with_few_samples(self) -> tuple[str, ...]:
        """The names of the latencies that have too few samples, for example "ttft_p99"."""
        return tuple(name for name in self.unsupported if name not in STEADY_STATE_RATES)

    def speed_per_user(self, interactivity: str) -> float | None:
        """Return the tokens per second that one user sees, by a definition of interactivity.

        Args:
            interactivity: The name of the definition: tpot50, endpoints or agentx.
        """
        speed_by_definition = {
            "tpot50": self.per_user,
            "endpoints": self.per_user_endpoints,
            "agentx": self.per_user_agentx,
        }
        return speed_by_definition[interactivity]

    @property
    def group(self) -> PointGroup:
        """What the load point has in common with the others of its curve."""
        return PointGroup(isl=self.isl, osl=self.osl, target=self.target)

    @property
    def short_label(self) -> str:
        """The load as text, or the name of the run if the load is not known."""
        return self.load_label or self.name

    @property
    def label(self) -> str:
        """The load as text, after the lengths and the target if the sweep has several."""
        return ", ".join(filter(None, (self.group.label, self.short_label)))


def load_point_result(name: str, summary: Summary, point: LoadPoint | None) -> LoadPointResult:
    """Return the metrics of a run as a load point of a sweep.

    The report of a sweep shows it as a row of its table and as a point of its charts.

    Args:
        name: The name of the run.
        summary: Its summary.
        point: The load point that a sweep requested. None for a run of another command.
    """
    result = _result_with_rates(name, summary)
    result = _with_latencies(result, summary)
    if point is None:
        return result
    return msgspec.structs.replace(result, isl=point.isl, osl=point.osl, target=point.target)


def _result_with_rates(name: str, summary: Summary) -> LoadPointResult:
    """Return the load, the throughput and the outcome of a run, without its latencies.

    The load of a closed loop is its number of virtual users, and that of an open loop is its
    offered rate.
    """
    requests = summary.requests
    goodput = summary.goodput
    gpu_count = summary.target.gpus
    rates = select_headline_rates(summary)
    has_too_many_errors = fails_by_errors(summary)

    concurrency = _measured_concurrency(summary.stages)
    is_closed_loop = concurrency is not None
    load_value = summary.load.offered_rps if concurrency is None else float(concurrency)

    # A closed loop is in steady state while all of its virtual users are active.
    has_steady_state = summary.window.steady.duration_s is not None
    reached_concurrency = has_steady_state if is_closed_loop else True

    return LoadPointResult(
        name=name,
        # The load
        load_label=short_arrival(summary.load.arrival),
        load_value=load_value,
        is_closed_loop=is_closed_loop,
        started_at_once=_started_at_once(summary.stages),
        reached_concurrency=reached_concurrency,
        # The throughput
        ok=requests.ok,
        failed=requests.decided - requests.ok,
        requests_per_s=rates.requests,
        output_per_s=rates.output,
        per_gpu=per_gpu(rates.output, gpu_count),
        total_per_gpu=per_gpu(rates.total, gpu_count),
        # The outcome
        slo_attainment=goodput.share,
        slo_met=goodput.met,
        slo_undecided=is_slo_undecided(summary),
        undecided_reasons=list_undecided_reasons(summary),
        sustained=summary.sustainable.sustained,
        many_errors=has_too_many_errors,
        answers=summary.answers,
        valid=summary.verdict.valid,
        state=summary.run.state,
        simulated=summary.target.simulated,
    )


def _with_latencies(result: LoadPointResult, summary: Summary) -> LoadPointResult:
    """Return a load point with the latencies of its run, in ms."""
    interactivity = compute_interactivity(summary)
    return msgspec.structs.replace(
        result,
        ttft_p50=summary.ttft_ms.p50,
        ttft_p99=summary.ttft_ms.p99,
        tpot_p50=summary.tpot_ms.p50,
        tpot_p99=summary.tpot_ms.p99,
        e2e_p50=summary.e2e_ms.p50,
        per_user=interactivity.tpot50,
        per_user_endpoints=interactivity.endpoints,
        per_user_agentx=interactivity.agentx,
        unsupported=(*_rates_without_steady_state(summary), *_latencies_with_few_samples(summary)),
    )


def _measured_concurrency(stages: Sequence[StageSummary]) -> int | None:
    """Return the number of virtual users of the measured load. Return None in an open loop."""
    return next((stage.concurrency for stage in stages if stage.measured), None)


def _rates_without_steady_state(summary: Summary) -> tuple[str, ...]:
    """Return the names of the rates of a load point if it has no steady state, else ()."""
    return () if has_steady_rates(summary) else STEADY_STATE_RATES


def _latencies_with_few_samples(summary: Summary) -> tuple[str, ...]:
    """Return the names of the percentiles with too few samples, for example "ttft_p99"."""
    distributions = {"ttft": summary.ttft_ms, "tpot": summary.tpot_ms, "e2e": summary.e2e_ms}
    return tuple(
        f"{metric}_{quantile}"
        for metric, distribution in distributions.items()
        for quantile in LATENCY_QUANTILES
        if distribution.count and quantile not in distribution.supported
    )


def _started_at_once(stages: Sequence[StageSummary]) -> bool:
    """Return whether all virtual users of a closed loop started at the same time.

    By default, the start of the users is spread over the time `ramp_s` of a stage. It is 0 only if
    the user requested that they start together. The first stage that starts several users decides;
    later ones, such as a measured stage after a warm-up, may only continue with those users.
    """
    for stage in stages:
        has_several_users = stage.concurrency is not None and stage.concurrency > 1
        continues_with_users = stage.ramp_from == RAMP_OF_PREVIOUS_STAGE
        starts_several_users = has_several_users and not continues_with_users
        if starts_several_users:
            return stage.ramp_s == 0
    return False


AVERAGED_METRICS = (
    "requests_per_s",
    "output_per_s",
    "per_gpu",
    "total_per_gpu",
    "per_user",
    "per_user_endpoints",
    "per_user_agentx",
    "ttft_p50",
    "ttft_p99",
    "tpot_p50",
    "tpot_p99",
    "e2e_p50",
    "slo_attainment",
)
"""The metrics of a load point of which repeats have a mean."""


def average_repeats(repeats: Sequence[LoadPointResult]) -> LoadPointResult:
    """Return one load point for several runs of the same load.

    It has the means of the valid repeats, or of all if none is valid. Its name states the load and
    how many runs were averaged. A single repeat is returned as it is.
    """
    averaged = [repeat for repeat in repeats if repeat.valid] or list(repeats)
    if len(averaged) == 1:
        return averaged[0]
    point = _combine_outcomes(averaged)
    name = f"{point.short_label}, mean of {len(averaged)} runs"
    return msgspec.structs.replace(point, name=name, **_mean_metrics(averaged))


def _combine_outcomes(repeats: Sequence[LoadPointResult]) -> LoadPointResult:
    """Return the first repeat, with the request counts and outcomes of all repeats.

    Requests are added. A positive outcome, such as that the SLO was met, must be that of every
    repeat. A reservation, such as a metric that is not reliable, applies if one repeat has it.
    """
    unsupported_metrics = {metric for repeat in repeats for metric in repeat.unsupported}
    reasons = dict.fromkeys(reason for repeat in repeats for reason in repeat.undecided_reasons)
    return msgspec.structs.replace(
        repeats[0],
        ok=sum(repeat.ok for repeat in repeats),
        failed=sum(repeat.failed for repeat in repeats),
        answers=_merge_answers([repeat.answers for repeat in repeats]),
        # In every repeat
        slo_met=_all_or_unknown([repeat.slo_met for repeat in repeats]),
        sustained=_all_or_unknown([repeat.sustained for repeat in repeats]),
        reached_concurrency=all(repeat.reached_concurrency for repeat in repeats),
        # In any repeat
        unsupported=tuple(sorted(unsupported_metrics)),
        slo_undecided=any(repeat.slo_undecided for repeat in repeats),
        undecided_reasons=tuple(reasons),
        simulated=any(repeat.simulated for repeat in repeats),
    )


def _merge_answers(scores: Sequence[AnswerScores | None]) -> AnswerScores | None:
    """Return the scores of the checked answers of all repeats, or None if one has none."""
    known = [score for score in scores if score is not None]
    return merge_scores(known) if len(known) == len(scores) else None


def _mean_metrics(points: Sequence[LoadPointResult]) -> dict[str, float | None]:
    """Return the mean of each of AVERAGED_METRICS over load points, by its name."""
    return {
        metric: _mean([getattr(point, metric) for point in points]) for metric in AVERAGED_METRICS
    }


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None if a value is not known."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def _all_or_unknown(values: Sequence[bool | None]) -> bool | None:
    """Return False if one value is False, else None if one is not known (None), else True."""
    if False in values:
        return False
    return None if None in values else True
