"""Apply the options of the command line to a workload.

docs/reference/workload-file.md describes the rules: an option for the load replaces the measured
stages, a duration or count replaces their ends, and SLO terms replace the SLO of the workload or
are added to it. `flags.py` reads the options, and `stage_overrides.py` applies those of the stages.
"""

from __future__ import annotations

from loadgen.core import seeds
from loadgen.core.slo import (
    ATTAINMENT,
    MISSING_DEADLINES,
    MISSING_DEADLINES_HINT,
    Slo,
    merge_slos,
)
from loadgen.core.workload.diagnostics import DocumentErrors
from loadgen.core.workload.distributions import FixedTokens
from loadgen.core.workload.flags import Overrides
from loadgen.core.workload.question_classes import add_questions
from loadgen.core.workload.request_classes import Mix, Requests
from loadgen.core.workload.request_kinds import FromFile, FromTrace, Synthetic
from loadgen.core.workload.schema import Workload
from loadgen.core.workload.stage_overrides import changed_trace_fields, override_stages
from loadgen.core.workload.tasks import Task
from loadgen.core.workload.trajectories import Trajectories
from loadgen.core.workload.trajectory_overrides import (
    override_trajectories,
    refuse_trajectory_options,
)


def apply_overrides(workload: Workload, overrides: Overrides, errors: DocumentErrors) -> Workload:
    """Return the workload as changed by the options of the command line.

    Options that contradict the workload or each other are added to `errors`. An option that is not
    specified is None, or empty, and changes nothing.
    """
    # These fields depend on the workload and on several options.
    combined_values = {
        "requests": add_questions(
            _override_requests(workload.requests, overrides, errors), overrides, errors
        ),
        "stages": override_stages(workload, overrides, errors),
        "slo": _override_slo(workload, overrides, errors),
        "limits": workload.limits.model_copy(update=dict(overrides.limits)),
        "replaced_stages": _names_of_replaced_stages(workload, overrides),
        "salt": _override_salt(workload, overrides, errors),
    }

    # These options each set one field of the workload, if they are specified.
    option_values = {
        "grace_ns": overrides.grace,
        "timeout_ns": overrides.timeout,
        "stall_timeout_ns": overrides.stall_timeout,
        "stop_when": overrides.stop_when if overrides.stop_when else None,
        "max_in_flight": overrides.max_in_flight,
        "max_in_prefill": overrides.max_in_prefill,
        "seed": overrides.seed,
        "schedule_seed": overrides.schedule_seed,
    }
    specified_values = {field: value for field, value in option_values.items() if value is not None}
    return workload.model_copy(update=combined_values | specified_values)


def _override_salt(workload: Workload, overrides: Overrides, errors: DocumentErrors) -> str | None:
    """Return the salt of the option `--salt`, or else that of the workload.

    A salt is a text from which the prompts are generated: with the same salt and seed, a run sends
    the same prompts again. That must not happen if a workload states which share of its prompts is
    in the cache of the server (`cache`), because an earlier run would have filled the cache. So
    such a workload gets a random salt in every run (`seeds.FRESH`) unless one is specified.
    """
    if overrides.salt is not None:
        _check_salt_has_effect(overrides.salt, workload.requests, errors)
        return overrides.salt

    states_cache_share = (
        isinstance(workload.requests, Synthetic) and workload.requests.cache is not None
    )
    if states_cache_share and not workload.salt:
        return seeds.FRESH

    return workload.salt


def _check_salt_has_effect(salt: str, requests: Requests, errors: DocumentErrors) -> None:
    """Add an error for a salt with prompts of a file, which it cannot change."""
    if isinstance(requests, FromFile):
        problem = "a salt changes generated prompts, but prompts of a file are sent unchanged"
        errors.add_option("conflict", problem, f"--salt {salt}", "leave the option out")


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


def _names_of_replaced_stages(workload: Workload, overrides: Overrides) -> tuple[str, ...]:
    """Return the names of the stages of the file that one stage of the options replaces.

    `--request-rate` and `--concurrency` describe a load of a single stage, which replaces all
    measured stages. If there were several, a note tells the user their names.

    Options may be applied to a workload more than once. So if these options replace nothing, the
    names of an earlier replacement are returned.
    """
    measured_stages = [stage for stage in workload.stages if stage.measured]
    has_load_option = overrides.request_rate is not None or overrides.concurrency is not None
    if not has_load_option or len(measured_stages) <= 1:
        return workload.replaced_stages

    # In a run, a stage without a name is called "load".
    return tuple(stage.name or "load" for stage in measured_stages)


