"""Result files of other tools, read as what they are: their figures under their own definitions, never as records.

Recognises a file by what is in it, not by its name. Only `read` touches a file. What a tool calls TTFT, TPOT or ITL is
not what is called so here; `COUNTS` says how each counts, and nothing made of these figures hides it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from loadgen.compare import Side
from loadgen.errors import UserError
from loadgen.quantiles import QUANTILES

if TYPE_CHECKING:
    from loadgen.mlperf import Spread

COUNTS: dict[str, str] = {
    "vllm bench serve": (
        "From sent. TTFT is the first event with a choice: in chat the role event, which carries no token. TPOT is "
        "(E2E - TTFT) / (n - 1), E2E up to the last event, usage too. ITL is pooled, with the gap from the role event "
        "to the first token in it. Percentiles are interpolated"
    ),
    "SGLang bench_serving": (
        "From sent. TTFT is the first event with text. TPOT is (E2E - TTFT) / (n - 1). ITL is pooled over events. "
        "Percentiles are interpolated"
    ),
    "AIPerf": (
        "From sent. TTFT is the first event with content. ITL is one value per request, (E2E - TTFT) / (n - 1), which "
        "is called TPOT here; inter-chunk latency is pooled. Percentiles are interpolated"
    ),
    "GuideLLM": (
        "From sent. TTFT is the first event with text. TPOT is (last token - sent) / n: the first token's wait is "
        "in it. ITL is one value per request, (last - first) / (n - 1), weighted by its tokens: "
        "nearest to TPOT as it is here"
    ),
    "inference-perf": (
        "From sent, the wait to be sent apart (schedule_delay). TPOT is (last - first) / (n - 1). ITL is pooled. "
        "Percentiles are interpolated"
    ),
    "genai-bench": "From sent. TPOT is (E2E - TTFT) / (n - 1). No gaps between events. Percentiles are interpolated",
    "mlcommons/endpoints": (
        "From issue. TPOT is (E2E - TTFT) / (n - 1), with TTFT from the stream and E2E from its end; negative ones "
        "stay in. No gaps between events"
    ),
    "MLPerf LoadGen": (
        "From the scheduled instant in Server, else from issue. TPOT is (E2E - TTFT) / (n - 1) in whole ns. "
        "Percentiles are elements of the sample, as here"
    ),
}


WITH_FIRST = "tpot_with_first_ms"  # E2E / n, the first token's wait in it: not a metric here; shown, not compared


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What another tool has reported. `figures`: by the path of the nearest thing here (`ttft_ms.p99`), in our units;
    `called`: what the tool itself calls each family of them."""

    tool: str
    version: str
    file: str
    model: str
    target: str
    load: str
    started: str
    figures: dict[str, float]
    called: dict[str, str]
    counts: str
    notes: tuple[str, ...] = ()


def side(result: Result, name: str) -> Side:
    """As something to compare."""
    notes = (f"figures of {result.tool}: {result.counts}", *result.notes)
    return Side(name=name, told=dict(result.figures), notes=notes)


def read(path: Path) -> Result:
    """Raises UserError for a file that cannot be read, or that no known tool has written."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", str(path), "") from None
    return parse(data, str(path))


def parse(data: bytes, where: str = "") -> Result:
    """The result in a file's bytes. Raises UserError."""
    text = data.decode("utf-8", "replace")
    if "MLPerf Results Summary" in text[:4000]:
        return _log(where)
    if text.startswith('{"metadata"') and '"metrics"' in text.splitlines()[0] and '"benchmarks"' not in text:
        return _aiperf_records(text, where)
    try:
        value, several = _json(text)
    except ValueError as error:
        raise UserError(f"not the result of a known tool: no JSON ({error})", where, _KNOWN) from None
    for recognised, make in _TOOLS:
        if isinstance(value, dict) and recognised(value):
            try:
                made = make(value, where)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                what = (
                    f"looks like a result of another tool, but not one that can be read: {type(error).__name__} {error}"
                )
                raise UserError(what, where, _KNOWN) from None
            if not made.figures:
                raise UserError(f"a result of {made.tool} without one figure", where, "did its run finish?")
            if several:
                note = f"the last of {several} results in the file"
                made = msgspec.structs.replace(made, notes=(*made.notes, note))
            return made
    raise UserError("not the result of a known tool", where, _KNOWN)


