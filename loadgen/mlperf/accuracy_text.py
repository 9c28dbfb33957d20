"""Renders a result of accuracy mode: each mean next to the rules' bounds, and TEST06. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.core import format
from loadgen.mlperf.accuracy import TIERS, AccuracyMean, AccuracyResult, AccuracyTarget
from loadgen.mlperf.text import disclosure_notice
from loadgen.render.section import (
    Bullets,
    Facts,
    Kind,
    Paragraph,
    Report,
    Section,
    Table,
    named_facts,
    section,
    simulated_notice,
)

METRIC_LABELS = {
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "tokens_per_sample": "tokens/sample",
}


def create_report(result: AccuracyResult, failures: Sequence[str] = ()) -> Report:
    """Return the report of an accuracy run: the means, the targets of the rules, and compliance.

    It begins with the notice that the result is unofficial, and ends with whether the targets are
    met. The terminal prints the short form of it, `brief`, unless `--full` is specified.

    Args:
        result: The result.
        failures: The first few reasons why samples got no response.
    """
    notices = [disclosure_notice(result.disclosure)]
    if result.simulated:
        notices.insert(0, simulated_notice())

    return Report(
        title=f"MLPerf-style (unofficial) accuracy · {result.benchmark} · round {result.round}",
        generated_by="loadgen mlperf accuracy",
        notices=notices,
        headline=_tier_verdicts(result),
        headline_last=True,
        sections=[
            section("", _run_facts(result), Bullets(failures)),
            section("Means", _means_table(result)),
            _compliance_section(result),
        ],
        brief=_brief_sections(result, failures),
    )


def describe_result(result: AccuracyResult) -> str:
    """Return the result in one sentence."""
    prefix = "SIMULATED: " if result.simulated else ""
    return (
        f"{prefix}MLPerf-style (unofficial) accuracy of {result.benchmark}, round {result.round}, "
        f"by {result.model}: {describe_outcome(result)}."
    )


def describe_outcome(result: AccuracyResult) -> str:
    """Return the outcome of the lower tier, for example "99 % met"."""
    return f"{TIERS[0] * 100:g} % {_describe_tier(result, TIERS[0])}"


def _tier_verdicts(result: AccuracyResult) -> list[Paragraph]:
    """Return a sentence per tier."""
    verdicts = []
    for tier in TIERS:
        text = f"{tier * 100:g} % of the reference: {_describe_tier(result, tier)}"
        verdicts.append(Paragraph(text, _tier_color(result, tier), large=True))
    return verdicts


def _tier_color(result: AccuracyResult, tier: float) -> Kind:
    return "good" if result.meets(tier) else "bad"


def _describe_tier(result: AccuracyResult, tier: float) -> str:
    """Return the outcome of a tier as text, for example "MISSED by ROUGE-1".

    A tier is a required fraction of the reference's accuracy: 0.99 or 0.999. It is met only if
    every sample that the rules require was sent and has a response.
    """
    missed_metrics = [
        METRIC_LABELS[target.metric]
        for target in result.targets
        if target.tier == tier and not target.met
    ]
    if missed_metrics:
        return f"MISSED by {', '.join(missed_metrics)}"
    if result.meets(tier):
        return "met"

    return "the responses meet it, but not every sample that the rules require has one"


def _brief_sections(result: AccuracyResult, failures: Sequence[str]) -> list[Section]:
    """Return the sections of the default output, which is short.

    They say which data set was sent, whether the two required fractions of the reference's accuracy
    are met, and the mean scores. Below are the compliance test TEST06, the number of warnings, and
    one example of why samples got no response.

    Args:
        result: The result.
        failures: Reasons why samples got no response.
    """
    rows = [("TEST06", _brief_test06(result))]
    if failures:
        rows.append(("Failed", failures[0]))

    if result.warnings:
        rows.append(("Warnings", f"{format.counted(len(result.warnings), 'warning')} (--full)"))

    return [
        section("", _run_facts(result)),
        section("", *_tier_verdicts(result)),
        section("", _means_table(result), indented=True),
        section("", Facts(rows), _trial_warning(result)),
    ]


def _run_facts(result: AccuracyResult) -> Facts:
    responses = (
        f"{result.answered:,} of {result.samples:,} samples, greedy sampling, "
        f"by {result.model} at {result.url}"
    )
    return named_facts(Data=result.dataset, Responses=responses)


def _means_table(result: AccuracyResult) -> Table:
    """Return a row per mean with its interval and the bounds of both tiers."""
    head = ("", "mean", "95 % CI", *(f"{tier * 100:g} % target" for tier in TIERS))
    return Table(head, [_mean_row(mean, result.targets) for mean in result.means])


def _mean_row(mean: AccuracyMean, targets: Sequence[AccuracyTarget]) -> list[str]:
    interval = format.NONE
    if mean.low is not None and mean.high is not None:
        interval = f"{mean.low:.4f} to {mean.high:.4f}"
    bounds = [_describe_bounds(mean.metric, targets, tier) for tier in TIERS]
    return [METRIC_LABELS[mean.metric], f"{mean.mean:.4f}", interval, *bounds]


def _describe_bounds(metric: str, targets: Sequence[AccuracyTarget], tier: float) -> str:
    """Return whether a mean meets a tier, and its bounds."""
    target = next(target for target in targets if target.metric == metric and target.tier == tier)
    outcome = "met" if target.met else "MISSED"
    upper = "" if target.most is None else f", at most {target.most:.4f}"
    return f"{outcome}: at least {target.least:.4f}{upper}"


def _compliance_section(result: AccuracyResult) -> Section:
    """Return the section about MLPerf's compliance tests, with the warnings.

    TEST06 checks that the server reports its first tokens and token counts truthfully. It is the
    only compliance test that this program makes. The others that the rules require are named.
    """
    required_tests = ", ".join(result.compliance) or "none"
    return section(
        "Compliance",
        Facts([("TEST06", _describe_test06(result))]),
        f"Compliance tests that the rules require for {result.benchmark}: {required_tests}.",
        Bullets(result.warnings, "warn"),
        _trial_warning(result),
    )


def _trial_warning(result: AccuracyResult) -> Bullets:
    """Return a warning if fewer samples were sent than the rules require."""
    sentences = []
    if result.samples < result.samples_of_rules:
        sentences.append(
            f"{result.samples:,} of the rules' {result.samples_of_rules:,} samples were sent: "
            "use this result as a trial only."
        )
    return Bullets(sentences, "warn")


def _brief_test06(result: AccuracyResult) -> str:
    """Return the outcome of TEST06, MLPerf's compliance test of token counts, or "" without one."""
    test06 = result.test06
    if test06 is None:
        return ""
    if test06.passed:
        return "passed"

    return (
        f"FAILED: {test06.repeated_end_tokens:,} responses end with two end tokens, "
        f"{test06.wrong_lengths:,} are not as long as reported"
    )


def _describe_test06(result: AccuracyResult) -> str:
    """Return the outcome of TEST06 and how it differs from an official one, or "" without one."""
    outcome = _brief_test06(result)
    if not outcome:
        return ""
    return (
        f"{outcome}. Token IDs: {result.token_ids}. The first token is not checked, because "
        "responses are texts. An official test logs 100 samples of a performance run."
    )
