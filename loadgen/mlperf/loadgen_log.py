"""Reads MLPerf LoadGen's log files: `mlperf_log_summary.txt`, and `mlperf_log_detail.txt` beside it.

Pure but for `read_log`. A LoadGen log has no fingerprint of its load, and the result has none either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from loadgen.core.errors import UserError, of_reading
from loadgen.core.stats.quantiles import QUANTILES
from loadgen.formats import ForeignResult, ToolFile
from loadgen.mlperf.loadgen_spread import PERCENTILES, LoadGenSpread

SUMMARY = "mlperf_log_summary.txt"
MARK = ":::MLLOG "
UNOFFICIAL = "MLPerf-style, unofficial"  # first words of our own logs


class LoadGenLog(msgspec.Struct, frozen=True, kw_only=True):
    """An official log, or one of ours: figures as written, None where the log does not have them.

    `detail`: the keys of the detail log, {} without one. There is no fingerprint: a log does not identify its load.
    """

    unofficial: bool
    sut: str
    scenario: str  # "Server", "Offline", "SingleStream", "MultiStream"
    valid: bool
    reasons: tuple[str, ...]
    target_qps: float | None
    queries: int | None
    samples_per_s: float | None
    scheduled_samples_per_s: float | None
    tokens_per_s: float | None
    latency: LoadGenSpread | None
    ttft: LoadGenSpread | None
    tpot: LoadGenSpread | None
    detail: dict[str, Any]


def read_log(path: Path) -> LoadGenLog:
    """The log at `path`: a folder with LoadGen's files, or the summary file; includes the detail file if there is one.

    Raises UserError for anything but a LoadGen summary.
    """
    summary = path / SUMMARY if path.is_dir() else path
    try:
        text = summary.read_text("utf-8", errors="replace")
    except OSError as error:
        problem = f"no LoadGen summary there: {error.strerror}"
        raise UserError(
            of_reading(error), problem, str(summary), f"name a {SUMMARY} or its folder"
        ) from None
    detail_file = summary.with_name(summary.name.replace("summary", "detail"))
    detail = (
        detail_file.read_text("utf-8", errors="replace")
        if detail_file != summary and detail_file.is_file()
        else ""
    )
    return parse_log(text, detail, where=str(summary))


_LINE = re.compile(r"^\s*(.+?)\s*:\s*(\S.*?)\s*$")


_PERCENTILE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,9})?) percentile (.*?)(?: \(ns\))?$")


_KINDS = {
    "latency": "latency",
    "first token latency": "ttft",
    "time to output token": "tpot",
    "time per output token": "tpot",
}
"""Names of the three distributions in both generations of the log."""


def parse_log(summary: str, detail: str = "", where: str = "") -> LoadGenLog:
    """Parse the text of a summary and of a detail log. Raises UserError when the summary is not LoadGen's."""
    if "MLPerf Results Summary" not in summary:
        raise UserError(
            "wrong_format", "not a LoadGen summary", where, f"the file that LoadGen calls {SUMMARY}"
        )
    results_text, _, parameters_text = summary.partition("Test Parameters Used")
    fields: dict[str, str] = {}
    spreads: dict[str, dict[str, int | None]] = {}
    for line in results_text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        label, value = match.groups()
        percentile = _PERCENTILE.fullmatch(label)
        statistic, _, name = label.removesuffix(" (ns)").partition(" ")
        if percentile:
            spreads.setdefault(_KINDS.get(percentile[2].lower(), ""), {})[
                f"{float(percentile[1]):g}"
            ] = _integer(value)
        elif statistic in ("Min", "Max", "Mean") and name.lower() in _KINDS:
            spreads.setdefault(_KINDS[name.lower()], {})[statistic.lower()] = _integer(value)
        else:
            fields.setdefault(label, value)
    parameters = {
        match[1]: match[2]
        for match in map(_LINE.match, parameters_text.splitlines())
        if match is not None
    }
    if "Result is" not in fields:
        hint = "run it again, or find the file"
        raise UserError(
            "damaged_file", "a LoadGen summary that was cut off: it has no result", where, hint
        )
    details = _detail_values(detail)
    scenario = fields.get("Scenario", "").replace(" ", "")
    queries = details.get("result_query_count")
    if scenario == "Offline":
        queries = details.get("generated_samples_per_query") or _integer(
            parameters.get("samples_per_query", "")
        )
    return LoadGenLog(
        unofficial=summary.startswith(UNOFFICIAL),
        sut=fields.get("SUT name", ""),
        scenario=scenario,
        valid=fields["Result is"] == "VALID",
        reasons=tuple(_reasons(fields, details)),
        target_qps=_number(parameters.get("target_qps")),
        queries=queries if isinstance(queries, int) else None,
        samples_per_s=_number(
            fields.get("Samples per second") or fields.get("Completed samples per second")
        ),
        scheduled_samples_per_s=_number(fields.get("Scheduled samples per second")),
        tokens_per_s=_number(
            fields.get("Tokens per second") or fields.get("Completed tokens per second")
        ),
        latency=_spread(spreads.get("latency"), queries),
        ttft=_spread(spreads.get("ttft"), queries),
        tpot=_spread(spreads.get("tpot"), queries),
        detail=details,
    )


