"""The result of accuracy mode: the rules' targets, the means of a run, and LoadGen's accuracy log.

Pure. The targets are those of the submission checker, which compares means without an interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from loadgen.core.errors import OK, SLO_MISSED, UNSOUND, UserError
from loadgen.mlperf.result import DISCLOSURE, Test06
from loadgen.mlperf.rules import load_rules

LOG_FILE = "mlperf_log_accuracy.json"
VERIFICATION_FILE = "verify_accuracy.txt"
SCHEMA = 1

TIERS = (0.99, 0.999)
"""The fractions of the reference's accuracy that the rules require."""

TOKENS = "tokens_per_sample"
MIN_TOKENS_FRACTION = 0.9
MAX_TOKENS_FRACTION = 1.1
"""Bounds of the mean response length, in parts of the reference's, at both tiers."""


class AccuracyMean(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over all samples in the units of the rules (ROUGE x 100).

    `low` and `high` are its 95 % confidence interval, None if there is none.
    """

    metric: str
    mean: float
    low: float | None = None
    high: float | None = None


class AccuracyTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the rules on a mean, and whether they are met.

    Attributes:
        tier: The fraction of the reference's accuracy: 0.99 or 0.999.
        metric: The metric.
        least: The lower bound of the mean.
        most: The upper bound; None if there is none.
        met: Whether the mean is within the bounds.
    """

    tier: float
    metric: str
    least: float
    most: float | None = None
    met: bool


class AccuracyResult(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `mlperf_accuracy.json`.

    Attributes:
        schema: The version of this format.
        benchmark: The benchmark.
        round: The round of the rules.
        dataset: The name of the data set.
        dataset_sha256: The hash of its file.
        url: The endpoint.
        model: The model that responded.
        version: The version of the load generator.
        samples: The number of samples that were sent.
        samples_of_rules: The number that the rules require.
        answered: How many samples got a response.
        means: The measured means.
        targets: The bounds of both tiers.
        token_ids: Where the token IDs in LoadGen's log come from. "" if there are none and no log.
        test06: The checks of TEST06 on all responses of this run. An official test logs 100
            samples of a performance run.
        compliance: The compliance tests that the rules require for this model.
        simulated: Whether a performance model responded.
        warnings: What is missing, and what speaks against relying on the result.
        disclosure: That the result is unofficial.
    """

    schema: int = SCHEMA
    benchmark: str
    round: str
    dataset: str
    dataset_sha256: str
    url: str
    model: str
    version: str
    samples: int
    samples_of_rules: int
    answered: int
    means: tuple[AccuracyMean, ...]
    targets: tuple[AccuracyTarget, ...]
    token_ids: str = ""
    test06: Test06 | None = None
    compliance: tuple[str, ...] = ()
    simulated: bool = False
    warnings: tuple[str, ...] = ()
    disclosure: str = DISCLOSURE

    def meets(self, tier: float) -> bool:
        """Return True if every sample of the rules has a response, and all means meet the tier."""
        is_complete = self.answered == self.samples == self.samples_of_rules
        return is_complete and self.means_meet(tier)

    def means_meet(self, tier: float) -> bool:
        """Return True if every mean is within the bounds of the tier."""
        return all(target.met for target in self.targets if target.tier == tier)

    @property
    def exit_code(self) -> int:
        """0 if 99 % is met, 1 if a mean misses it, 3 if samples or responses are missing."""
        if not self.means_meet(TIERS[0]):
            return SLO_MISSED
        return OK if self.meets(TIERS[0]) else UNSOUND


def reference_accuracy(benchmark: str) -> dict[str, float]:
    """Return the scores of MLPerf's reference implementation, by metric.

    The rules require 99 % or 99.9 % of them. Only the ROUGE metrics can be computed here.

    Raises UserError for an unknown benchmark, or one whose accuracy is not scored here.
    """
    benchmarks = load_rules().benchmarks
    scored = ", ".join(name for name, spec in benchmarks.items() if spec.accuracy)
    if benchmark not in benchmarks:
        raise UserError(
            "unknown_name", f'unknown benchmark "{benchmark}"', "--benchmark", f"known: {scored}"
        )

    accuracy = benchmarks[benchmark].accuracy
    if not accuracy:
        raise UserError(
            "unsupported",
            f"the accuracy of {benchmark} is not scored: its rules require more than ROUGE",
            "--benchmark",
            f"known: {scored}",
        )

    return accuracy


def check_targets(
    reference: Mapping[str, float], means: Sequence[AccuracyMean]
) -> tuple[AccuracyTarget, ...]:
    """Return the targets of the rules at both tiers, and whether the measured means meet them.

    A tier is a required fraction of the accuracy of MLPerf's reference implementation: 99 % or
    99.9 %. There is a target for each metric and tier. As in the submission checker, it is compared
    with the mean alone, and not with the confidence interval of the mean.

    Args:
        reference: The accuracy of the reference implementation, by metric.
        means: The measured means. The target of a metric without a mean is missed.
    """
    measured = {mean.metric: mean.mean for mean in means}
    return tuple(
        _check_target(tier, metric, reference_mean, measured.get(metric))
        for tier in TIERS
        for metric, reference_mean in reference.items()
    )


def _check_target(
    tier: float, metric: str, reference_mean: float, measured_mean: float | None
) -> AccuracyTarget:
    """Return the bounds on one mean, and whether it is within them.

    MLPerf has tiers of accuracy: 0.99 and 0.999 of the reference implementation's. An accuracy only
    has a lower bound, the tier's fraction of the reference. The mean response length has a lower
    and an upper bound, which are the same at both tiers.

    Args:
        tier: The fraction of the reference's accuracy that is required.
        metric: The metric.
        reference_mean: Its mean for the reference implementation.
        measured_mean: The measured mean, or None if there is none.
    """
    lower_bound = reference_mean * tier
    upper_bound = math.inf
    if metric == TOKENS:
        lower_bound = reference_mean * MIN_TOKENS_FRACTION
        upper_bound = reference_mean * MAX_TOKENS_FRACTION

    is_met = measured_mean is not None and lower_bound <= measured_mean <= upper_bound
    return AccuracyTarget(
        tier=tier,
        metric=metric,
        least=lower_bound,
        most=None if math.isinf(upper_bound) else upper_bound,
        met=is_met,
    )


def format_accuracy_log(
    responses: Sequence[Sequence[int]], token_counts: Sequence[int]
) -> Iterator[str]:
    """Yield the lines of `mlperf_log_accuracy.json` as LoadGen writes them.

    MLPerf's accuracy scripts read this file. Its key `qsl_idx` is the index of the sample in the
    data set, and `seq_id` that of the query; here both are equal, because samples are sent in the
    order of the data set.

    Args:
        responses: The token IDs of each response, which are written as int64 in hexadecimal.
        token_counts: The number of tokens that the server reported for each.
    """
    yield "[\n"
    last_sample = len(responses) - 1
    for sample, (token_ids, count) in enumerate(zip(responses, token_counts, strict=True)):
        token_ids_hex = np.array(token_ids, "<i8").tobytes().hex().upper()
        line_end = "\n" if sample == last_sample else ",\n"
        yield (
            f'{{ "seq_id" : {sample}, "qsl_idx" : {sample}, "data" : "{token_ids_hex}", '
            f'"token_count" : {count} }}{line_end}'
        )

    yield "]\n"


def format_verification(test06: Test06) -> str:
    """Return the text of `verify_accuracy.txt`, as the official script of TEST06 writes it.

    A check passes if no response has failed it. The check of the first token is skipped if the
    server does not report first tokens.
    """
    first_token_check = "Skipped"
    if test06.wrong_first_tokens is not None:
        first_token_check = str(test06.wrong_first_tokens == 0)

    lines = (
        f"First token check pass: {first_token_check}",
        f"EOS check pass: {test06.repeated_end_tokens == 0}",
        f"Sample length check pass: {test06.wrong_lengths == 0}",
        f"TEST06 verification {'complete' if test06.passed else 'failed'}",
    )
    return "\n".join(lines) + "\n"
