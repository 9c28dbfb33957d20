"""Checks the rules of MLPerf Endpoints on a rehearsed curve, each with its section. Pure.

Sections are those of `endpoints_rules.md` in mlcommons/endpoints_policies, v1.0, and "SR" those of
`endpoints_submission_rules.md`. Section 9.1 lists the automated checks of the organizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from loadgen.core import format
from loadgen.mlperf.endpoints import accuracy_runs, rules
from loadgen.mlperf.endpoints.curve_result import CurveResult, PointResult
from loadgen.mlperf.endpoints.points import required_points

Outcome = Literal["met", "missed", "flagged", "rehearsal", "not checkable"]
"""What a check found.

- "met" and "missed": the rule holds, or a submission would be rejected.
- "flagged": section 9.1 flags the point for the reviewers, or its result is only that of the
  complete run.
- "rehearsal": every rehearsal misses the rule.
- "not checkable": the files do not show it.
"""


class RuleCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The check of one rule.

    Attributes:
        section: The section of the rules.
        rule: What the rule requires, in a few words.
        outcome: What was found.
        value: The value that was found, or why nothing can be found.
    """

    section: str
    rule: str
    outcome: Outcome
    value: str


class CurveCheck(msgspec.Struct, frozen=True, kw_only=True):
    """All checks of a curve, in the order of the sections."""

    benchmark: str
    target: str
    is_simulated: bool
    checks: tuple[RuleCheck, ...]
    disclosure: str = rules.DISCLOSURE

    def count(self, outcome: Outcome) -> int:
        """Return the number of checks with an outcome."""
        return sum(1 for check in self.checks if check.outcome == outcome)


UNCHECKED_RULES = (
    ("2.2.1", "no disallowed optimization", "needs a review of the system"),
    ("2.8", "token counts by the reference tokenizer", "counts are those of the server"),
    ("2.9", "the model is equivalent to the reference", "needs a review of weights and software"),
    ("2.9.4", "only an approved drafter for speculative decoding", "no list is published yet"),
    ("4.1", "the first token is a genuine part of the response", "needs a review of responses"),
    ("5.7.1", "the server reorders queries only within a pass", "happens inside the server"),
    ("6.3.2", "the logs of the warm-up are kept", "no request was sent before the measured ones"),
    ("7", "publication status (Available, Preview or RDI)", "a statement of the submitter"),
    ("8.2", "the system description is complete and true", "written by the submitter"),
    ("8.4", "the software is disclosed", "written by the submitter"),
    ("9.2", "the curve is plausible to reviewers", "a manual review"),
    ("SR 4.6", "the seed set may be used in the target cohort", "depends on the day of submission"),
)
"""Rules that no file of a rehearsal shows: section, rule, and why."""


def check_curve(result: CurveResult) -> CurveCheck:
    """Check every rule of MLPerf Endpoints on a curve, and sort the checks by section."""
    checks_of_files = [
        *_check_client_and_model(result),
        *_check_metrics(result),
        *_check_structure(result),
        *_check_offline(result),
        *_check_runs(result),
    ]
    not_checkable = [
        RuleCheck(section=section, rule=rule, outcome="not checkable", value=reason)
        for section, rule, reason in UNCHECKED_RULES
    ]
    checks = [*checks_of_files, *not_checkable]

    return CurveCheck(
        benchmark=result.curve.benchmark,
        target=result.curve.target,
        is_simulated=result.curve.is_simulated,
        checks=tuple(sorted(checks, key=_section_order)),
    )


def _section_order(check: RuleCheck) -> tuple[bool, list[int]]:
    """Return a sort key: sections by number (2.9.4 before 2.10), and "SR" sections at the end."""
    is_submission_rule = check.section.startswith("SR")
    numbers = check.section.removeprefix("SR ").split(".")
    return is_submission_rule, [int(number) for number in numbers]


def _outcome(is_met: bool, otherwise: Outcome = "missed") -> Outcome:
    """Return "met" if a rule is met, or else the other outcome."""
    return "met" if is_met else otherwise


def _names(points: Sequence[PointResult]) -> str:
    """Return the names of measurement points, separated by commas."""
    return ", ".join(point.point.name for point in points)


