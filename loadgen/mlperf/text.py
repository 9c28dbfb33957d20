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

OUTPUT_RATE_TILE = "Output throughput"
REQUEST_RATE_TILE = "Request throughput"
"""Names of the headline numbers of a run that are rates (`loadgen/runs/tiles.py`)."""

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
    """Return the default output of a result, as four parts without headings.

    They are the name of the test, the verdict with the limits, facts such as rates and warnings,
    and the command that prints every section.

    Args:
        result: The result.
        gpus: The number of GPUs behind the endpoint, or None if it is not known.
        run_dir: The directory of the result; "" to leave out the command.
    """
    title = _describe_test(result)
    if result.target_qps:
        title += f", {_describe_target_rate(result)}"

    details_command = f"loadgen report {run_dir} --full" if run_dir else ""
    no_heading = ""
    return (
        section(no_heading, Paragraph(title)),
        section(no_heading, _brief_limits(result), indented=True),
        section(no_heading, Facts(list(_brief_rows(result, gpus))), indented=True),
        section(no_heading, named_facts(Details=details_command)),
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
    """Return the row of one limit: passed or not, the measured percentile, and early stopping.

    For example ("ok", "TTFT p99", "1,204.000 ms", "2,000 ms", "3 of 24,576", "passes").
    """
    is_passed = check.is_within_limit and check.early_stopping_met
    return (
        "ok" if is_passed else "x",
        f"{check.metric.upper()} p{LIMIT_QUANTILE * 100:g}",
        _format_percentile(check),
        f"{check.limit_ns / NS_PER_MS:,g} ms",
        f"{check.violations:,} of {check.query_count:,}",
        _describe_early_stopping(check),
    )


def _brief_rows(result: MlperfResult, gpus: int | None) -> Iterator[tuple[str, str]]:
    """Yield the facts of the default output, each as a label and a text.

    For example ("Throughput", "18,200 output tok/s, ..."). The default output is brief: it has the
    first sentence about stability and the number of errors and warnings. The report with `--full`
    has their complete texts.

    Args:
        result: The result.
        gpus: The number of GPUs behind the endpoint, or None if it is not known.
    """
    yield "Throughput", _describe_throughput(result, gpus)
    yield "Queries", f"{_describe_queries(result)}; {_describe_length(result)}"
    yield "Data", result.dataset
    yield from _brief_reason_rows(result)

    stability_sentences = list(_describe_stability(result))
    if stability_sentences:
        yield "Stability", stability_sentences[0]

    if result.errors:
        yield "Errors", f"{format.counted(len(result.errors), 'error')} (--full)"

    if result.warnings:
        yield "Warnings", f"{format.counted(len(result.warnings), 'warning')} (--full)"


def _describe_throughput(result: MlperfResult, gpus: int | None) -> str:
    """Return the rates of output tokens and samples, and the time until which they are counted.

    LoadGen counts until the query that was issued last completes, in Offline until the last
    completion. For example "18,200 output tok/s, 61.2 samples/s until the last completion; 2,275
    tok/s per GPU (8)".
    """
    tokens_rate, samples_rate = completed_rates(result, gpus)
    rates_text = f"{tokens_rate.value} output tok/s, {samples_rate.value} samples/s"
    throughput = f"{rates_text} {tokens_rate.window}"
    return f"{throughput}; {tokens_rate.per_gpu}" if tokens_rate.per_gpu else throughput


def _brief_reason_rows(result: MlperfResult) -> Iterator[tuple[str, str]]:
    """Yield the first reasons why a result is INVALID, and how many more there are."""
    for reason in result.reasons[:MAX_BRIEF_REASONS]:
        yield "INVALID", reason.text
    further_reasons = len(result.reasons) - MAX_BRIEF_REASONS
    if further_reasons > 0:
        yield "", f"{further_reasons} more reasons: --full"


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
    loadgen_tokens_rate, loadgen_samples_rate = completed_rates(result, gpus)
    full_run_rate = format.quantity(result.full_run_tokens_per_s, 4)
    return [
        ("Test", f"{result.benchmark} {result.scenario}, round {result.round}"),
        ("Target rate", f"{result.target_qps:,.6g}/s" if result.target_qps else ""),
        ("Data", result.dataset),
        ("Queries", f"{_describe_queries(result)}, {_describe_length(result)}"),
        ("Tokens", _describe_tokens(result)),
        ("Tokens/s", loadgen_tokens_rate.describe()),
        ("Full run", f"{full_run_rate} tokens/s until the last completion"),
        ("Samples/s", _describe_samples_rate(result, loadgen_samples_rate)),
    ]


def _describe_tokens(result: MlperfResult) -> str:
    """Return the number of output tokens, and how many responses are too short to have a TPOT."""
    return (
        f"{result.tokens:,}; {result.one_token_replies:,} responses of one token "
        "(counted here, left out of TPOT)"
    )


def _describe_samples_rate(result: MlperfResult, completed_rate: CompletedRate) -> str:
    """Return the rate of completed samples and, of a test with a schedule, the scheduled rate."""
    completed_text = f"{completed_rate.value} completed"
    if result.scenario == "offline":
        return completed_text
    return f"{completed_text}, {format.quantity(result.scheduled_samples_per_s, 4)} scheduled"


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
    """Return the section with each limit, its early stopping and the submission checker.

    Bars show the measured percentiles on a scale from 0 to at least 100 % of the limit, where a
    line marks the limit.
    """
    limits: Table | str = "Offline has no limit on latency and therefore no early stopping."
    if result.checks:
        limits = limits_table(result)

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
            _format_percentile(check),
            _passes_or_fails(check.is_within_limit),
            _passes_or_fails(check.is_below_limit),
            f"{check.violations:,} of {check.query_count:,}",
            _describe_early_stopping(check),
        )
        rows.append(cells)

    return Table(head, rows)


