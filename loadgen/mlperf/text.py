"""Renders an MLPerf-style result: the report of its command and what it adds to that of its run.

Pure. Every output says that the result is unofficial.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from loadgen.core import format
from loadgen.core.metrics import token_usage
from loadgen.core.slo import describe_term
from loadgen.mlperf.loadgen_spread import PERCENTILES
from loadgen.mlperf.log_files import checker_text
from loadgen.mlperf.result import DISCLOSURE, MlperfResult
from loadgen.render.additions import ExtraSections
from loadgen.render.page import Bar, Tile
from loadgen.render.section import (
    Bars,
    Bullets,
    Facts,
    Kind,
    Notice,
    Paragraph,
    Report,
    Section,
    Table,
    named_facts,
    section,
    simulated_notice,
)

if TYPE_CHECKING:
    from loadgen.mlperf.loadgen_spread import LoadGenSpread
    from loadgen.mlperf.result import Check

NS_PER_MS = 1_000_000

LIMIT_QUANTILE = 0.99
"""The percentile that the rules limit, of both TTFT and TPOT."""

MAX_BRIEF_REASONS = 3
"""How many reasons for an INVALID result the default output shows."""

LATENCY_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "latency": "E2E latency"}
"""The labels of the distributions of a result, by the name of their attribute."""


# -- the report of the command ---------------------------------------------------------------------


def create_report(
    result: MlperfResult,
    *,
    gpus: int | None = None,
    part_sections: Iterable[Section] = (),
    run_dir: str = "",
) -> Report:
    """Return the report of an MLPerf-style result.

    Args:
        result: The result.
        gpus: The number of GPUs behind the endpoint, or None if it is not known.
        part_sections: Sections about the parts of the run, for example one row per endpoint.
        run_dir: The directory of the result, which the default output names. "" if unknown.
    """
    notices = [disclosure_notice(result.disclosure)]
    if result.simulated:
        notices.insert(0, simulated_notice())
    return Report(
        title=f"{result.scenario.capitalize()} · {result.benchmark} · round {result.round}",
        page_title=f"mlperf-{result.benchmark}-{result.scenario}",
        generated_by="loadgen report of an MLPerf-style result",
        notices=notices,
        headline=[Paragraph(describe_verdict(result), _verdict_kind(result), large=True)],
        sections=[*part_sections, *detail_sections(result, gpus)],
        brief=brief_sections(result, gpus, run_dir=run_dir),
    )


def disclosure_notice(disclosure: str = DISCLOSURE) -> Notice:
    """Return the notice that the result is unofficial and not verified by MLCommons."""
    label, _, meaning = disclosure.partition(": ")
    return Notice(label, meaning)


def describe_verdict(result: MlperfResult) -> str:
    """Return the verdict by the rules in one sentence, with the reasons if it is INVALID."""
    test = f"MLPerf-style {_describe_test(result)}, unofficial"
    if result.valid:
        return f"{test}: VALID."
    reasons = "; ".join(reason.text for reason in result.reasons)
    return f"{test}: INVALID. {reasons}."


def _describe_test(result: MlperfResult) -> str:
    """Return the scenario, benchmark and round, for example "Server, llama2-70b, round v6.1"."""
    return f"{result.scenario.capitalize()}, {result.benchmark}, round {result.round}"


def _verdict_kind(result: MlperfResult) -> Kind:
    """Return the color of the verdict."""
    return "good" if result.valid else "bad"


# -- the default output ----------------------------------------------------------------------------


def brief_sections(
    result: MlperfResult, gpus: int | None, *, run_dir: str = ""
) -> tuple[Section, ...]:
    """Return the default output: verdict, limits, rates and what keeps the result from counting."""
    title = _describe_test(result)
    if result.target_qps:
        title += f", {_describe_target_rate(result)}"
    path_facts = named_facts(Details=f"loadgen report {run_dir} --full" if run_dir else "")
    return (
        section("", Paragraph(title)),
        section("", _brief_limits(result), indented=True),
        section("", Facts(list(_brief_rows(result, gpus))), indented=True),
        section("", path_facts),
    )


def _describe_target_rate(result: MlperfResult) -> str:
    """Return the rate that was requested, which in Offline only sizes the single query."""
    if result.scenario == "offline":
        return f"sized for {result.target_qps:,.6g} samples/s"
    return f"{result.target_qps:,.6g} queries/s"


def _brief_limits(result: MlperfResult) -> Table | Paragraph:
    """Return the verdict above the limits: measured value, violations and early stopping."""
    verdict = describe_validity(result)
    if not result.checks:
        return Paragraph(verdict, _verdict_kind(result))
    head = ("", verdict, "measured", "limit", "violations", "early stopping")
    return Table(head, [_brief_limit_row(check) for check in result.checks], label_columns=2)


def _brief_limit_row(check: Check) -> tuple[str, ...]:
    """Return the row of one limit: passed or not, the measured percentile, and early stopping."""
    is_passed = check.met and check.early_stopping_met
    return (
        "ok" if is_passed else "x",
        f"{check.metric.upper()} p99",
        _format_checked_value(check),
        f"{check.limit_ns / NS_PER_MS:,g} ms",
        f"{check.over:,} of {check.count:,}",
        _describe_early_stopping(check),
    )


def _brief_rows(result: MlperfResult, gpus: int | None) -> Iterator[tuple[str, str]]:
    """Yield the labels and texts of the default output below the limits.

    They are rates, queries, data set, why the result is INVALID, whether the rate is sustained, and
    the number of errors and warnings. The complete texts are in the report with `--full`.
    """
    tokens_rate, samples_rate = completed_rates(result, gpus)
    throughput = (
        f"{tokens_rate.value} output tok/s, {samples_rate.value} samples/s {tokens_rate.window}"
    )
    if tokens_rate.per_gpu:
        throughput += f"; {tokens_rate.per_gpu}"
    yield "Throughput", throughput
    yield "Queries", f"{_describe_queries(result)}; {_describe_length(result)}"
    yield "Data", result.dataset
    reasons = [reason.text for reason in result.reasons]
    for reason in reasons[:MAX_BRIEF_REASONS]:
        yield "INVALID", reason
    if len(reasons) > MAX_BRIEF_REASONS:
        yield "", f"{len(reasons) - MAX_BRIEF_REASONS} more reasons: --full"
    first_stability_sentence = next(_describe_stability(result), "")
    if first_stability_sentence:
        yield "Stability", first_stability_sentence
    if result.errors:
        yield "Errors", f"{format.counted(len(result.errors), 'error')} (--full)"
    if result.warnings:
        yield "Warnings", f"{format.counted(len(result.warnings), 'warning')} (--full)"


# -- every section ---------------------------------------------------------------------------------


def detail_sections(result: MlperfResult, gpus: int | None) -> tuple[Section, ...]:
    """Return every section of the result, for its own report and for that of its run or search."""
    return (
        section(
            "MLPerf-style result, unofficial",
            Facts(_result_rows(result, gpus)),
            _latency_table(result),
            id="mlperf",
        ),
        _limits_section(result),
        _verdict_section(result),
        section("Notes", Bullets(result.notes), id="mlperf-notes"),
    )


def _result_rows(result: MlperfResult, gpus: int | None) -> list[tuple[str, str]]:
    """Return the labels and texts of what was tested and what was measured.

    There are two rates of output tokens. "Tokens/s" is LoadGen's: its measurement window ends when
    the query that was issued last completes. "Full run" counts until the last completion of any
    query. Rows without a text, such as the target rate of some results, are not shown.

    Args:
        result: The result.
        gpus: The number of GPUs behind the endpoint, or None if it is not known.
    """
    tokens_rate, samples_rate = completed_rates(result, gpus)
    target_rate_text = f"{result.target_qps:,.6g}/s" if result.target_qps else ""
    tokens_text = (
        f"{result.tokens:,}; {result.one_token_replies:,} responses of one token "
        "(counted here, left out of TPOT)"
    )
    tokens_rate_text = _join_present(
        f"{tokens_rate.value} {tokens_rate.window}", tokens_rate.per_gpu
    )
    full_run_rate = format.quantity(result.whole_tokens_per_s, 4)
    scheduled_rate_text = ""
    if result.scenario != "offline":
        scheduled_rate_text = f"{format.quantity(result.scheduled_samples_per_s, 4)} scheduled"
    samples_rate_text = _join_present(f"{samples_rate.value} completed", scheduled_rate_text)
    return [
        ("Test", f"{result.benchmark} {result.scenario}, round {result.round}"),
        ("Target rate", target_rate_text),
        ("Data", result.dataset),
        ("Queries", f"{_describe_queries(result)}, {_describe_length(result)}"),
        ("Tokens", tokens_text),
        ("Tokens/s", tokens_rate_text),
        ("Full run", f"{full_run_rate} tokens/s until the last completion"),
        ("Samples/s", samples_rate_text),
    ]


def _join_present(*texts: str) -> str:
    """Return the texts that are not empty, joined by commas."""
    return ", ".join(filter(None, texts))


def _describe_queries(result: MlperfResult) -> str:
    """Return how many queries were issued and completed. In Offline, these are samples."""
    return f"{result.queries:,} issued, {result.resolved:,} completed"


def _describe_length(result: MlperfResult) -> str:
    """Return how long the schedule is and has to be. Offline has one query and no schedule."""
    if result.scenario == "offline":
        return f"one query of {format.counted(result.queries, 'sample')}"
    return f"{result.scheduled_s:,.3f} s scheduled, at least {result.min_duration_s:g} s required"


def _latency_table(result: MlperfResult) -> Table:
    """Return the distributions of TTFT, TPOT and latency in ms, with LoadGen's percentiles."""
    head = ("ms", *(f"p{quantile * 100:g}" for quantile in PERCENTILES), "mean", "max")
    rows = []
    for attribute, label in LATENCY_NAMES.items():
        spread: LoadGenSpread | None = getattr(result, attribute)
        if spread is not None:
            values_ns = (*spread.percentiles, spread.mean, spread.max)
            rows.append((label, *map(_format_ms, values_ns)))
    return Table(head, rows)


