"""The report on a validation, the forecast of a dry run, and the JUnit results.

`page_sections.py` has the parts that only the HTML page shows. The metrics were computed in
`evaluate.py`, the verdicts in `judge.py`. This module is pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from loadgen.contracts.page_sections import (
    VERDICT_COLORS,
    PageInputs,
    annex_sections,
    signature_section,
    usage_section,
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
    analyses_text,
    confidence_text,
    short_horizon_text,
    validity_text,
)
from loadgen.core import format
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import Host, TargetFacts
from loadgen.render.junit import Case, Outcome, simulated_case
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
from loadgen.runs.rates import headline

MEANINGS = {
    PASS: "every promise was kept, as surely as the contract asks",
    FAIL: "at least one promise was broken, as surely as the contract asks",
    INCONCLUSIVE: (
        "at least one promise could be neither shown nor refuted: neither a pass nor a failure"
    ),
}
FORECAST_OUTCOMES = {PASS: "kept", FAIL: "broken", INCONCLUSIVE: "undecided"}


# -- the report -----------------------------------------------------------------------------------


def build_report(validation: Validation, inputs: PageInputs | None = None) -> Report:
    """Return the report on a validation.

    Args:
        validation: The verdict with its terms.
        inputs: What the page shows besides the verdict, for two parties to sign. None for the
            verdict alone.
    """
    common_notes = _common_notes(validation.levels)
    title_parts = [validation.contract, validation.target, validation.model]
    sections = [_introduction(validation, inputs)]
    if inputs is not None:
        sections.append(usage_section(validation, inputs.contract))
    sections += [_level_section(level, common_notes, inputs) for level in validation.levels]
    sections.append(section("Said of every level", Bullets(common_notes, "warn")))
    conditions = _build_conditions(validation, inputs)
    sections.append(section("What was measured, and from where", conditions))
    if inputs is not None:
        sections += [signature_section(validation), *annex_sections(validation, inputs)]
    sentence = f"{validation.verdict}: {validation.sentence}."
    return Report(
        title=" · ".join(part for part in title_parts if part),
        page_title=f"{validation.verdict}: {validation.contract}",
        generated_by=f"loadgen {validation.version} validation",
        notices=list(_warnings(validation)),
        headline=[Paragraph(sentence, VERDICT_COLORS[validation.verdict], large=True)],
        headline_last=True,
        sections=sections,
    )


def _warnings(validation: Validation) -> Iterator[Notice]:
    """Yield what a reader must know before the verdict."""
    if validation.simulated:
        yield simulated_notice(
            "a model of a server answered, no real one: this verdict is an exercise"
        )
    if validation.interrupted:
        yield Notice("INTERRUPTED", "the user broke it off: what was not run is not known")


def _introduction(validation: Validation, inputs: PageInputs | None) -> Section:
    """Return the section that explains what the verdict means."""
    return section(
        "",
        f"{validation.verdict} means: {MEANINGS[validation.verdict]}.",
        "" if inputs is None else inputs.contract.description,
        analyses_text(validation),
        short_horizon_text(validation),
    )


def _level_section(
    level: LevelVerdict, common_notes: Sequence[str], inputs: PageInputs | None
) -> Section:
    """Return the section of a level: its load, its throughput, its terms and its own notes.

    What is the same for most of its terms is not repeated in each row: why no term could be
    judged, and what the PASS verdicts hold for. Notes that all levels share are in a section of
    their own.
    """
    throughput = "" if inputs is None else throughput_text(level.runs, inputs.summaries)
    failure = f"NOTHING SHOWN: {level.failure_reason}" if level.failure_reason else ""
    validity = _most_common_validity(level.terms)
    validity_sentence = ""
    if validity.text:
        exceptions = ", unless a row says otherwise" if validity.has_exceptions else ""
        validity_sentence = f"Kept {validity.text}{exceptions}."
    rows = [_term_row(term, level.failure_reason, validity.text) for term in level.terms]
    level_notes = [note for note in level.notes if note not in common_notes]
    return section(
        f"{level.name}: {level.verdict}",
        Paragraph(_load_text(level), "soft"),
        Paragraph(throughput),
        Paragraph(failure, "warn"),
        Table(("verdict", "", "promise", "measured"), rows, "prose"),
        Paragraph(validity_sentence, "soft"),
        Bullets(level_notes, "warn"),
    )


def _load_text(level: LevelVerdict) -> str:
    """Return the workload, the arrivals, the number of requests and the runs of a level."""
    requests = f"{level.ok:,} of {level.requests:,} requests ok"
    parts = [level.workload, level.load, requests, ", ".join(level.runs)]
    return " · ".join(part for part in parts if part)


class CommonValidity(NamedTuple):
    """What most PASS verdicts of a level hold for, and whether there are exceptions."""

    text: str
    has_exceptions: bool


def _most_common_validity(terms: Sequence[TermVerdict]) -> CommonValidity:
    """Return what most PASS verdicts of a level hold for. It is printed once, below the terms.

    A PASS holds for events that recur within a time, which depends on the length of the load.
    """
    texts = [validity_text(term) for term in terms]
    counts = Counter(text for text in texts if text)
    if not counts:
        return CommonValidity("", has_exceptions=False)
    ((most_common, _),) = counts.most_common(1)
    return CommonValidity(most_common, has_exceptions=len(counts) > 1)


def _term_row(term: TermVerdict, level_failure: str, common_validity: str) -> tuple[str, ...]:
    """Return the row of a term: verdict, requirement, text, and reason.

    The reason why no term of the level could be judged, and the validity that is common to the
    terms, are printed once for the level and left out here.
    """
    reasons = [format.NONE if term.reason == level_failure else term.reason]
    validity = validity_text(term)
    if validity not in ("", common_validity):
        reasons.append(validity)
    measured = ", ".join(reason for reason in reasons if reason)
    return term.verdict, term.requirement, term.term, measured


def throughput_text(run_names: Sequence[str], summaries: Mapping[str, Summary]) -> str:
    """Return the throughput of a level as a sentence, such as "Throughput: 12.5 requests/s, ...".

    Each rate is the mean over the valid runs, and is left out if one of them does not have it.
    Return "" if no run is valid.

    Args:
        run_names: The directories of the runs of the level.
        summaries: The summaries of all runs, by their directories.
    """
    valid_runs = [
        summaries[name] for name in run_names if name in summaries and summaries[name].verdict.valid
    ]
    rates = [headline(summary) for summary in valid_runs]
    if not rates:
        return ""
    requests = _mean([rate.requests for rate in rates])
    total = _mean([rate.total for rate in rates])
    output = _mean([rate.output for rate in rates])
    output_per_gpu = _mean([rate.output_per_gpu for rate in rates])
    goodput = _mean([rate.goodput for rate in rates])
    output_text = format.rate(output, " output tokens/s")
    if output_per_gpu is not None:
        output_text += f" ({format.rate(output_per_gpu)} per GPU)"
    parts = [format.rate(requests, " requests/s"), output_text]
    if total is not None:
        parts.append(format.rate(total, " tokens/s with the prompts"))
    if goodput is not None:
        parts.append(f"goodput {format.rate(goodput, ' requests/s')}")
    window = rates[0].window
    if len(rates) > 1:
        window = f"{window}, mean of {len(rates)} runs"
    return f"Throughput: {', '.join(parts)}, in the {window}"


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None if a value is unknown or there are no values."""
    known_values = [value for value in values if value is not None]
    if not known_values or len(known_values) < len(values):
        return None
    return fmean(known_values)


