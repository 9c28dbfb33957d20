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
from loadgen.core.workload.request_classes import Mix
from loadgen.core.workload.request_kinds import FromFile, FromTrace, Synthetic
from loadgen.core.workload.schema import Workload
from loadgen.core.workload.stage_overrides import override_stages, trace_changes
from loadgen.core.workload.tasks import Task

Requests = Synthetic | FromFile | FromTrace | Task | Mix


def apply_overrides(workload: Workload, flags: Overrides, errors: DocumentErrors) -> Workload:
    """Return the workload as changed by the options. Conflicts are added to `errors`.

    The order of the changes matters only for the salt, which an option sets last.
    """
    changes: dict[str, Any] = {
        "requests": _override_requests(workload.requests, flags, errors),
        "stages": override_stages(workload, flags, errors),
        "slo": _override_slo(workload, flags, errors),
        "limits": workload.limits.model_copy(update=dict(flags.limits)),
        "replaced": _replaced_stages(workload, flags),
        "salt": workload.salt,
    }
    # The cache of a server must not contain prompts of an earlier run if the workload states what
    # it contains, so the texts are new in every run.
    if isinstance(workload.requests, Synthetic) and workload.requests.cache is not None:
        changes["salt"] = workload.salt or seeds.FRESH
    simple_options = {
        "grace_ns": flags.grace,
        "timeout_ns": flags.timeout,
        "stall_timeout_ns": flags.stall_timeout,
        "stop_when": flags.stop_when or None,
        "max_in_flight": flags.max_in_flight,
        "max_in_prefill": flags.max_in_prefill,
        "seed": flags.seed,
        "schedule_seed": flags.schedule_seed,
        "salt": flags.salt,
    }
    changes |= {field: value for field, value in simple_options.items() if value is not None}
    if flags.salt is not None and isinstance(workload.requests, FromFile):
        problem = "a salt changes generated prompts; those of a file are sent as they stand"
        errors.add_option("conflict", problem, f"--salt {flags.salt}", "leave the flag out")
    return workload.model_copy(update=changes)


def with_unique_prompts(workload: Workload, run_name: str) -> Workload:
    """Return the workload of one of several runs with the same seed, with prompts of its own.

    Its salt depends on the name of the run (`c8`, `r2`). Otherwise a run would send the prompts of
    another one, which the prefix cache of a server may remember. A workload without a seed does not
    change, because each run draws its own seed.
    """
    if workload.seed is None:
        return workload
    salt = seeds.salt_at(workload.seed, workload.salt, run_name)
    return workload.model_copy(update={"salt": salt})


def _replaced_stages(workload: Workload, flags: Overrides) -> tuple[str, ...]:
    """Return the names of the measured stages if one stage of the command line replaces several."""
    measured = tuple(stage.name or "load" for stage in workload.stages if stage.measured)
    has_load_option = flags.request_rate is not None or flags.concurrency is not None
    return measured if len(measured) > 1 and has_load_option else workload.replaced


def _override_requests(requests: Requests, flags: Overrides, errors: DocumentErrors) -> Requests:
    """Return the requests with the lengths and the choices of a trace that options set.

    Lengths can be set for generated prompts, and for rows of a file the output length. A length
    that cannot be set is an error.
    """
    if isinstance(requests, FromTrace | Task | Mix):
        _refuse_lengths(requests, flags, errors)
        if isinstance(requests, FromTrace):
            return requests.model_copy(update=trace_changes(flags))
        return requests
    changes: dict[str, Any] = {}
    if flags.input_tokens is not None:
        changes["input_tokens"] = FixedTokens.model_construct(value=flags.input_tokens)
        if isinstance(requests, FromFile):
            problem = "the prompts come from a file: their length is what it is"
            option = f"--input-tokens {flags.input_tokens}"
            errors.add_option("conflict", problem, option, "leave the flag out")
    if flags.output_tokens == "unlimited":
        changes["output_tokens"] = "unlimited"
        if not isinstance(requests, FromFile):
            problem = "only rows of a data set can be sent without a limit"
            hint = "a number of tokens: --output-tokens 200"
            errors.add_option("conflict", problem, "--output-tokens unlimited", hint)
    elif flags.output_tokens is not None:
        changes["output_tokens"] = FixedTokens.model_construct(value=flags.output_tokens)
    return requests.model_copy(update=changes)


def _refuse_lengths(
    requests: FromTrace | Task | Mix, flags: Overrides, errors: DocumentErrors
) -> None:
    """Add an error for each length that options set although the requests have their own."""
    owner = {FromTrace: "trace", Task: "steps", Mix: "classes"}[type(requests)]
    options = {"--input-tokens": flags.input_tokens, "--output-tokens": flags.output_tokens}
    for option, tokens in options.items():
        if tokens is not None:
            problem = f"the lengths are those of the {owner}"
            errors.add_option("conflict", problem, f"{option} {tokens}", "leave the flag out")


def _override_slo(workload: Workload, flags: Overrides, errors: DocumentErrors) -> Slo | None:
    """Return the SLO of the options, with the terms that they add, or the SLO of the workload.

    An error is added if no class would be judged by it, or if an attainment has no limit to attain.
    """
    if flags.replacement_slo is None and flags.added_slo is None:
        return workload.slo
    # Requests of a single kind have no classes.
    classes = getattr(workload.requests, "classes", {}).values()
    if classes and all(request_class.slo for request_class in classes):
        hint = "write the limits of the classes in a file of your own, which may extend this one"
        errors.add_option("no_effect", "each class has an SLO of its own", "--slo", hint)
    slo = merge_slos(flags.replacement_slo or workload.slo or Slo(), flags.added_slo or Slo())
    if not slo.terms and slo.goodput_share is not None:
        share = f"{slo.goodput_share * 100:g}%"
        hint = "add --slo ttft:2s"
        if workload.slo is not None and workload.slo.terms:
            hint = (
                f"--slo +{ATTAINMENT}:{share} keeps the limits of the workload; "
                "or add --slo ttft:2s"
            )
        problem = "an attainment needs a latency limit that requests can meet"
        errors.add_option("no_slo", problem, f"--slo {ATTAINMENT}:{share}", hint)
    return slo
