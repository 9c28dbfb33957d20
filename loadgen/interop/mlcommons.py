"""Reads result files of MLCommons: the `result_summary.json` of mlcommons/endpoints, and LoadGen's summary log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.interop.result import ForeignResult, counted, numbers, result, statistics

if TYPE_CHECKING:
    from loadgen.stats.loadgen_spread import LoadGenSpread


def endpoints(value: dict[str, Any], where: str) -> ForeignResult:
    figures: dict[str, float] = {}
    for our_name, their_name in (("ttft_ms", "ttft"), ("tpot_ms", "tpot"), ("e2e_ms", "latency")):
        figures |= statistics(our_name, value.get(their_name), 1e-6)
    figures |= numbers({"load.completed_rps": value.get("qps"), "tokens.output_per_s": value.get("tps")})
    for our_name, their_name in (
        ("tokens.input", "input_sequence_lengths"),
        ("tokens.output", "output_sequence_lengths"),
    ):
        figures |= numbers({our_name: (value.get(their_name) or {}).get("total")})
    figures |= counted(value.get("n_samples_completed"), value.get("n_samples_failed"))
    pattern = (value.get("run_config") or {}).get("load_pattern") or {}
    target_load = pattern.get("target_qps") or pattern.get("target_concurrency")
    notes = []
    if figures.get("tpot_ms.min", 0) < 0:
        notes.append("some of its TPOTs are negative: a first token was stamped after the end of its answer")
    if value.get("complete") is False:
        notes.append("its run is not complete")
    return result(
        "mlcommons/endpoints",
        where,
        figures,
        {"ttft_ms": "ttft", "tpot_ms": "tpot", "e2e_ms": "latency"},
        version=value.get("version"),
        load=" ".join(filter(None, (str(pattern.get("type") or ""), f"{target_load:g}" if target_load else ""))),
        notes=notes,
    )


def loadgen_log(where: str) -> ForeignResult:
    from loadgen.interop.loadgen_log import read_log

    log = read_log(Path(where))
    figures: dict[str, float] = {}
    for our_name, spread in (("ttft_ms", log.ttft), ("tpot_ms", log.tpot), ("e2e_ms", log.latency)):
        if spread is not None:
            figures |= statistics(our_name, _spread_fields(spread), 1e-6)
    rate = log.samples_per_s if log.samples_per_s is not None else log.scheduled_samples_per_s
    figures |= numbers(
        {"tokens.output_per_s": log.tokens_per_s, "load.completed_rps": rate, "requests.ok": log.queries}
    )
    notes = (f"MLPerf {log.scenario}, {'VALID' if log.valid else 'INVALID'}" + ", unofficial" * log.unofficial,)
    return result(
        "MLPerf LoadGen",
        where,
        figures,
        {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "latency"},
        target=log.sut,
        load=f"{log.scenario} {log.target_qps:g}/s" if log.target_qps else log.scenario,
        notes=(*notes, *(reason.rstrip(". ") for reason in log.reasons)),
    )


def _spread_fields(spread: LoadGenSpread) -> dict[str, Any]:
    from loadgen.stats.loadgen_spread import PERCENTILES

    percentiles = {f"{p * 100:.1f}": value for p, value in zip(PERCENTILES, spread.percentiles, strict=False)}
    return {"mean": spread.mean, "min": spread.min, "max": spread.max, "percentiles": percentiles}
