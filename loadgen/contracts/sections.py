"""The report on a validation, the forecast of a dry run, and the JUnit results.

A terminal prints `build_brief_sections` by default, and every section with `--full`.
`page_sections.py` has the parts that only the HTML page shows. The metrics were computed in
`evaluate.py` and the verdicts in `judge.py`. This module is pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from loadgen.contracts.page_sections import (
    VERDICT_COLORS,
    PageInputs,
    build_annex_sections,
    build_signature_section,
    build_usage_section,
)
from loadgen.contracts.verdict import (
    FAIL,
    INCONCLUSIVE,
    PASS,
    LevelForecast,
    LevelVerdict,
    NeededLoad,
    TermVerdict,
    Validation,
)
from loadgen.contracts.verdict_text import (
    compute_term_confidence,
    describe_extensions,
    describe_short_horizon,
    find_common_confidence,
    format_confidence,
    format_coverage,
    format_term_interval,
    format_term_value,
)
from loadgen.core import format
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import Host, TargetFacts
from loadgen.render.junit import JUnitCase, Outcome, simulated_case
from loadgen.render.section import (
    Bullets,
    Facts,
    Notice,
    Paragraph,
    Report,
    Section,
    Table,
    named_facts,
    section,
    simulated_notice,
)
from loadgen.runs.rates import HeadlineRates, select_headline_rates

FORECAST_OUTCOMES = {PASS: "pass", FAIL: "fail", INCONCLUSIVE: "inconclusive"}


# -- the report -----------------------------------------------------------------------------------


def build_report(validation: Validation, inputs: PageInputs | None = None) -> Report:
    """Return the report on a validation.

    Args:
        validation: The verdict with its terms.
        inputs: The data behind the verdict, such as the contract and the summaries of the runs. It
            is needed for the page, which the two parties of the contract sign. None for a report
            on the verdict alone.
    """
    title_parts = [validation.contract, validation.target, validation.model]
    verdict_paragraph = Paragraph(
        f"{validation.verdict}: {validation.sentence}.",
        VERDICT_COLORS[validation.verdict],
        large=True,
    )

    return Report(
        title=" · ".join(part for part in title_parts if part),
        page_title=f"{validation.verdict}: {validation.contract}",
        generated_by=f"loadgen {validation.version} validation",
        notices=list(_list_notices(validation)),
        headline=[verdict_paragraph],
        sections=list(_build_full_sections(validation, inputs)),
        brief=build_brief_sections(validation, verdict_paragraph),
    )


def _build_full_sections(validation: Validation, inputs: PageInputs | None) -> Iterator[Section]:
    """Yield the sections of the full report, in their order."""
    shared_notes = _find_shared_notes(validation.levels)
    yield _build_introduction_section(validation, inputs)

    if inputs is not None:
        yield build_usage_section(validation, inputs.contract)

    for level in validation.levels:
        yield _build_level_section(level, shared_notes, inputs)

    yield section("All levels", Bullets(shared_notes, "warn"))
    yield section("Target and client", _build_conditions(validation, inputs))

    if inputs is not None:
        yield build_signature_section(validation)
        yield from build_annex_sections(validation, inputs)


def _list_notices(validation: Validation) -> Iterator[Notice]:
    """Yield what a reader must know before the verdict."""
    if validation.simulated:
        yield simulated_notice("The verdict is about a performance model, not about real hardware.")
    if validation.interrupted:
        yield Notice("INTERRUPTED", "The validation was interrupted. Some levels were not run.")


# -- the short report on a terminal ---------------------------------------------------------------


def build_brief_sections(validation: Validation, verdict_paragraph: Paragraph) -> list[Section]:
    """Return what a terminal prints by default: the verdict, a row per term, and what to do next.

    Args:
        validation: The verdict with its terms.
        verdict_paragraph: The verdict as a sentence.
    """
    has_several_levels = len(validation.levels) > 1
    common_confidence = find_common_confidence(validation)
    rows = [
        _build_brief_row(
            term,
            level.name if has_several_levels else "",
            _format_brief_interval(term, validation, common_confidence),
        )
        for level in validation.levels
        for term in level.terms
    ]
    level_column = ["level"] if has_several_levels else []
    interval_column = "CI"
    if common_confidence is not None:
        interval_column = f"{common_confidence * 100:g} % CI"
    head = ("verdict", *level_column, "measured", interval_column, "term")
    label_columns = 1 + len(level_column)
    failures = [
        Paragraph(f"Level {level.name} was not judged: {level.failure_reason}.", "warn")
        for level in validation.levels
        if level.failure_reason
    ]

    return [
        section("", verdict_paragraph),
        section("", Table(head, rows, kind="remarks", label_columns=label_columns)),
        section("", Facts([_describe_level_load(level) for level in validation.levels])),
        section(
            "",
            Paragraph(_explain_recommended_terms(validation), "soft"),
            *failures,
            Paragraph(describe_next_step(validation)),
        ),
    ]


def _describe_level_load(level: LevelVerdict) -> tuple[str, str]:
    """Return the name of a level and the load that it was judged under."""
    parts = (level.workload, level.load, f"{level.requests:,} requests")
    return f"Level {level.name}", ", ".join(part for part in parts if part)


def _format_brief_interval(
    term: TermVerdict, validation: Validation, common_confidence: float | None
) -> str:
    """Return the interval of a term, with its confidence if other terms have another one."""
    interval = format_term_interval(term)
    if common_confidence is not None or interval == format.NONE:
        return interval
    return f"{interval} ({compute_term_confidence(validation, term) * 100:g} %)"


def _build_brief_row(term: TermVerdict, level: str, interval: str) -> tuple[str, ...]:
    """Return the row of a term: verdict, level (if there are several), metric, interval, term.

    The term is last, because it is the longest cell and may take more than one line. A term of the
    list `should` is marked, because it does not count for the verdict.
    """
    mark = " (should)" if term.requirement == "should" else ""
    level_cell = [level] if level else []
    return (
        f"{term.verdict}{mark}",
        *level_cell,
        format_term_value(term),
        interval,
        term.term,
    )


def describe_next_step(validation: Validation) -> str:
    """Return the last sentence on a terminal: what to do next, or for a PASS what it covers.

    A PASS of a latency covers slowdowns of the server that recur within a time (the recurrence
    horizon), which depends on the length of the load. The shortest such time of all terms is given.
    """
    if validation.interrupted:
        return "Run the validation again to judge all levels."
    if validation.verdict == FAIL:
        return _describe_how_to_mend_failure(validation)
    if validation.verdict == INCONCLUSIVE:
        return _describe_how_to_decide(validation)

    horizons_s = [
        term.horizon_s
        for level in validation.levels
        for term in level.terms
        if term.verdict == PASS and term.horizon_s is not None
    ]
    if not horizons_s:
        return "All required terms are met."

    shortest_horizon = format.duration(min(horizons_s))
    return (
        f"A slowdown of the server that comes less often than every {shortest_horizon} may have "
        "been missed. A longer load covers rarer slowdowns."
    )


def _explain_recommended_terms(validation: Validation) -> str:
    """Return what the mark "(should)" of terms means, or "" if no term has it."""
    has_recommended_term = any(
        term.requirement == "should" for level in validation.levels for term in level.terms
    )
    if not has_recommended_term:
        return ""
    return "(should): a recommended term, which does not count for the verdict."


def _describe_how_to_mend_failure(validation: Validation) -> str:
    """Return what the user can do about a FAIL, and where undecided terms are explained."""
    advice = "A longer test cannot change a FAIL. Change the server, then validate it again."
    has_undecided_term = any(
        not term.is_decided for level in validation.levels for term in level.terms
    )
    if has_undecided_term:
        advice += " --full says why terms are INCONCLUSIVE."

    return advice


def _describe_how_to_decide(validation: Validation) -> str:
    """Return what the user can do to get a verdict on an INCONCLUSIVE validation.

    A level that could not be measured has to be measured again. Other levels need more load, with
    `--extend`. How much they need is not known for every term. Some terms need more than load, such
    as another server, so the reason is given.
    """
    undecided_levels = validation.undecided_levels
    if all(level.failure_reason for level in undecided_levels):
        return "Remove the cause, then run the validation again."

    unmeasurable_terms = _describe_unmeasurable_terms(undecided_levels)
    if not any(level.can_be_decided_by_load for level in undecided_levels):
        return unmeasurable_terms
    return " ".join(filter(None, [_describe_needed_load(undecided_levels), unmeasurable_terms]))


def _describe_needed_load(undecided_levels: Sequence[LevelVerdict]) -> str:
    """Return how much more load decides the terms of levels, or how to see the reason."""
    additional_loads_s = [
        term.additional_load_s
        for level in undecided_levels
        for term in level.terms
        if term.additional_load_s is not None
    ]
    if not additional_loads_s:
        return "Not enough data to decide. Use --full for the reason of each term."

    needed = format.duration(max(additional_loads_s))
    return f"Not enough data to decide: about {needed} more load is needed (--extend)."


def _describe_unmeasurable_terms(undecided_levels: Sequence[LevelVerdict]) -> str:
    """Return why more load cannot decide terms, such as that no server reports their metric.

    Return "" if there is no such term.
    """
    reasons = {
        f"{term.term}: {term.reason}": None
        for level in undecided_levels
        for term in level.undecided_terms
        if term.code == "unmeasurable"
    }
    return f"More load cannot decide this: {'; '.join(reasons)}." if reasons else ""


# -- the sections of the full report --------------------------------------------------------------


def _build_introduction_section(validation: Validation, inputs: PageInputs | None) -> Section:
    """Return the section below the verdict.

    It has the description of the contract, how often the validation was extended, and a warning if
    its recurrence horizon is shorter than usual.
    """
    return section(
        "",
        "" if inputs is None else inputs.contract.description,
        describe_extensions(validation),
        describe_short_horizon(validation),
    )


def _build_level_section(
    level: LevelVerdict, shared_notes: Sequence[str], inputs: PageInputs | None
) -> Section:
    """Return the section of a level: its load, its throughput, its terms and its notes.

    A PASS covers slowdowns of the server that recur within some time, such as 12 minutes. Most
    terms of a level have the same text about this (the coverage). It is printed once below the
    table, and only terms with another coverage repeat theirs in their row. The reason why no term
    of the level could be judged is also printed once.

    Args:
        level: The verdict on the level.
        shared_notes: The notes that all levels have. They are in a section of their own.
        inputs: The data behind the verdict. None for a report on the verdict alone.
    """
    throughput = "" if inputs is None else format_throughput(level.runs, inputs.summaries)
    failure = f"NOT JUDGED: {level.failure_reason}" if level.failure_reason else ""
    coverage = _find_most_common_coverage(level.terms)
    rows = [_build_term_row(term, level.failure_reason, coverage.text) for term in level.terms]
    level_notes = [note for note in level.notes if note not in shared_notes]

    return section(
        f"{level.name}: {level.verdict}",
        Paragraph(_format_load(level), "soft"),
        Paragraph(throughput),
        Paragraph(failure, "warn"),
        Table(("verdict", "", "term", "measured"), rows, "prose"),
        Paragraph(coverage.sentence(), "soft"),
        Bullets(level_notes, "warn"),
    )


def _format_load(level: LevelVerdict) -> str:
    """Return the workload, the arrivals, the number of requests and the runs of a level."""
    requests = f"{level.ok:,} of {level.requests:,} requests ok"
    parts = [level.workload, level.load, requests, ", ".join(level.runs)]
    return " · ".join(part for part in parts if part)


class CommonCoverage(NamedTuple):
    """What most PASS verdicts of a level cover.

    Attributes:
        text: The text of `format_coverage`, such as "covers slowdowns that come at least every
            12 min". ""
            if no PASS has such a text.
        has_exceptions: Whether other PASS verdicts of the level cover something else.
    """

    text: str
    has_exceptions: bool

    def sentence(self) -> str:
        """Return the coverage as a sentence below the table of the terms, or ""."""
        if not self.text:
            return ""
        exceptions = ", unless a row says otherwise" if self.has_exceptions else ""
        return f"PASS {self.text}{exceptions}."


def _find_most_common_coverage(terms: Sequence[TermVerdict]) -> CommonCoverage:
    """Return the text about covered slowdowns that most PASS verdicts of a level share.

    A PASS covers slowdowns of the server that recur within some time, such as 12 minutes, and has a
    text that says so. The report prints the most common of these texts once, below the table of the
    terms, and the others in their rows.
    """
    coverage_texts = [format_coverage(term) for term in terms]
    counts = Counter(text for text in coverage_texts if text)
    if not counts:
        return CommonCoverage("", has_exceptions=False)
    [(most_common_text, _)] = counts.most_common(1)
    return CommonCoverage(most_common_text, has_exceptions=len(counts) > 1)


def _build_term_row(term: TermVerdict, level_failure: str, common_coverage: str) -> tuple[str, ...]:
    """Return the row of a term: verdict, requirement, text, and reason of the verdict.

    What the report says once for the whole level is not repeated in the row.

    Args:
        term: The verdict on the term.
        level_failure: Why no term of the level could be judged, or "". A row with this reason has a
            dash instead.
        common_coverage: What most PASS verdicts of the level cover. If this one covers something
            else, the row says so.
    """
    reason = format.NONE if term.reason == level_failure else term.reason
    coverage = format_coverage(term)
    if coverage == common_coverage:
        coverage = ""
    explanation = ", ".join(text for text in (reason, coverage) if text)
    return term.verdict, term.requirement, term.term, explanation


def format_throughput(run_names: Sequence[str], summaries: Mapping[str, Summary]) -> str:
    """Return the throughput of a level as text, such as "Throughput: 12.5 req/s, ...".

    Each rate is the mean over the valid runs, and is left out if one of them does not have it.
    Return "" if no run is valid.

    Args:
        run_names: The directories of the runs of the level.
        summaries: The summaries of all runs, by their directories.
    """
    valid_runs = [
        summaries[name] for name in run_names if name in summaries and summaries[name].verdict.valid
    ]
    if not valid_runs:
        return ""

    rates_of_runs = [select_headline_rates(summary) for summary in valid_runs]
    window = rates_of_runs[0].window
    if len(valid_runs) > 1:
        window = f"{window}, mean of {len(valid_runs)} runs"

    rate_texts = _format_rates(_average_rates(rates_of_runs))
    return f"Throughput: {', '.join(rate_texts)}, in the {window}"


def _average_rates(rates: Sequence[HeadlineRates]) -> HeadlineRates:
    """Return the mean of each rate over several runs, or None for a rate that a run lacks."""
    return HeadlineRates(
        requests=_compute_mean_if_known([rate.requests for rate in rates]),
        input=_compute_mean_if_known([rate.input for rate in rates]),
        output=_compute_mean_if_known([rate.output for rate in rates]),
        total=_compute_mean_if_known([rate.total for rate in rates]),
        output_per_gpu=_compute_mean_if_known([rate.output_per_gpu for rate in rates]),
        goodput=_compute_mean_if_known([rate.goodput for rate in rates]),
        steady=rates[0].steady,
    )


def _format_rates(rates: HeadlineRates) -> list[str]:
    """Return the rates as texts, such as ["12.5 req/s", "1,200 output tok/s (150 per GPU)"]."""
    output = format.rate(rates.output, " output tok/s")
    if rates.output_per_gpu is not None:
        output += f" ({format.quantity(rates.output_per_gpu)} per GPU)"

    texts = [format.rate(rates.requests, " req/s"), output]
    if rates.total is not None:
        texts.append(format.rate(rates.total, " tok/s including prompts"))

    if rates.goodput is not None:
        texts.append(f"goodput {format.rate(rates.goodput, ' req/s')}")

    return texts


def _compute_mean_if_known(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None if a value is unknown or there are no values."""
    known_values = [value for value in values if value is not None]
    if not known_values or len(known_values) < len(values):
        return None
    return fmean(known_values)