_KNOWN = (
    "known: vllm bench serve, SGLang, AIPerf, GuideLLM, inference-perf, genai-bench, mlcommons/endpoints, MLPerf logs"
)


def _json(text: str) -> tuple[Any, int]:
    """One document, or the last of several lines (their number beside it)."""
    try:
        return json.loads(text), 0
    except json.JSONDecodeError:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 1:
            raise
        return json.loads(lines[-1]), len(lines)


# -- pieces --------------------------------------------------------------------------------------------------------


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _known(figures: Mapping[str, Any], scales: Mapping[str, float] | None = None) -> dict[str, float]:
    """Those that are numbers."""
    found = {}
    for path, value in figures.items():
        number = _number(value)
        if number is not None:
            found[path] = number * (scales or {}).get(path, 1.0)
    return found


_STATS = {"p50": ("p50", "median", "50.0"), "p90": ("p90", "90.0"), "p95": ("p95", "95.0"), "p99": ("p99", "99.0")}
_STATS |= {"p99_9": ("p999", "p99_9", "99.9"), "mean": ("mean", "avg"), "min": ("min",), "max": ("max",)}


def _spread(name: str, stats: Any, scale: float = 1.0) -> dict[str, float]:
    """A block of statistics under any of the field's spellings, as `name.p50` and so on."""
    if not isinstance(stats, Mapping):
        return {}
    inner = stats.get("percentiles")
    places = {**(inner if isinstance(inner, Mapping) else {}), **stats}
    found = {}
    for ours, spellings in _STATS.items():
        number = next((n for s in spellings if (n := _number(places.get(s))) is not None), None)
        if number is not None:
            found[f"{name}.{ours}"] = number * scale
    return found


def _counted(ok: Any, failed: Any) -> dict[str, float]:
    good, bad = _number(ok), _number(failed) or 0.0
    if good is None:
        return {}
    found = {"requests.ok": good, "requests.failed": bad, "requests.scheduled": good + bad}
    return found | ({"ok_share": good / (good + bad)} if good + bad else {})


def _result(tool: str, where: str, figures: dict[str, float], called: dict[str, str], **rest: Any) -> Result:
    words = {name: str(rest.get(name) or "") for name in ("version", "model", "target", "load", "started")}
    notes = tuple(rest.get("notes", ()))
    return Result(tool=tool, file=where, figures=figures, called=called, counts=COUNTS[tool], notes=notes, **words)


def _in_flight(lanes: Any, rate: Any) -> str:
    """The load in words, as the vLLM family stores it: inf is its word for "as fast as lanes are free"."""
    number = rate if isinstance(rate, int | float) else None
    unlimited = number is None or not math.isfinite(number) or rate == "inf"
    words = [] if unlimited else [f"{number:g}/s"]
    words += [f"{lanes} in flight at most"] if lanes else []
    return ", ".join(words) or "everything at once"


# -- one function per tool -----------------------------------------------------------------------------------------


def _bench_serving(value: dict[str, Any], where: str, tool: str, e2e: str) -> Result:
    """vLLM's and SGLang's flat files, which have one ancestor."""
    figures: dict[str, float] = {}
    for ours, theirs in (("ttft_ms", "ttft"), ("tpot_ms", "tpot"), ("inter_chunk_ms", "itl"), ("e2e_ms", e2e)):
        stats = {
            stat: value.get(f"{stat}_{theirs}_ms") for stat in ("mean", "median", "p50", "p90", "p95", "p99", "p99.9")
        }
        stats["p99_9"] = stats.pop("p99.9")
        figures |= _spread(ours, stats)
    total = value.get("total_token_throughput", value.get("total_throughput"))
    figures |= _known(
        {
            "load.completed_rps": value.get("request_throughput"),
            "goodput.rps": value.get("request_goodput"),
            "tokens.output_per_s": value.get("output_throughput"),
            "tokens.total_per_s": total,
            "tokens.input": value.get("total_input_tokens"),
            "tokens.output": value.get("total_output_tokens"),
        }
    )
    figures |= _counted(value.get("completed"), value.get("failed"))
    return _result(
        tool,
        where,
        figures,
        {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "inter_chunk_ms": "ITL", "e2e_ms": "E2EL"},
        model=value.get("model_id"),
        load=_in_flight(value.get("max_concurrency"), value.get("request_rate")),
        started=value.get("date"),
    )


