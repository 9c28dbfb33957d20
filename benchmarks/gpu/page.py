"""The record of a rehearsal on a GPU as a page. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import rig

LABEL = {
    True: "Measured on {gpus}, engine {engine}, **random weights** in the shape of Llama 2 {shape}: no model that"
    " anybody uses, no acceptance figures, no answers worth reading.",
    False: "**A rehearsal without a GPU**, engine {engine}, a tiny random model: that the steps run, and no figure of a"
    " machine for LLMs.",
}


def facts(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What the page says of a run."""

    def at(block: str, quantile: str) -> float | None:
        found: float | None = (summary[block] or {}).get(quantile)
        return found

    energy, requests = summary.get("energy") or {}, summary["requests"]
    tasks = (summary.get("sessions") or {}).get("ok_per_s")  # of agents: rates are of tasks
    return {
        "requests": requests["scheduled"],
        "ok": requests["ok"],
        "completed_per_s": tasks or summary["load"]["completed_rps"],
        "output_tokens_per_s": summary["tokens"]["output_per_s"],
        "cached_share": summary["tokens"]["cached_share"],
        "ttft_p50_ms": at("ttft_ms", "p50"),
        "ttft_p95_ms": at("ttft_ms", "p95"),
        "tpot_p50_ms": at("tpot_ms", "p50"),
        "itl_p50_ms": at("itl_ms", "p50"),
        "itl_absent": summary["itl_absent"],
        "send_lag_p99_ms": at("send_lag_ms", "p99"),
        "stamp_error_p99_ms": at("stamp_error_ms", "p99"),
        "valid": summary["verdict"]["valid"],
        "reasons": summary["verdict"]["reasons"],
        "joules": energy.get("joules"),
        "nvml_joules": summary["nvml_joules"],
    }


def _shown(value: Any, digits: int = 1) -> str:
    return (
        "" if value is None else f"{value:,.{digits}f}" if isinstance(value, float) else str(value)
    )


def page(steps: Mapping[str, Mapping[str, Any] | None]) -> str:
    """The record, of the steps that are done."""
    look, engine = steps["look"] or {}, steps["engine"] or {}
    gpus = ", ".join(
        f"{gpu['name']} ({int(gpu['memory_mib']):,} MiB, driver {gpu['driver']})"
        for gpu in look.get("gpus", ())
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
    host = f"{look.get('cores')} cores, {look.get('memory_mib', 0):,} MiB"
    compiler, there = (
        look.get("cuda_compiler") or "none",
        ", ".join(look.get("engines", ())) or "none",
    )
    parts += [
        f"Machine: GPU: {gpus or 'none'}; {host}; CUDA compiler: {compiler}; engines: {there}.",
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
        "send lag p99, ms",
        "J by NVML",
        "J by the run",
        "verdict",
    ]
    rows = []
    for name, found in steps.items():
        if found is None or "cached_share" not in found:  # not a load
            continue
        cached = None if found["cached_share"] is None else f"{found['cached_share']:.0%}"
        rows.append(
            [
                name,
                f"{found['ok']} of {found['requests']}",
                _shown(found["completed_per_s"], 2),
                _shown(found["output_tokens_per_s"], 0),
                cached or "",
                _shown(found["ttft_p50_ms"]),
                _shown(found["ttft_p95_ms"]),
                _shown(found["tpot_p50_ms"], 2),
                _shown(found["itl_p50_ms"], 2) or "withheld",
                _shown(found["send_lag_p99_ms"], 2),
                _shown(found["nvml_joules"], 0),
                _shown(found["joules"], 0),
                "VALID" if found["valid"] else "INVALID",
            ]
        )
    parts += [rig.format_table(columns, rows), ""]
    for name, found in steps.items():
        if found and found.get("reasons"):
            parts.append(f"- {name}: {'; '.join(found['reasons'])}")
    if search := steps.get("search"):
        parts += [
            "",
            f"Search: {search.get('state')}, confirmed: {search.get('confirmed')}; {search.get('bound_why') or ''}",
        ]
    if verdict := steps.get("validate"):
        parts += [
            "",
            f"Contract: {verdict.get('verdict') or verdict.get('outcome')}; `loadgen verify bundle.zip` agreed.",
        ]
    if left := [name for name, found in steps.items() if found is None]:
        parts += ["", f"Not done yet: {', '.join(left)}."]
    return "\n".join(parts) + "\n"
