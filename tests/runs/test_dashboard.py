"""The live view: its figures against the summary's, what it reads of a growing folder, the process on a terminal."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import runs
from queueing import fail, rows
from rich.console import Console

from loadgen.core.metrics.summary import summarize
from loadgen.core.results import store
from loadgen.core.results.manifest import Second, StagePlan, TargetFacts
from loadgen.core.results.spool import Tail
from loadgen.core.server_metrics.series import MetricSample
from loadgen.core.slo import Slo, Term
from loadgen.core.stats.quantiles import BOUND, SUPPORT
from loadgen.runs.dashboard import (
    RECENT_S,
    Dashboard,
    TargetView,
    View,
    draw,
    events_per_s,
    trend_line,
)

S = 1_000_000_000


def shown(found: np.ndarray, now_s: float, **changed: object) -> tuple[View, str]:
    view = View(runs.header("r", len(found), **changed))
    for part in np.array_split(found[np.argsort(found["done_ns"])], 7):
        view.add(part)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(draw(view.picture(now_s)))
    return view, console.export_text()


def test_figures_since_the_start_are_those_of_the_summary() -> None:
    found = rows(1, 800)
    fail(found, 0.05)
    header = runs.header("r", 800, slo=Slo(terms=(Term(metric="ttft", limit_ns=S // 5),)))
    view = View(header)
    for part in np.array_split(found, 9):
        view.add(part)
    summary, now = summarize(header, found), float(found["done_ns"].max()) / 1e9
    seen = view.picture(now)
    assert SUPPORT["p99"] < 800
    for name, mine in (("ttft_ms", seen.ttft), ("tpot_ms", seen.tpot)):
        whole = getattr(summary, name)
        assert mine.all[0] == pytest.approx(whole.p50, rel=2 * BOUND)
        assert mine.all[1] == pytest.approx(whole.p99, rel=2 * BOUND)
    assert (seen.ok, seen.done, seen.planned) == (summary.requests.ok, 800, 800)
    assert seen.good_all == pytest.approx(summary.goodput.share)
    assert dict(seen.errors) == {"http_5xx": summary.requests.failed}


def test_the_last_seconds_are_the_last_seconds() -> None:
    found = rows(2, 900)
    now = float(found["due_ns"].max()) / 1e9 - 20  # in the middle of the load
    seen_by_then = found[found["done_ns"] <= now * 1e9]
    view = View(runs.header("r", 900))
    view.add(seen_by_then)
    seen = view.picture(now)
    last = seen_by_then[seen_by_then["done_ns"] >= round((now - RECENT_S) * 1e9)]
    ttft = np.sort(last["first_token_ns"] - last["due_ns"])
    assert seen.ttft.recent == pytest.approx(
        (ttft[len(ttft) // 2] / 1e6, ttft[int(len(ttft) * 0.99)] / 1e6)
    )
    assert seen.completed == pytest.approx(len(last) / RECENT_S)
    assert len(view._recent) == len(last), "older rows are let go"


def test_rates_load_and_time_left() -> None:
    stages = (
        StagePlan(
            name="warm-up", arrival="poisson 5/s", measured=False, slots=50, end_ns=10 * S, rate=5.0
        ),
        StagePlan(
            name="load",
            arrival="poisson 10/s",
            start_ns=10 * S,
            slots=250,
            end_ns=35 * S,
            rate=10.0,
        ),
    )
    view = View(runs.header("r", 300, stages=stages))
    assert view.picture(2.0).offered == 5.0
    view.sample(
        [
            Second(t_s=t, worker=w, sent=int(5 * t), in_flight=3, cpu_share=0.1 * w)
            for t in range(1, 21)
            for w in (0, 1)
        ]
    )
    seen = view.picture(20.0)
    assert (seen.stage, seen.offered, seen.left_s) == ("load · poisson 10/s", 10.0, 15.0)
    assert (
        seen.sent == pytest.approx(10.0) and seen.in_flight == 6 and seen.cpu == pytest.approx(0.1)
    )
    assert view.picture(40.0).left_s == 0


def test_a_row_for_each_of_several_targets() -> None:
    found = rows(3, 400)
    found["target"] = np.arange(400) % 2
    targets = (TargetFacts(name="node-a"), TargetFacts(name="node-b"))
    view, text = shown(found, float(found["done_ns"].max()) / 1e9, targets=targets)
    seen = view.picture(float(found["done_ns"].max()) / 1e9)
    assert [node.name for node in seen.nodes] == ["node-a", "node-b"]
    assert "node-a" in text and "node-b" in text
    assert View(runs.header("r", 1)).picture(1.0).nodes == ()


def test_it_says_what_there_is_to_say_and_fits() -> None:
    found = rows(4, 600)
    fail(found, 0.1)
    _, text = shown(found, 30.0)
    for said in (
        "load · poisson 10/s",
        "of 600 done",
        "TTFT",
        "TPOT",
        "within SLO",
        "generator",
        "http_5xx",
        "completed",
    ):
        assert said in text
    assert max(map(len, text.splitlines())) <= 100
    empty = Console(width=60, record=True, file=io.StringIO())
    empty.print(draw(View(runs.header("r", 0, stages=())).picture(0.1)))
    assert "- / -" in empty.export_text()


def test_the_tail_waits_for_the_other_half(tmp_path: Path) -> None:
    found = rows(5, 30)
    folder = runs.write(tmp_path / "r", found)
    tail = Tail(folder)
    path = folder / "spool" / "w0.rows"
    data = path.read_bytes()
    path.write_bytes(data[: 10 * found.itemsize + 7])
    assert len(tail.rows()) == 10 and len(tail.rows()) == 0
    path.write_bytes(data)
    assert tail.rows()["slot"].tolist() == list(range(10, 30))
    seconds = folder / "spool" / "w0.seconds"
    whole = seconds.read_bytes()
    seconds.write_bytes(whole[:-9])
    first = len(tail.seconds())
    seconds.write_bytes(whole)
    assert first and len(tail.seconds()) == 1
    counts = store.read_run(folder).timeline[0]
    assert events_per_s(folder, 1.0, 2.0) == pytest.approx(counts[100:200].sum())
    store.drop_spool(folder)
    assert len(tail.rows()) == 0 and tail.seconds() == []
    tail.close()


def test_a_small_screen_shows_the_worst_and_wraps_nothing_that_is_drawn() -> None:
    nodes = tuple(
        TargetView(f"node{i:02}", 1.0, int(i == 29), (float(i), float(i))) for i in range(30)
    )
    view = View(runs.header("r", 100))
    view.add(rows(4, 100))
    console = Console(record=True, width=40, file=io.StringIO())
    console.print(draw(msgspec.structs.replace(view.picture(20.0), nodes=nodes), 40, 24))
    lines = console.export_text().splitlines()
    assert (
        sum("node" in line for line in lines) == 5
        and "and 25 more, none of them worse" in lines[-1]
    )
    assert next(line for line in lines if "node" in line).startswith("node29")
    assert sum("━" in line for line in lines) <= 1
    assert any("last 10 s    since start" in line for line in lines)


@pytest.mark.processes
def test_the_process_draws_and_leaves(tmp_path: Path) -> None:
    """On a terminal of its own, until its standard input ends."""
    folder = runs.write(tmp_path / "r", rows(6, 200))
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "loadgen.runs.dashboard", str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        told = b""
        while b"since the start" not in told:
            told += os.read(ours, 65536)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(120) == 0
    plain = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", told).decode()
    assert "load" in plain and "of 200 done" in plain
    os.close(ours)


@pytest.mark.processes
def test_the_view_of_a_run_that_ended_closes(tmp_path: Path) -> None:
    live = Dashboard(runs.write(tmp_path / "r", rows(7, 20)))
    live.close()
    assert live._process.returncode == 0


def test_trend_lines_slo_colours_and_the_servers_queue() -> None:
    found = rows(3, 600)
    slo = Slo(terms=(Term(metric="ttft", limit_ns=S // 1000), Term(metric="tpot", limit_ns=S)))
    view = View(runs.header("r", 600, slo=slo))
    page = {"target": 0, "page": "http://a/metrics", "labels": ""}
    for second in range(1, 100):
        now_ns = second * S // 2
        view.add(found[(found["done_ns"] <= now_ns) & (found["done_ns"] > now_ns - S // 2)])
        names = (("vllm:num_requests_waiting", second), ("vllm:kv_cache_usage_perc", 0.5))
        view.serve(
            [MetricSample(t_s=second, name=name, value=value, **page) for name, value in names]
        )
        picture = view.picture(second / 2)
    assert (picture.ttft.kept[1], picture.tpot.kept[1]) == (False, True)
    assert 20 <= len(picture.trend) <= 40, "over the whole run, in bounded space"
    waiting = [point.waiting for point in picture.trend]
    assert waiting == sorted(waiting) and waiting[0] < 4 and waiting[-1] > 90
    console = Console(width=100, record=True, file=io.StringIO(), color_system="standard")
    console.print(draw(picture, 100))
    text = console.export_text(clear=False)
    assert "99 waiting, KV cache 50.0 % full" in text
    assert "limit 1.00 at p99" in text
    assert re.search(r"waiting +▁[▁▂▃▄▅▆▇]+█+ +to 9", text), text
    coloured = console.export_text(styles=True)
    assert re.search(r"\x1b\[1;31m[0-9]", coloured) and re.search(r"\x1b\[32m[0-9]", coloured)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_an_ordinary_terminal_has_trend_and_colour_and_breaks_no_word(width: int) -> None:
    found = rows(3, 600)
    slo = Slo(
        terms=(
            Term(metric="ttft", limit_ns=S // 1000, quantile=0.95),
            Term(metric="tpot", limit_ns=S),
        )
    )
    view = View(runs.header("r", 600, slo=slo))
    for second in range(1, 100):
        now_ns = second * S // 2
        view.add(found[(found["done_ns"] <= now_ns) & (found["done_ns"] > now_ns - S // 2)])
        picture = view.picture(second / 2)
    console = Console(width=width, record=True, file=io.StringIO(), color_system="standard")
    console.print(draw(picture, width, 24))
    text = console.export_text(clear=False)
    lines = text.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= width
    for name in ("TTFT p50", "TPOT p50", "tokens"):
        assert (
            sum(re.match(rf"{name} +[▁▂▃▄▅▆▇█ ]+ to [0-9]", line) is not None for line in lines)
            == 1
        ), text
    names = {"TTFT", "TPOT", "within", "generator", "load", "in", "ms,", "tokens", ""}
    rows_shown = [line for line in lines if line.strip(" ━")]
    assert {line.split(" ")[0] for line in rows_shown} <= names - {""}, (
        text
    )  # no row goes on in a second line
    assert re.search(r"\x1b\[1;31m[0-9]", console.export_text(styles=True))


@pytest.mark.parametrize(
    ("values", "line"), [([], ""), ([1.0], ""), ([0.0, 0.0], "▁▁"), ([0.0, None, 2.0, 4.0], "▁ ▅█")]
)
def test_a_trend_line_goes_from_nothing_to_the_highest(
    values: list[float | None], line: str
) -> None:
    assert trend_line(values) == line
