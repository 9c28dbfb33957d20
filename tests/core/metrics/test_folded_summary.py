"""A run whose rows are folded says what the rows would have said; drift; rows that rotate and are dropped."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import make_examples
import msgspec
import numpy as np
import pytest
from folding import folded
from make_examples import blank, stream
from runs import NO_PAGES, says, when_started
from servers import shared
from test_summary import HEADER, hand_rows

from loadgen.core import run_folder
from loadgen.core.execution import run
from loadgen.core.execution.bodies import UNKNOWN
from loadgen.core.execution.plan import Settings, Tuning
from loadgen.core.followers import compactor
from loadgen.core.metrics import drift
from loadgen.core.metrics.accumulator import Accumulator
from loadgen.core.metrics.summary import Summary
from loadgen.core.results import store
from loadgen.core.results.manifest import Header, Second, StagePlan, TargetFacts, encode
from loadgen.core.results.parquet import from_parquet
from loadgen.core.results.record import KINDS, ROW, SOURCES, STATUSES, RecordKey, unsent_record
from loadgen.core.results.spool import Spool, recorded, segments
from loadgen.core.run_summary import build, summarize
from loadgen.core.slo import Slo, Term
from loadgen.core.stats.amounts import BINS, TimeCurve
from loadgen.core.stats.quantiles import Histogram
from loadgen.core.workload import load, read_flags
from loadgen.runs import text

MS, S = 1_000_000, 1_000_000_000
UNTOLD = {
    "gap_variation",
    "gap_variation_planned",
    "in_flight_max",
    "warnings",
    "kept",
    "between",
}  # needs all rows at once
ABOUT = {"steady", "in_flight_mean", "output_per_s"}  # read off a curve


def conversations() -> tuple[Any, ...]:
    """60 conversations of three turns on two targets: some fail in the middle, some are cut, some cancelled."""
    draw = np.random.default_rng(5)
    rows = blank(180)
    rows["session"], rows["turn"] = rows["slot"] // 3, rows["slot"] % 3
    rows["target"] = rows["session"] % 2
    rows["due_ns"] = (rows["slot"] // 3) * 100 * MS + (rows["slot"] % 3) * 700 * MS
    rows["output_events"] = rows["output_tokens"] = 20
    rows["input_tokens"], rows["built_tokens"] = 50, 45
    rows["input_source"] = rows["output_source"] = SOURCES.index("server")
    stream(
        rows,
        draw.integers(50, 400, 180) * MS,
        draw.integers(5, 15, 180) * MS,
        draw.integers(10, 90, 180) * 1000,
    )
    failed = np.isin(rows["session"], [7, 20]) & (rows["turn"] == 1)
    after = np.isin(rows["session"], [7, 20]) & (rows["turn"] == 2)
    rows["status"][failed], rows["kind"][failed] = STATUSES.index("failed"), KINDS.index("http_5xx")
    rows["status"][after], rows["kind"][after] = (
        STATUSES.index("dropped"),
        KINDS.index("previous_turn_failed"),
    )
    unsent = [name for name in rows.dtype.names if name.endswith("_ns") and name != "due_ns"]
    for name in unsent:
        rows[name][after] = -1
    rows["status"][(rows["session"] == 30) & (rows["turn"] == 2)] = STATUSES.index("cancelled")
    cut = (rows["session"] >= 55) & (rows["turn"] >= 1)
    rows["status"][cut], rows["kind"][cut] = STATUSES.index("unfinished"), KINDS.index("unfinished")
    for name in ("first_token_ns", "first_answer_ns", "last_token_ns", "end_ns"):
        rows[name][cut] = -1
    rows["finish_reason"][cut] = 0
    rows["done_ns"][cut] = (
        rows["due_ns"][cut] + rows["session"][cut] % 2 * S
    )  # every second one is over 300 ms
    for name in unsent:
        rows[name][cut & (rows["turn"] == 2)] = -1
    rows = rows[~((rows["session"] >= 58) & (rows["turn"] == 2))]
    header = Header(
        state="finished",
        turns=3,
        stages=(StagePlan(name="all", arrival="constant 10/s"),),
        targets=(TargetFacts(name="a"), TargetFacts(name="b")),
        slo=Slo(terms=(Term(metric="ttft", limit_ns=300 * MS, quantile=0.9),)),
    )
    return header, rows, [Histogram()], [], [], []


def examples() -> list[tuple[Any, ...]]:
    priced = make_examples.token_priced()
    header, rows, gaps, _, _, texts = priced
    return [
        make_examples.rented_gpus(),
        priced,
        (header, rows, gaps, [], [], texts),  # without a timeline
        (HEADER, hand_rows(), [Histogram()] * 2, [], [], ["", "says no"]),
        conversations(),
    ]


def alike(a: Any, b: Any, path: str = "") -> None:
    name = path.rpartition(".")[2]
    if name in UNTOLD:
        return
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            alike(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (left, right) in enumerate(zip(a, b, strict=True)):
            alike(left, right, f"{path}[{i}]")
    elif isinstance(a, float) and isinstance(b, (int, float)):
        about = 0.01 if any(word in name for word in ABOUT) or ".drift." in path else 0.0011
        away = 0.004 if ".drift." in path else 10 if name == "margin_ms" else 1e-6  # of differences
        assert b == pytest.approx(a, rel=about, abs=away), path
    else:
        assert a == b, path


@pytest.mark.parametrize("which", range(5))
def test_a_summary_that_is_only_judged_lacks_what_readers_ask_for_and_nothing_else(
    which: int,
) -> None:
    header, rows, *rest = examples()[which]
    whole, judged = (
        summarize(header, rows, *rest, explained=explained) for explained in (True, False)
    )
    of_readers = ("sustainable", "splits", "slowest", "between", "causes", "within", "stimulus")
    defaults = {name: getattr(judged, name) for name in of_readers}
    assert msgspec.structs.replace(whole, **defaults) == judged
    assert not any(
        (judged.slowest, judged.causes.text, judged.within, judged.stimulus, judged.splits.groups)
    )
    assert any(getattr(whole, name) != value for name, value in defaults.items())


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("which", range(5))
def test_what_is_folded_says_what_the_rows_say(which: int, parts: int) -> None:
    header, rows, gaps, timeline, seconds, texts = examples()[which]
    real = summarize(header, rows, gaps, timeline, seconds, texts)
    found = build(header, folded(header, rows, texts, parts), gaps, timeline, seconds)
    assert found.sustainable.sustained is None and "not kept" in found.sustainable.why
    assert (
        not found.splits.groups and found.splits.why and not found.slowest and not found.causes.text
    )
    assert not found.within
    not_kept = ("sustainable", "splits", "slowest", "causes", "within")
    found = msgspec.structs.replace(found, **{name: getattr(real, name) for name in not_kept})
    of_rows = ("arrivals", "spacing", "lanes", "repeats")
    real = msgspec.structs.replace(
        real, stimulus=tuple(one for one in real.stimulus if one.code not in of_rows)
    )
    alike(msgspec.to_builtins(real), msgspec.to_builtins(found))
    assert found.requests == real.requests
    assert found.verdict.reasons == real.verdict.reasons
    assert found.goodput.good == real.goodput.good


def test_an_empty_run() -> None:
    summary = build(HEADER, Accumulator(HEADER))
    assert summary.requests.scheduled == summary.requests.lost == 9
    assert not summary.verdict.valid


def test_what_is_no_ledger_is_refused() -> None:
    sound = Accumulator(HEADER).to_bytes()
    damaged = [
        sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :]
        for at in range(6, len(sound), len(sound) // 50)
    ]
    for data in (b"", b"\x00", Accumulator(Header()).to_bytes(), *damaged, sound[:-1]):
        with pytest.raises(ValueError, match="ledger"):
            Accumulator.from_bytes(data, HEADER)


@pytest.mark.parametrize("hours", [0.01, 1, 30])
def test_a_curve_of_any_length_takes_the_same_room(hours: float) -> None:
    draw = np.random.default_rng(1)
    start = (draw.random(5000) * hours * 3600e9).astype(np.int64)
    end = start + draw.integers(0, 30, 5000) * S
    amount = draw.integers(1, 9, 5000)
    whole, parts = TimeCurve(), [TimeCurve(), TimeCurve()]
    whole.add(start, end, amount)
    early = start < hours * 1800e9
    for part, chosen in zip(parts, (early, ~early), strict=True):
        part.add(start[chosen], end[chosen], amount[chosen])
    parts[0].merge(parts[1])
    assert len(whole.slope) == BINS
    span_s = hours * 3600
    low, high = span_s * 0.2, span_s * 0.8
    length = np.maximum(end - start, 1)
    share = np.clip(np.minimum(end, high * 1e9) - np.maximum(start, low * 1e9), 0, None) / length
    exact = float(
        (np.where(end > start, share, (start >= low * 1e9) & (start <= high * 1e9)) * amount).sum()
    )
    assert whole.between(low, high) == pytest.approx(exact, rel=0.005)
    assert parts[0].between(low, high) == pytest.approx(whole.between(low, high), rel=1e-6)
    assert whole.between(0, span_s + 100) == pytest.approx(amount.sum(), rel=1e-6)


def slower(change: float, seconds: int) -> Summary:
    """A request every 10 ms whose TTFT grows over the run by this share, and whose tokens come as fast as ever."""
    rows = blank(seconds * 100)
    rows["due_ns"] = rows["slot"] * 10 * MS
    rows["output_events"] = rows["output_tokens"] = 5
    rows["output_source"] = SOURCES.index("server")
    growth = 1 + change * np.arange(len(rows)) / len(rows)
    stream(
        rows,
        (100 * MS * growth).astype(np.int64),
        np.full(len(rows), 10 * MS),
        np.full(len(rows), 20_000),
    )
    return summarize(Header(state="finished", stages=(StagePlan(name="load"),)), rows)


def test_drift_is_found_and_only_what_drifts() -> None:
    found = slower(0.5, 60).drift
    assert found.block_s == 2
    assert len(found.blocks) == 30
    assert found.ttft_p99 == pytest.approx((1 + 0.5 * 5 / 6) / (1 + 0.5 / 6) - 1, abs=0.02)
    assert found.output_per_s == pytest.approx(0, abs=0.01)
    assert found.blocks[3].output_per_s == pytest.approx(500, rel=0.01)
    said = next(
        line for line in text.render(slower(0.5, 60)).splitlines() if line.startswith("Drift")
    )
    assert f"TTFT p50 {(found.ttft_p50 or 0) * 100:+.1f} %" in said
    steady = slower(0.0, 60).drift
    assert (steady.ttft_p50, steady.ttft_p99, steady.tpot_p99) == (0, 0, 0)
    assert "Drift" not in text.render(slower(0.5, 5))
    short = slower(0.5, 5).drift
    assert short.ttft_p99 is None
    assert len(short.blocks) == 5


@pytest.mark.parametrize("last_s", [0, 31, 32, 63, 64, 40_000])
def test_blocks_are_as_short_as_they_may_be(last_s: int) -> None:
    rows = blank(1)
    rows["due_ns"] = last_s * S
    accumulator = Accumulator(Header())
    accumulator.add(rows, [])
    length = accumulator.block_ns
    assert last_s * S < length * drift.BLOCKS
    assert length == S or last_s * S >= length // 2 * drift.BLOCKS


def test_in_flight_is_the_sum_over_workers_of_the_same_second() -> None:
    samples = [
        Second(t_s=t + 0.01 * w, worker=w, in_flight=10 * w + t)
        for t in range(1, 5)
        for w in range(3)
    ]
    rows = make_examples.blank(2)
    rows["due_ns"] = [0, 10 * S]
    rows["sent_ns"], rows["last_token_ns"] = rows["due_ns"], rows["due_ns"] + S
    ledger = Accumulator(Header())
    ledger.add(rows, [])
    assert build(Header(), ledger, seconds=samples).load.in_flight_max == 30 + 3 * 4


# -- whole runs ----------------------------------------------------------------------------------------------------


def go(
    folder: Path, keep: str, workers: int = 1, segment_rows: int = 100, **flags: str
) -> tuple[Summary, Path]:
    folder.mkdir(exist_ok=True)
    file = folder / "w.yaml"
    file.write_text(
        "name: long\nrequests: {input_tokens: 8, output_tokens: 4, turns: {count: 2, tool_result_tokens: 3}}\n"
    )
    made = load(
        str(file), read_flags(**({"seed": "7", "warmup": "20req", "slo": ("ttft:60s",)} | flags))
    )
    told = Settings(
        url=shared().url,
        model="sim",
        server="trtllm",
        out=folder / "out",
        keep=keep,
        workers=workers,
        route="sticky",
        tuning=Tuning(segment_rows=segment_rows),
        **NO_PAGES,
    )
    return run.execute(made, told)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("keep", "workers"), [("raw", 1), ("sample", 2), ("histogram", 1), ("histogram", 2)]
)
def test_what_is_kept(tmp_path: Path, keep: str, workers: int) -> None:
    summary, out = go(tmp_path, keep, workers, 30, request_rate="300", num_requests="150")
    assert summary.requests.ok == summary.requests.scheduled == 300
    assert summary.warmup.ok == 40
    assert summary.sessions is not None
    assert summary.sessions.ok == 150
    assert summary.ttft_ms.count == 300
    assert summary.goodput.good == 300
    assert summary.kept == keep
    assert not (out / "spool").exists()
    assert (out / "requests").exists() == (keep == "raw")
    assert (out / "sample").exists() == (keep == "sample")
    assert store.has_rows(out) == (keep == "raw")
    if keep == "sample":
        rows, _ = from_parquet([out / "sample" / "requests.parquet"])
        assert sorted(rows["slot"].tolist()) == list(range(340))
    again = run_folder.summary(out)
    assert again.requests == summary.requests
    assert again.ttft_ms == summary.ttft_ms
    if keep == "raw":
        assert len(np.unique(store.read_run(out).rows["slot"])) == 340


def test_segments_come_and_go(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(encode(Header(stages=(StagePlan(),))))
    spool = Spool(tmp_path, 3, 10)
    keeping = compactor.Raw(tmp_path)
    place = iter(range(1000))
    taken = 0
    for _ in range(7):
        for _ in range(4):
            spool.row(
                unsent_record(
                    RecordKey(next(place), 0, 0, 3, 0, -1, 0, -1),
                    5,
                    "in_flight_cap",
                    "dropped",
                    UNKNOWN,
                )
            )
        spool.flush()
        for segment in segments(tmp_path)[
            :-1
        ]:  # what the recorder does with those that are complete
            rows = np.fromfile(segment.path, ROW)
            keeping.take(segment, segment.first, rows[:4])
            keeping.take(segment, segment.first + 4, rows[4:])
            keeping.done(segment)
            segment.path.unlink()
            taken += len(rows)
        assert len(np.unique(store.read_run(tmp_path).rows["slot"])) == len(
            store.read_run(tmp_path).rows
        )
    spool.close()
    assert taken == 24
    assert sorted(store.read_run(tmp_path).rows["slot"].tolist()) == list(range(28))
    assert sorted(recorded(tmp_path, 3, Header())["first"].tolist()) == list(range(28))
    again = Spool(tmp_path, 3)  # of a worker that died: its file goes on
    again.row(
        unsent_record(RecordKey(28, 0, 0, 3, 0, -1, 0, -1), 5, "worker_died", "lost", UNKNOWN)
    )
    again.close()
    assert sorted(recorded(tmp_path, 3, Header())["first"].tolist()) == list(range(29))


def test_rows_that_the_compactor_had_not_saved_are_counted(tmp_path: Path) -> None:
    """It dies between two writes of its sums: what it took after the first, and what came later, is in the spool."""
    header = Header(keep="histogram", stages=(StagePlan(),))
    (tmp_path / "run.json").write_bytes(encode(header))
    spool = Spool(tmp_path, 0, 100)
    fold = compactor.Fold(tmp_path, header)
    taken = 0
    for part in range(9):
        rows = blank(30)
        rows["slot"] += 30 * part
        rows["due_ns"] = rows["slot"] * MS
        for row in rows:
            spool.row(row.tobytes())
        spool.flush()
        first, *more = segments(tmp_path)
        if part in {
            1,
            3,
            4,
        }:  # it reads the second part (and saves), the fourth (a file is full), the fifth
            for segment in (first, *more):
                new = np.fromfile(segment.path, ROW)[max(0, taken - segment.first) :]
                fold.take(segment, taken, new)
                taken += len(new)
                if more and segment is first:
                    fold.done(segment)
                    segment.path.unlink()
            if part == 1:
                fold._save()
        assert run_folder.summary(tmp_path).requests.scheduled == 30 * (part + 1)
    assert taken == 150
    assert len(segments(tmp_path)) == 2


def test_a_sample_is_of_all_and_bounded(tmp_path: Path) -> None:
    header = Header(keep="sample", stages=(StagePlan(),))
    Spool(tmp_path, 0).close()
    (tmp_path / "run.json").write_bytes(encode(header))
    fold = compactor.Fold(tmp_path, header, 1000)
    segment = segments(tmp_path)[0]
    for i in range(20):
        rows = blank(500)
        rows["slot"] += 500 * i
        rows["due_ns"] = rows["slot"] * MS
        fold.take(segment, 500 * i, rows)
    fold.end()
    slots = from_parquet([tmp_path / "sample" / "requests.parquet"])[0]["slot"]
    assert 500 <= len(slots) <= 1000
    counts = np.bincount(slots // 1000, minlength=10)
    assert counts.min() > len(slots) / 10 * 0.6  # from everywhere
    assert run_folder.summary(tmp_path).requests.scheduled == 10_000


@pytest.mark.processes
def test_a_worker_that_dies_without_rows_kept(tmp_path: Path) -> None:
    def kill(_: Any) -> None:
        loop = asyncio.get_running_loop()
        mine = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
        pids = [int(pid) for pid in Path(mine).read_text().split()]
        workers = [
            pid for pid in pids if "backends.worker" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        loop.call_later(1.2, os.kill, workers[1], signal.SIGKILL)

    file = tmp_path / "w.yaml"
    file.write_text("name: long\nrequests: {input_tokens: 8, output_tokens: 4}\n")
    made = load(str(file), read_flags(seed="7", warmup="0", request_rate="100", num_requests="300"))
    told = Settings(
        url=shared().url,
        model="sim",
        server="trtllm",
        out=tmp_path / "out",
        keep="histogram",
        workers=2,
        **NO_PAGES,
    )
    summary, _ = run.execute(made, told, when_started(kill))
    requests = summary.requests
    assert requests.scheduled == 300
    assert requests.ok + requests.lost == 300
    assert requests.lost > 50
    assert not summary.verdict.valid
    assert says(summary.verdict.codes, "worker_died", worker=1)
