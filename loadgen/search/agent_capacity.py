"""How many agents a system serves: sessions per accelerator and per megawatt.

These are the metrics of AA-AgentPerf: the highest number of concurrent agents at a tier of output
speed (25th percentile) and TTFT (95th percentile), per accelerator and per megawatt
(artificialanalysis.ai/methodology/agentperf, read on 2026-11-30).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadgen.core import format, units
from loadgen.core.errors import UserError
from loadgen.core.execution.system_file import read_provisioned_kw
from loadgen.core.metrics.summary import NamedSummary, Summary
from loadgen.core.results import checksums, store
from loadgen.render.section import Section, Table, section
from loadgen.search import experiment
from loadgen.search.experiment import ExperimentPlan, StoredSearch
from loadgen.search.search_results import capacity_and_state, find_best_trial

SESSIONS = "sessions"
"""The value of --over for a search over concurrent sessions, and of the option in its plan."""
TIER = re.compile(r"(?P<speed>[0-9]+(\.[0-9]+)?):(?P<ttft>[0-9.]+(ms|s))")
TIER_HINT = "SPEED:TTFT, output tokens per second and a time: 20:10s, 60:5s or 180:3s"
PRESET_PROVISIONED_KW_KEY = "preset.provisioned_kw"
"""The metadata with the provisioned power of a simulated system, from its preset."""
MS_PER_S = 1_000
WATTS_PER_KW = 1_000
KW_PER_MW = 1_000


class AgentCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """The highest number of sessions that met the SLO, and what they are divided by.

    A value is None if it is not known.

    Attributes:
        sessions: The highest number of concurrent sessions.
        accelerators: The number of accelerators of the system.
        sessions_per_accelerator: Sessions divided by accelerators.
        provisioned_kw: The power that is provisioned for the system, from the system file, or from
            the preset of a simulated system.
        sessions_per_provisioned_mw: Sessions divided by that power.
        measured_kw: The mean power of the accelerators in the trial at this number of sessions.
        sessions_per_measured_mw: Sessions divided by that power.
    """

    sessions: float | None
    accelerators: int | None
    sessions_per_accelerator: float | None
    provisioned_kw: float | None
    sessions_per_provisioned_mw: float | None
    measured_kw: float | None
    sessions_per_measured_mw: float | None


class StoredAgentSearch(
    StoredSearch,
    frozen=True,
    kw_only=True,
    rename={"result": "answer", "term_names": "goal", "trials": "told"},
):
    """The content of `search.json` of a search over sessions."""

    agents: AgentCapacity


class TierLimits(NamedTuple):
    """The limits that a tier stands for.

    The tier "20:10s" has two limits:

    - The 25th percentile of the output speed is at least 20 tokens per second. The speed of a
      request is 1 / TPOT. So the slowest quarter of the speeds is the highest quarter of TPOT, and
      the 75th percentile of TPOT is at most 50 ms.
    - The 95th percentile of TTFT is at most 10 s.

    Attributes:
        lowest_tokens_per_s: The lowest output speed of a request.
        longest_ttft: The longest TTFT as it was typed, such as "10s".
    """

    lowest_tokens_per_s: float
    longest_ttft: str


def parse_tier(tier: str) -> TierLimits:
    """Return the limits of a tier.

    Raises:
        UserError: The text is not a tier.
    """
    option = f"--tier {tier}"
    match = TIER.fullmatch(tier.strip())
    lowest_tokens_per_s = 0.0 if match is None else float(match["speed"])
    if match is None or lowest_tokens_per_s == 0:
        raise UserError("invalid_value", f"{tier!r} is not a tier", option, TIER_HINT)

    longest_ttft = match["ttft"]
    try:
        units.duration_ns(longest_ttft)
    except units.InvalidValueError as error:
        raise UserError(error.code, f"{tier!r} {error}", option, TIER_HINT) from None

    return TierLimits(lowest_tokens_per_s, longest_ttft)


def tier_objectives(tier: str) -> tuple[str, str]:
    """Return the terms of --slo that a tier stands for.

    Raises:
        UserError: The text is not a tier.
    """
    limits = parse_tier(tier)
    longest_tpot_ms = MS_PER_S / limits.lowest_tokens_per_s
    return (f"ttft:{limits.longest_ttft}:p95", f"tpot:{longest_tpot_ms:.6f}ms:p75")


def counts_sessions(plan: ExperimentPlan) -> bool:
    """Return whether the loads of a search are numbers of concurrent sessions."""
    return plan.options.get("over") == SESSIONS


def compute_agent_capacity(sessions: float | None, summary: Summary | None) -> AgentCapacity:
    """Return the sessions per accelerator and per megawatt.

    Args:
        sessions: The highest number of sessions that met the SLO, or None if there is none.
        summary: The summary of the trial at this number, which describes the system.
    """
    accelerators = None if summary is None else summary.target.gpus
    provisioned_kw = None if summary is None else _provisioned_kw(summary)
    measured_kw = None if summary is None else _measured_kw(summary)
    return AgentCapacity(
        sessions=sessions,
        accelerators=accelerators,
        sessions_per_accelerator=_divide(sessions, accelerators),
        provisioned_kw=provisioned_kw,
        sessions_per_provisioned_mw=_divide(sessions, _to_mw(provisioned_kw)),
        measured_kw=measured_kw,
        sessions_per_measured_mw=_divide(sessions, _to_mw(measured_kw)),
    )


def _provisioned_kw(summary: Summary) -> float | None:
    """Return the provisioned power of the system file, else of the preset, or None."""
    metadata = summary.run.metadata
    stated_kw = read_provisioned_kw(metadata)
    if stated_kw is not None:
        return stated_kw

    preset_kw = metadata.get(PRESET_PROVISIONED_KW_KEY)
    return None if preset_kw is None else float(preset_kw)


def _measured_kw(summary: Summary) -> float | None:
    """Return the measured power of the accelerators, or None if it was not measured."""
    energy = summary.energy
    if energy is None or energy.watts is None:
        return None
    return energy.watts / WATTS_PER_KW


def _to_mw(power_kw: float | None) -> float | None:
    """Return a power in megawatts, or None if it is not known."""
    return None if power_kw is None else power_kw / KW_PER_MW


def _divide(sessions: float | None, divisor: float | None) -> float | None:
    """Return a number of sessions divided by a number of accelerators or by a power.

    Return None if one of the numbers is not known, or if the divisor is 0.
    """
    if sessions is None or divisor is None or divisor == 0:
        return None
    return sessions / divisor


def find_agent_capacity(search: StoredSearch, runs: Sequence[NamedSummary]) -> AgentCapacity:
    """Return the sessions per accelerator and per megawatt that a search has found.

    Args:
        search: The result of the search.
        runs: The summaries of its trials, with their names.
    """
    sessions, _ = capacity_and_state(search.result, search.trials)
    best_trial = find_best_trial(search.trials)
    if best_trial is None:
        return compute_agent_capacity(sessions, None)

    summary_by_name = dict(runs)
    return compute_agent_capacity(sessions, summary_by_name.get(best_trial.run_name))


def with_agents(search: StoredSearch, runs: Sequence[NamedSummary]) -> StoredAgentSearch:
    """Return the content of `search.json` with the agent capacity."""
    fields = {name: getattr(search, name) for name in StoredSearch.__struct_fields__}
    return StoredAgentSearch(**fields, agents=find_agent_capacity(search, runs))


def add_agents_to_result(
    output_dir: Path, search: StoredSearch, runs: Sequence[NamedSummary]
) -> None:
    """Write `search.json` of a search over sessions again, with its agent capacity."""
    content = format.document(with_agents(search, runs))
    store.replace(output_dir / experiment.RESULT_FILE, content)
    checksums.write(output_dir)


def list_brief_rows(agents: AgentCapacity) -> list[tuple[str, str]]:
    """Return the row about agents in the short result of a search, as a label and a text.

    For example: ("Sessions", "3.1 per accelerator, 810 per measured MW"). Return [] if the system
    is not known, so that the sessions can be divided by nothing.
    """
    sessions_by_unit = {
        "per accelerator": agents.sessions_per_accelerator,
        "per provisioned MW": agents.sessions_per_provisioned_mw,
        "per measured MW": agents.sessions_per_measured_mw,
    }
    texts = [
        f"{format.quantity(sessions)} {unit}"
        for unit, sessions in sessions_by_unit.items()
        if sessions is not None
    ]
    return [("Sessions", ", ".join(texts))] if texts else []


class _SessionsPer(NamedTuple):
    """A number of sessions divided by a property of the system.

    Attributes:
        label: The name of the result, such as "sessions per measured MW".
        sessions: The result. None if it is not known.
        divisor: The property of the system. None if it is not known.
        divisor_format: How the property is shown, such as "{:,.4g} kW".
    """

    label: str
    sessions: float | None
    divisor: float | None
    divisor_format: str


def build_agents_section(agents: AgentCapacity) -> Section:
    """Return the section with the sessions per accelerator and per megawatt.

    Each row shows by what the sessions were divided, in the column "of": "sessions per measured MW,
    810, 12.5 kW". Rows with an unknown number are left out.
    """
    number = "{:,.4g}"
    kilowatts = "{:,.4g} kW"
    divisions = [
        _SessionsPer(
            "sessions per accelerator",
            agents.sessions_per_accelerator,
            agents.accelerators,
            divisor_format=number,
        ),
        _SessionsPer(
            "sessions per provisioned MW",
            agents.sessions_per_provisioned_mw,
            agents.provisioned_kw,
            divisor_format=kilowatts,
        ),
        _SessionsPer(
            "sessions per measured MW",
            agents.sessions_per_measured_mw,
            agents.measured_kw,
            divisor_format=kilowatts,
        ),
    ]
    rows = []
    for division in divisions:
        if division.sessions is not None and division.divisor is not None:
            divisor = division.divisor_format.format(division.divisor)
            rows.append((division.label, format.quantity(division.sessions), divisor))

    return section(
        "Sessions per accelerator and per megawatt",
        Table(("metric", "value", "of"), rows),
        id="agents",
    )