def _check_points(
    *,
    section: str,
    rule: str,
    points: Sequence[PointResult],
    is_met: Callable[[PointResult], bool],
    describe: Callable[[PointResult], str],
    otherwise: Outcome = "missed",
) -> RuleCheck:
    """Check a rule that each measurement point has to meet.

    Args:
        section: The section of the rules.
        rule: What the rule requires, in a few words.
        points: The measurement points that the rule applies to.
        is_met: Returns whether a point meets the rule.
        describe: Returns the value of a point that does not meet the rule.
        otherwise: The outcome if a point does not meet the rule. "flagged" if the reviewers may
            accept a reason for it.
    """
    if not points:
        return RuleCheck(
            section=section, rule=rule, outcome="not checkable", value="no point was measured"
        )

    offenders = [point for point in points if not is_met(point)]
    if not offenders:
        return RuleCheck(
            section=section, rule=rule, outcome="met", value=f"all {len(points)} points"
        )

    values_of_offenders = [f"{point.point.name}: {describe(point)}" for point in offenders]
    return RuleCheck(
        section=section, rule=rule, outcome=otherwise, value="; ".join(values_of_offenders)
    )


# -- client, model and seeds -----------------------------------------------------------------------


def _check_client_and_model(result: CurveResult) -> Iterator[RuleCheck]:
    """Yield the checks of the client that sent the queries, of its random seeds, and of the model.

    The organizers publish sets of random seeds. All measurement points have to use the same set.
    """
    curve = result.curve
    yield RuleCheck(
        section="2.1.1",
        rule="the reference client of MLCommons sent the queries",
        outcome="rehearsal",
        value="sent by loadgen: a rehearsal is never a submission",
    )

    seed_set = rules.load_rules().seed_sets.get(curve.seed_set)
    yield RuleCheck(
        section="9.1",
        rule="the seed set is a published one, the same at every point",
        outcome=_outcome(seed_set is not None),
        value=f"seed set {curve.seed_set}, cohort {curve.target_cohort}",
    )
    if seed_set is not None:
        yield _check_points(
            section="2.1.1",
            rule="the order of samples has the seed of the seed set",
            points=result.points,
            is_met=lambda point: point.load.seed == seed_set.sample_index_rng_seed,
            describe=lambda point: f"seed {point.load.seed}",
        )

    yield _check_salts(result.points)
    yield _check_model(result)


def _check_salts(points: Sequence[PointResult]) -> RuleCheck:
    """Check that each measurement point has a salt, and that all salts differ.

    A salt is a random text in front of each prompt, so that no prompt is in the server's cache.
    """
    salts = [point.load.salt for point in points]
    different_salts = set(salts)
    has_salts_everywhere = all(salts)
    is_met = has_salts_everywhere and len(different_salts) == len(salts)

    return RuleCheck(
        section="2.9.5.1",
        rule="no two queries share a prefix but the system prompt (salt)",
        outcome=_outcome(is_met) if points else "not checkable",
        value=f"{len(different_salts)} different salts at {len(salts)} points",
    )


def _check_model(result: CurveResult) -> RuleCheck:
    """Check that the server names the model of the benchmark at every measurement point.

    Names are compared by letters and digits only: "meta/Llama-3.1-8B" contains "llama3.1-8b".
    """
    models = sorted({point.load.model for point in result.points})
    expected_name = _letters_and_digits(result.curve.benchmark)
    has_other_model = any(expected_name not in _letters_and_digits(model) for model in models)
    is_met = bool(models) and not has_other_model

    return RuleCheck(
        section="3.2",
        rule=f"the model is {result.curve.model}",
        outcome=_outcome(is_met, "flagged"),
        value=f"the server names {', '.join(models) or 'none'}",
    )


def _letters_and_digits(text: str) -> str:
    """Return the letters and digits of a text in lower case: "llama318b" for "Llama-3.1-8B"."""
    return "".join(character for character in text.lower() if character.isalnum())


# -- metrics ---------------------------------------------------------------------------------------