def _common_notes(levels: Sequence[LevelVerdict]) -> list[str]:
    """Return the notes that all of several levels have. They are printed once."""
    if len(levels) < 2:
        return []
    return [note for note in levels[0].notes if all(note in level.notes for level in levels)]


def _build_conditions(validation: Validation, inputs: PageInputs | None) -> Facts:
    """Return the conditions of the measurement as a list of labels with values.

    They say which target was measured, when, from which host and with which versions. All runs of a
    validation have the same target and host, so the summary of the first run is used. Values that
    are not known are left out of the list.
    """
    first_summary = None
    contract_gpus = None
    if inputs is not None:
        contract_gpus = inputs.contract.gpus
        first_summary = next(iter(inputs.summaries.values()), None)
    target = TargetFacts()
    host = Host()
    if first_summary is not None:
        target = first_summary.target
        host = first_summary.run.host
    horizon = f"asked for what comes back within {format.duration(validation.horizon_s)}"
    cpus = f"{host.cpus} CPUs" if host.cpus else ""
    python = f"Python {host.python}" if host.python else ""
    values_by_label: dict[str, str | Sequence[str]] = {
        "Target": (validation.target, target.url),
        "Model": validation.model,
        "Server": validation.server,
        "Software": target.software,
        "Hardware": _hardware_texts(first_summary, contract_gpus),
        "Region": validation.region,
        **format.said(validation.metadata),
        "When": f"{validation.started} to {validation.ended}".replace("T", " "),
        "Confidence": (confidence_text(validation), horizon),
        "Client": (host.name, host.cpu, cpus, host.kernel),
        "Clock": host.clock,
        "Made by": (f"loadgen {validation.version}", python),
        "Contract": f"SHA-256 {validation.contract_sha256}",
    }
    return named_facts(**values_by_label)


