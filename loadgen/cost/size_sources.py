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
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import TargetFacts
from loadgen.core.run_folder import refuse_shard
from loadgen.core.slo import Slo
from loadgen.core.workload.flags import read_flags
from loadgen.cost import published
from loadgen.cost.capacity_planning import MeasuredRate, derive_measured_rate
from loadgen.cost.evidence_reader import read_evidence, resolve_gpu_count
from loadgen.cost.machine_searches import (
    SIMULATED,
    RunCommand,
    build_search_command,
    find_simulated_target,
)
from loadgen.cost.recorded_runs import with_record_reader
from loadgen.cost.sizing import convert_published_rate
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
    """Return the rate at which one source can serve the requested workload, and its evidence.

    A published rate is converted. A simulated machine is searched, which takes minutes unless the
    search is already stored, and its result is then read like any other result folder.

    Raises:
        UserError: The source does not exist, is of another workload, or was measured under another
            SLO than requested.
    """
    if is_published(source):
        rate = find_published_rate(source.removeprefix(PUBLISHED), request.profile)
        return SourceCapacity(rate, None)

    if is_simulated_machine(source):
        folder = run_search(source, request.profile, request.slo, request.run_command)
        evidence = _read_result_folder(folder, request)
    else:
        evidence = _read_result_folder(Path(source), request)
        _check_same_slo(request.slo, evidence, source)

    rate = derive_rate_for_workload(evidence, read_workload_name(request.profile), request.gpus)
    return SourceCapacity(replace(rate, name=source), evidence)


def _read_result_folder(folder: Path, request: SourceRequest) -> Evidence:
    """Return the measurements in a result folder, with access to the records of their requests.

    A folder whose files were changed since they were written is read, with a warning.

    Raises:
        UserError: The folder has no usable result, or only that of one node of a cluster.
    """
    refuse_shard(folder)
    warn_if_changed(folder)
    (evidence,) = read_evidence([folder], allow_invalid=request.allow_invalid)
    return with_record_reader(evidence)


