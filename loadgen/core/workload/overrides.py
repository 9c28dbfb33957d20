"""Apply the options of the command line to a workload.

docs/reference/workload-file.md describes the rules: an option for the load replaces the measured
stages, a duration or count replaces their ends, and SLO terms replace the SLO of the workload or
are added to it. `flags.py` reads the options, and `stage_overrides.py` applies those of the stages.
"""

from __future__ import annotations

from typing import Any

from loadgen.core import seeds
from loadgen.core.slo import ATTAINMENT, Slo, merge_slos
from loadgen.core.workload.diagnostics import DocumentErrors
from loadgen.core.workload.distributions import FixedTokens
from loadgen.core.workload.flags import Overrides
from loadgen.core.workload.request_classes import Mix, Requests
from loadgen.core.workload.request_kinds import FromFile, FromTrace, Synthetic
from loadgen.core.workload.schema import Workload
from loadgen.core.workload.stage_overrides import changed_trace_fields, override_stages
from loadgen.core.workload.tasks import Task


def apply_overrides(workload: Workload, overrides: Overrides, errors: DocumentErrors) -> Workload:
    """Return the workload as changed by the options of the command line.

    Options that contradict the workload or each other are added to `errors`. An option that is not
    specified is None, or empty, and changes nothing.
    """
    changes: dict[str, Any] = {
        "requests": _override_requests(workload.requests, overrides, errors),
        "stages": override_stages(workload, overrides, errors),
        "slo": _override_slo(workload, overrides, errors),
        "limits": workload.limits.model_copy(update=dict(overrides.limits)),
        "replaced": _replaced_stages(workload, overrides),
        "salt": workload.salt,
    }
    # If the workload states what the cache of the server contains, it must not contain prompts of
    # an earlier run. So the texts are new in every run, unless `--salt` below fixes them.
    if isinstance(workload.requests, Synthetic) and workload.requests.cache is not None:
        changes["salt"] = workload.salt or seeds.FRESH
    options_by_field = {
        "grace_ns": overrides.grace,
        "timeout_ns": overrides.timeout,
        "stall_timeout_ns": overrides.stall_timeout,
        "stop_when": overrides.stop_when or None,
        "max_in_flight": overrides.max_in_flight,
        "max_in_prefill": overrides.max_in_prefill,
        "seed": overrides.seed,
        "schedule_seed": overrides.schedule_seed,
        "salt": overrides.salt,
    }
    changes |= {field: value for field, value in options_by_field.items() if value is not None}
    if overrides.salt is not None and isinstance(workload.requests, FromFile):
        problem = "a salt changes generated prompts, but prompts of a file are sent unchanged"
        errors.add_option("conflict", problem, f"--salt {overrides.salt}", "leave the option out")
    return workload.model_copy(update=changes)


def with_unique_prompts(workload: Workload, run_name: str) -> Workload:
    """Return the workload of one of several runs with the same seed, with prompts of its own.

    Its salt depends on the name of the run (`c8`, `r2`). Otherwise a run would send the prompts of
    another one, which the prefix cache of a server may remember. A workload without a seed does not
    change, because each run draws its own seed.
    """
    if workload.seed is None:
        return workload
    salt = seeds.salt_of_run(workload.seed, workload.salt, run_name)
    return workload.model_copy(update={"salt": salt})


def _replaced_stages(workload: Workload, overrides: Overrides) -> tuple[str, ...]:
    """Return the names of the measured stages if one stage of the command line replaces several."""
    measured = tuple(stage.name or "load" for stage in workload.stages if stage.measured)
    has_load_option = overrides.request_rate is not None or overrides.concurrency is not None
    return measured if len(measured) > 1 and has_load_option else workload.replaced


def _override_requests(
    requests: Requests, overrides: Overrides, errors: DocumentErrors
) -> Requests:
    """Return the requests as changed by the options for lengths and for traces.

    What the options `--input-tokens` and `--output-tokens` can set depends on the requests:

    - Generated prompts: both lengths.
    - Rows of a data set: the output length, which may also be "unlimited".
    - A trace, a task and a mix of classes: nothing, because these have lengths of their own.

    An error is added for each length that cannot be set.
    """
    if isinstance(requests, FromTrace | Task | Mix):
        _refuse_lengths(requests, overrides, errors)
        if isinstance(requests, FromTrace):
            return requests.model_copy(update=changed_trace_fields(overrides))
        return requests
    changes: dict[str, Any] = {}
    if overrides.input_tokens is not None:
        changes["input_tokens"] = FixedTokens.model_construct(value=overrides.input_tokens)
        if isinstance(requests, FromFile):
            problem = "the prompts come from a file, so their length cannot be set"
            option = f"--input-tokens {overrides.input_tokens}"
            errors.add_option("conflict", problem, option, "leave the option out")
    if overrides.output_tokens == "unlimited":
        changes["output_tokens"] = "unlimited"
        if not isinstance(requests, FromFile):
            problem = "only rows of a data set can be sent without an output limit"
            hint = "give a number of tokens, for example --output-tokens 200"
            errors.add_option("conflict", problem, "--output-tokens unlimited", hint)
    elif overrides.output_tokens is not None:
        changes["output_tokens"] = FixedTokens.model_construct(value=overrides.output_tokens)
    return requests.model_copy(update=changes)


def _refuse_lengths(
    requests: FromTrace | Task | Mix, overrides: Overrides, errors: DocumentErrors
) -> None:
    """Add an error for each length that options set although the requests have their own."""
    owner = {FromTrace: "trace", Task: "steps", Mix: "classes"}[type(requests)]
    options = {"--input-tokens": overrides.input_tokens, "--output-tokens": overrides.output_tokens}
    for option, tokens in options.items():
        if tokens is not None:
            problem = f"the lengths are defined by the {owner}"
            errors.add_option("conflict", problem, f"{option} {tokens}", "leave the option out")


def _override_slo(workload: Workload, overrides: Overrides, errors: DocumentErrors) -> Slo | None:
    """Return the SLO of the workload as changed by the options.

    `--slo ttft:2s` replaces the SLO of the workload, and `--slo +ttft:2s` adds a term to it. An
    error is added in two cases: if each class has an SLO of its own, so that this one has no
    effect, and if there is an attainment but no latency limit that requests could attain.
    """
    if overrides.replacement_slo is None and overrides.added_slo is None:
        return workload.slo
    # Requests of a single kind have no classes.
    classes = getattr(workload.requests, "classes", {}).values()
    if classes and all(request_class.slo for request_class in classes):
        hint = (
            "write the limits of the classes in your own workload file, which may extend this one"
        )
        errors.add_option("no_effect", "each request class has its own SLO", "--slo", hint)
    slo = merge_slos(
        overrides.replacement_slo or workload.slo or Slo(), overrides.added_slo or Slo()
    )
    if not slo.terms and slo.goodput_share is not None:
        share = f"{slo.goodput_share * 100:g}%"
        hint = "add --slo ttft:2s"
        if workload.slo is not None and workload.slo.terms:
            hint = (
                f"use --slo +{ATTAINMENT}:{share} to keep the limits of the workload, "
                "or add --slo ttft:2s"
            )
        problem = "an attainment needs a latency limit that requests can meet"
        errors.add_option("no_slo", problem, f"--slo {ATTAINMENT}:{share}", hint)
    return slo