def _describe_limit(check: Check) -> str:
    """Return a limit as text, for example "TTFT p99 at most 2,000 ms"."""
    return describe_term(check.metric, LIMIT_QUANTILE, check.limit_ns / NS_PER_MS)


def _format_percentile(check: Check) -> str:
    """Return the percentile that is limited, for example "1,204.000 ms"."""
    if check.percentile_ns is None:
        return "never completed"
    return f"{_format_ms(check.percentile_ns)} ms"


def _passes_or_fails(is_passed: bool) -> str:
    return "passes" if is_passed else "fails"


def _describe_early_stopping(check: Check) -> str:
    """Return the outcome of early stopping, with the queries that are missing if it fails."""
    if check.early_stopping_met:
        return "passes"
    return f"fails, {check.missing_queries:,} more queries needed"


def _limit_bars(result: MlperfResult) -> Iterator[Bar]:
    """Yield a bar per limit: the measured percentile in % of the limit.

    A percentile that falls on a query that never completed has no value, and so no bar.
    """
    for check in result.checks:
        if check.percentile_ns is None:
            continue
        used_percent = 100 * check.percentile_ns / check.limit_ns
        text = f"{used_percent:,.1f} % of the limit"
        color = "good" if check.is_within_limit else "bad"
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

    A run can be VALID although a queue grows, which would fail a longer run. The sentences are, as
    far as they apply: what the user should do if the rate is not sustained or this is not known;
    why it is or is not sustained; and the highest rate that is VALID in runs of official length,
    which can be higher than the sustained one.
    """
    is_stability_unknown = result.sustained is None
    would_fail_longer_run = result.valid and result.sustained is False

    can_be_verified = result.is_valid_by_rules_only and result.longer_minutes is not None
    if would_fail_longer_run:
        yield (
            "A queue grows: a longer run at this rate would miss the limits. "
            "--find-peak finds a rate that is sustained."
        )
    elif can_be_verified:
        yield (
            "Stability not verified; run --find-peak --sustain "
            f"(about {result.longer_minutes:,.0f} min)."
        )

    if result.sustained_reason:
        # What this run shows is no proof for a longer one.
        prefix = "In this run: " if is_stability_unknown else ""
        yield f"{prefix}{result.sustained_reason}"

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

    def describe(self, unit: str = "") -> str:
        """Return the rate with its unit, its window and, if it is known, the rate per GPU."""
        rate = f"{self.value} {unit}".rstrip()
        return _join_present(f"{rate} {self.window}", self.per_gpu)


def completed_rates(result: MlperfResult, gpus: int | None) -> tuple[CompletedRate, CompletedRate]:
    """Return the rate of output tokens and the rate of samples, as text.

    LoadGen counts both until the query that was issued last completes, in Offline until the last
    completion. Only the rate of tokens is also divided by the number of GPUs, as is usual.

    Args:
        result: The result.
        gpus: The number of GPUs behind the endpoint, or None if it is not known.
    """
    window_text = "until the last-issued query completed"
    if result.scenario == "offline":
        window_text = "until the last completion"

    tokens_rate = CompletedRate(
        value=format.quantity(result.completed_tokens_per_s, 4),
        window=window_text,
        per_gpu=_describe_rate_per_gpu(result.completed_tokens_per_s, gpus),
    )
    samples_rate = CompletedRate(
        value=format.quantity(result.completed_samples_per_s, 4), window=window_text, per_gpu=""
    )
    return tokens_rate, samples_rate


def _describe_rate_per_gpu(tokens_per_s: float | None, gpus: int | None) -> str:
    """Return the tokens/s of one GPU, or "" if the rate or the number of GPUs is not known."""
    gpu_tokens_per_s = token_usage.per_gpu(tokens_per_s, gpus)
    if gpu_tokens_per_s is None:
        return ""
    return f"{format.quantity(gpu_tokens_per_s)} tok/s per GPU ({gpus})"


# -- additions to the report of the run, or of the search for a peak -------------------------------


def create_extra_sections(result: MlperfResult, gpus: int | None) -> ExtraSections:
    """Return what an MLPerf-style result adds to the report of the run or search of its directory.

    These are a notice that the result is unofficial, its verdict with the rate of tokens, and its
    sections. Tiles are the headline numbers at the top of the page. Those that show a rate of the
    run are replaced, so that the page shows the rates of the result everywhere.

    Args:
        result: The result.
        gpus: The number of GPUs behind the endpoint, or None if it is not known.
    """
    tokens_rate, _samples_rate = completed_rates(result, gpus)

    def replace_rate_tiles(tiles: Sequence[Tile]) -> Sequence[Tile]:
        return [_replace_rate_tile(tile, result, gpus) for tile in tiles]

    return ExtraSections(
        notices=(disclosure_notice(result.disclosure),),
        verdict_text=describe_verdict(result),
        is_good=result.valid,
        metrics=f"{tokens_rate.describe('output tokens/s')}.",
        replace_tiles=replace_rate_tiles,
        sections=detail_sections(result, gpus),
    )


def _replace_rate_tile(tile: Tile, result: MlperfResult, gpus: int | None) -> Tile:
    """Return a tile of the page of a run with the rate of the MLPerf-style result.

    A tile is a headline number at the top of the page. One that shows no rate is returned
    unchanged.
    """
    tokens_rate, samples_rate = completed_rates(result, gpus)
    rates_by_tile = {OUTPUT_RATE_TILE: tokens_rate, REQUEST_RATE_TILE: samples_rate}
    rate = rates_by_tile.get(tile.name)
    if rate is None:
        return tile
    return tile._replace(value=rate.value, note=_join_present(rate.per_gpu, rate.window))
