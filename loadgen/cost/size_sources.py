"""Finds the capacity of each source that is named to `loadgen size`.

A source is one of three things: `published:SYSTEM` (a row of the published table), `sim:PRESET` (a
simulated machine, which is searched), or a result folder.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.cli.output import print_status, warn_if_changed
from loadgen.core.errors import OK, SLO_MISSED, CombinedError, UserError, did_you_mean
from loadgen.core.metrics.goodput import Goodput
from loadgen.core.results.manifest import TargetFacts
from loadgen.core.run_folder import refuse_shard
from loadgen.core.slo import Slo
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
    """The conditions under which `loadgen size` needs the capacity of its sources.

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
    """Return the capacity of one source, at which it can be used for the requested workload.

    A published rate is converted. A simulated machine is searched, which takes minutes, and its
    search is then read like any other result folder.

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
    warn_if_changed(folder)
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
            f"{source} has several prices that differ in commitment",
            "--price",
            " or ".join(f"--price '{source}={price.name}'" for price in matching),
        )
    return matching[0]


def expected_target(source: str) -> TargetFacts:
    """Return the facts on its target that the search of a simulated machine will record.

    They are needed before the search, to report a missing price before minutes of searching.
    """
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
            f'the result has the workload "{measured_workload}", not {workload}',
            evidence.folder,
            f"use {measured_workload}, or a result of {workload}",
        )
    gpu_count = gpus_of(evidence, gpus)
    if gpu_count is None:
        raise UserError(
            "missing_option",
            "the result has no number of GPUs",
            evidence.folder,
            "--gpus 4",
        )
    return measured_rate_of(evidence, gpu_count)


def run_search(source: str, profile: str, slo: Sequence[str], run_command: RunCommand) -> Path:
    """Search a simulated machine, or reuse an equal search, and return the folder of its result.

    Only the progress of the search is shown, because `loadgen size` has a report of its own. A
    search that was stopped early may still leave a capacity, as a lower bound. A search that ends
    with "SLO missed" found no load that passes.

    Raises:
        UserError: No capacity was found.
    """
    search = search_command(source, profile, slo)
    print_status(f"Searching: loadgen {shlex.join(search.arguments)}")
    with (
        open(os.devnull, "w", encoding="utf-8") as discarded,
        contextlib.redirect_stdout(discarded),
    ):
        exit_code = run_command(search.arguments)
    capacity_file = search.folder / CAPACITY_FILE
    has_capacity = capacity_file.is_file()
    if exit_code == OK or (exit_code != SLO_MISSED and has_capacity):
        return search.folder
    reason = "the search did not finish"
    if has_capacity:
        reason = load_capacity(capacity_file.read_bytes()).lower_bound_reason
    raise UserError(
        "no_figure",
        f"no capacity found: {reason}",
        source,
        f"see loadgen report {shlex.quote(str(search.folder))}, or relax --slo",
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
            f'no published token counts for the workload "{profile}"',
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
    """Return the one published system whose label contains a text, in upper or lower case.

    Of several such systems, those with a Server rate are preferred: an Offline rate has no limit on
    latency, so it cannot be used for users.

    Raises:
        UserError: No system has such a label, or several have.
    """
    all_systems = published.mlperf().rows
    matching = [system for system in all_systems if name.lower() in system.label.lower()]
    matching_with_rate = [system for system in matching if system.server is not None]
    candidates = matching_with_rate or matching
    if len(candidates) == 1:
        return candidates[0]
    suggested = candidates or all_systems
    labels = "; ".join(system.label for system in suggested if system.server is not None)
    problem = f'unknown published system "{name}"'
    if candidates:
        problem = f'several published systems match "{name}"'
    raise UserError(
        "ambiguous" if candidates else "unknown_name",
        problem,
        f"{PUBLISHED}{name}",
        f"give a part of one of: {labels}",
    )


def describe_published_capacity(workload: str) -> list[str]:
    """Return sentences that compare the published capacity for a workload with its source.

    The table of published capacities was computed from the Offline rates of a rack. Returns an
    empty list if the table has no row for the workload.
    """
    rack_rates = published.rack(published.nodes().rows)
    recomputed_rows = [
        published.arithmetic(row, rack_rates)
        for row in published.profiles().rows
        if row.profile == workload
    ]
    return [
        f"published for {workload}: ~{row.profile.published_per_s:,.0f} per second for a rack of "
        f"72 GPUs ({row.by_output:,.0f} by output tokens alone), from an Offline rate without a "
        "limit on latency: what that arithmetic ignores is in docs/evidence/published.md"
        for row in recomputed_rows
    ]


def _check_same_slo(slo: Sequence[str], evidence: Evidence, source: str) -> None:
    """Check that a stored result was measured under the SLO that the user requests, if any.

    A capacity is the highest rate under one SLO. It says nothing about another SLO, so `--slo`
    cannot be applied to a stored result afterwards.

    Raises:
        CombinedError: The text of an SLO term is wrong.
        UserError: The result was measured under another SLO.
    """
    from loadgen.cost.comparability import slo_words

    flags = read_flags(slo=tuple(slo))
    if flags.errors:
        raise CombinedError(flags.errors)
    if not slo:
        return
    # A term that extends the SLO of a workload (`--slo +...`) is no SLO to compare with.
    requested = flags.replacement_slo if flags.added_slo is None else None
    if requested is not None and _is_measured_slo(requested, evidence.summary.goodput):
        return
    raise UserError(
        "no_effect",
        f"the result was measured under another SLO: {slo_words(evidence.summary)}",
        f"--slo, {source}",
        "remove --slo, or search again with loadgen search --slo",
    )


def _is_measured_slo(requested: Slo, goodput: Goodput) -> bool:
    """Return True if an SLO has the limits and the goodput share under which a run was judged."""
    from loadgen.core.stats.quantiles import milliseconds

    measured_limits = {(term.metric, term.quantile): term.limit_ms for term in goodput.slo}
    requested_limits = {
        (term.metric, term.quantile): milliseconds(term.limit_ns) for term in requested.terms
    }
    is_same_share = requested.goodput_share == goodput.share_limit
    return is_same_share and requested_limits == measured_limits