def _format_ms(value_ns: int | None) -> str:
    """Return nanoseconds as milliseconds, or a dash for a query that never completed."""
    if value_ns is None:
        return format.NONE
    return f"{value_ns / NS_PER_MS:,.3f}"


def _limits_section(result: MlperfResult) -> Section:
    """Return the section with each limit, its early stopping and the submission checker."""
    limits: Table | str = limits_table(result)
    if not result.checks:
        limits = "Offline has no limit on latency and therefore no early stopping."
    bars = Bars(
        rows=list(_limit_bars(result)),
        unit=" %",
        marked_value=100.0,
        included_value=0.0,
        title="Measured p99 in % of the limit",
    )
    checker = Paragraph(f"{checker_text(result)}.", "soft")
    return section("Limits and early stopping", bars, limits, checker)


def limits_table(result: MlperfResult) -> Table:
    """Return the table of limits: the measured percentile, both outcomes, and early stopping.

    LoadGen accepts a percentile equal to its limit, and the submission checker does not. The table
    has no rows in Offline, which has no limits.
    """
    head = ("limit", "measured", "LoadGen", "submission checker", "violations", "early stopping")
    rows = []
    for check in result.checks:
        cells = (
            _describe_limit(check),
            _format_checked_value(check),
            _passes_or_fails(check.met),
            _passes_or_fails(check.checker_met),
            f"{check.over:,} of {check.count:,}",
            _describe_early_stopping(check),
        )
        rows.append(cells)
    return Table(head, rows)