def _reasons(fields: dict[str, str], details: dict[str, Any]) -> Iterator[str]:
    for label in ("Performance constraints", "Min duration", "Min queries", "Early stopping"):
        if fields.get(f"{label} satisfied", "Yes") == "NO":
            yield f"{label.lower()} not satisfied"
    reason = details.get("result_invalid_reason")
    if isinstance(reason, str) and reason.strip():
        yield reason.strip()


def _detail_values(text: str) -> dict[str, Any]:
    """The keys of a detail log, with the last value of each. Skips lines that are not JSON: LoadGen does not escape."""
    values: dict[str, Any] = {}
    for line in text.splitlines():
        if not line.startswith(MARK):
            continue
        try:
            entry = json.loads(line[len(MARK) :])
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("key"), str):
            values[entry["key"]] = entry.get("value")
    return values


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else None


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and abs(value) < float("inf") else None


def _spread(statistics: dict[str, int | None] | None, count: Any) -> LoadGenSpread | None:
    if not statistics:
        return None
    return LoadGenSpread(
        count=count if isinstance(count, int) else 0,
        min=statistics.get("min"),
        max=statistics.get("max"),
        mean=statistics.get("mean"),
        percentiles=tuple(statistics.get(f"{p * 100:g}") for p in PERCENTILES),
    )


def fits(file: ToolFile) -> bool:
    return "MLPerf Results Summary" in file.text[:4000]


def as_result(file: ToolFile) -> ForeignResult:
    """The log as the result of another tool."""
    log = read_log(Path(file.where))
    figures: dict[str, float] = {}
    for our_name, spread in (("ttft_ms", log.ttft), ("tpot_ms", log.tpot), ("e2e_ms", log.latency)):
        if spread is not None:
            at = dict(zip(PERCENTILES, spread.percentiles, strict=False))
            stats = {name: at.get(p) for name, p in QUANTILES}
            stats |= {"mean": spread.mean, "min": spread.min, "max": spread.max}
            figures |= {
                f"{our_name}.{name}": ns * 1e-6 for name, ns in stats.items() if ns is not None
            }
    rate = log.samples_per_s if log.samples_per_s is not None else log.scheduled_samples_per_s
    rates = {
        "tokens.output_per_s": log.tokens_per_s,
        "load.completed_rps": rate,
        "requests.ok": log.queries,
    }
    figures |= {path: float(value) for path, value in rates.items() if value is not None}
    standing = (
        f"MLPerf {log.scenario}, {'VALID' if log.valid else 'INVALID'}"
        + ", unofficial" * log.unofficial
    )
    return ForeignResult(
        file=file.where,
        metrics=figures,
        called={"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "latency"},
        target=log.sut,
        load=f"{log.scenario} {log.target_qps:g}/s" if log.target_qps else log.scenario,
        notes=(standing, *(reason.rstrip(". ") for reason in log.reasons)),
    )