def _vllm(value: dict[str, Any], where: str) -> Result:
    return _bench_serving(value, where, "vllm bench serve", "e2el")


def _sglang(value: dict[str, Any], where: str) -> Result:
    return _bench_serving(value, where, "SGLang bench_serving", "e2e_latency")


def _aiperf(value: dict[str, Any], where: str) -> Result:
    def mean(name: str) -> Any:
        block = value.get(name)
        return block.get("avg") if isinstance(block, Mapping) else None

    units = {"ms": 1.0, "s": 1e3, "sec": 1e3, "us": 1e-3, "ns": 1e-6}
    figures: dict[str, float] = {}
    for ours, theirs in (
        ("ttft_ms", "time_to_first_token"),
        ("tpot_ms", "inter_token_latency"),
        ("inter_chunk_ms", "inter_chunk_latency"),
        ("e2e_ms", "request_latency"),
    ):
        block = value.get(theirs)
        if isinstance(block, Mapping):
            figures |= _spread(ours, block, units.get(str(block.get("unit")), 1.0))
    figures |= _known(
        {
            "load.completed_rps": mean("request_throughput"),
            "goodput.rps": mean("goodput"),
            "tokens.output_per_s": mean("output_token_throughput"),
            "tokens.total_per_s": mean("total_token_throughput"),
            "tokens.input": mean("total_isl"),
            "tokens.output": mean("total_osl"),
        }
    )
    figures |= _counted(mean("request_count"), mean("error_request_count"))
    asked = value.get("input_config") or {}
    models = (asked.get("models") or {}).get("items") or [{}]
    urls = (asked.get("endpoint") or {}).get("urls") or [""]
    return _result(
        "AIPerf",
        where,
        figures,
        {
            "ttft_ms": "Time to First Token",
            "tpot_ms": "Inter Token Latency",
            "inter_chunk_ms": "Inter Chunk Latency",
            "e2e_ms": "Request Latency",
        },
        version=value.get("aiperf_version"),
        model=models[0].get("name"),
        target=urls[0],
        started=value.get("start_time"),
    )


def _aiperf_records(text: str, where: str) -> Result:
    """`profile_export.jsonl`: a line per request, from which the statistics are made as AIPerf makes them."""
    names = {"ttft_ms": "time_to_first_token", "tpot_ms": "inter_token_latency", "e2e_ms": "request_latency"}
    values: dict[str, list[float]] = {ours: [] for ours in (*names, "inter_chunk_ms")}
    tokens, failed = 0.0, 0
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
            found = record["metrics"]
            if record.get("error"):
                failed += 1
                continue
            for ours, theirs in names.items():
                if theirs in found:
                    values[ours].append(float(found[theirs]["value"]))
            values["inter_chunk_ms"] += found.get("inter_chunk_latency", {}).get("value", [])
            tokens += found.get("output_sequence_length", {}).get("value", 0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"no record of AIPerf: {error}", f"{where}:{number}", "the line is damaged") from None
    figures: dict[str, float] = {}
    for ours, sample in values.items():
        if sample:
            stats = {name: float(np.percentile(sample, 100 * p)) for name, p in QUANTILES}
            figures |= _spread(ours, {**stats, "mean": float(np.mean(sample)), "min": min(sample), "max": max(sample)})
    figures |= _counted(len(values["e2e_ms"]), failed) | {"tokens.output": tokens}
    called = {ours: theirs.replace("_", " ") for ours, theirs in names.items()}
    return _result("AIPerf", where, figures, {**called, "inter_chunk_ms": "inter chunk latency"})


