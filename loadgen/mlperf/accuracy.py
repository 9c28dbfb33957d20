"""Accuracy mode: the rules' targets, what a run of all samples came to, and LoadGen's accuracy log. Pure.

Source of the targets: the submission checker's table, which tests the means alone, without an interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from loadgen.core.errors import OK, SLO_MISSED, UNSOUND, UserError
from loadgen.mlperf.result import DISCLOSURE, Test06
from loadgen.mlperf.rules import Benchmark, rules

LOG, VERIFY, SCHEMA = "mlperf_log_accuracy.json", "verify_accuracy.txt", 1
TIERS = (0.99, 0.999)
TOKENS, FEWEST_TOKENS, MOST_TOKENS = (
    "tokens_per_sample",
    0.9,
    1.1,
)  # of the reference's, at both tiers


class AccuracyMean(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over all samples, in the units of the rules (ROUGE x 100), with its 95 % interval where there is one."""

    metric: str
    mean: float
    low: float | None = None
    high: float | None = None


class AccuracyTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A bound of the rules on a mean, and whether it is met. `tier`: 0.99 or 0.999 of the reference's accuracy."""

    tier: float
    metric: str
    least: float
    most: float | None = None
    met: bool


class AccuracyResult(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `mlperf_accuracy.json`.

    `token_ids`: who made the ids in LoadGen's log; "" where there are none, and no log. `test06`: its checks over all
    answers of this run; an official one logs 100 of a performance run.
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
    compliance: tuple[str, ...] = ()  # the tests that the rules ask for with this model
    simulated: bool = False
    warnings: tuple[str, ...] = ()
    disclosure: str = DISCLOSURE

    def meets(self, tier: float) -> bool:
        """Whether all samples of the rules were answered, and every mean is within the bounds of the tier."""
        complete = self.answered == self.samples == self.samples_of_rules
        return complete and all(target.met for target in self.targets if target.tier == tier)

    @property
    def exit_code(self) -> int:
        """0 where 99 % is met; 1 where a mean misses it; 3 where samples or answers are missing."""
        if not all(target.met for target in self.targets if target.tier == TIERS[0]):
            return SLO_MISSED
        return OK if self.meets(TIERS[0]) else UNSOUND


def reference(benchmark: str) -> dict[str, float]:
    """The accuracy of the reference. Raises UserError for a benchmark whose accuracy is not scored here."""
    found: Benchmark | None = rules().benchmarks.get(benchmark)
    known = [name for name, spec in rules().benchmarks.items() if spec.accuracy]
    if found is None:
        raise UserError(
            "unknown_name",
            f'unknown benchmark "{benchmark}"',
            "--benchmark",
            f"known: {', '.join(known)}",
        )
    if not found.accuracy:
        what = f"the accuracy of {benchmark} is not scored here: its rules ask for more than ROUGE"
        raise UserError("unsupported", what, "--benchmark", f"known: {', '.join(known)}")
    return found.accuracy


def targets(
    of_reference: Mapping[str, float], means: Sequence[AccuracyMean]
) -> tuple[AccuracyTarget, ...]:
    """The bounds of both tiers, judged as the submission checker does: by the mean alone."""
    by_metric = {one.metric: one.mean for one in means}
    found = []
    for tier in TIERS:
        for metric, value in of_reference.items():
            of_tokens = metric == TOKENS
            least = value * (FEWEST_TOKENS if of_tokens else tier)
            most = value * MOST_TOKENS if of_tokens else None
            mean = by_metric.get(metric)
            met = mean is not None and mean >= least and (most is None or mean <= most)
            found.append(AccuracyTarget(tier=tier, metric=metric, least=least, most=most, met=met))
    return tuple(found)


def log(answers: Sequence[Sequence[int]], reported: Sequence[int]) -> Iterator[str]:
    """`mlperf_log_accuracy.json` as LoadGen writes it: per sample the token ids as int64 in hex, and their number."""
    yield "[\n"
    for i, (tokens, count) in enumerate(zip(answers, reported, strict=True)):
        data = np.array(tokens, "<i8").tobytes().hex().upper()
        end = "\n" if i == len(answers) - 1 else ",\n"
        yield f'{{ "seq_id" : {i}, "qsl_idx" : {i}, "data" : "{data}", "token_count" : {count} }}{end}'
    yield "]\n"


def verification(found: Test06) -> str:
    """`verify_accuracy.txt` of TEST06 in its official form."""
    first = "Skipped" if found.first_token is None else str(found.first_token == 0)
    lines = (
        f"First token check pass: {first}",
        f"EOS check pass: {found.end_tokens == 0}",
        f"Sample length check pass: {found.length == 0}",
        f"TEST06 verification {'complete' if found.passed else 'failed'}",
    )
    return "\n".join(lines) + "\n"
