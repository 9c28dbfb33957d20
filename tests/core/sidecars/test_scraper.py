"""Server metrics: pages become samples, and the samples of a run become metrics."""

from __future__ import annotations

import json
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import run_fixtures
import run_page
from command_line import exits
from hypothesis import given
from hypothesis import strategies as st
from loadgen_sdk.transport.target import Target
from loadgen_sdk.wire_formats.server_profiles import SERVER_PROFILES
from servers import start

import loadgen
from loadgen.core import run_folder
from loadgen.core.errors import CombinedError
from loadgen.core.execution.plan import Endpoint, Settings
from loadgen.core.results import store
from loadgen.core.server_metrics import series
from loadgen.core.server_metrics.series import (
    CACHE_HIT_RATE,
    CACHED_TOKENS,
    INPUT_TOKENS,
    KV_USE,
    OUTPUT_TOKENS,
    RUNNING,
    UP,
    WAITING,
    IterationParser,
    MetricSample,
)
from loadgen.core.sidecars import page_addresses
from loadgen.runs import charts as run_charts
from loadgen.runs import text
from loadgen.runs.page_data import MAX_BINS, compute_chart_data
from loadgen.sim.server.options import Options

# -- pages -----------------------------------------------------------------------------------------

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \\"b\\""} 3.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="m"} 1234.0
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{le="0.1"} 4
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 5
vllm:time_to_first_token_seconds_sum 0.7
vllm:time_to_first_token_seconds_count 5
vllm:kv_cache_usage_perc NaN
"""


def test_a_metrics_page_is_parsed_into_samples() -> None:
    assert series.parse_page(VLLM) == {
        ("vllm:num_requests_running", 'engine="0",model_name="a \\"b\\""'): 3.0,
        ("vllm:generation_tokens_total", 'engine="0",model_name="m"'): 1234.0,
        ("vllm:time_to_first_token_seconds_bucket", 'le="0.1"'): 4.0,
        ("vllm:time_to_first_token_seconds_bucket", 'le="+Inf"'): 5.0,
        ("vllm:time_to_first_token_seconds_sum", ""): 0.7,
        ("vllm:time_to_first_token_seconds_count", ""): 5.0,
    }


@pytest.mark.parametrize(
    "page",
    [
        "",
        "<html><body>no</body></html>",
        '{"detail": "Not Found"}',
        "a 1\nb",
        "x{y=1} 2",
        "# TYPE a gauge\n",
    ],
)
def test_a_text_that_is_no_metrics_page_is_refused(page: str) -> None:
    with pytest.raises(ValueError):
        series.parse_page(page)


@given(st.text(max_size=200))
def test_any_text_is_parsed_into_samples_or_refused(page: str) -> None:
    with suppress(ValueError):
        assert series.parse_page(page)


def row(number: int, active: int = 2) -> dict[str, Any]:
    blocks = {"usedNumBlocks": 25, "maxNumBlocks": 100, "cacheHitRate": 0.5}
    return {
        "iter": number,
        "iterLatencyMS": 10.0 * number,
        "numActiveRequests": active,
        "kvCacheStats": blocks,
    }


def test_iterations_drained_by_another_reader_are_counted_as_missed() -> None:
    page = IterationParser()
    first = page.parse(json.dumps([row(1), row(2), row(3, active=9)]).encode())

    assert first["trtllm_iteration:numActiveRequests", ""] == 9
    assert first["trtllm_iteration:iterLatencyMS", ""] == 20
    assert first["trtllm_iteration:kvCacheStats.usedShare", ""] == 0.25
    assert page.parse(b"[]")["trtllm_iteration:missed_total", ""] == 0
    last = page.parse(json.dumps([row(7)]).encode())
    assert (last["trtllm_iteration:read_total", ""], last["trtllm_iteration:missed_total", ""]) == (
        4,
        3,
    )
    with pytest.raises(ValueError, match="not a list of iterations"):
        page.parse(b'[1, "x"]')


# -- a run -----------------------------------------------------------------------------------------


def samples_of_reads(
    *reads: tuple[float, dict[str, float] | None], page: str = "http://a/metrics"
) -> list[MetricSample]:
    """Return samples as `PageReader.new_samples` does; None stands for a read that failed.

    Each read has the changed values and `up`.
    """
    samples: list[MetricSample] = []
    last: dict[str, float] = {}
    for t_s, values in reads:
        new = {name: value for name, value in (values or {}).items() if last.get(name) != value}
        last |= new
        for name, value in (*new.items(), (UP, float(values is not None))):
            samples.append(
                MetricSample(t_s=t_s, target=0, page=page, name=name, labels="", value=value)
            )
    return samples


TOKENS, RUN = "vllm:generation_tokens_total", "vllm:num_requests_running"


def test_counters_count_from_the_first_read_and_through_a_restart() -> None:
    samples = samples_of_reads(
        (-0.1, {TOKENS: 1000, RUN: 0}),
        (1.0, {TOKENS: 1100, RUN: 7}),
        (2.0, None),
        (3.0, {TOKENS: 1300, RUN: 7}),
        (4.0, {TOKENS: 50, RUN: 1}),
    )
    server_totals = series.summarize(samples, 350)

    assert server_totals is not None
    assert (
        server_totals.output_tokens,
        server_totals.running_max,
        server_totals.pages[0].reads,
        server_totals.pages[0].failed,
    ) == (
        350,
        7,
        5,
        1,
    )
    assert series.find_token_difference(server_totals) is None
    assert series.compute_curves(samples)[OUTPUT_TOKENS].values == pytest.approx(
        (100 / 1.1, 100, 50)
    )
    assert series.compute_curves(samples)[RUNNING] == series.MetricCurve(
        (-0.1, 1.0, 3.0, 4.0), (0, 7, 7, 1)
    )


def test_a_counter_that_appears_later_starts_at_zero_and_pages_are_summed() -> None:
    first_samples = samples_of_reads(
        (0.0, {TOKENS: 500}), (1.0, {TOKENS: 500, "sglang:generation_tokens_total": 40})
    )
    other = samples_of_reads((0.0, {TOKENS: 5}), (1.0, {TOKENS: 25}), page="http://b/metrics")
    samples = sorted([*first_samples, *other], key=lambda sample: sample.t_s)
    server_totals = series.summarize(samples, 100)

    assert server_totals is not None and server_totals.output_tokens == 60
    assert series.find_token_difference(server_totals) == {
        "server_tokens": 60,
        "client_tokens": 100,
        "share": -0.4,
        "cause": "restarted",
    }


def test_the_page_draws_server_metrics_over_those_of_the_client(tmp_path: Path) -> None:
    stored = store.read_run(run_fixtures.write(tmp_path / "r"))
    chart_data = compute_chart_data(*stored[:5])
    kv = "vllm:kv_cache_usage_perc"
    samples = samples_of_reads(
        *((t / 4 - 0.5, {TOKENS: 50 * t, RUN: t % 9, kv: t % 10 / 10}) for t in range(1000))
    )
    charts = {
        chart.title: chart
        for chart in run_charts.build_server_charts(chart_data, series.compute_curves(samples))
    }

    assert list(charts) == [
        "Requests in the server",
        "Output throughput, server and client",
        "Server caches",
    ]
    tokens, ours = charts["Output throughput, server and client"].series
    assert set(tokens.y) == {200} and len(tokens.x) <= MAX_BINS and min(tokens.x) >= 0
    assert max(tokens.x) <= chart_data.length_s
    rates = [value for values in chart_data.load.output_rate.series.values() for value in values]
    assert sum(v or 0 for v in ours.y) / len(ours.y) == pytest.approx(
        sum(v or 0 for v in rates) / len(rates), rel=0.1
    )
    assert list(run_charts.build_server_charts(chart_data, {})) == []


def test_without_a_readable_page_there_are_no_server_metrics() -> None:
    assert series.summarize([], 10) is None
    assert series.summarize(samples_of_reads((0.0, None)), 10) is None


def test_every_server_type_maps_the_important_metrics() -> None:
    for prefix in ("trtllm_", "vllm:", "sglang:", "llamacpp:", "dynamo_frontend_"):
        for metric in (RUNNING, WAITING, OUTPUT_TOKENS, INPUT_TOKENS, CACHED_TOKENS):
            assert sum(name.startswith(prefix) for name in series.NAMES_BY_QUANTITY[metric]), (
                prefix,
                metric,
            )
    names = [name for names in series.NAMES_BY_QUANTITY.values() for name in names]
    assert len(names) == len(set(names))


# -- where the pages are ---------------------------------------------------------------------------

KEY = "sk-very-secret-key"


def find_pages(url: str, server: str, *urls: str) -> tuple[page_addresses.PageAddress, ...]:
    settings = Settings(
        url=url, targets=(Endpoint(url=url, api_key=KEY),), server_metrics=urls or ("auto",)
    )
    probe_result: Any = types.SimpleNamespace(
        target=Target.parse(url), server=server, server_profile=SERVER_PROFILES[server]
    )
    return page_addresses.find_page_addresses(settings.pages, [probe_result])


def test_a_server_with_two_api_keys_has_one_metrics_page() -> None:
    urls = ("http://h:8000/v1", "http://h:8000/v1", "http://h:8000/other/v1", "http://h:8001/v1")
    settings = Settings(
        url=urls[0], targets=tuple(Endpoint(url=url, api_key=str(i)) for i, url in enumerate(urls))
    )
    probe_results: list[Any] = [
        types.SimpleNamespace(
            target=Target.parse(url), server="vllm", server_profile=SERVER_PROFILES["vllm"]
        )
        for url in urls
    ]

    assert [
        place.target for place in page_addresses.find_page_addresses(settings.pages, probe_results)
    ] == [0, 2, 3]


@pytest.mark.parametrize(
    ("server", "arguments", "paths"),
    [
        ("trtllm", (), ["http://h:8000/x/prometheus/metrics"]),
        ("trtllm", ("drain",), ["http://h:8000/x/metrics"]),
        ("vllm", (), ["http://h:8000/x/metrics"]),
        ("vllm", ("off",), []),
        ("openai", (), []),
        ("azure", (), []),
        ("generic", (), ["http://h:8000/x/prometheus/metrics", "http://h:8000/x/metrics"]),
        ("vllm", ("http://u:pw@h:9090/m?token=abc",), ["http://h:9090/m"]),
    ],
)
def test_the_server_type_determines_the_addresses_of_metrics_pages(
    server: str, arguments: tuple[str, ...], paths: list[str]
) -> None:
    addresses = find_pages("http://h:8000/x/v1", server, *arguments)
    assert [url for place in addresses for url in place.urls if place.kind == "metrics"] == paths


def test_the_api_key_is_sent_only_to_metrics_pages_of_the_target_host() -> None:
    for arguments, expected in (
        ((), f"Bearer {KEY}"),
        (("http://h:8000/metrics",), f"Bearer {KEY}"),
        (("http://h:9090/metrics",), None),
        (("http://other:8000/metrics",), None),
    ):
        (place,) = find_pages("http://h:8000/v1", "vllm", *arguments)
        assert place.headers.get("Authorization") == expected


@pytest.mark.parametrize(
    "arguments",
    [("auto", "off"), ("ftp://h/metrics",), ("metrics",), ("http://",), ("http://h:0/",)],
)
def test_an_invalid_server_metrics_option_is_refused_before_any_request(
    arguments: tuple[str, ...],
) -> None:
    fault = page_addresses.check_page_options(arguments)
    assert fault is not None and fault.where == "--server-metrics" and fault.hint
    with pytest.raises(CombinedError):
        loadgen.run("qa", url="http://127.0.0.1:9", server_metrics=arguments)


# -- whole -----------------------------------------------------------------------------------------


def go(folder: Path, url: str, *flags: str) -> int:
    load = (
        "--request-rate",
        "inf",
        "-n",
        "12",
        "--isl",
        "20",
        "--osl",
        "8",
        "--warmup",
        "0",
        "--seed",
        "7",
    )
    return exits("run", "qa", "--url", url, "--out", str(folder), *load, *flags)


@pytest.mark.processes
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_run_stores_the_samples_of_the_metrics_page(
    tmp_path: Path,
    workers: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with (
        start(Options(ttft="5ms", itl="1ms")) as server,
        start(Options(ttft="5ms", itl="1ms")) as second_server,
    ):
        go(tmp_path / "r", server.url, "--url", second_server.url, "--workers", workers)
    result = loadgen.load(tmp_path / "r")
    server_metrics = result.summary.server

    assert server_metrics is not None and len(server_metrics.pages) == 2
    assert server_metrics.output_tokens == server_metrics.client_output_tokens == 12 * 8
    assert server_metrics.requests_ok == 12 and all(
        page.reads >= 2 and not page.failed for page in server_metrics.pages
    )
    full_report = " ".join(text.render(result.summary).split())
    assert "96 output tokens counted" in full_report
    table = result.server
    assert table.column_names == ["t_s", "target", "page", "name", "labels", "value"]
    assert table["t_s"][0].as_py() < 0 and set(table["target"].to_pylist()) == {0, 1}
    assert all(
        KEY.encode() not in file.read_bytes()
        for file in (tmp_path / "r").rglob("*")
        if file.is_file()
    )
    assert "Server metrics" in run_page.render(result.summary)


@pytest.mark.processes
def test_a_server_without_a_metrics_page_has_no_server_metrics(tmp_path: Path) -> None:
    with start(Options(ttft="5ms", itl="1ms", api_flavor="openai")) as server:
        go(tmp_path / "r", server.url)
        assert not (tmp_path / "r" / series.FILE).exists()
        assert loadgen.load(tmp_path / "r").summary.server is None
        go(tmp_path / "off", server.url, "--server-metrics", "off")
        assert loadgen.load(tmp_path / "off").summary.server is None


def test_samples_of_a_truncated_run_are_read(tmp_path: Path) -> None:
    folder = run_fixtures.write(tmp_path / "r")
    lines = samples_of_reads(
        (0.0, {TOKENS: 0, RUN: 1, "vllm:kv_cache_usage_perc": 0.25}), (2.0, {TOKENS: 10})
    )
    data = b"".join(
        json.dumps({f: getattr(x, f) for f in x.__struct_fields__}).encode() + b"\n" for x in lines
    )
    (folder / series.FILE).write_bytes(data[:-9])
    summary = run_folder.summary(folder)

    assert summary.server is not None and summary.server.kv_use_max == 0.25
    assert run_fixtures.says(summary.verdict.warning_codes, "server_counts") == (
        summary.server.output_tokens is not None
    )
    assert "25.0 % full" in " ".join(text.render(summary).split())
    assert not {KV_USE, CACHE_HIT_RATE} & set(series.compute_curves([]))