def _describe_limit(check: Check) -> str:
    """Return a limit as text, for example "TTFT p99 at most 2,000 ms"."""
    return describe_term(check.metric, LIMIT_QUANTILE, check.limit_ns / NS_PER_MS)


def _format_checked_value(check: Check) -> str:
    """Return the percentile that the limit is about."""
    if check.value_ns is None:
        return "never completed"
    return f"{_format_ms(check.value_ns)} ms"


def _passes_or_fails(is_passed: bool) -> str:
    return "passes" if is_passed else "fails"


def _describe_early_stopping(check: Check) -> str:
    """Return the outcome of early stopping, with the queries that are missing if it fails."""
    if check.early_stopping_met:
        return "passes"
    return f"fails, {check.more:,} more queries needed"


def _limit_bars(result: MlperfResult) -> Iterator[Bar]:
    """Yield a bar per limit: the measured percentile in % of the limit.

    A percentile that falls on a query that never completed has no value, and so no bar.
    """
    for check in result.checks:
        if check.value_ns is None:
            continue
        used_percent = 100 * check.value_ns / check.limit_ns
        text = f"{used_percent:,.1f} % of the limit"
        color = "good" if check.met else "bad"
        segment = (0.0, used_percent, color, text)
        yield Bar(_describe_limit(check), text, [segment])


def _verdict_section(result: MlperfResult) -> Section:
    """Return the section with the verdict, the reasons for it and whether the rate is stable."""
    sentences = [*_describe_stability(result), *(reason.text for reason in result.reasons)]
    if result.valid and not result.checker_valid:
        sentences.append(
            "A measured value equals its limit. LoadGen accepts that; "
            "the submission checker requires less than the limit."
        )
    verdict = Paragraph(describe_validity(result), _verdict_kind(result), large=True)
    return section("Result", verdict, Bullets(sentences))