def _guidellm(value: dict[str, Any], where: str) -> Result:
    runs = value["benchmarks"]
    run = runs[-1]
    metrics = run["metrics"]

    def good(name: str) -> Any:
        block = metrics.get(name)
        return block.get("successful") if isinstance(block, Mapping) else None

    figures: dict[str, float] = {}
    for ours, theirs, scale in (
        ("ttft_ms", "time_to_first_token_ms", 1.0),
        ("tpot_ms", "inter_token_latency_ms", 1.0),
        (WITH_FIRST, "time_per_output_token_ms", 1.0),
        ("e2e_ms", "request_latency", 1e3),
    ):
        figures |= _spread(ours, good(theirs), scale)
    rates = {"load.completed_rps": "requests_per_second", "tokens.output_per_s": "output_tokens_per_second"}
    rates |= {"tokens.total_per_s": "tokens_per_second"}
    figures |= _known({path: (good(theirs) or {}).get("mean") for path, theirs in rates.items()})
    totals = {"tokens.input": "prompt_token_count", "tokens.output": "output_token_count"}
    figures |= _known({path: (good(theirs) or {}).get("total_sum") for path, theirs in totals.items()})
    made = metrics.get("request_totals") or {}
    figures |= _counted(made.get("successful"), (made.get("errored") or 0) + (made.get("incomplete") or 0))
    spec = (value.get("config") or {}).get("spec") or {}
    backend = spec.get("backend") or {}
    strategy = (run.get("config") or {}).get("strategy") or {}
    lanes = strategy.get("streams") or strategy.get("max_concurrency")
    notes = (f"the last of {len(runs)} benchmarks in the file",) if len(runs) > 1 else ()
    return _result(
        "GuideLLM",
        where,
        figures,
        {"ttft_ms": "TTFT", "tpot_ms": "ITL", WITH_FIRST: "TPOT", "e2e_ms": "Request latency"},
        version=(value.get("metadata") or {}).get("guidellm_version"),
        model=backend.get("model"),
        target=backend.get("target"),
        load=" ".join(filter(None, (strategy.get("type_"), f"{lanes}" if lanes else ""))),
        notes=notes,
    )


def _inference_perf(value: dict[str, Any], where: str) -> Result:
    good = value["successes"]
    latency, rates = good.get("latency") or {}, good.get("throughput") or {}
    figures: dict[str, float] = {}
    for ours, theirs in (
        ("ttft_ms", "time_to_first_token"),
        ("tpot_ms", "time_per_output_token"),
        (WITH_FIRST, "normalized_time_per_output_token"),
        ("inter_chunk_ms", "inter_token_latency"),
        ("e2e_ms", "request_latency"),
    ):
        figures |= _spread(ours, latency.get(theirs), 1e3)
    figures |= _known(
        {
            "load.completed_rps": rates.get("requests_per_sec"),
            "tokens.output_per_s": rates.get("output_tokens_per_sec"),
            "tokens.total_per_s": rates.get("total_tokens_per_sec"),
        }
    )
    figures |= _counted(good.get("count"), (value.get("failures") or {}).get("count"))
    asked = value.get("load_summary") or {}
    late = _number((asked.get("schedule_delay") or {}).get("p99"))
    notes = (
        (f"requests were sent up to {late * 1e3:,.0f} ms (p99) after they were due",) if late and late > 0.05 else ()
    )
    rate = _number(asked.get("requested_rate"))
    return _result(
        "inference-perf",
        where,
        figures,
        {
            "ttft_ms": "time_to_first_token",
            "tpot_ms": "time_per_output_token",
            WITH_FIRST: "normalized_time_per_output_token",
            "inter_chunk_ms": "inter_token_latency",
            "e2e_ms": "request_latency",
        },
        load=f"{rate:g}/s" if rate else "",
        notes=notes,
    )


