"""`loadgen capacity`: how many users, VMs and racks, from a run under its SLO and from published figures.

Parses flags and prints; the arithmetic is in `cost.capacity_planning`, the published figures in `mlperf.published`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.core import units
from loadgen.core.errors import OK, UserError, meant
from loadgen.core.execution.options import typed
from loadgen.shell.options import AllowInvalid
from loadgen.shell.output import print_report, say_changed

if TYPE_CHECKING:
    from loadgen.cost.capacity_planning import MeasuredRate
    from loadgen.pricing.evidence import Evidence


def capacity(
    profile: Annotated[str, typer.Option("--profile", help="qa, rag, summarization or agentic.")],
    users: Annotated[int | None, typer.Option("--users", min=1, help="Users who work at the same time.")] = None,
    think: Annotated[str, typer.Option("--think", help="From an answer to the user's next question.")] = "30s",
    results: Annotated[Path | None, typer.Option("--results", help="Folder of a run or a search.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="GPUs of that run, where it recorded none.")] = None,
    gpus_per_vm: Annotated[int, typer.Option("--gpus-per-vm", min=1, help="GPUs of a VM, the fault domain.")] = 4,
    vms_per_rack: Annotated[int, typer.Option("--vms-per-rack", min=1, help="VMs of a rack.")] = 18,
    allow_invalid: AllowInvalid = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """How many users, VMs and racks: the published arithmetic, what it ignores, and what a run under the SLO says.

    Exit: 0 done, 2 wrong flags or results, 3 the result is not a valid measurement.

    Example: loadgen capacity --profile rag --results search --users 5000
    """
    from loadgen.cost import capacity_planning, inputs, published
    from loadgen.cost import capacity_text as report

    known = [row.profile for row in published.profiles().rows]
    if profile not in known:
        raise UserError("unknown_name", f'no profile is called "{profile}"', "--profile", meant(profile, known))
    if users is not None and results is None:
        hint = "--results DIR: a run of this profile under its SLO; an Offline rate says nothing about users"
        raise UserError("missing_option", "how many users a machine carries needs a run", "--results", hint)
    think_s = typed("--think", think, units.seconds) or 0.0
    if results is not None:
        say_changed(results)
    evidence = None if results is None else inputs.read_evidence([results], allow_invalid=allow_invalid)[0]
    measured = None if evidence is None else measured_rate(evidence, profile, gpus)
    plan = None
    if measured is not None:
        plan = capacity_planning.fleet(measured.rate, measured.gpus, gpus_per_vm=gpus_per_vm, vms_per_rack=vms_per_rack)
    if plan is not None and measured is not None and users is not None:
        plan = capacity_planning.plan(plan, users, think_s, measured.response_s)
    if as_json:
        print(report.render_json(profile, evidence, measured, plan), end="")
    else:
        print_report(report.report(profile, evidence, measured, plan))
    return OK


def measured_rate(evidence: Evidence, profile: str, gpus: int | None) -> MeasuredRate:
    """The rate that a result of this profile was seen to carry. Raises UserError for another workload."""
    from loadgen.cost.capacity_planning import measured
    from loadgen.cost.inputs import gpus_of

    summary = evidence.summary
    if summary.run.workload != profile:
        problem = f'the run is of the workload "{summary.run.workload}", not of {profile}'
        hint = f"ask for {summary.run.workload}, or give a run of {profile}"
        raise UserError("mismatch", problem, evidence.folder, hint)
    gpu_count = gpus_of(evidence, gpus, "--gpus")
    if gpu_count is None:
        raise UserError("missing_option", "the run does not say how many GPUs it used", evidence.folder, "--gpus 4")
    return measured(evidence, gpu_count)
