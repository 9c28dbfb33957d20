"""Tests of comparisons: equal, different and incomparable sides, conditions, and formats."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
import repository_paths
import run_fixtures
from command_line import exits
from expected_errors import refused
from golden import check_golden, normalize
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from queueing import fail, rows, send_late

from loadgen.compare import block_errors, comparison, judgement, significance, thresholds
from loadgen.compare import compare_text as compared
from loadgen.compare.difference import Difference
from loadgen.core.analysis import within_run_variance
from loadgen.core.analysis.within_run_variance import ScaledEstimate
from loadgen.core.errors import CombinedError
from loadgen.core.metrics.fluidity import Fluidity
from loadgen.core.metrics.sections import Recovery
from loadgen.core.metrics.summary import load_summary
from loadgen.core.results.manifest import Fingerprints, StagePlan, TargetFacts
from loadgen.core.run_summary import summarize
from loadgen.core.slo import Slo, Term
from loadgen.render import html as as_page
from loadgen.render import junit, table
from loadgen.render import markdown as as_markdown
from loadgen.render import text as as_text
from loadgen.repeated import comparable_metrics
from loadgen.runs.comparison_side import ComparedRun, Side, SideFacts

EXAMPLE = repository_paths.DATA / "summary_example_rag_gpus.json"
INSTANTS = (
    "first_byte_ns",
    "first_event_ns",
    "first_token_ns",
    "first_answer_ns",
    "last_token_ns",
    "end_ns",
    "done_ns",
)


def slower(records: NDArray[np.void], by: float) -> NDArray[np.void]:
    """Every latency times `by`."""
    scaled = records.copy()
    for field in INSTANTS:
        came = records[field] >= 0
        scaled[field][came] = records["due_ns"][came] + (
            (records[field] - records["due_ns"])[came] * by
        ).astype(np.int64)
    return scaled


def run(records: NDArray[np.void], name: str = "r", **changes: object) -> ComparedRun:
    manifest = run_fixtures.manifest(name, len(records), **changes)
    return ComparedRun(
        name=name, summary=summarize(manifest, records), manifest=manifest, rows=records
    )


def side(name: str, *records: NDArray[np.void], **changes: object) -> Side:
    return Side(
        name=name,
        runs=tuple(run(run_records, f"r{i}", **changes) for i, run_records in enumerate(records)),
    )


def compare_sides(*sides: Side, **how: object) -> dict[str, str]:
    result = comparison.compare(sides, **how)  # type: ignore[arg-type]
    return {difference.metric: difference.detailed_outcome for difference in result.differences}


# -- words -----------------------------------------------------------------------------------------


def test_two_equal_runs_show_no_difference() -> None:
    result = comparison.compare([side("a", rows(11, 1000)), side("b", rows(12, 1000))])

    assert result.same_work is True and result.valid
    assert {difference.outcome for difference in result.differences} == {
        "equivalent",
        "inconclusive",
    }
    assert all(
        difference.low is not None and difference.low <= 0 <= (difference.high or 0)
        for difference in result.differences
    )
    assert "--repeat 3" in result.scope


def test_a_large_shift_of_latencies_is_worse() -> None:
    first_side = side("a", *(rows(seed, 1000) for seed in (11, 12, 13)))
    other = side("b", *(slower(rows(seed, 1000), 1.3) for seed in (14, 15, 16)))
    worse, better = compare_sides(first_side, other), compare_sides(other, first_side)
    for metric in ("tpot_ms.p50", "tpot_ms.p99", "e2e_ms.p50"):
        assert (worse[metric], better[metric]) == ("worse", "better")
    assert worse["ok_share"] == "equivalent"


def test_one_run_on_each_side_may_differ_but_is_never_better_or_worse() -> None:
    alone, repeats = (
        side("a", rows(11, 1000)),
        side("c", *(rows(seed, 1000) for seed in (13, 14, 15))),
    )
    far = side("b", slower(rows(12, 1000), 1.3))
    for before_side, other in ((alone, far), (far, alone), (repeats, far), (far, repeats)):
        outcomes_by_metric = compare_sides(before_side, other)
        assert (
            outcomes_by_metric["tpot_ms.p50"]
            == outcomes_by_metric["e2e_ms.p50"]
            == "these two runs differ"
        )
        assert not {"better", "worse"} & set(outcomes_by_metric.values())

    assert "--repeat 3" in comparison.compare([alone, far]).scope


def test_the_headline_groups_metrics_of_single_runs_by_direction() -> None:
    result = comparison.compare([side("a", rows(11, 1000)), side("b", slower(rows(12, 1000), 1.3))])
    sentence = compared.summarize_differences(result, "b")
    _, _, higher = sentence.partition("higher in ")
    assert "TPOT p50" in higher.partition(")")[0]

    result = comparison.compare([side("b", slower(rows(12, 1000), 1.3)), side("a", rows(11, 1000))])
    sentence = compared.summarize_differences(result, "a")
    _, _, lower = sentence.partition("lower in ")
    assert "TPOT p50" in lower.partition(")")[0]


def test_the_headline_names_an_outcome_as_the_table_does() -> None:
    """In the headline and in each row, for example "equivalent"."""
    result = comparison.compare([side("a", rows(11, 1000)), side("b", rows(12, 1000))])
    count = sum(difference.outcome == "equivalent" for difference in result.differences)
    assert count > 0

    printed = as_text.render(compared.build_report(result), full=False)
    assert f"equivalent in {count} metric" in printed
    assert printed.count("equivalent (") == count
    assert "no significant difference" not in printed


def test_the_brief_text_names_in_what_the_sides_differ() -> None:
    names = ("a", "b")
    facts = [
        SideFacts(name=name, workload="qa", load="poisson 20/s", url=f"http://{name}:8000")
        for name in names
    ]
    result = comparison.compare([side("a", rows(11, 300)), side("b", rows(12, 300))])
    result = msgspec.structs.replace(result, facts=tuple(facts))
    printed = " ".join(as_text.render(compared.build_report(result), full=False).split())
    assert "workload and load: qa, poisson 20/s." in printed
    assert "URL: http://a:8000 (a), http://b:8000 (b)." in printed

    facts[1] = msgspec.structs.replace(facts[1], load="poisson 30/s")
    result = msgspec.structs.replace(result, facts=tuple(facts))
    assert "load: poisson 20/s (a), poisson 30/s (b)." in compared.describe_sides(result)

    long_facts = [msgspec.structs.replace(fact, url=fact.url * 20) for fact in facts]
    assert not compared.describe_sides(msgspec.structs.replace(result, facts=tuple(long_facts)))


def test_variation_between_server_starts_is_rarely_taken_for_a_difference() -> None:
    """Repeats whose starts vary by 5 % give at most 7 false differences in 100 pairs."""
    draw = np.random.default_rng(8)
    base = [rows(seed, 700) for seed in range(6)]
    wrong = 0
    for _ in range(16):
        runs_of = [slower(records, float(draw.lognormal(0, 0.05))) for records in base]
        outcomes_by_metric = compare_sides(side("a", *runs_of[:3]), side("b", *runs_of[3:]))
        wrong += bool({"better", "worse"} & set(outcomes_by_metric.values()))
    assert wrong <= 1


def test_a_difference_in_a_tail_from_one_slow_period_per_run_is_undecided() -> None:
    """A difference that comes from three slow periods of 8 s, one in each run, is inconclusive."""
    clean = [rows(seed, 2000, 8.0) for seed in range(1, 7)]
    for records in clean:  # without the noise of the queue
        records["last_token_ns"] = records["first_token_ns"] + (
            2e9 + records["due_ns"] % 1e7
        ).astype(np.int64)
    for records in clean[3:]:
        spell = (records["due_ns"] > 100e9) & (records["due_ns"] < 108e9)
        records["last_token_ns"][spell] += (
            2 * (records["last_token_ns"] - records["first_token_ns"])[spell]
        )
    result = comparison.compare([side("a", *clean[:3]), side("b", *clean[3:])])
    (tpot,) = (
        difference for difference in result.differences if difference.metric == "tpot_ms.p99"
    )

    assert (tpot.change or 0) > 1 and (tpot.low or 0) > 0
    assert tpot.detailed_outcome == "inconclusive" and "a few periods of time" in tpot.reason
    assert significance.fisher_exact(0, 20, 3, 20) == pytest.approx(0.2308, abs=1e-4)
    assert significance.fisher_exact(0, 20, 20, 20) < 1e-10


def test_failure_shares_of_repeats_without_a_failure_are_uncertain() -> None:
    """Runs that do not vary within a side still give an uncertain share of failures."""
    bad = [rows(seed, 700) for seed in (4, 5, 6)]
    for records in bad:
        fail(records[:1], 1.0)
    outcomes_by_metric = compare_sides(
        side("a", *(rows(seed, 700) for seed in (1, 2, 3))), side("b", *bad)
    )
    assert outcomes_by_metric["ok_share"] == "equivalent"


def test_failures_are_compared_as_shares_of_the_requests() -> None:
    bad = rows(12, 1000)
    fail(bad, 0.009)  # under the limit of the verdict
    few_comparison = comparison.compare([side("a", rows(11, 1000)), side("b", bad)])
    share = next(
        difference for difference in few_comparison.differences if difference.metric == "ok_share"
    )

    assert share.is_fraction and share.change == pytest.approx(-0.009, abs=0.006)
    assert share.detectable is not None and 0.005 < share.detectable < 0.05


def test_runs_of_different_work_are_not_judged_unless_requested() -> None:
    other = Fingerprints(recipe="another")
    result = comparison.compare(
        [
            side("a", rows(1, 300)),
            side("b", slower(rows(2, 300), 2), fingerprints=other, workload="rag"),
        ]
    )

    assert result.same_work is False and result.work_differences == ("workload: chat vs. rag",)
    assert {difference.detailed_outcome for difference in result.differences} == {"inconclusive"}
    assert {difference.reason for difference in result.differences} == {comparison.NOT_SAME_WORK}
    assert all(difference.change is not None for difference in result.differences)
    report = compared.build_report(result)
    for rendered_text in (as_text.render(report, full=True), as_markdown.render(report)):
        assert f"not judged ({comparison.NOT_SAME_WORK})" in " ".join(rendered_text.split())

    forced_result = comparison.compare(
        [side("a", rows(1, 300)), side("b", slower(rows(2, 300), 2), fingerprints=other)],
        allow_different_work=True,
    )

    assert "these two runs differ" in {
        difference.detailed_outcome for difference in forced_result.differences
    }


def test_different_work_under_one_name_is_explained_by_its_difference() -> None:
    longer = rows(2, 600)
    longer["input_tokens"] *= 2
    sides = [
        side(
            name,
            records,
            fingerprints=Fingerprints(recipe=name),
            grace_s=grace_s,
            stages=(StagePlan(end_ns=end_ns),),
        )
        for name, records, grace_s, end_ns in (
            ("a", rows(1, 300), None, 30 * 10**9),
            ("b", longer, 2.0, 10**10),
        )
    ]

    assert comparison.compare(sides).work_differences == (
        "duration: 30.0 s vs. 10.0 s",
        "mean prompt length: 150 vs. 300 tokens",
        "grace, s: none vs. 2",
    )


def test_different_work_names_the_keys_and_options_that_differ() -> None:
    text_a = "name: a\nseed: 1\nrequests: {input_tokens: 5, turns: {count: 3}}\n"
    text_b = "name: b\nseed: 2\nrequests: {input_tokens: 5, turns: {count: 4}, prefixes: 2}\n"
    commands = (
        ("loadgen", "run", "w.yaml", "-c", "8", "--set", "turns=all", "--seed", "1", "-o", "a"),
        ("loadgen", "run", "w.yaml", "--concurrency=8", "--seed", "2", "--json", "-o", "b"),
    )
    sides = [
        side(
            name,
            rows(number, 300),
            fingerprints=Fingerprints(recipe=name),
            source_text=source_text,
            command=command,
        )
        for number, name, source_text, command in (
            (1, "a", text_a, commands[0]),
            (2, "b", text_b, commands[1]),
        )
    ]

    assert comparison.compare(sides).work_differences == (
        "requests.turns.count: 3 vs. 4",
        "requests.prefixes: not set vs. 2",
        "--set: turns=all vs. not set",
    )


def test_different_content_of_equal_workload_files_has_an_explanation() -> None:
    sides = [
        side(name, rows(number, 300), fingerprints=Fingerprints(recipe=name), source_text="name: a")
        for number, name in ((1, "hash-a"), (2, "hash-b"))
    ]

    (difference,) = comparison.compare(sides).work_differences
    assert "hash-a vs. hash-b" in difference and "other content" in difference


def test_an_slo_limit_is_not_part_of_the_work() -> None:
    other = Slo(terms=(Term(metric="ttft", limit_ns=10**9),))
    result = comparison.compare(
        [
            side("a", rows(1, 300), fingerprints=Fingerprints(recipe="one", work="same")),
            side(
                "b", rows(2, 300), fingerprints=Fingerprints(recipe="two", work="same"), slo=other
            ),
        ]
    )

    assert result.same_work is True and result.work_differences == ()
    assert any("different SLOs: TTFT p99" in note for note in result.notes)
    assert {
        difference.reason for difference in result.differences if "goodput" in difference.metric
    } == {"the SLOs differ"}


def with_deadlines(name: str, seed: int, per_token_ms: float) -> Side:
    """Return a side with a fluidity index for these token deadlines, and an SLO with them."""
    limit = Term(metric="tpot", limit_ns=int(per_token_ms * 1e6))
    compared_side = side(name, rows(seed, 300), slo=Slo(terms=(limit,)))
    fluidity = Fluidity(first_token_ms=100.0, per_token_ms=per_token_ms, index=0.9)
    summary = msgspec.structs.replace(compared_side.runs[0].summary, fluidity=fluidity)
    compared_run = msgspec.structs.replace(compared_side.runs[0], summary=summary)
    return msgspec.structs.replace(compared_side, runs=(compared_run,))


@pytest.mark.parametrize(("per_token_ms", "is_noted"), [(20.0, False), (30.0, True)])
def test_metrics_of_different_slos_are_named_as_not_compared(
    per_token_ms: float, is_noted: bool
) -> None:
    result = comparison.compare(
        [with_deadlines("a", 1, 20.0), with_deadlines("b", 2, per_token_ms)]
    )
    reasons = {difference.metric: difference.reason for difference in result.differences}
    assert (reasons["fluidity.index"] == comparison.DEADLINES_DIFFER) is is_noted
    assert (reasons["goodput.share"] == comparison.SLOS_DIFFER) is is_noted

    notes = [note for note in result.notes if note.startswith("different")]
    assert len(notes) == (2 if is_noted else 0)
    brief = as_text.render(compared.build_report(result), full=False)
    assert (comparison.DEADLINES_DIFFER in brief) is is_noted
    assert (comparison.SLOS_DIFFER in brief) is is_noted


def test_truncated_responses_are_different_work() -> None:
    clamped = rows(2, 300)
    clamped["asked_output"] = 3 * clamped["output_tokens"]
    result = comparison.compare([side("a", rows(1, 300)), side("b", clamped)])
    (work_difference,) = result.work_differences
    assert "100.0 % vs. 33.3 %" in work_difference
    assert comparison.compare([side("a", clamped), side("b", clamped)]).same_work


def test_an_invalid_run_is_not_judged() -> None:
    bad = rows(2, 300)
    send_late(bad)
    result = comparison.compare([side("a", rows(1, 300)), side("b", bad)])
    assert not result.valid and {difference.reason for difference in result.differences} == {
        "b is INVALID"
    }


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_result_compared_with_itself_or_a_copy_is_not_judged(repeats: int) -> None:
    """A build that names one folder twice would pass as equivalent."""
    runs_of_it = [rows(number, 500) for number in range(repeats)]
    other_runs = [rows(20 + number, 500) for number in range(repeats - 1)]
    result = comparison.compare([side("a", *runs_of_it), side("b", *other_runs, runs_of_it[-1])])

    assert {
        (difference.detailed_outcome, difference.reason) for difference in result.differences
    } == {("inconclusive", comparison.SAME_RUN)}

    conditions = thresholds.parse_thresholds(["ttft_ms.p99 > +5%", "ttft_ms.p99 > 900s"])
    changed_threshold_outcome, value = thresholds.check_thresholds(
        conditions, result, beyond_noise=False
    )
    assert (
        changed_threshold_outcome.failed is None
        and comparison.SAME_RUN in changed_threshold_outcome.text
        and value.failed is False
    )


def test_a_comparison_of_too_few_samples_is_inconclusive() -> None:
    differences_by_name = {
        difference.metric: difference
        for difference in comparison.compare(
            [side("a", rows(1, 300)), side("b", rows(2, 300))]
        ).differences
    }

    assert differences_by_name["ttft_ms.p99"].reason == "300 samples, p99 needs 662"
    assert differences_by_name["ttft_ms.p50"].detailed_outcome == "inconclusive"
    assert differences_by_name["ttft_ms.p50"].needed_load_factor is not None


def test_repeats_are_compared_by_the_variation_between_runs() -> None:
    """The runs of a side have different offsets, so blocks within a run are not enough."""
    shifts = (0.8, 1.0, 1.25)
    first_side = side("a", *(slower(rows(i, 700), by) for i, by in enumerate(shifts)))
    other = side("b", *(slower(rows(i + 5, 700), by) for i, by in enumerate(reversed(shifts))))
    result = comparison.compare([first_side, other])

    assert "repeated runs" in result.scope
    assert (
        "worse" not in compare_sides(first_side, other).values()
        and "better" not in compare_sides(first_side, other).values()
    )
    far = side("c", *(slower(rows(i + 5, 700), by * 3) for i, by in enumerate(shifts)))
    assert compare_sides(first_side, far)["tpot_ms.p50"] == "worse"

    alone = compare_sides(
        side("a", slower(rows(0, 700), 0.8)), side("b", slower(rows(5, 700), 1.25))
    )

    assert alone["tpot_ms.p50"] == "these two runs differ"


def test_a_comparison_with_a_summary_without_records_has_no_interval() -> None:
    summary = load_summary(EXAMPLE.read_bytes())
    stored_side = Side(name="kept", runs=(ComparedRun(name="kept", summary=summary),))
    result = comparison.compare([stored_side, stored_side])
    assert {difference.detailed_outcome for difference in result.differences} == {"inconclusive"}
    assert any("no records" in note for note in result.notes)


def test_metrics_of_another_tool_are_reported_and_not_judged() -> None:
    other_tool_side = Side(
        name="other",
        reported_metrics={"ttft_ms.p50": 500.0, "tokens.output_per_s": 900.0},
        notes=("figures of other",),
    )
    result = comparison.compare([side("a", rows(1, 300)), other_tool_side])

    assert {difference.metric for difference in result.differences} == {
        "ttft_ms.p50",
        "tokens.output_per_s",
    }
    assert {difference.detailed_outcome for difference in result.differences} == {
        "inconclusive"
    } and result.same_work is None


# -- statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chances", "levels"),
    [
        (
            [0.001, 0.04, 0.03],
            [0.05 / 3, 0.05 / 2, 0.05 / 2],
        ),  # 0.03 > 0.05 / 2 stops; 0.04 shares its level
        ([0.001, 0.02, 0.03], [0.05 / 3, 0.05 / 2, 0.05]),
        ([0.5, None, 0.4], [0.05 / 2, 0.05, 0.05 / 2]),
        ([], []),
    ],
)
def test_holm_correction_equals_a_worked_example(
    chances: list[float | None], levels: list[float]
) -> None:
    assert significance.holm_levels(chances, 0.05) == pytest.approx(levels)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_holm_levels_reject_the_same_differences_as_the_step_down_procedure(
    chances: list[float],
) -> None:
    levels = significance.holm_levels(chances, 0.05)
    expected = set()
    for place, i in enumerate(sorted(range(len(chances)), key=lambda i: (chances[i], i))):
        if chances[i] > 0.05 / (len(chances) - place):
            break
        expected.add(i)
    assert {i for i, chance in enumerate(chances) if chance <= levels[i]} == expected


def test_subtracting_estimates_combines_their_errors_and_degrees_of_freedom() -> None:
    gap = significance.subtract(ScaledEstimate(1.0, 0.3, 19), ScaledEstimate(2.0, 0.4, 9))
    assert (gap.value, gap.error) == pytest.approx((1.0, 0.5))
    assert gap.degrees_of_freedom == pytest.approx(0.5**4 / (0.3**4 / 19 + 0.4**4 / 9))
    assert (
        significance.p_value(ScaledEstimate(0.0, 0.0, 9)) == 1.0
        and significance.p_value(ScaledEstimate(1.0, 0.0, 9)) == 0.0
    )


def test_the_error_of_a_quantile_equals_its_sampling_error() -> None:
    """The standard error of the log of a median of n independent draws has a known value."""
    draw = np.random.default_rng(3)
    n, sigma = 4000, 0.3
    truth = math.sqrt(math.pi / 2) * sigma / math.sqrt(n)
    values = draw.lognormal(15, sigma, n)

    assert block_errors.estimate_percentile_error(values, 0.5)[0] == pytest.approx(truth, rel=0.7)

    samples = [draw.lognormal(15, sigma, n) for _ in range(20)]
    ranks = [
        within_run_variance.estimate_log_percentile_error(values, np.sort(values), 0.5, 20)
        for values in samples
    ]

    assert np.mean(ranks) == pytest.approx(truth, rel=0.2)


def test_percentiles_of_correlated_values_have_a_larger_error() -> None:
    draw = np.random.default_rng(4)
    steps = np.repeat(draw.normal(0, 0.3, 40), 50)
    tied = np.exp(15 + steps + draw.normal(0, 0.05, 2000))
    free = draw.permutation(tied)
    assert (
        block_errors.estimate_percentile_error(tied, 0.5)[0]
        > 2.5 * block_errors.estimate_percentile_error(free, 0.5)[0]
    )


# -- paths and conditions --------------------------------------------------------------------------


def test_every_metric_path_selects_a_number_of_the_summary() -> None:
    summary = load_summary(EXAMPLE.read_bytes())
    for path in comparable_metrics.metric_paths():
        assert comparable_metrics.find_metric(path) is not None
        value = comparable_metrics.metric_value(summary, path)
        assert value is None or math.isfinite(value), path

    assert comparable_metrics.metric_value(summary, "ttft_ms.p99") == summary.ttft_ms.p99
    assert (
        comparable_metrics.find_metric("ttft_ms.p98") is None
        and comparable_metrics.find_metric("run.id") is None
    )


def make_difference(**field_values: object) -> Difference:
    fields = {
        "metric": "ttft_ms.p99",
        "name": "TTFT p99",
        "unit": "ms",
        "side": "b",
        "is_repeated": True,
        **field_values,
    }
    return Difference(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "before", "after", "failed"),
    [
        ("ttft_ms.p99 > +5%", 100.0, 106.0, True),
        ("ttft_ms.p99 > +5%", 100.0, 105.0, False),
        ("ttft_ms.p99 >= +5%", 100.0, 105.0, True),
        ("ttft.p99>+5%", 100.0, 106.0, True),
        ("ttft_p99 > +5%", 100.0, 106.0, True),
        ("ttft_ms.p99 < -5%", 100.0, 94.0, True),
        ("ttft_ms.p99 > +20ms", 100.0, 121.0, True),
        ("ttft_ms.p99 > +0.02s", 100.0, 119.0, False),
        ("ttft_ms.p99 > 500", 100.0, 501.0, True),
        ("ttft_ms.p99 > 0.5s", 100.0, 499.0, False),
        ("ttft_ms.p99 > +5%", None, 106.0, None),
        ("ttft_ms.p99 > +5%", 0.0, 106.0, None),
    ],
)
def test_a_condition_fails_only_beyond_its_limit(
    text: str, before: float | None, after: float, failed: bool | None
) -> None:
    (condition,) = thresholds.parse_thresholds([text])
    change = after / before - 1 if before else None
    result = comparison.compare([side("a", rows(1, 20)), side("b", rows(2, 20))])
    difference = make_difference(before=before, after=after, change=change)
    (outcome,) = thresholds.check_thresholds(
        [condition], msgspec.structs.replace(result, differences=(difference,))
    )
    assert outcome.failed is failed


def test_conditions_on_shares_are_in_percentage_points() -> None:
    (below, loss) = thresholds.parse_thresholds(["goodput.share < 99%", "ok_share < -0.5%"])
    assert (below.kind, below.limit) == ("value", 0.99)
    assert (loss.kind, loss.limit) == ("difference", -0.005)


@pytest.mark.parametrize(
    ("text", "failed"),
    [("ttft_ms.p99 > +5%", None), ("ttft_ms.p99 > +5ms", None), ("ttft_ms.p99 > 100ms", True)],
)
def test_a_condition_on_a_change_is_undecided_with_one_run_on_each_side(
    text: str, failed: bool | None
) -> None:
    (condition,) = thresholds.parse_thresholds([text])
    difference = make_difference(
        before=100.0, after=150.0, change=0.5, low=0.4, high=0.6, is_repeated=False
    )
    for beyond_noise in (False, True):
        outcome = thresholds.check_threshold(
            condition, difference, beyond_noise=beyond_noise, run_count=3
        )
        assert outcome.failed is failed
        assert (failed is not None) or "--repeat" in outcome.text


@pytest.mark.parametrize(
    ("text", "failed"),
    [("ttft_ms.p99 > +500%", None), ("ttft_ms.p99 > +5s", None), ("ttft_ms.p99 > 1ms", True)],
)
def test_a_condition_on_a_change_of_different_work_is_undecided_unless_allowed(
    text: str, failed: bool | None
) -> None:
    conditions = thresholds.parse_thresholds([text])
    other = msgspec.structs.replace(run(rows(1, 60)).summary.fingerprints, recipe="another")
    sides = [
        side("a", rows(1, 60), rows(3, 60)),
        side("b", rows(2, 60), rows(4, 60), fingerprints=other),
    ]
    (threshold_outcome,) = thresholds.check_thresholds(conditions, comparison.compare(sides))

    assert threshold_outcome.failed is failed

    (threshold_outcome,) = thresholds.check_thresholds(
        conditions, comparison.compare(sides, allow_different_work=True)
    )

    assert threshold_outcome.failed is not None


@pytest.mark.parametrize(
    ("change", "low", "high", "expected_text"),
    [
        (0.1, 0.05, 0.2, "+5.0 to +20.0 %"),
        (256.0, 73.9, 1e6, ">= 74.9x"),
        (1.5, -0.2, 4.0, "0.800x to 5.00x"),
    ],
)
def test_an_interval_is_printed_in_the_unit_of_its_change(
    change: float, low: float, high: float, expected_text: str
) -> None:
    assert (
        thresholds.format_interval(
            make_difference(before=1.0, after=1 + change, change=change, low=low, high=high)
        )
        == expected_text
    )


def test_the_interval_of_a_relative_condition_is_in_percent() -> None:
    """A change and its interval are never "(+105.8 %), CI 1.93x to 2.19x"."""
    (condition,) = thresholds.parse_thresholds(["ttft_ms.p99 > +5%"])
    difference = make_difference(before=100.0, after=210.0, change=1.1, low=0.9, high=1.2)
    text = thresholds.check_threshold(condition, difference, beyond_noise=True, run_count=3).text
    assert text.endswith("(+110.0 %), CI +90.0 to +120.0 %")


def test_the_interval_of_a_changed_share_stays_between_0_and_1() -> None:
    known_scaled_estimate = ScaledEstimate(value=-0.1, error=2.0, degrees_of_freedom=3)
    share = make_difference(metric="goodput.share", before=0.5, after=0.4, change=-0.1)
    judged_difference = judgement.judge(share, known_scaled_estimate, 1, 0.05, 0.05)
    assert (judged_difference.low, judged_difference.high, judged_difference.detectable) == (
        -0.5,
        0.5,
        None,
    )


@pytest.mark.parametrize("text", ["ttft_ms.p99 > +5%", "ttft_ms.p99 > +10ms"])
@pytest.mark.parametrize(
    ("low", "high", "failed"),
    [
        (0.06, 0.2, True),
        (0.04, 0.2, None),
        (-0.295, 2.906, None),
        (-0.02, 0.03, False),
        (None, None, None),
    ],
)
def test_beyond_noise_decides_a_condition_if_its_limit_is_outside_the_interval(
    text: str, low: float | None, high: float | None, failed: bool | None
) -> None:
    (condition,) = thresholds.parse_thresholds([text])
    difference = make_difference(before=200.0, after=220.0, change=0.1, low=low, high=high)
    assert (
        thresholds.check_threshold(condition, difference, beyond_noise=True, run_count=3).failed
        is failed
    )


def test_an_undecided_condition_states_how_many_runs_would_decide_it() -> None:
    """The limit is half a half width from the middle, so four times as many runs are needed."""
    (condition,) = thresholds.parse_thresholds(["ok_share < -0.5%"])
    difference = make_difference(
        metric="ok_share", before=0.9, after=0.91, change=0.01, low=-0.02, high=0.04
    )
    outcome = thresholds.check_threshold(condition, difference, beyond_noise=True, run_count=3)

    assert outcome.failed is None
    assert "about 12 runs per side" in outcome.text


@pytest.mark.parametrize(
    ("value", "error", "word"),
    [
        (0.3, 0.01, "worse"),
        (-0.3, 0.01, "better"),
        (0.01, 0.01, "equivalent"),
        (0.01, 0.2, "inconclusive"),
        (0.3, 0.3, "inconclusive"),
    ],
)
def test_a_difference_is_different_equivalent_or_inconclusive(
    value: float, error: float, word: str
) -> None:
    known_scaled_estimate = ScaledEstimate(value=value, error=error, degrees_of_freedom=1000)
    difference = judgement.judge(
        make_difference(before=1.0, after=1.0, change=0.0), known_scaled_estimate, -1, 0.05, 0.05
    )

    assert difference.detailed_outcome == word
    assert difference.outcome == {"worse": "different", "better": "different"}.get(word, word)
    assert (difference.equivalent_within is not None) is (word == "equivalent")
    assert (
        difference.equivalent_within is None
        or difference.equivalent_within <= judgement.EQUIVALENT_CHANGE
    )
    assert (difference.needed_load_factor is not None) is (word == "inconclusive")


def test_the_needed_load_of_an_inconclusive_difference_decides_it() -> None:
    known_scaled_estimate = ScaledEstimate(value=0.02, error=0.1, degrees_of_freedom=1000)
    base = make_difference(before=1.0, after=1.0, change=0.0)
    difference = judgement.judge(base, known_scaled_estimate, -1, 0.05, 0.05)

    assert difference.outcome == "inconclusive" and difference.needed_load_factor is not None

    narrower = ScaledEstimate(
        value=0.02,
        error=0.1 / math.sqrt(difference.needed_load_factor * 1.01),
        degrees_of_freedom=1000,
    )

    assert judgement.judge(base, narrower, -1, 0.05, 0.05).outcome == "equivalent"


def test_repeats_with_too_few_requests_for_a_percentile_are_inconclusive_in_it() -> None:
    """Three runs of 96 requests have 288 of the 662 that a p99 needs."""
    result = comparison.compare(
        [
            side("a", *(rows(seed, 96) for seed in (1, 2, 3))),
            side("b", *(rows(seed, 96) for seed in (4, 5, 6))),
        ]
    )
    ttft = {difference.metric: difference for difference in result.differences}["ttft_ms.p99"]

    assert (ttft.outcome, ttft.low) == ("inconclusive", None)
    assert "288 samples" in ttft.reason

    (condition,) = thresholds.parse_thresholds(["ttft_ms.p99 > +5%"])
    (outcome,) = thresholds.check_thresholds([condition], result, beyond_noise=True)
    assert outcome.failed is None


def test_a_comparison_states_workload_target_server_and_date_of_both_sides() -> None:
    facts = TargetFacts(url="http://a:8000", server="vllm", version="0.32.0", model="m")
    a = side(
        "a", rows(1, 200), targets=(facts,), workload="qa", started="2026-11-01T10:00:00+00:00"
    )
    foreign = Side(
        name="b",
        reported_metrics={"ttft_ms.p50": 5.0},
        reported_facts=SideFacts(tool="GuideLLM", model="m2", url="http://b", load="4 in flight"),
    )
    result = comparison.compare([a, foreign])
    first_side_facts, other = result.facts

    assert (first_side_facts.workload, first_side_facts.model, first_side_facts.url) == (
        "qa",
        "m",
        "http://a:8000",
    )
    assert (first_side_facts.server, first_side_facts.started[:10]) == ("vllm 0.32.0", "2026-11-01")
    assert first_side_facts.slo and first_side_facts.load
    assert (other.tool, other.model, other.load) == ("GuideLLM", "m2", "4 in flight")

    report = compared.build_report(result)
    pages = (as_text.render(report, full=True), as_markdown.render(report), as_page.render(report))
    for page in pages:
        for text in ("qa", "http://a:8000", "vllm 0.32.0", "2026-11-01", "GuideLLM", "http://b"):
            assert text in page


@pytest.mark.parametrize(("high", "failed"), [(-0.006, True), (0.001, None)])
def test_beyond_noise_of_a_share_uses_percentage_points(high: float, failed: bool) -> None:
    (condition,) = thresholds.parse_thresholds(["ok_share < -0.5%"])
    difference = make_difference(
        metric="ok_share", before=0.9, after=0.85, change=-0.05, low=-0.1, high=high
    )

    assert (
        thresholds.check_threshold(condition, difference, beyond_noise=True, run_count=3).failed
        is failed
    )


@pytest.mark.parametrize(
    ("word", "noise"), [("inconclusive", True), ("equivalent", True), ("worse", False)]
)
def test_a_failed_condition_within_the_noise_is_marked(word: str, noise: bool) -> None:
    (condition,) = thresholds.parse_thresholds(["ttft_ms.p99 > +5%"])
    difference = make_difference(
        before=100.0, after=110.0, change=0.1, low=-0.2, high=0.4, detailed_outcome=word
    )
    outcome = thresholds.check_threshold(condition, difference, beyond_noise=False, run_count=3)

    assert outcome.failed is True
    assert outcome.text.endswith("noise: CI -20.0 to +40.0 %") is noise


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("ttft_ms.p99 >> 5", "invalid_value"),
        ("tfft_ms.p99 > +5%", "unknown_name"),
        ("requests.ok > 5ms", "invalid_value"),
        ("ttft_ms.p99 > 5%", "invalid_value"),
    ],
)
def test_invalid_conditions_are_refused(text: str, code: str) -> None:
    with refused(CombinedError, code) as faults:
        thresholds.parse_thresholds([text, "nonsense"])
    assert "nonsense" in str(faults.value)


# -- formats ---------------------------------------------------------------------------------------


def test_text_markdown_and_junit_of_a_comparison_agree() -> None:
    several = [rows(seed, 1000) for seed in (11, 12, 13, 14, 15, 16)]
    result = comparison.compare(
        [side("a", *several[:3]), side("b", *(slower(records, 1.3) for records in several[3:]))],
        extra_metrics=["load.achieved_rps"],
    )
    outcomes = list(
        thresholds.check_thresholds(
            thresholds.parse_thresholds(
                ["tpot_ms.p50 > +5%", "e2e_ms.p50 > 1h".replace("1h", "9999s")]
            ),
            result,
        )
    )
    report = compared.build_report(result, outcomes)
    plain, pasted = as_text.render(report, full=True), as_markdown.render(report)
    check_golden("compare", as_text.render(report))
    check_golden("compare_full", normalize(plain))
    for difference in result.differences:
        below = plain.splitlines()[plain.splitlines().index("b vs. a") :]
        index = next(i for i, line in enumerate(below) if line.startswith(difference.name))
        assert difference.detailed_outcome in " ".join(below[index : index + 2])
        assert any(row.startswith(f"| {difference.name}") for row in pasted.splitlines())

    assert "FAILED  tpot_ms.p50 > +5%" in plain and "passed  e2e_ms.p50 > 9999s" in plain
    assert "\x1b[31mworse" in as_text.render(report, full=True, color=True)
    assert "\x1b" not in plain

    tree = ElementTree.fromstring(
        junit.render("loadgen compare", list(compared.list_junit_cases(result, outcomes)))
    )

    assert tree.attrib["failures"] == "1" and len(tree.findall(".//testcase")) == 2


def test_recovery_times_of_both_sides_are_in_one_table() -> None:
    """The nth event of a kind beside the nth; of repeats each run; a side without one has none."""

    def of(name: str, *backs: float | None) -> Side:
        compared_run = run(rows(1, 60))
        ways = [
            Recovery(
                event="loss",
                load_before="4 replicas",
                load_after="3 replicas",
                at_s=20,
                observed_s=13,
                resolution_s=1.5,
                slo_missed=True,
                recovered_after_s=back_s,
            )
            for back_s in backs
        ]
        ended_recovery = Recovery(
            load_before="poisson 160/s",
            load_after="poisson 20/s",
            at_s=80,
            slo_missed=True,
            recovered_after_s=15.4,
        )
        recoveries = (*ways[:1], ended_recovery, *ways[1:])
        return Side(
            name=name,
            runs=(
                ComparedRun(
                    name="r",
                    summary=msgspec.structs.replace(compared_run.summary, recovery=recoveries),
                ),
            ),
        )

    a, b = of("a", 41.6, 3.0), of("b", None)
    result = comparison.compare([Side(name="a", runs=(*a.runs, *of("a", 44.0).runs)), b])
    plain = as_text.render(compared.build_report(result), full=True, width=160)
    first, spike, second = (
        line
        for line in plain[plain.index("Recovery to the SLO") :].splitlines()
        if line.startswith(("lost server ", "spike "))
    )
    assert (
        "after 41.6 s; met again after 44.0 s" in first and "NOT MET AGAIN within 13.0 s" in first
    )
    assert second.startswith("lost server ") and re.search(
        r"met again after 3\.0 s +- +1\.5 s$", second
    )
    assert spike.count("met again after 15.4 s") == 2
    without_events = comparison.compare([side("a", rows(1, 60))] * 2)
    assert "Recovery" not in as_text.render(compared.build_report(without_events), full=True)
    recovery_times = [
        (row["side"], row["number"], row["found"]["back_s"])
        for row in msgspec.to_builtins(result.recovery)
    ]
    assert [row for row in recovery_times if row[2] != 15.4] == [
        ("a", 1, 41.6),
        ("a", 2, 3.0),
        ("a", 1, 44.0),
        ("b", 1, None),
    ]


@given(
    st.lists(
        st.tuples(st.text(), st.sampled_from(["passed", "failed", "error", "skipped"]), st.text()),
        max_size=4,
    )
)
def test_junit_is_valid_xml_for_any_text(outcomes: list[tuple[str, str, str]]) -> None:
    cases = [
        junit.JUnitCase(name=name, group=name, outcome=outcome, text=text)  # type: ignore[arg-type]
        for name, outcome, text in outcomes
    ]
    tree = ElementTree.fromstring(junit.render("x", cases))
    assert len(tree.findall(".//testcase")) == len(outcomes)


def test_markdown_cells_cannot_break_the_table() -> None:
    assert table.format_markdown(("a", "b"), [("x|y\nz", "1")]).splitlines()[2] == "| x\\|y z | 1 |"


# -- the command -----------------------------------------------------------------------------------


def test_the_compare_command_prints_the_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = str(run_fixtures.write(tmp_path / "a", rows(1, 300)))
    b = str(run_fixtures.write(tmp_path / "b", slower(rows(2, 300), 1.5)))

    assert exits("compare", a, b) == 0
    assert "runs differ" in capsys.readouterr().out
    assert exits("compare", a, b, "--fail-on", "tpot_ms.p50 > +5%") == 4, (
        "one run a side decides nothing"
    )
    assert "inconclusive" in capsys.readouterr().out
    assert exits("compare", a, b, "--fail-on", "tpot_ms.p50 > 1ms") == 1, (
        "a value is that of the run"
    )

    capsys.readouterr()
    for name, by in (("a", 1.0), ("b", 1.5)):
        for seed in (3, 4, 5):
            run_fixtures.write(
                tmp_path / f"{name}s" / f"r{seed}", slower(rows(seed + len(name), 300), by)
            )
    a, b = str(tmp_path / "as"), str(tmp_path / "bs")
    xml = tmp_path / "out.xml"

    assert (
        exits("compare", a, b, "--fail-on", "tpot_ms.p50 > +5%", "--junit", str(xml), "--json") == 1
    )
    document = json.loads(capsys.readouterr().out)
    assert document["conditions"][0]["failed"] is True and document["comparison"]["sides"] == [
        "as",
        "bs",
    ]
    assert ElementTree.parse(xml).getroot().attrib["failures"] == "1"
    assert exits("compare", b, a, "--fail-on", "tpot_ms.p50 > +5%", "--markdown") == 0
    assert "| TPOT p50, ms |" in capsys.readouterr().out


def test_the_compare_command_refuses_results_that_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = str(run_fixtures.write(tmp_path / "a", rows(1, 60)))

    assert exits("compare", a) == 2
    assert exits("compare", a, str(tmp_path / "none")) == 2
    assert "no such file" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert exits("compare", a, str(tmp_path / "empty")) == 2
    assert "run.json" in capsys.readouterr().err

    for i in (1, 2):
        run_fixtures.write(
            tmp_path / "mixed" / f"c{i}",
            rows(i, 60),
            fingerprints=Fingerprints(recipe=f"recipe {i}"),
        )

    assert exits("compare", a, str(tmp_path / "mixed")) == 2
    assert "c1, c2 have different config fingerprints" in capsys.readouterr().err
    assert exits("compare", a, a, "--confidence", "wrong") == 2

    bad = rows(1, 60)
    send_late(bad)
    assert exits("compare", a, str(run_fixtures.write(tmp_path / "bad", bad))) == 3


def test_the_compare_command_accepts_folders_of_repeats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seeds in (("a", (1, 2)), ("b", (3, 4))):
        for seed in seeds:
            run_fixtures.write(tmp_path / name / f"r{seed}", rows(seed, 60))
    assert exits("compare", str(tmp_path / "a"), str(tmp_path / "b")) == 0
    assert "run-to-run variation" not in capsys.readouterr().out


FEWER_THAN_A_RUN_NEEDS = 5  # requests: a run of them is INVALID


def test_an_invalid_repeat_is_excluded_and_its_side_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One INVALID repeat of three made every line "inconclusive", at 5.4 times the latency."""
    for seed in (1, 2, 3):
        run_fixtures.write(tmp_path / "a" / f"r{seed}", rows(seed, 700))
        run_fixtures.write(tmp_path / "b" / f"r{seed}", slower(rows(seed + 5, 700), 5.4))
    run_fixtures.write(tmp_path / "b" / "r4", rows(9, FEWER_THAN_A_RUN_NEEDS))

    assert exits("compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json") == 0
    document = json.loads(capsys.readouterr().out)["comparison"]
    assert document["valid"] and document["runs"] == [3, 3]

    tpot = next(
        difference
        for difference in document["differences"]
        if difference["metric"] == "tpot_ms.p50"
    )

    assert tpot["low"] > 0 and tpot["why"] == ""
    assert any("left out: r4" in note for note in document["notes"])


def test_a_side_of_which_every_repeat_is_invalid_is_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        run_fixtures.write(tmp_path / "a" / f"r{seed}", rows(seed, 300))
        run_fixtures.write(tmp_path / "b" / f"r{seed}", rows(seed + 5, FEWER_THAN_A_RUN_NEEDS))
    assert exits("compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json") == 3
    document = json.loads(capsys.readouterr().out)["comparison"]
    assert not document["valid"] and document["runs"] == [2, 2]


def test_a_comparison_of_simulated_runs_begins_with_simulated() -> None:
    a, b = side("a", rows(1, 200), targets=(TargetFacts(simulated=True),)), side("b", rows(2, 200))
    result = comparison.compare([a, b])
    assert result.simulated == ("a",)
    report = compared.build_report(result)
    assert as_text.render(report).startswith("SIMULATED: ")
    assert as_markdown.render(report).startswith("**SIMULATED**: ")
    assert any("SIMULATED" in case.name for case in compared.list_junit_cases(result, ()))
