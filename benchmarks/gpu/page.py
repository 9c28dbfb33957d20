"""Format the record of a rehearsal on a GPU as a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import rig

LABEL = {
    True: "Measured on {gpus}, engine {engine}, **random weights** in the shape of Llama 2 "
    "{shape}: no model that"
    " anybody uses, no acceptance figures, no answers worth reading.",
    False: "**A rehearsal without a GPU**, engine {engine}, a tiny random model: that the steps "
    "run, and no figure of a"
    " machine for LLMs.",
}


def select_facts(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a run's summary that the page prints.

    `completed_per_s` counts tasks of an agent, because its rate is of tasks, and else requests.
    """

    def quantile_of(metric: str, quantile: str) -> float | None:
        """Return a quantile of a metric, or None if it was not reported."""
        value: float | None = (summary[metric] or {}).get(quantile)
        return value

    energy = summary.get("energy") or {}
    requests = summary["requests"]
    sessions = summary.get("sessions") or {}
    completed_tasks_per_s = sessions.get("ok_per_s")

    return {
        "requests": requests["scheduled"],
        "ok": requests["ok"],
        "completed_per_s": completed_tasks_per_s or summary["load"]["completed_rps"],
        "output_tokens_per_s": summary["tokens"]["output_per_s"],
        "cached_share": summary["tokens"]["cached_share"],
        "ttft_p50_ms": quantile_of("ttft_ms", "p50"),
        "ttft_p95_ms": quantile_of("ttft_ms", "p95"),
        "tpot_p50_ms": quantile_of("tpot_ms", "p50"),
        "itl_p50_ms": quantile_of("itl_ms", "p50"),
        "itl_absent": summary["itl_absent"],
        "send_lag_p99_ms": quantile_of("send_lag_ms", "p99"),
        "stamp_error_p99_ms": quantile_of("stamp_error_ms", "p99"),
        "valid": summary["verdict"]["valid"],
        "reasons": summary["verdict"]["reasons"],
        "joules": energy.get("joules"),
        "nvml_joules": summary["nvml_joules"],
    }


def _format_value(value: object, digits: int = 1) -> str:
    """Return a value as text: "" for None, and a float with so many decimal places."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.{digits}f}"
    return str(value)


def format_page(steps: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Return the record of a rehearsal as Markdown.

    `steps` has what each step has stored, by its name, and None for a step that is not done yet.
    """
    machine = steps["look"] or {}
    engine = steps["engine"] or {}

    parts = [
        "# A rehearsal of an hour with a GPU",
        "",
        f"`benchmarks/gpu/rehearse.py` ({rig.describe_commit_and_date()}). "
        f"{describe_label(machine, engine)}",
        "",
        describe_machine(machine),
        "",
        format_loads(steps),
        "",
    ]
    for name, result in steps.items():
        if result and result.get("reasons"):
            parts.append(f"- {name}: {'; '.join(result['reasons'])}")

    if search := steps.get("search"):
        parts += [
            "",
            f"Search: {search.get('state')}, confirmed: {search.get('confirmed')}; "
            f"{search.get('bound_why') or ''}",
        ]

    if verdict := steps.get("validate"):
        parts += [
            "",
            f"Contract: {verdict.get('verdict') or verdict.get('outcome')}; `loadgen verify "
            f"bundle.zip` agreed.",
        ]

    if steps_left := [name for name, result in steps.items() if result is None]:
        parts += ["", f"Not done yet: {', '.join(steps_left)}."]

    return "\n".join(parts) + "\n"


def describe_gpus(machine: Mapping[str, Any]) -> str:
    """Return the name, the memory and the driver of each GPU, or "" without one."""
    return ", ".join(
        f"{gpu['name']} ({int(gpu['memory_mib']):,} MiB, driver {gpu['driver']})"
        for gpu in machine.get("gpus", ())
    )


def describe_label(machine: Mapping[str, object], engine: Mapping[str, object]) -> str:
    """Return the sentence that says what kind of figures the page has."""
    gpus = describe_gpus(machine)
    is_measurement = bool(gpus) and engine.get("shape") != "tiny"
    shape = str(engine.get("shape", "")).upper()
    return LABEL[is_measurement].format(gpus=gpus, engine=engine.get("engine", "none"), shape=shape)


def describe_machine(machine: Mapping[str, Any]) -> str:
    """Return the sentence about the GPUs, the host, the compiler and the engines."""
    host = f"{machine.get('cores')} cores, {machine.get('memory_mib', 0):,} MiB"
    compiler = machine.get("cuda_compiler") or "none"
    engine_names = ", ".join(machine.get("engines", ())) or "none"
    return (
        f"Machine: GPU: {describe_gpus(machine) or 'none'}; {host}; CUDA compiler: {compiler}; "
        f"engines: {engine_names}."
    )


LOAD_COLUMNS = (
    "load",
    "ok of",
    "answered/s",
    "output tokens/s",
    "cached",
    "TTFT p50, ms",
    "p95",
    "TPOT p50, ms",
    "ITL p50, ms",
    "send delay p99, ms",
    "J by NVML",
    "J by the run",
    "verdict",
)


def format_loads(steps: Mapping[str, Mapping[str, object] | None]) -> str:
    """Return the table of the steps that are loads: those with facts of `select_facts`."""
    rows = [
        format_load(name, result)
        for name, result in steps.items()
        if result is not None and "cached_share" in result
    ]
    return rig.format_table(LOAD_COLUMNS, rows)


def format_load(name: str, facts: Mapping[str, object]) -> list[str]:
    """Return the row of a load."""
    cached_share = facts["cached_share"]
    return [
        name,
        f"{facts['ok']} of {facts['requests']}",
        _format_value(facts["completed_per_s"], 2),
        _format_value(facts["output_tokens_per_s"], 0),
        "" if cached_share is None else f"{cached_share:.0%}",
        _format_value(facts["ttft_p50_ms"]),
        _format_value(facts["ttft_p95_ms"]),
        _format_value(facts["tpot_p50_ms"], 2),
        _format_value(facts["itl_p50_ms"], 2) or "withheld",
        _format_value(facts["send_lag_p99_ms"], 2),
        _format_value(facts["nvml_joules"], 0),
        _format_value(facts["joules"], 0),
        "VALID" if facts["valid"] else "INVALID",
    ]