def _override_requests(
    requests: Requests, overrides: Overrides, errors: DocumentErrors
) -> Requests:
    """Return the requests as changed by the options for lengths and for traces.

    What the options `--input-tokens` and `--output-tokens` can set depends on the requests:

    - Generated prompts: both lengths.
    - Rows of a data set, or its sessions: the output length, which may also be "unlimited".
    - A trace, a task and a mix of classes: nothing, because these have lengths of their own.

    An error is added for each length that cannot be set.
    """
    if isinstance(requests, Trajectories):
        return override_trajectories(requests, overrides, errors)
    refuse_trajectory_options(overrides, errors)

    if isinstance(requests, FromTrace):
        _refuse_length_options("trace", overrides, errors)
        return requests.model_copy(update=changed_trace_fields(overrides))

    if isinstance(requests, Task | Mix):
        length_owner = "steps" if isinstance(requests, Task) else "classes"
        _refuse_length_options(length_owner, overrides, errors)
        return requests

    _check_length_options(requests, overrides, errors)
    return requests.model_copy(update=_changed_lengths(overrides))


def _changed_lengths(overrides: Overrides) -> dict[str, FixedTokens | str]:
    """Return the fields of requests that the options for lengths set, with their values."""
    changes: dict[str, FixedTokens | str] = {}
    if overrides.input_tokens is not None:
        changes["input_tokens"] = FixedTokens.model_construct(value=overrides.input_tokens)

    if overrides.output_tokens == "unlimited":
        changes["output_tokens"] = "unlimited"
    elif overrides.output_tokens is not None:
        changes["output_tokens"] = FixedTokens.model_construct(value=overrides.output_tokens)

    return changes


def _check_length_options(
    requests: Synthetic | FromFile, overrides: Overrides, errors: DocumentErrors
) -> None:
    """Add an error for a length that these requests cannot have."""
    if overrides.input_tokens is not None and isinstance(requests, FromFile):
        problem = "the prompts come from a file, so their length cannot be set"
        option = f"--input-tokens {overrides.input_tokens}"
        errors.add_option("conflict", problem, option, "leave the option out")
    if overrides.output_tokens == "unlimited" and not isinstance(requests, FromFile):
        problem = "only rows of a data set can be sent without an output limit"
        hint = "give a number of tokens, for example --output-tokens 200"
        errors.add_option("conflict", problem, "--output-tokens unlimited", hint)


def _refuse_length_options(length_owner: str, overrides: Overrides, errors: DocumentErrors) -> None:
    """Add an error for each option that sets a length although the requests have their own.

    `length_owner` is what defines the lengths of the requests, such as "trace".
    """
    options = {"--input-tokens": overrides.input_tokens, "--output-tokens": overrides.output_tokens}
    for option, tokens in options.items():
        if tokens is not None:
            problem = f"the lengths are defined by the {length_owner}"
            errors.add_option("conflict", problem, f"{option} {tokens}", "leave the option out")


def _override_slo(workload: Workload, overrides: Overrides, errors: DocumentErrors) -> Slo | None:
    """Return the SLO of the workload as changed by the options.

    `--slo ttft:2s` replaces the SLO of the workload, and `--slo +ttft:2s` adds a term to it. An
    error is added if the result has no effect or no meaning.
    """
    if overrides.replacement_slo is None and overrides.added_slo is None:
        return workload.slo
    _check_slo_has_effect(workload, errors)
    base_slo = overrides.replacement_slo or workload.slo or Slo()
    slo = merge_slos(base_slo, overrides.added_slo or Slo())
    _check_attainment_has_limit(slo, workload.slo, errors)
    if slo.lacks_token_deadlines:
        errors.add_option(
            "no_slo", f"the objective {MISSING_DEADLINES}", "--slo fluidity", MISSING_DEADLINES_HINT
        )
    return slo


def _check_slo_has_effect(workload: Workload, errors: DocumentErrors) -> None:
    """Add an error if each request class has its own SLO, which hides that of the workload."""
    if not isinstance(workload.requests, Mix):
        return
    if all(request_class.slo for request_class in workload.requests.classes.values()):
        hint = (
            "copy the workload file and remove the slo of each class from the copy: --slo then "
            "applies to all classes"
        )
        errors.add_option("no_effect", "each request class has its own SLO", "--slo", hint)


def _check_attainment_has_limit(slo: Slo, workload_slo: Slo | None, errors: DocumentErrors) -> None:
    """Add an error if an SLO has an attainment without a latency limit.

    The attainment, `slo.goodput_share`, is the share of requests that must meet all latency limits.
    The option `--slo attainment:99%` replaces the SLO of the workload with its limits, and
    `--slo +attainment:99%`, with a plus, keeps them.

    Args:
        slo: The SLO of the workload as the options have changed it.
        workload_slo: The SLO of the workload before.
        errors: The error is added here.
    """
    attainment = slo.goodput_share
    has_latency_limits = bool(slo.terms)
    if has_latency_limits or attainment is None:
        return

    term = f"{ATTAINMENT}:{attainment * 100:g}%"
    hint = "add --slo ttft:2s"
    had_latency_limits = workload_slo is not None and bool(workload_slo.terms)
    if had_latency_limits:
        hint = f"use --slo +{term} to keep the limits of the workload, or add --slo ttft:2s"

    problem = "an attainment needs a latency limit that requests can meet"
    errors.add_option("no_slo", problem, f"--slo {term}", hint)
