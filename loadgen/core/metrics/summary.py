"""The types of `summary.json`, its JSON text, and the exit code of a run.

`measurement` computes what core knows of a run, and `core.run_summary` adds the sections of
`core.analysis` and the verdict. `docs/reference/summary.md` defines every field, and a test
compares that page with these types. `schema` grows when a field changes its meaning or is removed,
not when one is added.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from loadgen.core import errors as codes
from loadgen.core import format
from loadgen.core.metrics import validity
from loadgen.core.metrics.accepted_length import AcceptedLengthCheck
from loadgen.core.metrics.answer_scores import AnswerScores
from loadgen.core.metrics.client_use import ClientUse
from loadgen.core.metrics.drift import Drift
from loadgen.core.metrics.fluidity import Fluidity
from loadgen.core.metrics.goodput import Goodput
from loadgen.core.metrics.interactivity import Interactivity
from loadgen.core.metrics.load import Load
from loadgen.core.metrics.machines import MachineSummary
from loadgen.core.metrics.part_summaries import (
    ClassSummary,
    ModelSummary,
    RackTokens,
    StageSummary,
    StepSummary,
    TargetSummary,
)
from loadgen.core.metrics.request_counts import Bytes, RequestCounts, Stalls
from loadgen.core.metrics.sections import (
    BetweenNodes,
    Explanation,
    Fairness,
    Recovery,
    SlowRequest,
    Speculation,
    Splits,
    StimulusCheck,
)
from loadgen.core.metrics.sustainable import Sustainable
from loadgen.core.metrics.task_summary import Sessions
from loadgen.core.metrics.token_usage import Tokens
from loadgen.core.metrics.uncertainty import WithheldStatistics
from loadgen.core.metrics.verdict import Verdict
from loadgen.core.metrics.windows import Window
from loadgen.core.results.json_files import decode_json
from loadgen.core.results.manifest import ChunkReuse, Fingerprints, Host, TargetFacts
from loadgen.core.server_metrics.energy import EnergyUse
from loadgen.core.server_metrics.hardware import SeenHardware
from loadgen.core.server_metrics.series import ServerTotals
from loadgen.core.stats.intervals import Interval
from loadgen.core.stats.quantiles import Distribution

SCHEMA = 1

FILE = "summary.json"
"""The name of the file in the directory of a run."""


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Which run this is, how it was started, and by which program.

    `state` is finished, interrupted (by the user), stopped, decided (by a search) or cut_off (there
    was no clean end). `salt` is "" if it is not known. `tokenizer_sha256` is that of the tokenizer
    file, and "" for the packaged vocabulary or if it is not known.
    """

    id: str
    name: str
    workload: str
    started: str
    ended: str
    state: str
    version: str
    command: tuple[str, ...]
    metadata: dict[str, str] = {}
    seed: int | None
    schedule_seed: int | None
    salt: str = ""
    client: str
    api: str
    stream: bool
    tokenizer: str
    tokenizer_tag: str
    tokenizer_sha256: str = ""
    host: Host


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `summary.json`.

    Only measured stages count, unless a name says otherwise (`warmup`, `window.whole`).
    """

    schema: int
    run: RunFacts
    target: TargetFacts
    rtt_ms: float | None
    # Names are looked up once, before the load. None if there were none, or it is not known.
    dns_ms: float | None = None
    window: Window
    bytes: Bytes
    fingerprints: Fingerprints
    verdict: Verdict
    # Whether the delivered load is the requested one.
    stimulus: tuple[StimulusCheck, ...] = ()
    requests: RequestCounts
    warmup: RequestCounts
    load: Load
    tokens: Tokens
    ttft_ms: Distribution
    ttft_from_sent_ms: Distribution
    first_answer_ms: Distribution
    tpot_ms: Distribution
    # Ok requests without a TPOT, because they are too short or have no span.
    tpot_undefined: int
    # Those of them that have enough tokens, all of which came at one instant.
    tpot_no_span: int = 0
    # Those of them that have enough tokens, and no event with output.
    tpot_no_output: int = 0
    tpot_mlperf_ms: Distribution
    inter_chunk_ms: Distribution
    itl_ms: Distribution | None
    # Why `itl_ms` is None, as a sentence.
    itl_undefined_reason: str = msgspec.field(name="itl_absent")
    # Why all statistics of a metric are None although it has samples, by metric.
    withheld_metrics: dict[str, str] = msgspec.field(default={}, name="unsound")
    # The statistics of other metrics that are None because they are too uncertain, by metric.
    withheld_statistics: dict[str, WithheldStatistics] = msgspec.field(default={}, name="withheld")
    e2e_ms: Distribution
    max_gap_ms: Distribution
    stalls: Stalls
    # Met token deadlines. None without deadlines, or if the token times were not stored.
    fluidity: Fluidity | None = None
    # The output speed that one user sees. Null for each definition whose latency is not known.
    interactivity: Interactivity = Interactivity()
    connect_ms: Distribution
    send_lag_ms: Distribution
    client_lag_ms: Distribution
    stamp_error_ms: Distribution
    # The timestamp error of every output event.
    event_error_ms: Distribution = Distribution()
    # The share of the output events that came with later ones in one read.
    event_unsure_share: float | None = None
    # Of a request: (first + last timestamp error) / (n - n1).
    tpot_error_ms: Distribution = Distribution()
    # The timestamp error at the end of a request's largest gap.
    max_gap_error_ms: Distribution = Distribution()
    goodput: Goodput
    # None if no request belongs to a conversation.
    sessions: Sessions | None
    client: ClientUse
    stages: tuple[StageSummary, ...]
    # Empty with a single target.
    targets: tuple[TargetSummary, ...]
    # One each if the targets are in several regions.
    regions: tuple[TargetSummary, ...] = ()
    # One each if targets name the node that they are on.
    nodes: tuple[TargetSummary, ...] = ()
    # None with a single target.
    rack: RackTokens | None = None
    node_differences: BetweenNodes = msgspec.field(default=BetweenNodes(), name="between")
    # Accelerators, driver and power limit that metrics pages name. None if none was read.
    hardware: SeenHardware | None = None
    # Empty if all requests are of one kind.
    classes: tuple[ClassSummary, ...] = ()
    # Over tenants. None if there are not two.
    fairness: Fairness | None = None
    # Empty if the classes do not request several models.
    models: tuple[ModelSummary, ...] = ()
    # The steps of tasks. Empty if there are none, or their numbers of requests are drawn.
    steps: tuple[StepSummary, ...] = ()
    # Whether the prefix caches of the servers were emptied before the load.
    cache_reset: bool = False
    # What prompts with retrieved chunks share. None without chunks.
    chunks: ChunkReuse | None = None
    # The share of cached prompt tokens that the workload requests with `cache`.
    requested_cache_share: float | None = msgspec.field(default=None, name="cache_asked")
    # The share of the prompts of a replayed trace that an endless prefix cache would have known.
    trace_cache_share: float | None = msgspec.field(default=None, name="cache_bound")
    drift: Drift = Drift()
    sustainable: Sustainable = Sustainable()
    # One for each spike, if there is an SLO.
    recovery: tuple[Recovery, ...] = ()
    # None if no server reports drafted tokens.
    speculation: Speculation | None = None
    # None if no accepted length was stated.
    accepted_length: AcceptedLengthCheck | None = None
    splits: Splits = Splits()
    slowest: tuple[SlowRequest, ...] = ()
    causes: Explanation = Explanation()
    # The scores of requests with known answers. None if the workload has none.
    answers: AnswerScores | None = None
    # What the servers counted. None if no metrics page was read.
    server: ServerTotals | None = None
    # What the accelerators used. None if nothing reports it.
    energy: EnergyUse | None = None
    # The metrics that have no field of their own: newer ones, and those of other packages.
    other_metrics: dict[str, Distribution] = msgspec.field(default={}, name="figures")
    # The machines that sent the load, or were lost. Empty if one machine sent it.
    machines: tuple[MachineSummary, ...] = ()
    # The path of a metric in the summary -> its interval by blocks of time. Empty if too short.
    within: dict[str, Interval] = {}
    # The percentiles that the user requested: field of a metric -> name of the percentile -> ms.
    percentiles: dict[str, dict[str, float]] = {}

    def withheld_reason(self, metric: str, statistic: str) -> str:
        """Return why a statistic of a metric (`p99`, `mean`) is withheld; "" if it is not."""
        if metric in self.withheld_metrics:
            return self.withheld_metrics[metric]
        withheld = self.withheld_statistics.get(metric)
        if withheld is None or statistic not in withheld.ranges:
            return ""
        return withheld.reason

    def metrics_withholding(self, statistic: str) -> set[str]:
        """Return the metrics of which a statistic (`p99`, `mean`) is withheld."""
        metrics = {*self.withheld_metrics, *self.withheld_statistics}
        return {metric for metric in metrics if self.withheld_reason(metric, statistic)}


class NamedSummary(NamedTuple):
    """The summary of a run, with the name of its directory in the result that it belongs to."""

    name: str
    summary: Summary


def exit_code(summary: Summary, *, strict: bool = False, reported: bool = False) -> int:
    """Return the exit code of a run.

    - 130: the run was interrupted.
    - 3: the measurement is not valid.
    - 1: the SLO is missed or, if there is no SLO, too many requests failed.
    - 4: the run does not decide the SLO, and `strict` is set.
    - 0: otherwise.

    Args:
        summary: The run.
        strict: Whether a run that does not decide its SLO has an exit code of its own.
        reported: Whether this is the exit code of a report, which does not end with 130.
    """
    if summary.run.state == "interrupted" and not reported:
        return codes.INTERRUPTED

    if not summary.verdict.valid:
        return codes.UNSOUND

    # None means that the SLO is not decided.
    is_slo_missed = summary.goodput.met is False
    if is_slo_missed or fails_by_errors(summary):
        return codes.SLO_MISSED

    if strict and is_inconclusive(summary):
        return codes.INCONCLUSIVE

    return codes.OK


def is_inconclusive(summary: Summary) -> bool:
    """Return True if it is not known, or not certain enough, whether a run meets its objectives.

    These are the terms of the SLOs of the run and of its request classes, the share of right
    answers, and the share of met token deadlines.
    """
    return (
        _is_slo_inconclusive(summary)
        or _is_answers_objective_undecided(summary)
        or _are_deadlines_inconclusive(summary)
    )


def _is_slo_inconclusive(summary: Summary) -> bool:
    """Return True if an SLO is undecided, or if one of its terms has too few samples.

    The goodput of a run without an SLO of its own is that of its classes.
    """
    if summary.goodput.undecided:
        return True

    class_goodputs = [request_class.goodput for request_class in summary.classes]
    goodputs = [summary.goodput, *class_goodputs]
    return any(not term.supported for goodput in goodputs for term in goodput.slo)


def _is_answers_objective_undecided(summary: Summary) -> bool:
    """Return True if there is an objective for the share of right answers that is undecided."""
    objective = None if summary.answers is None else summary.answers.objective
    return objective is not None and objective.met is None


def _are_deadlines_inconclusive(summary: Summary) -> bool:
    """Return True if an objective for token deadlines, of the run or of a class, is not certain."""
    class_fluidity = [request_class.fluidity for request_class in summary.classes]
    return any(_is_objective_inconclusive(part) for part in (summary.fluidity, *class_fluidity))


def _is_objective_inconclusive(fluidity: Fluidity | None) -> bool:
    """Return True if there is an objective for token deadlines that is undecided or unsupported."""
    objective = None if fluidity is None else fluidity.objective
    return objective is not None and (objective.met is None or not objective.supported)


def fails_by_errors(summary: Summary) -> bool:
    """Return True if a valid run has no SLO and an error rate above the limit `failure_share`."""
    has_slo = summary.goodput.has_any_slo
    return summary.verdict.valid and not has_slo and validity.has_high_error_rate(summary)


def dump_summary(summary: Summary) -> bytes:
    """Return the bytes of `summary.json`: UTF-8, indented by two, with a final newline.

    Unknown values are null and never left out.
    """
    return format.document(summary)


def load_summary(data: bytes, path: str = FILE) -> Summary:
    """Return the summary in the bytes of a `summary.json`.

    Fields that this version does not know are ignored.

    Args:
        data: The bytes of the file.
        path: The path of the file, for errors.

    Raises UserError for data that is no summary, and for a summary of a newer schema.
    """
    # An error shows the command that creates the file again. Its run directory is "DIR" if `path`
    # does not say which directory it is.
    parent, _, _ = path.rpartition("/")
    run_dir = parent or "DIR"
    hint = f"loadgen report {run_dir} --json > {run_dir}/summary.json creates it again"
    return decode_json(
        data,
        content_type=Summary,
        where=path,
        description="a summary of a run",
        hint=hint,
        schema=SCHEMA,
    )