def _check_metrics(result: CurveResult) -> Iterator[RuleCheck]:
    """Yield the checks of section 4: metrics, accuracy runs, steady windows and power."""
    # The points with a fixed concurrency. An Offline run, which sends all queries at once, has no
    # latency and no window.
    fixed = result.fixed_results

    yield _check_points(
        section="4.1",
        rule="TPOT p90 is positive, for tokens/s per user",
        points=fixed,
        is_met=lambda point: (point.metrics.tpot_p90_ms or 0) > 0,
        describe=lambda _: "no TPOT",
        otherwise="flagged",
    )
    yield _check_points(
        section="4.1",
        rule="TTFT p90 is reported",
        points=fixed,
        is_met=lambda point: point.metrics.ttft_p90_ms is not None,
        describe=lambda _: "no TTFT",
        otherwise="flagged",
    )
    yield from _list_accuracy_rules(result)

    yield _check_points(
        section="4.4",
        rule="the steady window is the result, over at least 4 passes",
        points=fixed,
        is_met=lambda point: point.has_official_window,
        describe=_describe_state,
        otherwise="flagged",
    )
    yield _check_points(
        section="4.4",
        rule="the run is steady",
        points=fixed,
        is_met=lambda point: point.verdict == "steady",
        describe=lambda point: point.verdict,
        otherwise="flagged",
    )
    yield _check_power(result)


def _list_accuracy_rules(result: CurveResult) -> Iterator[RuleCheck]:
    """Yield the rules for accuracy runs (section 4.3), with what they require of this curve.

    None of these rules can be checked here, because only the reference client runs and scores the
    accuracy data sets.
    """
    curve = result.curve.curve
    benchmark = rules.find_benchmark(result.curve.benchmark)

    yield _uncheckable_accuracy_rule(
        rule="exactly one accuracy run in each region and for Offline, none at other points",
        value=f"needed at {accuracy_runs.describe_accuracy_points(curve)}",
    )
    yield _uncheckable_accuracy_rule(
        rule="it has the concurrency of its point, right after the performance run",
        value=accuracy_runs.describe_accuracy_loads(curve),
    )
    yield _uncheckable_accuracy_rule(
        rule=f"each of its {benchmark.accuracy_samples:,} queries is sent without a salt",
        value="the reference client does so with --mode both",
    )
    yield _uncheckable_accuracy_rule(
        rule=f"it reaches {rules.ACCURACY_SHARE:.0%} of the reference",
        value=f"at least {accuracy_runs.describe_required_scores(benchmark)}",
    )


def _uncheckable_accuracy_rule(*, rule: str, value: str) -> RuleCheck:
    """Return a rule of section 4.3, which files of a curve cannot show to be met.

    Args:
        rule: What the rule requires.
        value: What it means for this curve.
    """
    return RuleCheck(section="4.3", rule=rule, outcome="not checkable", value=value)


def _describe_state(point: PointResult) -> str:
    """Describe a measurement point whose result is not that of a steady window, with the reason."""
    state = point.steady_state
    if state is None:
        return "no query was sent"

    reason = f", {state.reason}" if state.reason else ""
    return f"{state.status}{reason}; the result is that of the complete run"


def _check_power(result: CurveResult) -> RuleCheck:
    """Check that the curve has a throughput per kW of provisioned power."""
    power_kw = result.curve.provisioned_power_kw
    rule = "tokens/s per provisioned kW"
    if power_kw is None:
        return RuleCheck(
            section="4.5.3",
            rule=rule,
            outcome="not checkable",
            value="no power: provisioned_kw of --system, or --power-kw",
        )

    throughputs_per_kw = [result.tps_per_kw(point) or 0.0 for point in result.points]
    highest = max(throughputs_per_kw, default=0.0)
    return RuleCheck(
        section="4.5.3",
        rule=rule,
        outcome=_outcome(highest > 0),
        value=f"up to {highest:,.1f} at {power_kw:,.2f} kW; the power needs a public source",
    )


# -- structure of the curve ------------------------------------------------------------------------


def _check_structure(result: CurveResult) -> Iterator[RuleCheck]:
    """Yield the checks of section 5 on the measured points: their number and their regions."""
    yield from _check_point_count(result)
    yield from _check_regions(result)
    yield from _check_highest_concurrency(result)