def describe_validity(result: MlperfResult) -> str:
    """Return whether the result is VALID by the rules, and whether the server sustains the rate.

    A run can be VALID although a queue grows, which a longer run would show. Offline has no rate to
    sustain.
    """
    if not result.valid:
        return "INVALID"
    if result.scenario == "offline":
        return "VALID by MLPerf rules"
    if result.sustained is None:
        return "VALID by MLPerf rules; stability not verified"
    if result.sustained:
        return "VALID by MLPerf rules, and sustained"
    return "VALID by MLPerf rules, but not sustained"


def _describe_stability(result: MlperfResult) -> Iterator[str]:
    """Yield sentences about whether the server sustains the rate for longer than the run.

    They are: that it does not, or how a longer run can verify it; what this run shows about it; and
    the highest rate that is VALID in runs of the official length, if longer runs need a lower one.
    """
    if result.sustained is False and result.valid:
        yield (
            "A queue grows: a longer run at this rate would miss the limits. "
            "--find-peak finds a rate that is sustained."
        )
    elif result.is_valid_by_rules_only and result.longer_minutes is not None:
        yield (
            "Stability not verified; run --find-peak --sustain "
            f"(about {result.longer_minutes:,.0f} min)."
        )
    if result.sustained_why:
        subject = "In this run: " if result.sustained is None else ""
        yield f"{subject}{result.sustained_why}"
    if result.rules_qps is not None and result.target_qps is not None:
        yield (
            "Highest rate that is VALID by the rules in runs of the official length: "
            f"{result.rules_qps:,.4g}/s."
        )


# -- rates -----------------------------------------------------------------------------------------


class CompletedRate(NamedTuple):
    """A rate of LoadGen as text.

    Attributes:
        value: The rate, without its unit.
        window: When the measurement window of the rate ends, for example "until the last
            completion".
        per_gpu: The rate per GPU with its unit, or "" if it is not known.
    """

    value: str
    window: str
    per_gpu: str


def completed_rates(result: MlperfResult, gpus: int | None) -> tuple[CompletedRate, CompletedRate]:
    """Return output tokens/s and samples/s as text, in LoadGen's window.

    The window ends when the query that was issued last completes, in Offline with the last
    completion.

    Args:
        result: The result.
        gpus: The number of GPUs behind the endpoint, or None if it is not known.
    """
    window_text = "until the last-issued query completed"
    if result.scenario == "offline":
        window_text = "until the last completion"
    tokens_per_s = result.completed_tokens_per_s
    gpu_tokens_per_s = token_usage.per_gpu(tokens_per_s, gpus)
    per_gpu_text = ""
    if gpu_tokens_per_s is not None:
        per_gpu_text = f"{format.quantity(gpu_tokens_per_s)} tok/s per GPU ({gpus})"
    tokens_text = format.quantity(tokens_per_s, 4)
    samples_text = format.quantity(result.completed_samples_per_s, 4)
    return (
        CompletedRate(value=tokens_text, window=window_text, per_gpu=per_gpu_text),
        CompletedRate(value=samples_text, window=window_text, per_gpu=""),
    )


# -- additions to the report of the run, or of the search for a peak -------------------------------


def create_extra_sections(result: MlperfResult, gpus: int | None) -> ExtraSections:
    """Return what the result adds to the report of the run or search in the same directory.

    Besides its sections, these are the notice that it is unofficial, its verdict, and the rates of
    the headline: the tiles at the top of the page show the rates of LoadGen's window.

    Args:
        result: The result.
        gpus: The number of GPUs behind the endpoint, or None if it is not known.
    """
    tokens_rate, _samples_rate = completed_rates(result, gpus)
    tokens_text = _join_present(
        f"{tokens_rate.value} output tokens/s {tokens_rate.window}", tokens_rate.per_gpu
    )

    def replace_rates(tiles: Sequence[Tile]) -> Sequence[Tile]:
        return [_replace_rate(tile, result, gpus) for tile in tiles]

    return ExtraSections(
        notices=(disclosure_notice(result.disclosure),),
        verdict_text=describe_verdict(result),
        is_good=result.valid,
        replace_tiles=replace_rates,
        metrics=f"{tokens_text}.",
        sections=detail_sections(result, gpus),
    )


def _replace_rate(tile: Tile, result: MlperfResult, gpus: int | None) -> Tile:
    """Return a headline number of a run with the value in LoadGen's window, if it is a rate.

    The page of the run then shows the same rates as the MLPerf-style result. Other headline numbers
    are returned unchanged.
    """
    tokens_rate, samples_rate = completed_rates(result, gpus)
    rates_by_tile = {"Output throughput": tokens_rate, "Request throughput": samples_rate}
    rate = rates_by_tile.get(tile.name)
    if rate is None:
        return tile
    return tile._replace(value=rate.value, note=_join_present(rate.per_gpu, rate.window))
