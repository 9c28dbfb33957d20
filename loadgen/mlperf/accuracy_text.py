"""What a result of accuracy mode says: what was asked, each mean beside the rules' bounds, TEST06. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.core import format
from loadgen.mlperf.accuracy import TIERS, AccuracyMean, AccuracyResult, AccuracyTarget
from loadgen.render.section import (
    Bullets,
    Notice,
    Paragraph,
    Report,
    Table,
    named_facts,
    section,
    simulated_notice,
)

NAMES = {
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "tokens_per_sample": "tokens/sample",
}


def report(result: AccuracyResult, reasons: Sequence[str] = ()) -> Report:
    """The whole answer. reasons: why samples had no answer, the first few."""
    head = (
        "",
        "mean of the answers",
        "95 % interval",
        *(f"{tier * 100:g} % target" for tier in TIERS),
    )
    missing = result.samples_of_rules - result.samples
    trial = f"{result.samples:,} of the rules' {result.samples_of_rules:,} samples: a trial, for nothing else"
    answered = f"{result.answered:,} of {result.samples:,} samples, greedy, by {result.model} at {result.url}"
    word, _, meaning = result.disclosure.partition(": ")
    return Report(
        title=f"MLPerf-style (unofficial) accuracy · {result.benchmark} · round {result.round}",
        generated_by="loadgen mlperf accuracy",
        notices=[*([simulated_notice()] if result.simulated else []), Notice(word, meaning)],
        headline=[
            Paragraph(f"{tier * 100:g} % of the reference: {_verdict(result, tier)}", large=True)
            for tier in TIERS
        ],
        headline_last=True,
        sections=[
            section("", named_facts(Data=result.dataset, Answers=answered), Bullets(reasons)),
            section("Means", Table(head, [_row(mean, result.targets) for mean in result.means])),
            section(
                "Compliance",
                named_facts(TEST06=_test06(result)),
                f"Compliance tests that the rules ask for with {result.benchmark}: "
                f"{', '.join(result.compliance) or 'none'}",
                Bullets([*result.warnings, *([trial] if missing else [])], "warn"),
            ),
        ],
    )


def _test06(result: AccuracyResult) -> str:
    found = result.test06
    if found is None:
        return ""
    return (
        f"{'passed' if found.passed else 'FAILED'}: {found.end_tokens:,} answers with two end tokens, "
        f"{found.length:,} are not as long as reported; token ids by {result.token_ids}; the first token is not "
        "reported apart in an answer of text. An official one logs 100 samples of a performance run"
    )


def headline(result: AccuracyResult) -> str:
    """What came out, in one sentence."""
    mark = "SIMULATED: " if result.simulated else ""
    what = f"MLPerf-style (unofficial) accuracy of {result.benchmark}, round {result.round}, by {result.model}"
    return f"{mark}{what}: {word(result)}."


def word(result: AccuracyResult) -> str:
    """The outcome of the highest tier in a few words."""
    return f"{TIERS[0] * 100:g} % {_verdict(result, TIERS[0])}"


def _row(mean: AccuracyMean, targets: Sequence[AccuracyTarget]) -> list[str]:
    interval = (
        format.NONE
        if mean.low is None or mean.high is None
        else f"{mean.low:.4f} to {mean.high:.4f}"
    )
    return [
        NAMES[mean.metric],
        f"{mean.mean:.4f}",
        interval,
        *(_bound(mean.metric, targets, tier) for tier in TIERS),
    ]


def _bound(metric: str, targets: Sequence[AccuracyTarget], tier: float) -> str:
    target = next(one for one in targets if (one.metric, one.tier) == (metric, tier))
    most = "" if target.most is None else f", at most {target.most:.4f}"
    return f"{'met' if target.met else 'MISSED'}: at least {target.least:.4f}{most}"


def _verdict(result: AccuracyResult, tier: float) -> str:
    missed = [
        NAMES[target.metric] for target in result.targets if target.tier == tier and not target.met
    ]
    if missed:
        return f"MISSED by {', '.join(missed)}"
    if result.meets(tier):
        return "met"
    return "met by what was answered; not all samples of the rules were"
