"""The result files of tools that write JSON: rows of the table `loadgen.formats`.

Each tool has a function `is_...`, which recognises its file, and a function `read_...`, which
returns the result. The value of a `ToolFile` is the JSON object of the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from loadgen.core.errors import UserError
from loadgen.core.stats.quantiles import QUANTILES
from loadgen.formats import ForeignResult, ToolFile
from loadgen.interop.result_values import (
    MAX_VALUE,
    NANOSECONDS_MS,
    SECONDS_MS,
    TPOT_WITH_TTFT,
    LatencyField,
    ResultLayout,
    RunDescription,
    create_result,
    find_number,
    find_value,
    finite_number,
    latency_metrics,
    read_by_layout,
    request_metrics,
)

NOTABLE_SEND_DELAY_S = 0.05
"""A larger p99 of the send delay is reported, because latencies do not include it."""


# -- vllm bench serve, SGLang bench_serving ------------------------------------------------------


def is_sglang(file: ToolFile) -> bool:
    """Return True for a result of SGLang's bench_serving."""
    return "mean_e2e_latency_ms" in file.value and "mean_ttft_ms" in file.value


def read_sglang(file: ToolFile) -> ForeignResult:
    """Read a result of SGLang's bench_serving."""
    return _read_bench_serving(file, e2e_name="e2e_latency")


def is_vllm(file: ToolFile) -> bool:
    """Return True for a result of `vllm bench serve`."""
    return "mean_ttft_ms" in file.value and "request_throughput" in file.value


def read_vllm(file: ToolFile) -> ForeignResult:
    """Read a result of `vllm bench serve --save-result`."""
    return _read_bench_serving(file, e2e_name="e2el")


def _read_bench_serving(file: ToolFile, e2e_name: str) -> ForeignResult:
    """Read a result of vLLM or SGLang, whose tools have a common origin.

    Args:
        file: The file. It has keys such as `mean_ttft_ms` at its top level.
        e2e_name: The tool's name for the end-to-end latency.
    """
    document = file.value
    latencies = {
        "ttft_ms": LatencyField("ttft", "TTFT"),
        "tpot_ms": LatencyField("tpot", "TPOT"),
        "inter_chunk_ms": LatencyField("itl", "ITL"),
        "e2e_ms": LatencyField(e2e_name, "E2EL"),
    }

    layout = ResultLayout(
        latencies=latencies,
        metrics={
            "load.completed_rps": "request_throughput",
            "goodput.rps": "request_goodput",
            "tokens.output_per_s": "output_throughput",
            "tokens.total_per_s": _find_total_throughput_key(document),
            "tokens.input": "total_input_tokens",
            "tokens.output": "total_output_tokens",
        },
        ok="completed",
        failed=("failed",) if "failed" in document else (),
    )

    run = RunDescription(
        model=document.get("model_id"),
        load=_describe_bench_serving_load(document),
        started=document.get("date"),
    )

    # The layout needs an object for each latency, with all statistics of it.
    statistics_by_latency = _group_by_latency(
        document, [latency.path for latency in latencies.values()]
    )
    return read_by_layout(file, {**document, **statistics_by_latency}, layout, run)


def _find_total_throughput_key(document: Any) -> str:
    """Return the key of the rate of prompt and response tokens together.

    Versions of the tools differ in the name of this key.
    """
    if "total_token_throughput" in document:
        return "total_token_throughput"
    return "total_throughput"


