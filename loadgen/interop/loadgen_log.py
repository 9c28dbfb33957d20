"""MLPerf LoadGen's log files, read: `mlperf_log_summary.txt`, and `mlperf_log_detail.txt` beside it.

Text to values; only `read` touches files. A log of LoadGen has no fingerprint, and nothing read from it pretends to
one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loadgen.errors import UserError
from loadgen.stats.loadgen_spread import PERCENTILES, LoadGenSpread

if TYPE_CHECKING:
    from collections.abc import Iterator

SUMMARY = "mlperf_log_summary.txt"
MARK = ":::MLLOG "
UNOFFICIAL = "MLPerf-style, unofficial"  # how our own logs begin


class LoadGenLog(msgspec.Struct, frozen=True, kw_only=True):
    """An official log, or one of ours: figures as they are written, None where it does not have them.

    `generation` 1 is LoadGen up to 5.x ("Time to Output Token"), 2 is 6.x ("Time per Output Token"). `detail`: the
    keys of the detail log, {} without one. No fingerprint: nobody can say from a log which load it was.
    """

    path: str
    generation: int
    unofficial: bool
    sut: str
    scenario: str  # "Server", "Offline", "SingleStream", "MultiStream"
    mode: str
    valid: bool
    reasons: tuple[str, ...]
    target_qps: float | None
    queries: int | None
    ttft_limit_ns: int | None
    tpot_limit_ns: int | None
    samples_per_s: float | None
    scheduled_samples_per_s: float | None
    tokens_per_s: float | None
    latency: LoadGenSpread | None
    ttft: LoadGenSpread | None
    tpot: LoadGenSpread | None
    parameters: dict[str, str]
    detail: dict[str, Any]


def read_log(path: Path) -> LoadGenLog:
    """The log at `path`: a folder with LoadGen's files, or its summary file; with the detail file beside it if there.

    Raises UserError for what is no LoadGen summary.
    """
    summary = path / SUMMARY if path.is_dir() else path
    try:
        text = summary.read_text("utf-8", errors="replace")
    except OSError as error:
        what = f"no LoadGen summary there: {error.strerror}"
        raise UserError(what, str(summary), f"name a {SUMMARY} or its folder") from None
    beside = summary.with_name(summary.name.replace("summary", "detail"))
    detail = beside.read_text("utf-8", errors="replace") if beside != summary and beside.is_file() else ""
    return parse_log(text, detail, where=str(summary))


_LINE = re.compile(r"^\s*(.+?)\s*:\s*(\S.*?)\s*$")


_PERCENTILE = re.compile(r"([0-9.]+) percentile (.*?)(?: \(ns\))?$")


_KINDS = {
    "latency": "latency",
    "first token latency": "ttft",
    "time to output token": "tpot",
    "time per output token": "tpot",
}
"""How either generation calls the three distributions."""


def parse_log(summary: str, detail: str = "", where: str = "") -> LoadGenLog:
    """A summary's text, and that of the detail log, as values. Raises UserError when it is not LoadGen's."""
    if "MLPerf Results Summary" not in summary:
        raise UserError("not a LoadGen summary", where, f"the file that LoadGen calls {SUMMARY}")
    head, _, rest = summary.partition("Test Parameters Used")
    plain: dict[str, str] = {}
    spreads: dict[str, dict[str, int | None]] = {}
    for line in head.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        label, value = match.groups()
        percentile = _PERCENTILE.fullmatch(label)
        word, _, name = label.removesuffix(" (ns)").partition(" ")
        if percentile:
            spreads.setdefault(_KINDS.get(percentile[2].lower(), ""), {})[f"{float(percentile[1]):g}"] = _integer(value)
        elif word in ("Min", "Max", "Mean") and name.lower() in _KINDS:
            spreads.setdefault(_KINDS[name.lower()], {})[word.lower()] = _integer(value)
        else:
            plain.setdefault(label, value)
    parameters: dict[str, str] = {}
    for line in rest.splitlines():
        match = _LINE.match(line)
        if match is not None:
            parameters[match[1]] = match[2]
    if "Result is" not in plain:
        raise UserError("a LoadGen summary that was cut off: it has no result", where, "run it again, or find the file")
    details = _mllog(detail)
    scenario = plain.get("Scenario", "").replace(" ", "")
    offline = scenario == "Offline"
    queries = details.get("result_query_count")
    if offline:
        queries = details.get("generated_samples_per_query") or _integer(parameters.get("samples_per_query", ""))
    return LoadGenLog(
        path=where,
        generation=2 if "Time per Output Token" in head or "accuracy_sample_count" in parameters else 1,
        unofficial=summary.startswith(UNOFFICIAL),
        sut=plain.get("SUT name", ""),
        scenario=scenario,
        mode=plain.get("Mode", ""),
        valid=plain["Result is"] == "VALID",
        reasons=tuple(_reasons(plain, details)),
        target_qps=_number(parameters.get("target_qps")),
        queries=queries if isinstance(queries, int) else None,
        ttft_limit_ns=_integer(parameters.get("ttft_latency (ns)", "")) if not offline else None,
        tpot_limit_ns=_integer(parameters.get("tpot_latency (ns)", "")) if not offline else None,
        samples_per_s=_number(plain.get("Samples per second") or plain.get("Completed samples per second")),
        scheduled_samples_per_s=_number(plain.get("Scheduled samples per second")),
        tokens_per_s=_number(plain.get("Tokens per second") or plain.get("Completed tokens per second")),
        latency=_read_spread(spreads.get("latency"), queries),
        ttft=_read_spread(spreads.get("ttft"), queries),
        tpot=_read_spread(spreads.get("tpot"), queries),
        parameters=parameters,
        detail=details,
    )


def _reasons(plain: dict[str, str], details: dict[str, Any]) -> Iterator[str]:
    for label in ("Performance constraints", "Min duration", "Min queries", "Early stopping"):
        if plain.get(f"{label} satisfied", "Yes") == "NO":
            yield f"{label.lower()} not satisfied"
    reason = details.get("result_invalid_reason")
    if isinstance(reason, str) and reason.strip():
        yield reason.strip()


def _mllog(text: str) -> dict[str, Any]:
    """Keys of a detail log, the last value of each. Lines that are no JSON are passed over: LoadGen escapes
    nothing."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if not line.startswith(MARK):
            continue
        try:
            entry = json.loads(line[len(MARK) :])
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("key"), str):
            found[entry["key"]] = entry.get("value")
    return found


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else None


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and abs(value) < float("inf") else None


def _read_spread(found: dict[str, int | None] | None, count: Any) -> LoadGenSpread | None:
    if not found:
        return None
    return LoadGenSpread(
        count=count if isinstance(count, int) else 0,
        min=found.get("min"),
        max=found.get("max"),
        mean=found.get("mean"),
        percentiles=tuple(found.get(f"{p * 100:g}") for p in PERCENTILES),
    )
