"""Renders the numbers of agents at several tiers: the table, and how to continue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from loadgen.core import format
from loadgen.render.section import (
    Paragraph,
    Quoted,
    Report,
    Section,
    Table,
    section,
    simulated_notice,
)
from loadgen.search.agent_capacity import AgentCapacity
from loadgen.search.agent_tiers import StoredTiers, TierResult

UNKNOWN = "-"


class QuotientColumn(NamedTuple):
    """A column of the table: its name, and the quotient that it shows."""

    name: str
    read_value: Callable[[AgentCapacity], float | None]


COLUMNS = (
    QuotientColumn("per accelerator", lambda agents: agents.sessions_per_accelerator),
    QuotientColumn("per provisioned MW", lambda agents: agents.sessions_per_provisioned_mw),
    QuotientColumn("per measured MW", lambda agents: agents.sessions_per_measured_mw),
)


def describe_sessions(result: TierResult) -> str:
    """Return the number of sessions at a tier: "124", "at least 64", "none" or "not known"."""
    if result.agents is None:
        return "not known"
    sessions = result.agents.sessions
    if sessions is None:
        return "none" if result.state == "none" else "not known"

    is_at_least = result.lower_bound or result.state == "stopped"
    return f"at least {sessions:g}" if is_at_least else f"{sessions:g}"


def describe_tiers(stored: StoredTiers) -> str:
    """Return the result in one sentence, for example "Sessions: 124 at 20:10s, 64 at 50:5s."."""
    parts = [f"{describe_sessions(result)} at {result.tier}" for result in stored.tiers]
    prefix = "SIMULATED: " if stored.simulated else ""
    return f"{prefix}Sessions: {', '.join(parts)}."


def create_report(stored: StoredTiers) -> Report:
    """Return the report: a table of the tiers, their folders, and the command that continues."""
    title = f"Agents per tier: {stored.workload} on {stored.target}"
    table = build_tier_table(stored)
    resume_sections = list(_list_resume_sections(stored))
    return Report(
        title=title,
        page_title=f"{stored.workload}: agents per tier",
        generated_by=f"loadgen {stored.version} report of several tiers",
        notices=[simulated_notice()] if stored.simulated else [],
        headline=[Paragraph(describe_tiers(stored).removeprefix("SIMULATED: "), large=True)],
        sections=[
            section("Sessions per tier", table, id="tiers"),
            section("Searches", _build_search_table(stored)),
            *resume_sections,
        ],
        brief=[
            section("", Paragraph(title)),
            section("", table, indented=True),
            *resume_sections,
        ],
    )


def build_tier_table(stored: StoredTiers) -> Table:
    """Return the table of the tiers, with a column for each quotient that some tier has.

    A quotient is, for example, the number of sessions per accelerator.
    """
    columns = [column for column in COLUMNS if _has_value(column, stored.tiers)]
    rows = []
    for result in stored.tiers:
        quotients = [_format_value(_read_value(column, result)) for column in columns]
        rows.append((result.tier, describe_sessions(result), *quotients))

    names = [column.name for column in columns]
    return Table(("tier", "sessions", *names), rows)


def _has_value(column: QuotientColumn, results: Sequence[TierResult]) -> bool:
    """Return whether any tier has a value in a column."""
    return any(_read_value(column, result) is not None for result in results)


def _read_value(column: QuotientColumn, result: TierResult) -> float | None:
    """Return the value of a tier in a column, or None if it is not known."""
    return None if result.agents is None else column.read_value(result.agents)


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
