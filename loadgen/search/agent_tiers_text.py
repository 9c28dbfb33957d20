"""Renders the numbers of agents at several tiers: the table, and how to continue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from loadgen.core import format, units
from loadgen.render.section import (
    Paragraph,
    Quoted,
    Report,
    Section,
    Table,
    section,
    simulated_notice,
)
from loadgen.search.agent_capacity import AgentCapacity, TierLimits, parse_tier
from loadgen.search.agent_tiers import DescribedTiers, StoredTiers, TierResult

UNKNOWN = "-"
SPEED_COLUMN = "speed p25"
TTFT_COLUMN = "TTFT p95"
COLUMN_BY_METRIC = {"TPOT": SPEED_COLUMN, "TTFT": TTFT_COLUMN}
"""The column of a limit by the metric of its objective. The speed of a request is 1 / TPOT."""


class DivisionColumn(NamedTuple):
    """A column of the table: its name, and which division of the sessions it shows.

    Attributes:
        name: What the sessions are divided by, such as "per accelerator".
        read_value: Returns the sessions divided by it. None if it is not known.
    """

    name: str
    read_value: Callable[[AgentCapacity], float | None]

    def value_at(self, result: TierResult) -> float | None:
        """Return the value of the column for a tier, or None if it is not known."""
        return None if result.agents is None else self.read_value(result.agents)


COLUMNS = (
    DivisionColumn("per accelerator", lambda agents: agents.sessions_per_accelerator),
    DivisionColumn("per provisioned MW", lambda agents: agents.sessions_per_provisioned_mw),
    DivisionColumn("per measured MW", lambda agents: agents.sessions_per_measured_mw),
)


def describe_sessions(result: TierResult) -> str:
    """Return the number of sessions at a tier: "124", "at least 64", "none" or "not known".

    "at least 64" means that more was not tried: 64 is the highest number that was allowed, or the
    search was stopped.
    """
    if result.agents is None:  # its search has not ended
        return "not known"

    sessions = result.agents.sessions
    if sessions is None:
        return "none" if result.state == "none" else "not known"

    may_be_higher = result.lower_bound or result.state == "stopped"
    return f"at least {sessions:g}" if may_be_higher else f"{sessions:g}"


def describe_tiers(stored: StoredTiers) -> str:
    """Return the result in one sentence, after "SIMULATED: " if it is so."""
    prefix = "SIMULATED: " if stored.simulated else ""
    return f"{prefix}{list_sessions(stored)}."


def list_sessions(stored: StoredTiers) -> str:
    """Return the sessions at all tiers.

    For example "Sessions: 124 at 20 tok/s and TTFT 10 s, 64 at 50 tok/s and TTFT 5 s".
    """
    texts = []
    for result in stored.tiers:
        limits = parse_tier(result.tier)
        tier = f"{limits.lowest_tokens_per_s:g} tok/s and TTFT {_format_ttft(limits)}"
        texts.append(f"{describe_sessions(result)} at {tier}")
    return f"Sessions: {', '.join(texts)}"


def create_report(stored: DescribedTiers) -> Report:
    """Return the report: a table of the tiers, their folders, and the command that continues.

    The brief form for a terminal has no table of the folders.
    """
    title = f"Agents per tier: {stored.workload} on {stored.target}{_describe_system(stored)}"
    tier_table = build_tier_table(stored)
    resume_sections = list(_list_resume_sections(stored))
    full_sections = [
        section("Sessions per tier", tier_table, id="tiers"),
        section("Searches", _build_search_table(stored)),
        *resume_sections,
    ]
    brief_sections = [
        section("", Paragraph(title)),
        section("", tier_table, indented=True),
        *resume_sections,
    ]

    # A notice says that the result is simulated, so the headline does not repeat it.
    return Report(
        title=title,
        page_title=f"{stored.workload}: agents per tier",
        generated_by=f"loadgen {stored.version} report of several tiers",
        notices=[simulated_notice()] if stored.simulated else [],
        headline=[Paragraph(f"{list_sessions(stored)}.", large=True)],
        sections=full_sections,
        brief=brief_sections,
    )


def _describe_system(stored: DescribedTiers) -> str:
    """Return the model and the number of GPUs, such as " (llama-2-70b, 4 GPUs)", or ""."""
    gpu_counts = [
        result.agents.accelerators
        for result in stored.tiers
        if result.agents is not None and result.agents.accelerators is not None
    ]
    gpus = format.counted(gpu_counts[0], "GPU") if gpu_counts else ""
    details = ", ".join(filter(None, (stored.model, gpus)))
    return f" ({details})" if details else ""


def build_tier_table(stored: DescribedTiers) -> Table:
    """Return the table of the tiers: their limits, their sessions and what limited them.

    A column of which no tier has a value is left out. The sessions are in total, per accelerator
    and per megawatt.
    """
    columns = [
        column
        for column in COLUMNS
        if any(column.value_at(result) is not None for result in stored.tiers)
    ]
    rows = []
    for result in stored.tiers:
        limits = parse_tier(result.tier)
        values = [_format_value(column.value_at(result)) for column in columns]
        row = [
            f"at least {limits.lowest_tokens_per_s:g} tok/s",
            f"at most {_format_ttft(limits)}",
            describe_sessions(result),
            *values,
        ]
        if stored.limited_by:
            row.append(_describe_limit(stored.limited_by.get(result.tier, ())))
        rows.append(tuple(row))

    limit_column = ["limited by"] if stored.limited_by else []
    column_names = [column.name for column in columns]
    head = (SPEED_COLUMN, TTFT_COLUMN, "sessions", *column_names, *limit_column)
    return Table(head, rows)


def _format_ttft(limits: TierLimits) -> str:
    """Return the longest TTFT of a tier, such as "10 s"."""
    return f"{units.duration_ns(limits.longest_ttft) / units.NS_PER_S:g} s"


def _describe_limit(missed_objectives: Sequence[str]) -> str:
    """Return the columns whose limits were missed, such as "speed p25", or "-".

    An objective without a column, which a tier does not have, is named itself.
    """
    names = []
    for objective in missed_objectives:
        metric = objective.partition(" ")[0]
        names.append(COLUMN_BY_METRIC.get(metric, objective))
    return ", ".join(names) or UNKNOWN


def _format_value(value: float | None) -> str:
    """Return the text of a value, or "-" if it is not known."""
    return UNKNOWN if value is None else format.quantity(value)


def _build_search_table(stored: StoredTiers) -> Table:
    """Return the table that names the folder of each search, whose report has all details."""
    rows = [
        (result.tier, result.folder, result.stop_reason or "not ended") for result in stored.tiers
    ]
    return Table(("tier", "folder", "end of the search"), rows, label_columns=3)


def _list_resume_sections(stored: StoredTiers) -> Iterator[Section]:
    """Yield the section with the command that continues the searches, if anything is left."""
    if stored.resume_command:
        yield section("Resume with", Quoted(stored.resume_command))