def _check_point_count(result: CurveResult) -> Iterator[RuleCheck]:
    """Yield the checks of the number of points. A curve without an Offline run needs one less."""
    planned_points = result.curve.curve.points
    count = len(result.points)
    has_offline_run = planned_points[-1].is_offline_run
    least_count = required_points("dedicated" if has_offline_run else "elected")
    yield RuleCheck(
        section="5.3",
        rule=f"at least {least_count} points",
        outcome=_outcome(count >= least_count),
        value=f"{count} measured of {len(planned_points)} planned",
    )
    yield RuleCheck(
        section="5.6",
        rule=f"at most {rules.MAX_POINTS} points",
        outcome=_outcome(count <= rules.MAX_POINTS),
        value=str(count),
    )


def _check_regions(result: CurveResult) -> Iterator[RuleCheck]:
    """Yield for each region, a range of concurrencies, the check that it has a measured point."""
    for region in result.curve.curve.regions.regions:
        points = [point for point in result.fixed_results if point.point.region == region.name]
        concurrencies = format.value_range(str(region.start), str(region.end))
        yield RuleCheck(
            section="5.3",
            rule=f"a point in {region.label}, {concurrencies}",
            outcome=_outcome(bool(points)),
            value=_names(points) or "none",
        )


def _check_highest_concurrency(result: CurveResult) -> Iterator[RuleCheck]:
    """Yield the checks of C_max, the highest concurrency of a curve, and of points above it."""
    curve = result.curve.curve
    yield RuleCheck(
        section="5.4",
        rule="C_max is above 32, and above 33 without an approval",
        outcome=_outcome(curve.c_max > rules.MAX_C_MAX_WITH_APPROVAL, "flagged"),
        value=f"C_max {curve.c_max:,}, C_min {curve.c_min}",
    )
    yield _check_points(
        section="5.4",
        rule=f"every concurrency is at most {curve.regions.margin_end:,}",
        points=result.fixed_results,
        is_met=lambda point: point.point.concurrency <= curve.regions.margin_end,
        describe=lambda point: f"{point.point.concurrency:,}",
        otherwise="flagged",
    )


def _check_offline(result: CurveResult) -> Iterator[RuleCheck]:
    """Yield the checks of section 5.7 on the Offline point.

    The Offline point is a run that sends all queries at once. Instead, a curve may elect its point
    at the highest concurrency, C_max, which needs no further checks.
    """
    offline = result.offline_result
    if offline is None:
        yield RuleCheck(
            section="5.7", rule="one Offline point", outcome="missed", value="not measured"
        )
        return

    yield RuleCheck(
        section="5.7",
        rule="one Offline point",
        outcome="met",
        value=f"{offline.point.name}, {offline.point.offline}",
    )

    if not offline.point.is_offline_run:
        return

    c_max = result.curve.curve.c_max
    yield RuleCheck(
        section="5.7.2",
        rule=f"the concurrency of Offline is at least C_max, {c_max:,}",
        outcome=_outcome(offline.point.concurrency >= c_max, "flagged"),
        value=f"{offline.point.concurrency:,}, the size of the data set",
    )
    yield _check_offline_throughput(result, offline)


def _check_offline_throughput(result: CurveResult, offline: PointResult) -> RuleCheck:
    """Check that the Offline run has at least 98 % of the throughput of the point at C_max.

    C_max is the highest concurrency of the curve. An Offline run sends all queries at once, so it
    should not be slower. Less is "flagged": a reviewer would ask for a reason.
    """
    c_max = result.curve.curve.c_max
    rule = f"Offline reaches {rules.MIN_OFFLINE_THROUGHPUT:.0%} of the tokens/s at C_max"

    tps_at_c_max = _find_throughput(result, c_max)
    if tps_at_c_max <= 0:
        return RuleCheck(
            section="5.7.2", rule=rule, outcome="not checkable", value=f"no point at {c_max:,}"
        )

    ratio = offline.metrics.system_tps / tps_at_c_max
    return RuleCheck(
        section="5.7.2",
        rule=rule,
        outcome=_outcome(ratio >= rules.MIN_OFFLINE_THROUGHPUT, "flagged"),
        value=format.percent(ratio),
    )


def _find_throughput(result: CurveResult, concurrency: int) -> float:
    """Return the tokens/s of the measured point with a fixed concurrency, 0 if there is none."""
    for point in result.fixed_results:
        if point.point.concurrency == concurrency:
            return point.metrics.system_tps
    return 0.0


# -- single runs -----------------------------------------------------------------------------------