def _find_shared_notes(levels: Sequence[LevelVerdict]) -> list[str]:
    """Return the notes that all of several levels have. They are printed once."""
    if len(levels) < 2:
        return []
    return [note for note in levels[0].notes if all(note in level.notes for level in levels)]


def _build_conditions(validation: Validation, inputs: PageInputs | None) -> Facts:
    """Return the conditions of the measurement as a list of labels with values.

    They say which target was measured, when, from which host and with which versions. Values that
    are not known are left out of the list.
    """
    any_summary: Summary | None = None
    contract_gpus: int | None = None
    if inputs is not None:
        # All runs of a validation have the same target and host.
        any_summary = next(iter(inputs.summaries.values()), None)
        contract_gpus = inputs.contract.gpus

    target_facts = _describe_target(validation, any_summary, contract_gpus)
    metadata_facts = format.metadata_by_heading(validation.metadata)
    measurement_facts = _describe_measurement(validation, any_summary)

    return named_facts(**target_facts, **metadata_facts, **measurement_facts)


def _describe_target(
    validation: Validation, summary: Summary | None, contract_gpus: int | None
) -> dict[str, str | Sequence[str]]:
    """Return what is known of the target, by label. Unknown values are empty.

    Args:
        validation: The validation.
        summary: The summary of a run, or None without runs.
        contract_gpus: The number of GPUs in the contract, or None.
    """
    target = TargetFacts() if summary is None else summary.target
    return {
        "Target": (validation.target, target.url),
        "Model": validation.model,
        "Server": validation.server,
        "Software": target.software,
        "Hardware": _describe_hardware(summary, contract_gpus),
        "Region": validation.region,
    }