def _genai_bench(value: dict[str, Any], where: str) -> Result:
    run = value["aggregated_metrics"]
    scale = 1.0 if value.get("_time_unit", "s") == "ms" else 1e3
    figures: dict[str, float] = {}
    for ours, theirs in (("ttft_ms", "ttft"), ("tpot_ms", "tpot"), ("e2e_ms", "e2e_latency")):
        figures |= _spread(ours, (run.get("stats") or {}).get(theirs), scale)
    figures |= _known(
        {
            "load.completed_rps": run.get("requests_per_second"),
            "tokens.output_per_s": run.get("mean_output_throughput_tokens_per_s"),
            "tokens.total_per_s": run.get("mean_total_tokens_throughput_tokens_per_s"),
        }
    )
    figures |= _counted(run.get("num_completed_requests"), run.get("num_error_requests"))
    lanes = run.get("num_concurrency")
    return _result(
        "genai-bench",
        where,
        figures,
        {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E latency"},
        load=" ".join(filter(None, (str(run.get("scenario") or ""), f"{lanes} in flight" if lanes else ""))),
    )


def _endpoints(value: dict[str, Any], where: str) -> Result:
    figures: dict[str, float] = {}
    for ours, theirs in (("ttft_ms", "ttft"), ("tpot_ms", "tpot"), ("e2e_ms", "latency")):
        figures |= _spread(ours, value.get(theirs), 1e-6)
    figures |= _known({"load.completed_rps": value.get("qps"), "tokens.output_per_s": value.get("tps")})
    for ours, theirs in (("tokens.input", "input_sequence_lengths"), ("tokens.output", "output_sequence_lengths")):
        figures |= _known({ours: (value.get(theirs) or {}).get("total")})
    figures |= _counted(value.get("n_samples_completed"), value.get("n_samples_failed"))
    pattern = (value.get("run_config") or {}).get("load_pattern") or {}
    amount = pattern.get("target_qps") or pattern.get("target_concurrency")
    notes = []
    if figures.get("tpot_ms.min", 0) < 0:
        notes.append("some of its TPOTs are negative: a first token was stamped after the end of its answer")
    if value.get("complete") is False:
        notes.append("its run is not complete")
    return _result(
        "mlcommons/endpoints",
        where,
        figures,
        {"ttft_ms": "ttft", "tpot_ms": "tpot", "e2e_ms": "latency"},
        version=value.get("version"),
        load=" ".join(filter(None, (str(pattern.get("type") or ""), f"{amount:g}" if amount else ""))),
        notes=notes,
    )


def _log(where: str) -> Result:
    from loadgen import mlperf_log

    log = mlperf_log.read(Path(where))
    figures: dict[str, float] = {}
    for ours, spread in (("ttft_ms", log.ttft), ("tpot_ms", log.tpot), ("e2e_ms", log.latency)):
        if spread is not None:
            figures |= _spread(ours, _of_log(spread), 1e-6)
    rate = log.samples_per_s if log.samples_per_s is not None else log.scheduled_samples_per_s
    figures |= _known({"tokens.output_per_s": log.tokens_per_s, "load.completed_rps": rate, "requests.ok": log.queries})
    notes = (f"MLPerf {log.scenario}, {'VALID' if log.valid else 'INVALID'}" + ", unofficial" * log.unofficial,)
    return _result(
        "MLPerf LoadGen",
        where,
        figures,
        {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "latency"},
        target=log.sut,
        load=f"{log.scenario} {log.target_qps:g}/s" if log.target_qps else log.scenario,
        notes=(*notes, *log.reasons),
    )


def _of_log(spread: Spread) -> dict[str, Any]:
    from loadgen.mlperf import PERCENTILES

    percentiles = {f"{p * 100:.1f}": value for p, value in zip(PERCENTILES, spread.percentiles, strict=False)}
    return {"mean": spread.mean, "min": spread.min, "max": spread.max, "percentiles": percentiles}


_TOOLS: tuple[tuple[Callable[[dict[str, Any]], bool], Callable[[dict[str, Any], str], Result]], ...] = (
    (lambda value: "mean_e2e_latency_ms" in value and "mean_ttft_ms" in value, _sglang),
    (lambda value: "mean_ttft_ms" in value and "request_throughput" in value, _vllm),
    (lambda value: "aiperf_version" in value or isinstance(value.get("request_latency"), dict), _aiperf),
    (lambda value: isinstance(value.get("benchmarks"), list) and len(value["benchmarks"]) > 0, _guidellm),
    (lambda value: "successes" in value and "load_summary" in value, _inference_perf),
    (lambda value: isinstance(value.get("aggregated_metrics"), dict), _genai_bench),
    (lambda value: "n_samples_issued" in value and "latency" in value, _endpoints),
)
"""How a tool's file is known, and who reads it; the first that fits."""
