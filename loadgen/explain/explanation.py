"""Explains the difference between our run and the result of another tool, metric by metric."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadgen.core.errors import UserError
from loadgen.core.run_folder import is_run, open_run, refuse_shard
from loadgen.explain.comparability import check_comparability
from loadgen.explain.count_parts import explain_counts
from loadgen.explain.latency_parts import explain_latencies, list_withheld_latencies
from loadgen.explain.log_match import list_log_differences
from loadgen.explain.other_result import read_other_result
from loadgen.explain.our_run import LoadgenRun
from loadgen.explain.parts import ExplainedMetric
from loadgen.explain.rate_parts import explain_rates


class ExplainedDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between two results, which `--json` prints.

    Attributes:
        ours: The folder of our run.
        theirs: The file of the other tool.
        tool: The other tool with its version.
        definitions_version: The version of the tool whose definitions were used.
        definitions_source: Where the definitions are in the source of that tool.
        valid: Whether our run is valid.
        simulated: Whether a simulated server responded to our run.
        differences: Properties of the loads that differ, with `--anyway`. Those that begin with
            "server log" say why the log is not that of the other run.
        unknown: Properties of the load that the file of the other tool does not name.
        remarks: Further differences between the loads, as sentences.
        withheld: Latencies that our run withholds.
        metrics: The metrics that both results have.
    """

    ours: str
    theirs: str
    tool: str
    definitions_version: str
    definitions_source: str
    valid: bool
    simulated: bool
    differences: tuple[str, ...]
    unknown: tuple[str, ...]
    remarks: tuple[str, ...]
    withheld: tuple[str, ...]
    metrics: tuple[ExplainedMetric, ...]


def explain_difference(
    loadgen_path: Path,
    other_path: Path,
    *,
    allow_differences: bool = False,
    server_log: Path | None = None,
) -> ExplainedDifference:
    """Return the difference between our run and the result of another tool, in parts.

    Args:
        loadgen_path: The folder of the run.
        other_path: The result file of the other tool, or a directory with one.
        allow_differences: Whether to explain results of different servers or loads as well.
        server_log: The log of the simulated server that the other tool measured, if there is one.

    Raises:
        UserError: A result cannot be read, our run has no records or no successful request, the
            results are of different servers or loads, or the log is that of another run.
    """
    loadgen_run = _open_loadgen_run(loadgen_path)
    other_result = read_other_result(other_path, server_log)

    # Whether both results are of the same load, and the log is that of the other run.
    comparability = check_comparability(loadgen_run, other_result)
    if comparability.differences and not allow_differences:
        raise UserError(
            "mismatch",
            f"the results are of different loads: {'; '.join(comparability.differences)}",
            f"{loadgen_path} and {other_path}",
            "measure the same load with both tools, or add --anyway to explain them nevertheless",
        )

    log_differences = list_log_differences(loadgen_run, other_result)
    if log_differences and not allow_differences:
        raise UserError(
            "mismatch",
            f"this is not the log of the other run: {'; '.join(log_differences)}",
            f"--server-log {server_log}",
            "give the log of the server from the time when the other tool measured it",
        )

    # The metrics that both results have, with the parts of their differences.
    metrics = (
        *explain_latencies(loadgen_run, other_result),
        *explain_rates(loadgen_run, other_result),
        *explain_counts(loadgen_run, other_result),
    )
    return ExplainedDifference(
        ours=str(loadgen_path),
        theirs=str(other_path),
        tool=other_result.name,
        definitions_version=other_result.definitions.version,
        definitions_source=other_result.definitions.source,
        valid=loadgen_run.summary.verdict.valid,
        simulated=loadgen_run.summary.target.simulated,
        differences=(
            *comparability.differences,
            *[f"server log: {difference}" for difference in log_differences],
        ),
        unknown=comparability.unknown,
        remarks=comparability.remarks,
        withheld=tuple(list_withheld_latencies(loadgen_run, other_result)),
        metrics=metrics,
    )


def _open_loadgen_run(path: Path) -> LoadgenRun:
    """Return the run of loadgen in a folder, with the records of its requests.

    Raises:
        UserError: The folder has no run, or the run has no records or no successful request.
    """
    if not path.exists():
        raise UserError(
            "missing_file",
            "there is no such folder",
            str(path),
            "give the folder of a run of loadgen as the first argument; loadgen list shows them",
        )

    if not is_run(path):
        raise UserError(
            "no_result",
            "this is no folder of a run",
            str(path),
            "give the folder of a single run of loadgen first, then the file of the other tool",
        )

    refuse_shard(path)
    run = open_run(path)
    if run.stored is None:
        raise UserError(
            "no_records",
            "the records of its requests were not kept",
            str(path),
            "metrics can be computed by other definitions only from records; run the load again",
        )

    stored = run.stored
    loadgen_run = LoadgenRun(run.summary, stored.manifest, stored.rows, stored.gaps)
    if loadgen_run.count_successful() == 0:
        raise UserError(
            "no_figure",
            "no request succeeded, so there is nothing to explain",
            str(path),
            f"see the reasons with: loadgen report {path}",
        )
    return loadgen_run