def _describe_measurement(
    validation: Validation, summary: Summary | None
) -> dict[str, str | Sequence[str]]:
    """Return when, how and from which host a target was measured, by label.

    Args:
        validation: The validation.
        summary: The summary of a run, or None without runs.
    """
    host = Host() if summary is None else summary.run.host
    cpus = f"{host.cpus} CPUs" if host.cpus else ""
    python = f"Python {host.python}" if host.python else ""
    horizon = f"recurrence horizon {format.duration(validation.horizon_s)}"

    return {
        "When": f"{validation.started} to {validation.ended}".replace("T", " "),
        "Confidence": (format_confidence(validation), horizon),
        "Client": (host.name, host.cpu, cpus, host.kernel),
        "Clock": host.clock,
        "Generated by": (f"loadgen {validation.version}", python),
        "Contract": f"SHA-256 {validation.contract_sha256}",
    }


def _describe_hardware(summary: Summary | None, contract_gpus: int | None) -> list[str]:
    """Return the texts that describe the hardware behind the endpoint.

    These are the hardware that was detected, or else the number of GPUs that the user specified,
    and the instance type. If the contract has another number of GPUs, a text explains which number
    the rates per GPU are computed from.

    Args:
        summary: The summary of a run, or None without runs.
        contract_gpus: The number of GPUs in the contract, or None.
    """
    if summary is None:
        return []

    target = summary.target
    texts: list[str] = []
    if summary.hardware is not None and summary.hardware.descriptions:
        texts.extend(summary.hardware.descriptions)
    elif target.gpus is not None:
        texts.append(format.counted(target.gpus, "GPU"))

    texts.append(target.shape)
    if contract_gpus is not None and target.gpus is not None and contract_gpus != target.gpus:
        texts.append(
            f"the contract names {format.counted(contract_gpus, 'GPU')}, "
            f"rates per GPU are computed from the {target.gpus} in use"
        )

    return [text for text in texts if text]


