"""Format the results of a rehearsal on a GPU as a Markdown page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import rig

MEASURED_LABEL = (
    "Measured on {gpus}, engine {engine}, **random weights** in the shape of Llama 2 {shape}: "
    "no model that anybody uses, no acceptance rates, no responses worth reading."
)
UNMEASURED_LABEL = (
    "**A rehearsal without a GPU**, engine {engine}, a tiny random model: it shows that the steps "
    "run. Its numbers describe no machine for LLMs."
)

StepResults = Mapping[str, Mapping[str, Any] | None]
"""The JSON object that each step stored, by the name of the step; None if it is not done yet."""


class RunFacts(NamedTuple):
    """The metrics of one load that the page prints. A metric that was not reported is None.

    Attributes:
        requests: The requests that were scheduled.
        ok: The requests that succeeded.
        completed_per_s: The rate of completed requests, or of completed tasks for an agent, whose
            load is a number of tasks of several requests each.
        output_tokens_per_s: The rate of output tokens.
        cached_share: The share of input tokens that came from the prefix cache.
        ttft_p50_ms: The median time to first token.
        ttft_p95_ms: Its 95th percentile.
        tpot_p50_ms: The median time per output token.
        itl_p50_ms: The median inter-token latency.
        send_lag_p99_ms: The 99th percentile of the delay with which the client sent requests.
        valid: Whether loadgen trusts the run.
        reasons: Why it does not.
        joules: The energy by the source of `loadgen run --energy`.
        nvml_joules: The energy by the counters of the GPUs.
    """

    requests: int
    ok: int
    completed_per_s: float | None
    output_tokens_per_s: float | None
    cached_share: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    tpot_p50_ms: float | None
    itl_p50_ms: float | None
    send_lag_p99_ms: float | None
    valid: bool
    reasons: list[str]
    joules: float | None
    nvml_joules: float | None


def select_facts(summary: Mapping[str, Any], nvml_joules: float | None) -> RunFacts:
    """Return the facts about a load that the page prints.

    Args:
        summary: The content of the run's summary.json.
        nvml_joules: The energy that the GPUs used during the load.
    """
    requests = summary["requests"]
    tokens = summary["tokens"]
    sessions = summary.get("sessions") or {}
    energy = summary.get("energy") or {}

    return RunFacts(
        requests=requests["scheduled"],
        ok=requests["ok"],
        completed_per_s=sessions.get("ok_per_s") or summary["load"]["completed_rps"],
        output_tokens_per_s=tokens["output_per_s"],
        cached_share=tokens["cached_share"],
        ttft_p50_ms=read_percentile(summary, "ttft_ms", "p50"),
        ttft_p95_ms=read_percentile(summary, "ttft_ms", "p95"),
        tpot_p50_ms=read_percentile(summary, "tpot_ms", "p50"),
        itl_p50_ms=read_percentile(summary, "itl_ms", "p50"),
        send_lag_p99_ms=read_percentile(summary, "send_lag_ms", "p99"),
        valid=summary["verdict"]["valid"],
        reasons=summary["verdict"]["reasons"],
        joules=energy.get("joules"),
        nvml_joules=nvml_joules,
    )


def read_percentile(summary: Mapping[str, Any], metric: str, percentile: str) -> float | None:
    """Return a percentile such as "p95" of a metric in a summary, None if it was not reported."""
    percentiles: Mapping[str, float | None] = summary[metric] or {}
    return percentiles.get(percentile)


# -- the page --------------------------------------------------------------------------------------


def format_page(results: StepResults) -> str:
    """Return the page about a rehearsal as Markdown.

    `results` has what each step stored, in the order of the steps. The steps "machine" and "engine"
    describe where the loads ran.
    """
    machine = results["machine"] or {}
    engine = results["engine"] or {}

    paragraphs = [
        "# A rehearsal of an hour with a GPU",
        f"`benchmarks/gpu/rehearse.py` ({rig.describe_commit_and_date()}). "
        + format_label(machine, engine),
        format_machine(machine),
        format_load_table(results),
        format_invalid_runs(results),
        format_search(results.get("search")),
        format_contract_verdict(results.get("validate")),
        format_unfinished_steps(results),
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def format_label(machine: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    """Return the sentence that tells whether the page has measurements of a GPU."""
    gpus = format_gpus(machine)
    shape = engine.get("shape", "")
    engine_name = engine.get("engine", "none")
    if gpus and shape != "tiny":
        return MEASURED_LABEL.format(gpus=gpus, engine=engine_name, shape=shape.upper())
    return UNMEASURED_LABEL.format(engine=engine_name)


def format_gpus(machine: Mapping[str, Any]) -> str:
    """Return the name, the memory and the driver of each GPU, or "" if there is none."""
    descriptions = [
        f"{gpu['name']} ({int(gpu['memory_mib']):,} MiB, driver {gpu['driver']})"
        for gpu in machine.get("gpus", [])
    ]
    return ", ".join(descriptions)


def format_machine(machine: Mapping[str, Any]) -> str:
    """Return the sentence about the GPUs, the host, the CUDA compiler and the engines."""
    gpus = format_gpus(machine) or "none"
    host = f"{machine.get('cores')} cores, {machine.get('memory_mib', 0):,} MiB"
    compiler = machine.get("cuda_compiler") or "none"
    engines = ", ".join(machine.get("engines", {})) or "none"
    return f"Machine: GPU: {gpus}; {host}; CUDA compiler: {compiler}; engines: {engines}."


LOAD_COLUMNS = (
    "load",
    "ok of",
    "completed/s",
    "output tokens/s",
    "cached",
    "TTFT p50, ms",
    "TTFT p95, ms",
    "TPOT p50, ms",
    "ITL p50, ms",
    "send delay p99, ms",
    "J by NVML",
    "J by the run",
    "verdict",
)


def format_load_table(results: StepResults) -> str:
    """Return the table of the loads, with one row for each.

    Of all steps, only a load has stored the key `cached_share`.
    """
    rows = [
        format_load_row(name, RunFacts(**result))
        for name, result in results.items()
        if result is not None and "cached_share" in result
    ]
    return rig.format_table(LOAD_COLUMNS, rows)


def format_load_row(name: str, facts: RunFacts) -> list[str]:
    """Return the cells of the row about one load."""
    cached_share = ""
    if facts.cached_share is not None:
        cached_share = f"{facts.cached_share:.0%}"

    return [
        name,
        f"{facts.ok} of {facts.requests}",
        format_number(facts.completed_per_s, decimals=2),
        format_number(facts.output_tokens_per_s, decimals=0),
        cached_share,
        format_number(facts.ttft_p50_ms, decimals=1),
        format_number(facts.ttft_p95_ms, decimals=1),
        format_number(facts.tpot_p50_ms, decimals=2),
        format_number(facts.itl_p50_ms, decimals=2) or "withheld",
        format_number(facts.send_lag_p99_ms, decimals=2),
        format_number(facts.nvml_joules, decimals=0),
        format_number(facts.joules, decimals=0),
        "VALID" if facts.valid else "INVALID",
    ]


def format_number(value: float | None, *, decimals: int) -> str:
    """Return a number with a fixed number of decimals, or an empty cell for None."""
    return "" if value is None else f"{value:,.{decimals}f}"


def format_invalid_runs(results: StepResults) -> str:
    """Return a list of the loads that loadgen does not trust, with its reasons."""
    lines = []
    for name, result in results.items():
        reasons = (result or {}).get("reasons")
        if reasons:
            lines.append(f"- {name}: {'; '.join(reasons)}")
    return "\n".join(lines)


def format_search(capacity: Mapping[str, Any] | None) -> str:
    """Return the sentence about the capacity search, or "" if it has not run.

    `capacity` is the content of its capacity.json. `bound_why` explains what limits the capacity.
    """
    if not capacity:
        return ""
    limit_reason = capacity.get("bound_why") or ""
    state = capacity.get("state")
    return f"Search: {state}, confirmed: {capacity.get('confirmed')}; {limit_reason}"


def format_contract_verdict(verdict: Mapping[str, Any] | None) -> str:
    """Return the sentence about the validated contract, or "" if that step has not run.

    `verdict` is the content of verdict.json. The step only ends if `loadgen verify` has agreed.
    """
    if not verdict:
        return ""
    outcome = verdict.get("verdict") or verdict.get("outcome")
    return f"Contract: {outcome}; `loadgen verify bundle.zip` agreed."


def format_unfinished_steps(results: StepResults) -> str:
    """Return the sentence that lists the steps without a result, or "" if all are done."""
    unfinished = [name for name, result in results.items() if result is None]
    return f"Not done yet: {', '.join(unfinished)}." if unfinished else ""
