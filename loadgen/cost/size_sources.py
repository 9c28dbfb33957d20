"""Finds the capacity of each source that is named to `loadgen size`.

A source is one of three things: `published:SYSTEM` (a row of the published table), `sim:PRESET` (a
simulated machine, which is searched), or a result folder.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.cli.output import say, say_changed
from loadgen.core.errors import OK, SLO_MISSED, CombinedError, UserError, did_you_mean
from loadgen.core.results.manifest import TargetFacts
from loadgen.core.run_folder import refuse_shard
from loadgen.core.workload.flags import read_flags
from loadgen.cost import published
from loadgen.cost.capacity_planning import MeasuredRate, measured_rate_of
from loadgen.cost.evidence_reader import gpus_of, read_evidence
from loadgen.cost.machine_searches import (
    SIMULATED,
    RunCommand,
    search_command,
    simulated_target,
)
from loadgen.cost.recorded_runs import with_records
from loadgen.cost.sizing import published_rate
from loadgen.pricing.evidence import Evidence
from loadgen.pricing.prices import Price, Prices, find_prices
from loadgen.repeated.capacity import CAPACITY_FILE, load_capacity

PUBLISHED = "published:"


class SourceCapacity(NamedTuple):
    """The rate of a source, and the measurements behind it. A published rate has none."""

    rate: MeasuredRate
    evidence: Evidence | None


class SourceRequest(NamedTuple):
    """What the capacity of the sources is asked for: the workload, the SLO, and the GPUs.

    Attributes:
        profile: A packaged workload or the path of a workload file.
        slo: The terms of the SLO for machines that are searched.
        gpus: GPUs of sources that recorded none.
        allow_invalid: True to accept measurements that are not valid.
        run_command: Runs the search of a simulated machine.
    """

    profile: str
    slo: Sequence[str]
    gpus: int | None
    allow_invalid: bool
    run_command: RunCommand


def is_published(source: str) -> bool:
    """Return True if the source is a row of the published table."""
    return source.startswith(PUBLISHED)


def is_simulated_machine(source: str) -> bool:
    """Return True if the source is a simulated machine, which is searched."""
    return source.startswith(SIMULATED)


def find_capacity(source: str, request: SourceRequest) -> SourceCapacity:
    """Return the capacity of one source. A simulated machine is searched first.

    Raises:
        UserError: The source does not exist, is of another workload, or was measured under another
            SLO than requested.
    """
    if is_published(source):
        rate = find_published_rate(source.removeprefix(PUBLISHED), request.profile)
        return SourceCapacity(rate, None)
    folder = Path(source)
    if is_simulated_machine(source):
        folder = run_search(source, request.profile, request.slo, request.run_command)
    refuse_shard(folder)
    say_changed(folder)
    evidence = read_evidence([folder], allow_invalid=request.allow_invalid)[0]
    if not is_simulated_machine(source):
        _check_same_slo(request.slo, evidence, source)
    evidence = with_records(evidence)
    rate = measured_rate_for(evidence, workload_name(request.profile), request.gpus)
    return SourceCapacity(replace(rate, name=source), evidence)


def find_source_price(prices: Prices, target: TargetFacts, price_name: str, source: str) -> Price:
    """Return the price of a source.

    Args:
        prices: The prices to choose from.
        target: What was measured.
        price_name: The name of the price that the user chose, or "".
        source: The source, as error messages name it.

    Raises:
        UserError: There is no price, or several.
    """
    matching = find_prices(prices, target, price_name, source)
    if len(matching) > 1:
        raise UserError(
            "ambiguous",
            f"{source} has prices of several commitments",
            "--price",
            " or ".join(f"--price '{source}={price.name}'" for price in matching),
        )
    return matching[0]


def expected_target(source: str) -> TargetFacts:
    """Return what the runs of a simulated machine will record and its price depends on."""
    target = simulated_target(source)
    model = target.context.model if target.context else ""
    return TargetFacts(name=target.name, model=model, simulated=True)


def measured_rate_for(evidence: Evidence, workload: str, gpus: int | None) -> MeasuredRate:
    """Return the measured rate of evidence for a workload.

    Raises:
        UserError: The evidence is of another workload, or its number of GPUs is not known.
    """
    measured_workload = evidence.summary.run.workload
    if measured_workload != workload:
        raise UserError(
            "mismatch",
            f'the run is of the workload "{measured_workload}", not of {workload}',
            evidence.folder,
            f"ask for {measured_workload}, or give a run of {workload}",
        )
    gpu_count = gpus_of(evidence, gpus)
    if gpu_count is None:
        raise UserError(
            "missing_option",
            "the run does not say how many GPUs it used",
            evidence.folder,
            "--gpus 4",
        )
    return measured_rate_of(evidence, gpu_count)


def run_search(source: str, profile: str, slo: Sequence[str], run_command: RunCommand) -> Path:
    """Search a simulated machine, or reuse an equal search, and return the folder of its result.

    Raises:
        UserError: No capacity was found.
    """
    search = search_command(source, profile, slo)
    say(f"loadgen {shlex.join(search.arguments)}")
    with contextlib.redirect_stdout(sys.stderr):
        exit_code = run_command(search.arguments)
    capacity_file = search.folder / CAPACITY_FILE
    has_capacity = capacity_file.is_file()
    if exit_code == OK or (exit_code != SLO_MISSED and has_capacity):
        return search.folder
    why = "the search came to no end"
    if has_capacity:
        why = load_capacity(capacity_file.read_bytes()).lower_bound_reason
    raise UserError(
        "no_figure",
        f"no capacity of this machine: {why}",
        source,
        "see the lines of the search above; longer trials, or a wider --slo",
    )


def workload_name(profile: str) -> str:
    """Return the `name` in a workload file, or the name of a packaged workload.

    Raises:
        CombinedError: The file has errors.
    """
    from loadgen.core.workload.workload_files import read_workload_text
    from loadgen.core.workload.yaml_marks import read_yaml

    if not Path(profile).is_file():
        return profile
    document, errors = read_yaml(read_workload_text(profile), profile, {})
    if errors:
        raise CombinedError(errors)
    return str(document.get("name", profile))


def find_published_rate(name: str, profile: str) -> MeasuredRate:
    """Return the published Server rate of the system whose name contains a text.

    Raises:
        UserError: No system, or several, have such a name, or the workload has no published
            lengths.
    """
    profiles = {row.profile: row for row in published.profiles().rows}
    if profile not in profiles:
        raise UserError(
            "unknown_name",
            f'no published lengths of "{profile}"',
            f"{PUBLISHED}{name}",
            did_you_mean(profile, list(profiles)),
        )
    system = _find_published_system(name)
    return published_rate(
        system.label,
        system.server,
        gpus=system.gpus,
        output_tokens=profiles[profile].output,
        workload=profile,
        publication=f"MLPerf Inference {system.round}, {system.quality}",
    )


def _find_published_system(name: str) -> published.System:
    systems = published.mlperf().rows
    matching = [system for system in systems if name.lower() in system.label.lower()]
    # Systems with a Server rate are preferred, because an Offline rate cannot be used.
    with_rate = [system for system in matching if system.server is not None] or matching
    if len(with_rate) == 1:
        return with_rate[0]
    candidates = with_rate or systems
    labels = "; ".join(system.label for system in candidates if system.server is not None)
    raise UserError(
        "ambiguous" if with_rate else "unknown_name",
        f'{"several systems are" if with_rate else "no published system is"} called "{name}"',
        f"{PUBLISHED}{name}",
        f"a part of one of: {labels}",
    )


def describe_published_capacity(workload: str) -> list[str]:
    """Return sentences on what the published table says of a packaged workload.

    Returns an empty list for other workloads.
    """
    rack = published.rack(published.nodes().rows)
    results = [
        published.arithmetic(row, rack)
        for row in published.profiles().rows
        if row.profile == workload
    ]
    return [
        f"published for {workload}: ~{result.profile.published_per_s:,.0f} per second of a rack of "
        f"72 GPUs ({result.by_output:,.0f} by output tokens alone), from an Offline rate without a "
        "limit on latency: what that arithmetic ignores is in docs/published.md"
        for result in results
    ]


def _check_same_slo(slo: Sequence[str], evidence: Evidence, source: str) -> None:
    """Raise UserError if a stored result was measured under another SLO than requested."""
    from loadgen.core.stats.quantiles import milliseconds
    from loadgen.cost.comparability import slo_words

    flags = read_flags(slo=tuple(slo))
    if flags.errors:
        raise CombinedError(flags.errors)
    if not slo:
        return
    goodput = evidence.summary.goodput
    measured = {(term.metric, term.quantile): term.limit_ms for term in goodput.slo}
    requested = flags.replacement_slo
    if requested is not None and flags.added_slo is None:
        limits = {
            (term.metric, term.quantile): milliseconds(term.limit_ns) for term in requested.terms
        }
        if requested.goodput_share == goodput.share_limit and limits == measured:
            return
    raise UserError(
        "no_effect",
        f"a stored result keeps the SLO that it was measured under: {slo_words(evidence.summary)}",
        f"--slo, {source}",
        "search again under this one: loadgen search --slo; or name a machine to search now: "
        "sim:gb300-vm",
    )