def _hardware_texts(summary: Summary | None, contract_gpus: int | None) -> list[str]:
    """Return the texts that describe the hardware behind the endpoint.

    The hardware that was detected comes before the number of GPUs that the user gave. A last text
    says so if the contract is for another number of GPUs, because rates per GPU then differ.
    """
    if summary is None:
        return []
    target = summary.target
    if summary.hardware is not None and summary.hardware.words:
        texts = [*summary.hardware.words, target.shape]
    elif target.gpus is not None:
        texts = [format.counted(target.gpus, "GPU"), target.shape]
    else:
        texts = [target.shape]
    if contract_gpus is not None and target.gpus is not None and contract_gpus != target.gpus:
        contract = format.counted(contract_gpus, "GPU")
        texts.append(
            f"the contract is for {contract}, "
            f"and figures per GPU are of the {target.gpus} that are here"
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
    difference = "" if real_target is None else f"{real_target} is not {preset}. "
    note = (
        f"{difference}A real server varies more than its model, and may need longer. "
        "Another model: --url sim:PRESET"
    )
    return Report(
        title=f"What each term needs for a decision, on a simulated {preset}",
        generated_by="loadgen validate --dry-run",
        sections=[*map(_forecast_section, forecasts), section("", note)],
    )


def _forecast_section(forecast: LevelForecast) -> Section:
    """Return the section of a level: the load that each of its terms needs.

    Each row has the needed load and the verdict that is expected after the load of the contract.
    The reason of a term that stays undecided comes below the table.
    """
    rows = [
        (
            term.requirement,
            term.term,
            _needed_load_text(term, forecast),
            FORECAST_OUTCOMES[term.outcome],
        )
        for term in forecast.terms
    ]
    load = f": {format.duration(forecast.length_s)} of load" if forecast.terms else ""
    return section(
        f"level {forecast.name}{load}",
        forecast.failure_reason,
        Table(("", "term", "needs", "in this time"), rows, label_columns=2),
        Bullets([f"{term.term}: {term.reason}" for term in forecast.terms if term.reason]),
    )


def _needed_load_text(term: NeededLoad, forecast: LevelForecast) -> str:
    """Return the load that a term needs, or that it needs more than was simulated."""
    if term.needed_s is None:
        return f"> {format.duration(forecast.simulated_s)}"
    return format.duration(term.needed_s)


# -- JUnit ----------------------------------------------------------------------------------------


def junit_cases(validation: Validation) -> list[Case]:
    """Return a JUnit case per term.

    A failed case makes a pipeline fail, so only a term of the list `must` can be one. An undecided
    term, and a failed term of the list `should`, is a skipped case with its reason.
    """
    cases = [simulated_case(validation.contract)] if validation.simulated else []
    for level in validation.levels:
        for term in level.terms:
            sentences = [f"{term.verdict}: {term.reason}", validity_text(term)]
            cases.append(
                Case(
                    group=level.name,
                    name=f"{term.requirement} {term.term}",
                    outcome=_junit_outcome(term),
                    text=", ".join(sentence for sentence in sentences if sentence),
                )
            )
    return cases


def _junit_outcome(term: TermVerdict) -> Outcome:
    """Return the JUnit outcome of a term. Only a term of the list `must` can fail."""
    if term.verdict == PASS:
        return "passed"
    if term.verdict == FAIL and term.requirement == "must":
        return "failed"
    return "skipped"