def find_source_price(prices: Prices, target: TargetFacts, price_name: str, source: str) -> Price:
    """Return the one price of a source: the price that the user chose, or the one for its target.

    Prices that differ only in commitment, such as "on demand" and "1 year", are ambiguous here.

    Args:
        prices: The prices to choose from.
        target: What was measured.
        price_name: The name of the price that the user chose, or "".
        source: The source, as error messages name it.

    Raises:
        UserError: No price matches, or several do.
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


def predict_target_facts(source: str) -> TargetFacts:
    """Return the facts on its target that the search of a simulated machine will record.

    They are needed before the search, to report a missing price before minutes of searching.
    """
    target = find_simulated_target(source)
    model = target.context.model if target.context else ""
    return TargetFacts(name=target.name, model=model, simulated=True)


def derive_rate_for_workload(evidence: Evidence, workload: str, gpus: int | None) -> MeasuredRate:
    """Return the rate that evidence shows, after checking that it can be used for a workload.

    Args:
        evidence: The measurements.
        workload: The name of the workload that the machines must serve.
        gpus: The number of GPUs that the user specified, for a run that recorded none.

    Raises:
        UserError: The evidence is of another workload, its number of GPUs is not known, or it
            shows no rate that could be used for users.
    """
    measured_workload = evidence.summary.run.workload
    if measured_workload != workload:
        raise UserError(
            "mismatch",
            f'the result has the workload "{measured_workload}", not {workload}',
            evidence.folder,
            f"use {measured_workload}, or a result of {workload}",
        )

    gpu_count = resolve_gpu_count(evidence, gpus)
    if gpu_count is None:
        raise UserError(
            "missing_option",
            "the result has no number of GPUs",
            evidence.folder,
            "--gpus 4",
        )

    return derive_measured_rate(evidence, gpu_count)


def run_search(source: str, profile: str, slo: Sequence[str], run_command: RunCommand) -> Path:
    """Search the capacity of a simulated machine and return the folder of the result.

    A stored search of the same inputs is reused. Only the progress of the search is shown, because
    `loadgen size` has a report of its own.

    Raises:
        UserError: No capacity was found.
    """
    search = build_search_command(source, profile, slo)
    print_status(f"Searching: loadgen {shlex.join(search.arguments)}")

    with (
        open(os.devnull, "w", encoding="utf-8") as discarded,
        contextlib.redirect_stdout(discarded),
    ):
        exit_code = run_command(search.arguments)

    capacity_file = search.folder / CAPACITY_FILE
    has_capacity = capacity_file.is_file()

    # A search that was stopped early may leave a capacity, as a lower bound. With the exit code
    # SLO_MISSED, `capacity.json` only says why no load passed.
    has_lower_bound = has_capacity and exit_code != SLO_MISSED
    if exit_code == OK or has_lower_bound:
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


def read_workload_name(profile: str) -> str:
    """Return the name of a workload, by which results of the same workload are recognised.

    Args:
        profile: A packaged workload, whose name this is, or the path of a workload file with a key
            `name`.

    Raises:
        CombinedError: The file has errors.
    """
    from loadgen.core.workload.workload_files import read_workload_text
    from loadgen.core.workload.yaml_marks import read_yaml

    if not Path(profile).is_file():
        return profile

    without_variables: dict[str, str] = {}
    document, errors = read_yaml(read_workload_text(profile), profile, without_variables)
    if errors:
        raise CombinedError(errors)

    return str(document.get("name", profile))


def find_published_rate(name: str, profile: str) -> MeasuredRate:
    """Return the published rate of a system, converted to requests of a workload.

    It is the rate of the Server scenario of MLPerf, whose requests have a latency limit.

    Args:
        name: A part of the name of the system, such as "GB300".
        profile: The workload. Its published number of output tokens converts the token rate.

    Raises:
        UserError: No system, or several, have such a name, the system has no Server rate, or the
            workload has no published lengths.
    """
    profiles = {row.profile: row for row in published.load_profiles().rows}
    if profile not in profiles:
        raise UserError(
            "unknown_name",
            f'no published token counts for the workload "{profile}"',
            f"{PUBLISHED}{name}",
            did_you_mean(profile, list(profiles)),
        )

    system = _find_published_system(name)
    return convert_published_rate(
        system.label,
        system.server,
        gpus=system.gpus,
        output_tokens=profiles[profile].output,
        workload=profile,
        publication=f"MLPerf Inference {system.round}, {system.quality}",
    )


def _find_published_system(name: str) -> published.System:
    """Return the one published system whose label contains a text, in upper or lower case.

    Systems with a Server rate are preferred. An Offline rate has no limit on latency, so it says
    nothing about how many users a system can serve.

    Raises:
        UserError: No system has such a label, or several have.
    """
    all_systems = published.load_systems().rows
    matching = [system for system in all_systems if name.lower() in system.label.lower()]
    matching_with_rate = [system for system in matching if system.server is not None]
    candidates = matching_with_rate or matching
    if len(candidates) == 1:
        return candidates[0]

    suggestions = candidates or all_systems
    labels = "; ".join(system.label for system in suggestions if system.server is not None)
    place = f"{PUBLISHED}{name}"
    hint = f"give a part of one of: {labels}"
    if not candidates:
        raise UserError("unknown_name", f'unknown published system "{name}"', place, hint)

    raise UserError("ambiguous", f'several published systems match "{name}"', place, hint)


def describe_published_capacity(workload: str) -> list[str]:
    """Return a remark on the capacity that was published for a workload, if there is one.

    The published table divided the Offline rate of a rack by all tokens of an interaction. The
    remark states that number and the one that follows from output tokens alone. The list is empty
    if the table has no row for the workload.
    """
    rack_rates = published.compute_rack_rates(published.load_nodes().rows)
    remarks = []
    for row in published.load_profiles().rows:
        if row.profile != workload:
            continue

        recomputed = published.recompute_profile(row, rack_rates)
        remarks.append(
            f"published for {workload}: ~{row.published_per_s:,.0f} per second for a "
            f"rack of 72 GPUs ({recomputed.per_output_token:,.0f} by output tokens "
            "alone). It is computed from an Offline rate without a latency limit; "
            "docs/evidence/published.md lists what this ignores"
        )

    return remarks


def _check_same_slo(slo: Sequence[str], evidence: Evidence, source: str) -> None:
    """Check that a stored result was measured under the SLO that the user requests, if any.

    A capacity is the highest rate under one SLO and says nothing about another SLO, so `--slo`
    cannot change a stored result. It is accepted only if it states the SLO of the result.

    Raises:
        CombinedError: The text of an SLO term is wrong.
        UserError: The result was measured under another SLO.
    """
    from loadgen.cost.comparability import describe_slo

    flags = read_flags(slo=tuple(slo))
    if flags.errors:
        raise CombinedError(flags.errors)
    if not slo:
        return

    # Terms that extend the SLO of a workload (`--slo +...`) are no complete SLO to compare with.
    has_extending_terms = flags.added_slo is not None
    complete_slo = None if has_extending_terms else flags.replacement_slo
    if complete_slo is not None and _is_same_slo(complete_slo, evidence.summary):
        return

    raise UserError(
        "no_effect",
        f"the result was measured under another SLO: {describe_slo(evidence.summary)}",
        f"--slo, {source}",
        "remove --slo, or search again with loadgen search --slo",
    )


def _is_same_slo(requested: Slo, summary: Summary) -> bool:
    """Return True if an SLO has the limits and the required shares of the SLO of a run.

    The order of the terms does not matter.
    """
    from loadgen.core.stats.quantiles import milliseconds

    measured = summary.goodput
    measured_limits = {(term.metric, term.quantile): term.limit_ms for term in measured.slo}
    requested_limits = {
        (term.metric, term.quantile): milliseconds(term.limit_ns) for term in requested.terms
    }
    has_same_share = requested.goodput_share == measured.share_limit

    answers_objective = None if summary.answers is None else summary.answers.objective
    measured_answers_share = None if answers_objective is None else answers_objective.limit
    has_same_answers_share = requested.answers_share == measured_answers_share

    return has_same_share and has_same_answers_share and requested_limits == measured_limits