def _group_by_latency(document: Any, latency_names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the statistics of each latency, which the file has in keys at its top level.

    For example, the key `mean_ttft_ms` becomes `{"ttft": {"mean": ...}}`. Other tools write their
    files in this form, which `ResultLayout` describes. Missing statistics are None.
    """
    statistics = ("mean", "median", "p50", "p90", "p95", "p99", "p99.9")
    return {
        name: {statistic: document.get(f"{statistic}_{name}_ms") for statistic in statistics}
        for name in latency_names
    }


def _describe_bench_serving_load(document: Any) -> str:
    """Return the requested rate and the limit of requests in flight, as far as they are set.

    The rate of a run without one is infinite, which is no finite number.
    """
    rate_per_s = finite_number(document.get("request_rate"))
    max_concurrency = document.get("max_concurrency")

    texts = []
    if rate_per_s is not None:
        texts.append(f"{rate_per_s:g}/s")

    if max_concurrency:
        texts.append(f"at most {max_concurrency} in flight")

    return ", ".join(texts) or "everything at once"


# -- AIPerf --------------------------------------------------------------------------------------

_PER_CHUNK_METRIC = "inter_chunk_ms"
"""The metric of which a request has one value for each chunk of its response."""

_AIPERF_LATENCIES = {
    "ttft_ms": LatencyField("time_to_first_token", "Time to First Token"),
    "tpot_ms": LatencyField("inter_token_latency", "Inter Token Latency"),
    _PER_CHUNK_METRIC: LatencyField("inter_chunk_latency", "Inter Chunk Latency"),
    "e2e_ms": LatencyField("request_latency", "Request Latency"),
}

_AIPERF_LAYOUT = ResultLayout(
    latencies=_AIPERF_LATENCIES,
    metrics={
        "load.completed_rps": "request_throughput.avg",
        "goodput.rps": "goodput.avg",
        "tokens.output_per_s": "output_token_throughput.avg",
        "tokens.total_per_s": "total_token_throughput.avg",
        # A metric with a single value, such as a total, has it in `avg`, too.
        "tokens.input": "total_isl.avg",
        "tokens.output": "total_osl.avg",
    },
    ok="request_count.avg",
    failed=("error_request_count.avg",),
)
"""Where `profile_export_aiperf.json` has its metrics."""


def is_aiperf(file: ToolFile) -> bool:
    """Return True for the summary or the records of an AIPerf run."""
    return (
        _is_aiperf_records(file.text)
        or "aiperf_version" in file.value
        or isinstance(file.value.get("request_latency"), dict)
    )


def read_aiperf(file: ToolFile) -> ForeignResult:
    """Read a result of AIPerf, which writes two files.

    `profile_export_aiperf.json` is a summary with the statistics of all metrics.
    `profile_export.jsonl` has the record of each request, from which statistics are computed here.
    """
    if _is_aiperf_records(file.text):
        return _read_aiperf_records(file.text, file.where)
    return _read_aiperf_summary(file)


def _read_aiperf_summary(file: ToolFile) -> ForeignResult:
    """Read `profile_export_aiperf.json`."""
    document = file.value
    run = RunDescription(
        version=document.get("aiperf_version"),
        model=find_value(document, "input_config.models.items.0.name"),
        target=find_value(document, "input_config.endpoint.urls.0"),
        started=document.get("start_time"),
    )
    return read_by_layout(file, document, _AIPERF_LAYOUT, run)


def _is_aiperf_records(text: str) -> bool:
    """Return True for the records of an AIPerf run. GuideLLM's file begins like them."""
    return (
        text.startswith('{"metadata"')
        and '"metrics"' in text.splitlines()[0]
        and '"benchmarks"' not in text
    )


class _AIPerfRecord(NamedTuple):
    """The metrics of one successful request.

    Attributes:
        values_ms: By the name of our metric, its values: one, or one for each chunk.
        output_tokens: The tokens of the response.
    """

    values_ms: dict[str, list[float]]
    output_tokens: float


_DAMAGED_RECORD_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""What parsing a record raises if the line is no JSON or a value has an unexpected type."""


def _read_aiperf_records(text: str, where: str) -> ForeignResult:
    """Compute the statistics of the records of a run as AIPerf computes them.

    Each line is the record of one request. Statistics are those of successful requests, and
    percentiles are interpolated between their values.

    Raises:
        UserError: A line is no record.
    """
    records = _pool_aiperf_records(text, where)
    metrics: dict[str, float] = {}
    for metric, sample in records.values_ms.items():
        metrics |= latency_metrics(metric, _compute_statistics(sample))

    metrics |= request_metrics(len(records.values_ms["e2e_ms"]), records.failed)
    metrics["tokens.output"] = records.output_tokens

    # AIPerf's name of a metric in words, such as "inter token latency".
    labels = {metric: field.path.replace("_", " ") for metric, field in _AIPERF_LATENCIES.items()}
    return create_result(where, metrics, labels, RunDescription())


class _PooledRecords(NamedTuple):
    """The metrics of all requests of a run.

    Attributes:
        values_ms: By the name of our metric, its values of all successful requests.
        output_tokens: The tokens of all their responses.
        failed: The number of failed requests.
    """

    values_ms: dict[str, list[float]]
    output_tokens: float
    failed: int


def _pool_aiperf_records(text: str, where: str) -> _PooledRecords:
    """Return the metrics of the records in a file, which has one JSON object in each line.

    Raises:
        UserError: A line is no record.
    """
    values_ms: dict[str, list[float]] = {metric: [] for metric in _AIPERF_LATENCIES}
    output_tokens = 0.0

    failed = 0
    for line_number, line in enumerate(text.splitlines(), 1):
        record = _parse_aiperf_record(line, f"{where}:{line_number}")
        if record is None:
            failed += 1
            continue
        output_tokens += record.output_tokens
        for metric, request_values_ms in record.values_ms.items():
            values_ms[metric] += request_values_ms

    return _PooledRecords(values_ms, output_tokens, failed)


def _parse_aiperf_record(line: str, location: str) -> _AIPerfRecord | None:
    """Return the metrics of a request from its JSON line, or None if the request failed.

    Raises:
        UserError: The line is no record. `location` is its file and line number.
    """
    try:
        record = json.loads(line)
        metrics = record["metrics"]
        has_failed = bool(record.get("error"))
        return None if has_failed else _parse_aiperf_metrics(metrics)
    except _DAMAGED_RECORD_ERRORS as error:
        raise UserError(
            "damaged_file", f"not a record of AIPerf: {error}", location, "the line is damaged"
        ) from None


def _parse_aiperf_metrics(metrics: dict[str, Any]) -> _AIPerfRecord:
    """Return the latencies and the output tokens of the object `metrics` of a record.

    For example, `{"request_latency": {"value": 12.5, "unit": "ms"}}` has one latency. The metric
    of chunks has a list of values instead of a number.

    Raises:
        Exception: The object has a wrong form. The types are those of _DAMAGED_RECORD_ERRORS.
    """
    values_ms: dict[str, list[float]] = {}
    for metric, field in _AIPERF_LATENCIES.items():
        if field.path in metrics:
            value = metrics[field.path]["value"]
            request_values = value if metric == _PER_CHUNK_METRIC else [value]
            values_ms[metric] = [_parse_latency(number, field.path) for number in request_values]

    output_tokens = metrics.get("output_sequence_length", {}).get("value", 0)
    if not isinstance(output_tokens, int | float):
        raise TypeError(f"output_sequence_length is {output_tokens!r}")

    return _AIPerfRecord(values_ms, float(output_tokens))


def _parse_latency(value: str | float, name: str) -> float:
    """Return a latency of a record in ms. Raises ValueError if it cannot be one."""
    latency_ms = float(value)
    if not 0 <= latency_ms <= MAX_VALUE:
        raise ValueError(f"{name} is {latency_ms:g}")
    return latency_ms


def _compute_statistics(sample: list[float]) -> dict[str, float]:
    """Return the statistics of a sample with interpolated percentiles, {} if it is empty."""
    if not sample:
        return {}
    statistics = {name: float(np.percentile(sample, 100 * p)) for name, p in QUANTILES}
    statistics["mean"] = float(np.mean(sample))
    statistics["min"] = min(sample)
    statistics["max"] = max(sample)
    return statistics


# -- GuideLLM, inference-perf, genai-bench, mlcommons/endpoints ----------------------------------


def is_guidellm(file: ToolFile) -> bool:
    """Return True for a result of GuideLLM."""
    benchmarks = file.value.get("benchmarks")
    return isinstance(benchmarks, list) and len(benchmarks) > 0


_GUIDELLM_LAYOUT = ResultLayout(
    latencies={
        "ttft_ms": LatencyField("time_to_first_token_ms.successful", "TTFT"),
        # GuideLLM calls the mean time between tokens ITL, which is our TPOT. Its own TPOT includes
        # the wait for the first token, so it is a separate metric.
        "tpot_ms": LatencyField("inter_token_latency_ms.successful", "ITL"),
        TPOT_WITH_TTFT: LatencyField("time_per_output_token_ms.successful", "TPOT"),
        "e2e_ms": LatencyField("request_latency.successful", "Request latency", SECONDS_MS),
    },
    metrics={
        "load.completed_rps": "requests_per_second.successful.mean",
        "tokens.output_per_s": "output_tokens_per_second.successful.mean",
        "tokens.total_per_s": "tokens_per_second.successful.mean",
        "tokens.input": "prompt_token_count.successful.total_sum",
        "tokens.output": "output_token_count.successful.total_sum",
    },
    ok="request_totals.successful",
    failed=("request_totals.errored", "request_totals.incomplete"),
)
"""Where a benchmark in `benchmarks.json` has its metrics."""


def read_guidellm(file: ToolFile) -> ForeignResult:
    """Read the last benchmark of GuideLLM's `benchmarks.json`, and note if there are others.

    The strategy of a benchmark is its load, for example {"type_": "concurrent", "streams": 8}.
    """
    document = file.value
    benchmarks = document["benchmarks"]
    last_benchmark = benchmarks[-1]
    strategy = find_value(last_benchmark, "config.strategy") or {}
    concurrency = strategy.get("streams") or strategy.get("max_concurrency")

    notes = []
    if len(benchmarks) > 1:
        notes.append(f"only the last of {len(benchmarks)} benchmarks in the file is read")

    run = RunDescription(
        version=find_value(document, "metadata.guidellm_version"),
        model=find_value(document, "config.spec.backend.model"),
        target=find_value(document, "config.spec.backend.target"),
        load=_join_known(strategy.get("type_"), concurrency),
        notes=notes,
    )
    return read_by_layout(file, last_benchmark["metrics"], _GUIDELLM_LAYOUT, run)


def is_inference_perf(file: ToolFile) -> bool:
    """Return True for a result of inference-perf."""
    return "successes" in file.value and "load_summary" in file.value


_INFERENCE_PERF_LATENCIES = {
    "ttft_ms": "time_to_first_token",
    "tpot_ms": "time_per_output_token",
    TPOT_WITH_TTFT: "normalized_time_per_output_token",
    "inter_chunk_ms": "inter_token_latency",
    "e2e_ms": "request_latency",
}
"""inference-perf's names of latencies, by the name of our metric."""

_INFERENCE_PERF_LAYOUT = ResultLayout(
    latencies={
        metric: LatencyField(f"successes.latency.{name}", name, SECONDS_MS)
        for metric, name in _INFERENCE_PERF_LATENCIES.items()
    },
    metrics={
        "load.completed_rps": "successes.throughput.requests_per_sec",
        "tokens.output_per_s": "successes.throughput.output_tokens_per_sec",
        "tokens.total_per_s": "successes.throughput.total_tokens_per_sec",
    },
    ok="successes.count",
    failed=("failures.count",),
)
"""Where `summary_lifecycle_metrics.json` has its metrics."""


def read_inference_perf(file: ToolFile) -> ForeignResult:
    """Read inference-perf's `summary_lifecycle_metrics.json`.

    Its latencies count from the time at which a request was really sent. If requests were sent much
    later than scheduled, a note says so, because the latencies do not include this delay.
    """
    document = file.value
    rate_per_s = find_number(document, "load_summary.requested_rate")
    send_delay_s = find_number(document, "load_summary.schedule_delay.p99")

    notes = []
    if send_delay_s is not None and send_delay_s > NOTABLE_SEND_DELAY_S:
        notes.append(
            f"requests were sent up to {send_delay_s * 1000.0:,.0f} ms (p99) after "
            "their scheduled time"
        )

    load = f"{rate_per_s:g}/s" if rate_per_s else ""
    run = RunDescription(load=load, notes=notes)
    return read_by_layout(file, document, _INFERENCE_PERF_LAYOUT, run)


def is_genai_bench(file: ToolFile) -> bool:
    """Return True for a result of genai-bench."""
    return isinstance(file.value.get("aggregated_metrics"), dict)


def read_genai_bench(file: ToolFile) -> ForeignResult:
    """Read the result of genai-bench at one concurrency.

    Latencies are in seconds, unless the field `_time_unit` of the file is "ms".
    """
    metrics = file.value["aggregated_metrics"]
    concurrency = metrics.get("num_concurrency")
    unit_ms = 1.0 if file.value.get("_time_unit", "s") == "ms" else SECONDS_MS
    layout = ResultLayout(
        latencies={
            "ttft_ms": LatencyField("stats.ttft", "TTFT", unit_ms),
            "tpot_ms": LatencyField("stats.tpot", "TPOT", unit_ms),
            "e2e_ms": LatencyField("stats.e2e_latency", "E2E latency", unit_ms),
        },
        metrics={
            "load.completed_rps": "requests_per_second",
            "tokens.output_per_s": "mean_output_throughput_tokens_per_s",
            "tokens.total_per_s": "mean_total_tokens_throughput_tokens_per_s",
        },
        ok="num_completed_requests",
        failed=("num_error_requests",),
    )
    load = _join_known(metrics.get("scenario"), f"{concurrency} in flight" if concurrency else "")

    return read_by_layout(file, metrics, layout, RunDescription(load=load))


def is_endpoints(file: ToolFile) -> bool:
    """Return True for a result of mlcommons/endpoints."""
    return "n_samples_issued" in file.value and "latency" in file.value


_ENDPOINTS_LAYOUT = ResultLayout(
    latencies={
        "ttft_ms": LatencyField("ttft", "ttft", NANOSECONDS_MS),
        "tpot_ms": LatencyField("tpot", "tpot", NANOSECONDS_MS),
        "e2e_ms": LatencyField("latency", "latency", NANOSECONDS_MS),
    },
    metrics={
        "load.completed_rps": "qps",
        "tokens.output_per_s": "tps",
        "tokens.input": "input_sequence_lengths.total",
        "tokens.output": "output_sequence_lengths.total",
    },
    # The tool does not write this field: `read_endpoints` adds it to the document.
    ok="n_samples_succeeded",
    failed=("n_samples_failed",),
)
"""Where `result_summary.json` has its metrics. Its times are in ns."""


def read_endpoints(file: ToolFile) -> ForeignResult:
    """Read the `result_summary.json` of mlcommons/endpoints.

    The load pattern has a type, such as "poisson", and either a target rate or a concurrency. The
    tool counts completed requests, failed ones included, from which the successful ones follow.
    """
    document = file.value
    load_pattern = find_value(document, "run_config.load_pattern") or {}
    target_load = load_pattern.get("target_qps") or load_pattern.get("target_concurrency")
    target_text = f"{target_load:g}" if target_load else ""
    run = RunDescription(
        version=document.get("version"),
        load=_join_known(load_pattern.get("type"), target_text),
        notes=_note_endpoints_problems(document),
    )
    complete_document = {**document, "n_samples_succeeded": _count_succeeded_samples(document)}

    return read_by_layout(file, complete_document, _ENDPOINTS_LAYOUT, run)


def _note_endpoints_problems(document: Mapping[str, Any]) -> list[str]:
    """Return what a reader of the metrics of mlcommons/endpoints should know."""
    notes = []
    if (find_number(document, "tpot.min") or 0.0) < 0:
        notes.append(
            "some TPOT values are negative, because a first token has a later "
            "timestamp than the end of its response"
        )

    if document.get("complete") is False:
        notes.append("the run of this file is not complete")

    return notes


def _count_succeeded_samples(document: Mapping[str, Any]) -> float | None:
    """Return how many requests of mlcommons/endpoints succeeded, or None if it is unknown.

    The tool counts a failed request as completed, too.
    """
    completed = finite_number(document.get("n_samples_completed"))
    failed = finite_number(document.get("n_samples_failed")) or 0.0
    return None if completed is None else completed - failed


def _join_known(*values: object) -> str:
    """Return the values that are not empty as one text."""
    return " ".join(str(value) for value in values if value)