# -- the forecast ---------------------------------------------------------------------------------


def build_forecast_report(
    forecasts: Sequence[LevelForecast], simulated_target: str, *, real_target: str | None
) -> Report:
    """Return the report on the load that each term needs for a decision.

    Args:
        forecasts: The forecast of each level.
        simulated_target: The simulated server.
        real_target: The target of the user if it is a real one, which was not simulated.
    """
    preset = simulated_target.removeprefix("simulated: ")
    difference = ""
    if real_target is not None:
        difference = f"The forecast is for a simulated {preset}, not for {real_target}. "

    note = (
        f"{difference}A real server varies more than the model and may need a longer load. "
        "Use --url sim:PRESET for another model."
    )
    return Report(
        title=f"Load that each term needs, on a simulated {preset}",
        generated_by="loadgen validate --dry-run",
        sections=[*map(_build_forecast_section, forecasts), section("", note)],
    )


def _build_forecast_section(forecast: LevelForecast) -> Section:
    """Return the section of a level: the load that each of its terms needs.

    Each row has the needed load and the verdict that is expected after the planned load. The reason
    of a term that stays undecided comes below the table.
    """
    rows = [
        (
            term.requirement,
            term.term,
            _format_needed_load(term, forecast),
            FORECAST_OUTCOMES[term.outcome],
        )
        for term in forecast.terms
    ]
    planned_load = ""
    if forecast.terms:
        planned_load = f": {format.duration(forecast.length_s)} of load planned"

    return section(
        f"Level {forecast.name}{planned_load}",
        forecast.failure_reason,
        Table(("", "term", "needs", "expected"), rows, label_columns=2),
        Bullets([f"{term.term}: {term.reason}" for term in forecast.terms if term.reason]),
    )


