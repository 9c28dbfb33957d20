"""Tests of the metrics of a run in progress: each scrape has what the records have."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import run_fixtures
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString

from loadgen.core.errors import UserError
from loadgen.core.metrics.columns import Columns
from loadgen.core.results.record import KIND, STATUS
from loadgen.core.results.record_log import Tail
from loadgen.telemetry.prometheus import BUCKET_EDGES, RunCollector, parse_listen_address, serve

DOCS = Path(__file__).parents[2] / "docs"


def _scraped(collector: RunCollector) -> dict[str, Any]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    text = generate_latest(registry).decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_no_metrics_are_exported_before_the_run_begins(tmp_path: Path) -> None:
    assert _scraped(RunCollector(tmp_path)) == {}


def test_the_scraped_metrics_equal_those_of_the_stored_records(tmp_path: Path) -> None:
    folder = run_fixtures.write(tmp_path / "r")
    with closing(RunCollector(folder)) as collector, closing(Tail(folder)) as tail:
        metrics = _scraped(collector)
        written_columns = Columns(tail.rows())
    ok = written_columns["status"] == 0

    assert metrics["loadgen_requests_total", ("status", "ok")] == ok.sum()
    assert metrics["loadgen_ttft_seconds_count",] == ok.sum()
    assert metrics["loadgen_ttft_seconds_sum",] == pytest.approx(
        written_columns.measure("ttft")[ok].sum() / 1e9
    )

    ttft_s = written_columns.measure("ttft")[ok] / 1e9
    for edge in BUCKET_EDGES[6:]:
        at_most = metrics["loadgen_ttft_seconds_bucket", ("le", floatToGoString(edge))]
        assert abs(at_most - (ttft_s <= edge).sum()) <= max(
            0.002 * len(ttft_s), (abs(ttft_s - edge) < 0.002 * edge).sum()
        )

    assert metrics["loadgen_inter_chunk_seconds_count",] > 0


def test_requests_cut_off_by_the_end_do_not_count_as_failed(tmp_path: Path) -> None:
    """The report says unfinished, and the dashboard's panel of failures showed them."""
    rows = run_fixtures.rows(1, 300)
    for place, status, kind in (
        (0, "failed", "reset"),
        (1, "unfinished", "unfinished"),
        (2, "lost", "worker_died"),
    ):
        rows["status"][place], rows["kind"][place] = STATUS[status], KIND[kind]
    with closing(RunCollector(run_fixtures.write(tmp_path / "r", rows))) as collector:
        metrics = _scraped(collector)

    assert metrics["loadgen_requests_total", ("status", "unfinished")] == 1

    failed = {
        name[1][1]: value for name, value in metrics.items() if name[0] == "loadgen_failures_total"
    }

    assert failed == {"reset": 1, "worker_died": 1}


@pytest.mark.parametrize(("turns", "of"), [(1, "requests"), (4, "starts")])
def test_the_offered_rate_has_a_description_of_what_it_counts(
    tmp_path: Path, turns: int, of: str
) -> None:
    """8 conversations/s of four requests each stood as 8 requests/s beside 32 sent."""
    with closing(
        RunCollector(run_fixtures.write(tmp_path / "r", turns_per_session=turns))
    ) as collector:
        assert ("loadgen_offered_per_second", ("of", of)) in _scraped(collector)


def test_dashboard_and_documentation_name_every_exported_metric(tmp_path: Path) -> None:
    with closing(RunCollector(run_fixtures.write(tmp_path / "r"))) as collector:
        exported = {name for name, *_ in _scraped(collector)}
        exported |= {"loadgen_failures_total"}  # none failed
    queries = re.findall(r"loadgen_\w+", (DOCS / "grafana.json").read_text("utf-8"))

    assert set(queries) and set(queries) <= exported

    table = (
        (DOCS / "reference" / "monitoring.md")
        .read_text("utf-8")
        .partition("| metric | meaning |")[2]
        .partition("\n\n")[0]
    )
    named = re.findall(r"`(loadgen_[\w{,}]+)", table)
    metric_names = {name for text in named for name in braces(text)}

    assert (
        metric_names <= {re.sub("_(count|sum|bucket)$", "", name) for name in exported} | exported
    )


def braces(text: str) -> list[str]:
    """`a_{b,c}_d` as `a_b_d` and `a_c_d`; a last pair of braces are labels."""
    before, _, rest = text.partition("{")
    inside, _, after = rest.partition("}")
    return [before + name + after for name in inside.split(",")] if after else [before]


def test_each_scrape_reads_only_new_records(tmp_path: Path) -> None:
    folder = run_fixtures.write(tmp_path / "r")
    record_file = next((folder / "spool").glob("w*.rows"))
    file_bytes = record_file.read_bytes()
    record_file.write_bytes(file_bytes[: len(file_bytes) // 2])
    with closing(RunCollector(folder)) as collector, closing(RunCollector(folder)) as fresh:
        half = _scraped(collector)["loadgen_requests_total", ("status", "ok")]
        with record_file.open("ab") as file:
            file.write(file_bytes[len(file_bytes) // 2 :])
        all_of_them = _scraped(collector)["loadgen_requests_total", ("status", "ok")]
        assert 0 < half < all_of_them
        assert all_of_them == _scraped(fresh)["loadgen_requests_total", ("status", "ok")]


def test_metrics_are_served_on_loopback(tmp_path: Path) -> None:
    folder = run_fixtures.write(tmp_path / "r")
    with closing(RunCollector(folder)) as collector:
        server = serve(collector, "127.0.0.1", 0)
        try:
            with urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as answer:
                assert b"loadgen_ttft_seconds_bucket" in answer.read()
        finally:
            server.shutdown()
            server.server_close()


@pytest.mark.parametrize(
    ("text", "at"),
    [
        (":9400", ("127.0.0.1", 9400)),
        ("9400", ("127.0.0.1", 9400)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:2", ("::1", 2)),
    ],
)
def test_the_listen_address_follows_from_the_option(text: str, at: tuple[str, int]) -> None:
    assert parse_listen_address(text) == at


@pytest.mark.parametrize("text", ["", ":", "host", ":0", ":65536", "h:x"])
def test_an_invalid_port_for_prometheus_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_listen_address(text)