def _check_runs(result: CurveResult) -> Iterator[RuleCheck]:
    """Yield the checks of single runs: section 6, and the accounting in section 9.1."""
    yield from _check_loads(result)
    yield from _check_passes(result)
    yield from _check_accounting(result.points)


def _check_loads(result: CurveResult) -> Iterator[RuleCheck]:
    """Yield the checks of the data set, the load, the duration and the warm-up of each run."""
    size = result.curve.dataset_size
    official_size = rules.dataset_lengths(result.curve.benchmark).samples
    points = result.points
    yield RuleCheck(
        section="6.5",
        rule=f"the data set has its {official_size:,} samples",
        outcome=_outcome(size == official_size, "flagged"),
        value=f"{size:,}: {result.curve.data_name}",
    )
    yield _check_points(
        section="6.1",
        rule="a fixed concurrency, or all queries at once in Offline",
        points=points,
        is_met=lambda point: point.load.concurrency == point.point.concurrency,
        describe=lambda point: f"{point.load.concurrency} in flight",
    )
    yield _check_points(
        section="6.2",
        rule="the steady window lasts 600 s up to a concurrency of 32, 1,200 s above it",
        points=points,
        is_met=lambda point: _judged_duration_s(point) >= point.point.min_window_s,
        describe=lambda point: format.duration(_judged_duration_s(point)),
        otherwise="flagged",
    )
    yield _check_points(
        section="6.3",
        rule="a warm-up of at most 24 h, without samples of the data set",
        points=points,
        is_met=lambda point: not point.load.has_warmup,
        describe=lambda _: "with a warm-up",
        otherwise="flagged",
    )


def _check_passes(result: CurveResult) -> Iterator[RuleCheck]:
    """Yield the checks of how each run sends the data set: in complete passes, with streaming.

    A pass sends each sample of the data set once.
    """
    size = result.curve.dataset_size
    yield _check_points(
        section="6.4",
        rule=f"complete passes of the data set of {size:,} samples",
        points=result.points,
        is_met=lambda point: point.issued > 0 and point.issued % size == 0,
        describe=lambda point: f"{point.issued:,} queries",
        otherwise="flagged",
    )
    yield _check_points(
        section="6.4",
        rule="at least one pass completed",
        points=result.points,
        is_met=lambda point: point.completed >= size,
        describe=lambda point: f"{point.completed:,} of {size:,}",
        otherwise="flagged",
    )
    yield _check_points(
        section="6.5",
        rule="responses are streamed",
        points=result.fixed_results,
        is_met=lambda point: point.load.is_streaming,
        describe=lambda _: "not streamed",
        otherwise="flagged",
    )


def _check_accounting(points: Sequence[PointResult]) -> Iterator[RuleCheck]:
    """Yield the checks of section 9.1: the numbers of queries, the servers and the load generator.

    A rule has the outcome "missed" or, if it needs an explanation to the reviewers, "flagged".
    """
    section = "9.1"
    yield _check_points(
        section=section,
        rule="completed and failed queries add up to the issued ones",
        points=points,
        is_met=lambda point: point.completed + point.failed == point.issued,
        describe=lambda point: f"{point.completed:,} + {point.failed:,} of {point.issued:,}",
        otherwise="flagged",
    )
    yield _check_points(
        section=section,
        rule="no query failed",
        points=points,
        is_met=lambda point: point.failed == 0,
        describe=lambda point: f"{point.failed:,} failed",
        otherwise="flagged",
    )

    servers = sorted({f"{point.load.target} ({point.load.model})" for point in points})
    yield RuleCheck(
        section=section,
        rule="the same server and model at every point",
        outcome=_outcome(len(servers) == 1, "flagged"),
        value=", ".join(servers) or "no point was measured",
    )
    yield _check_points(
        section=section,
        rule="the load generator did not distort the measurement",
        points=points,
        is_met=lambda point: not point.measurement_errors,
        describe=lambda point: "; ".join(point.measurement_errors),
        otherwise="missed",
    )


def _judged_duration_s(point: PointResult) -> float:
    """Return the duration to which the minimum of section 6.2 applies.

    This is the duration of the steady window, 0 without one, or of the whole run for Offline.
    """
    if point.point.is_offline_run:
        return point.total.duration_s
    return 0.0 if point.window is None else point.window.duration_s