def _format_needed_load(term: NeededLoad, forecast: LevelForecast) -> str:
    """Return the load that a term needs, or that it needs more than was simulated."""
    if term.needed_s is None:
        return f"> {format.duration(forecast.simulated_s)}"
    return format.duration(term.needed_s)


# -- JUnit ----------------------------------------------------------------------------------------


def build_junit_cases(validation: Validation) -> list[JUnitCase]:
    """Return a JUnit case per term.

    A failed case makes a pipeline fail, so only a term of the list `must` can be one. An undecided
    term, and a failed term of the list `should`, is a skipped case with its reason.
    """
    cases = [simulated_case(validation.contract)] if validation.simulated else []
    for level in validation.levels:
        for term in level.terms:
            sentences = [f"{term.verdict}: {term.reason}", format_coverage(term)]
            cases.append(
                JUnitCase(
                    group=level.name,
                    name=f"{term.requirement} {term.term}",
                    outcome=_get_junit_outcome(term),
                    text=", ".join(sentence for sentence in sentences if sentence),
                )
            )

    return cases


def _get_junit_outcome(term: TermVerdict) -> Outcome:
    """Return the JUnit outcome of a term. Only a term of the list `must` can fail."""
    if term.verdict == PASS:
        return "passed"
    if term.verdict == FAIL and term.requirement == "must":
        return "failed"
    return "skipped"
