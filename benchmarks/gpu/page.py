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
    """Return what the page shows of a run."""

    def quantile_of(metric: str, quantile: str) -> float | None:
        """Return a quantile of a metric, or None."""
        value: float | None = (summary[metric] or {}).get(quantile)
        return value

    energy, requests = summary.get("energy") or {}, summary["requests"]
    tasks = (summary.get("sessions") or {}).get("ok_per_s")  # of agents: rates are of tasks
    return {
        "requests": requests["scheduled"],
        "ok": requests["ok"],
        "completed_per_s": tasks or summary["load"]["completed_rps"],
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


def _format_value(value: Any, digits: int = 1) -> str:
    """Return a value as text, "" for None."""
    return (
        "" if value is None else f"{value:,.{digits}f}" if isinstance(value, float) else str(value)
    )


def format_page(steps: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Return the record of a rehearsal, with the steps that are done."""
    machine, engine = steps["look"] or {}, steps["engine"] or {}
    gpus = ", ".join(
        f"{gpu['name']} ({int(gpu['memory_mib']):,} MiB, driver {gpu['driver']})"
        for gpu in machine.get("gpus", ())
    )
    label = LABEL[bool(gpus) and engine.get("shape") != "tiny"].format(
        gpus=gpus, engine=engine.get("engine", "none"), shape=str(engine.get("shape", "")).upper()
    )
    parts = [
        "# A rehearsal of an hour with a GPU",
        "",
        f"`benchmarks/gpu/rehearse.py` ({rig.describe_tree_and_date()}). {label}",
        "",
    ]
    host = f"{machine.get('cores')} cores, {machine.get('memory_mib', 0):,} MiB"
    compiler, engine_names = (
        machine.get("cuda_compiler") or "none",
        ", ".join(machine.get("engines", ())) or "none",
    )
    parts += [
        f"Machine: GPU: {gpus or 'none'}; {host}; CUDA compiler: {compiler}; engines: "
        f"{engine_names}.",
        "",
    ]
    columns = [
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
    ]
    rows = []
    for name, result in steps.items():
        if result is None or "cached_share" not in result:  # not a load
            continue
        cached_text = None if result["cached_share"] is None else f"{result['cached_share']:.0%}"
        rows.append(
            [
                name,
                f"{result['ok']} of {result['requests']}",
                _format_value(result["completed_per_s"], 2),
                _format_value(result["output_tokens_per_s"], 0),
                cached_text or "",
                _format_value(result["ttft_p50_ms"]),
                _format_value(result["ttft_p95_ms"]),
                _format_value(result["tpot_p50_ms"], 2),
                _format_value(result["itl_p50_ms"], 2) or "withheld",
                _format_value(result["send_lag_p99_ms"], 2),
                _format_value(result["nvml_joules"], 0),
                _format_value(result["joules"], 0),
                "VALID" if result["valid"] else "INVALID",
            ]
        )
    parts += [rig.format_table(columns, rows), ""]
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
