"""Column arithmetic against the scalar definitions and against the slow way of saying the same."""

import math
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from counted_rows import CountedRows
from hypothesis import given, settings
from hypothesis import strategies as st
from loadgen_sdk import measures
from make_examples import blank
from numpy.typing import NDArray

from loadgen.core.errors import UserError
from loadgen.core.limits import ValidityLimits
from loadgen.core.metrics import columns as metrics
from loadgen.core.metrics import request_metrics, tasks
from loadgen.core.metrics.accumulator import MetricAccumulator
from loadgen.core.metrics.columns import UNDEFINED, Columns, JoinedColumns
from loadgen.core.metrics.goodput import measure_goodput
from loadgen.core.metrics.load import count_in_flight, gap_variation
from loadgen.core.metrics.run_accumulator import RunAccumulator
from loadgen.core.metrics.slo_sample import SloSample
from loadgen.core.metrics.windows import (
    Span,
    Window,
    count_events_between,
    count_events_within,
    make_span,
)
from loadgen.core.results import store
from loadgen.core.results.manifest import RunManifest, StagePlan, encode_manifest
from loadgen.core.results.parquet import CACHED_BYTES_PER_ROW, Frame, to_table, write_tables
from loadgen.core.results.record import BIN_NS, KINDS, ROW, STATUSES, concatenate_rows, select_rows
from loadgen.core.run_summary import summarize
from loadgen.core.slo import Slo, Term
from loadgen.core.stats.histogram import Histogram
from loadgen.core.stats.quantiles import BLOCK_ROWS
from loadgen.figures import METRICS
from loadgen.sim.record_columns import RecordColumns

S = 1_000_000_000
instant = st.one_of(st.just(-1), st.integers(0, 10**12))
FIELDS = ("due_ns", "sent_ns", "first_token_ns", "first_answer_ns", "last_token_ns", "end_ns")


def test_only_new_connections_have_a_connect_time() -> None:
    """A late client opens connections late; that delay is its own and no connect time."""
    rows = blank(4)
    rows["due_ns"] = 1_000
    rows["ready_ns"] = [
        5_000,
        5_000,
        0,
        -1,
    ]  # late on a kept connection; a new one; one opened in advance; none
    rows["reused"] = [1, 0, 0, 0]

    assert Columns(rows).measure("connect").tolist() == [0, 4_000, 0, metrics.UNDEFINED]


def _metrics_with_scalar_definitions() -> set[str]:
    """Return the names of the metrics that `loadgen_sdk.measures` defines, too."""
    return {row.name for row in METRICS.builtin_rows if hasattr(measures, row.name)}


@given(
    st.lists(
        st.tuples(
            *[instant] * 6,
            st.integers(-1, 2000),
            st.integers(-1, 50),
            st.integers(0, 9),
            st.booleans(),
        ),
        max_size=20,
    )
)
def test_metrics_of_columns_equal_their_scalar_definitions(values: list[tuple[int, ...]]) -> None:
    rows = blank(len(values))
    for row, (*instants, output, reasoning, first_tokens, at_once) in zip(
        rows, values, strict=True
    ):
        for field, value in zip(FIELDS, instants, strict=True):
            row[field] = value
        if at_once:
            row["first_answer_ns"] = row["first_token_ns"]
        row["output_tokens"], row["reasoning_tokens"], row["first_event_tokens"] = (
            output,
            reasoning,
            first_tokens,
        )
    columns = Columns(rows)
    for i, row in enumerate(rows):
        due, sent, first, answer, last, end = (int(row[field]) for field in FIELDS)
        output = int(row["output_tokens"])
        n = measures.streamed_tokens(output, int(row["reasoning_tokens"]), first, answer)
        expected = {
            "ttft": measures.ttft(due, first),
            "ttft_from_sent": measures.ttft_from_sent(sent, first),
            "first_answer": measures.first_answer(due, answer),
            "tpot": measures.tpot(first, last, n, max(int(row["first_event_tokens"]), 1)),
            "tpot_mlperf": measures.tpot_mlperf(due, first, end, output),
            "e2e": measures.e2e(due, end),
            "send_lag": measures.send_lag(due, sent),
        }
        assert expected.keys() == _metrics_with_scalar_definitions()
        measured_values = {metric: int(columns.measure(metric)[i]) for metric in expected}
        assert measured_values == {
            key: metrics.UNDEFINED if value is None else value for key, value in expected.items()
        }


def test_itl_is_the_time_between_successive_events() -> None:
    assert measures.gaps([5, 7, 7, 20]) == [2, 0, 13]
    assert measures.gaps([5]) == []


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(-1, 30)), max_size=25),
    st.integers(0, 30),
    st.integers(1, 40),
)
def test_the_number_in_flight_equals_counting_at_every_instant(
    spans_ns: list[tuple[int, int]], low: int, length: int
) -> None:
    rows = blank(len(spans_ns))
    for row, (sent, took) in zip(rows, spans_ns, strict=True):
        row["sent_ns"], row["done_ns"] = sent * S, -1 if took < 0 else (sent + took) * S
    stretch = Span(start_s=low, end_s=low + length, duration_s=length)
    halves = [Columns(rows[::2]), Columns(rows[1::2])]
    mean, largest = count_in_flight(halves, stretch)

    high = low + length
    spans = [(sent, max(sent, high) if took < 0 else sent + took) for sent, took in spans_ns]
    levels = [sum(start <= t < end for start, end in spans) for t in range(low, high + 1)]
    assert mean == pytest.approx(sum(levels[:-1]) / length)  # all instants are whole seconds
    assert largest == max(levels)


def variation(instants: NDArray[np.int64]) -> float:
    measured_variation = gap_variation(instants, np.zeros(len(instants), np.int64))
    assert measured_variation is not None
    return measured_variation


def test_the_inter_arrival_cv_is_0_for_constant_and_1_for_poisson_arrivals() -> None:
    draw = np.random.default_rng(4)

    assert variation(np.arange(1000) * S) == 0
    poisson = draw.permutation(np.cumsum(draw.exponential(S, 20_000)).astype(np.int64))
    assert variation(poisson) == pytest.approx(1, abs=0.02)

    two_rates = np.concatenate((np.arange(100) * S, 100 * S + np.arange(100) * S // 10))
    stages = np.repeat([0, 1], 100)
    assert gap_variation(two_rates, stages) == pytest.approx(0, abs=1e-6)
    assert gap_variation(two_rates, stages * 0) == pytest.approx(
        0.82, abs=0.01
    )  # what pooling would have said
    assert gap_variation(two_rates[:1], stages[:1]) is None


def test_events_of_a_partly_covered_bin_count_in_proportion() -> None:
    counts = np.array([10, 20, 30, 40])
    cut_span = make_span(
        BIN_NS // 2, BIN_NS * 5 // 2
    )  # half of the first, the second, half of the third
    assert count_events_within([counts, counts[:1] * 0], cut_span) == pytest.approx(5 + 20 + 15)
    assert count_events_within([counts, counts[:2]], cut_span) == pytest.approx(40 + 5 + 20)
    assert count_events_within([counts], make_span(BIN_NS, 99 * BIN_NS)) == pytest.approx(90)
    assert count_events_within([counts * 0], cut_span) is None
    assert count_events_within([counts], Span()) is None


@given(
    counts=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=20),
    start_ns=st.integers(0, 22 * BIN_NS),
    length_ns=st.integers(1, 22 * BIN_NS),
)
def test_event_counts_between_two_instants_interpolate_the_cumulative_count(
    counts: list[int], start_ns: int, length_ns: int
) -> None:
    sums, stretch = np.cumsum([0, *counts]), make_span(start_ns, start_ns + length_ns)
    assert stretch.start_s is not None and stretch.end_s is not None
    places = [stretch.start_s * 1e9 / BIN_NS, stretch.end_s * 1e9 / BIN_NS]
    low, high = np.interp(places, np.arange(len(sums)), sums)
    assert count_events_between(sums, stretch) == high - low


@given(
    statuses=st.lists(
        st.sampled_from((metrics.OK, metrics.OK, metrics.FAILED)), min_size=1, max_size=40
    ),
    stages=st.integers(1, 3),
    draw=st.randoms(use_true_random=False),
)
def test_joined_columns_in_an_order_are_those_of_all_in_that_order(
    statuses: list[int], stages: int, draw: Random
) -> None:
    rows = blank(len(statuses))
    rows["status"] = statuses
    rows["slot"] = rows["server_queue_ns"] = rows["first_token_ns"] = np.arange(len(rows)) * 7
    rows["stage"] = np.arange(len(rows)) % stages
    parts = [Columns(rows, rows["stage"] == stage) for stage in range(stages)]
    for ok in (False, True):
        joined_columns = JoinedColumns(parts, only_ok=ok)
        order = draw.sample(
            range(len(joined_columns["slot"])), draw.randint(0, len(joined_columns["slot"]))
        )
        some = JoinedColumns(parts, only_ok=ok, order=np.array(order, np.int64))
        for field in ("slot", "server_queue_ns", "status"):
            assert some[field].tolist() == joined_columns[field][order].tolist()
        assert some.measure("ttft").tolist() == joined_columns.measure("ttft")[order].tolist()


def test_records_copied_as_bytes_are_equal() -> None:
    rows = blank(6)
    rows["slot"], rows["end_ns"] = np.arange(6), np.arange(6) << 40
    none = concatenate_rows(())
    assert none.dtype == ROW and not len(none)
    both = concatenate_rows((rows[::2], rows[1::2]))
    assert both.dtype == ROW and both.tolist() == [*rows[::2].tolist(), *rows[1::2].tolist()]
    assert select_rows(rows, rows["slot"] > 3).tolist() == rows[4:].tolist()
    assert select_rows(rows, np.array([5, 0, 5])).tolist() == [rows[i].item() for i in (5, 0, 5)]


def test_metrics_of_tasks_read_few_columns_of_single_requests() -> None:
    rows = blank(1000)
    rows["session"], rows["slot"] = -1, np.arange(1000)
    columns = Columns(rows.view(CountedRows), rows["slot"] % 2 == 0)
    CountedRows.seen.clear()
    assert not len(tasks.tabulate_tasks(columns, 1).numbers)
    assert CountedRows.seen["picked"] <= 5 * len(
        columns
    )  # session, status, and the three instants of its latencies


def answers(slo: Slo, ttft_ms: list[int], **statuses: int) -> MetricAccumulator:
    """Ok requests due at 0 with these TTFTs, then others by status."""
    rows = blank(len(ttft_ms) + sum(statuses.values()))
    rows["due_ns"] = 0
    rows["first_token_ns"][: len(ttft_ms)] = np.array(ttft_ms) * 1_000_000
    rows["status"][len(ttft_ms) :] = np.repeat(
        [STATUSES.index(name) for name in statuses], list(statuses.values())
    )
    return RunAccumulator(RunManifest(slo=slo), rows, []).measured_and_warmup().measured


def slo_sample(
    requests: MetricAccumulator, gaps: Histogram | None = None, *, unrecorded: int = 0
) -> SloSample:
    return SloSample(requests, gaps or Histogram(), unrecorded, {}, ValidityLimits())


@pytest.mark.parametrize(
    ("ttft_ms", "statuses", "is_met", "value", "over", "count"),
    [
        ([1] * 98 + [5, 5], {}, True, 5, 0, 100),  # at the limit is within it
        ([1] * 98 + [5, 9], {}, False, 9, 1, 100),  # the place of p99 in 100 is the last
        ([1] * 198 + [5, 9], {}, True, 5, 1, 200),
        ([1] * 99, {"failed": 1}, False, None, 1, 100),
        ([1] * 199, {"failed": 1}, True, 1, 1, 200),  # place 198: the last that is not over
        ([1] * 198, {"dropped": 1, "lost": 1}, False, None, 2, 200),
        ([1] * 99, {"cancelled": 50}, True, 1, 0, 99),
        ([], {"cancelled": 3}, None, None, 0, 0),  # no request that could have one: undecided
    ],
)
def test_a_term_counts_failures_as_misses_and_excludes_cancelled_requests(
    ttft_ms: list[int],
    statuses: dict[str, int],
    is_met: bool,
    value: int | None,
    over: int,
    count: int,
) -> None:
    slo = Slo(terms=(Term(metric="ttft", limit_ns=5_000_000),))
    goodput = measure_goodput(slo_sample(answers(slo, ttft_ms, **statuses)), Window())
    term = goodput.slo[0]
    assert (term.met, term.value_ms, term.over, term.count) == (is_met, value, over, count)
    assert (goodput.met, goodput.good, goodput.counted) == (is_met, count - over, count)


def test_the_goodput_objective_counts_unrecorded_slots_as_misses() -> None:
    term = Term(metric="ttft", limit_ns=5_000_000, quantile=0.5)
    for share, unrecorded, met in (
        (0.9, 0, True),
        (0.91, 0, False),
        (0.9, 1, False),
        (None, 1, True),
    ):
        slo = Slo(terms=(term,), goodput_share=share)
        sample = slo_sample(answers(slo, [1] * 9 + [8]), unrecorded=unrecorded)
        assert measure_goodput(sample, Window()).met is met


def test_a_pooled_term_judges_gaps_and_not_requests() -> None:
    gaps = Histogram()
    gaps.add(np.array([10_000_000] * 98 + [50_000_000] * 2))
    slo = Slo(terms=(Term(metric="itl", limit_ns=20_000_000),))
    goodput = measure_goodput(slo_sample(answers(slo, [1, 1]), gaps), Window())

    assert (goodput.met, goodput.good, goodput.slo[0].over, goodput.slo[0].count) == (
        False,
        2,
        2,
        100,
    )
    assert goodput.slo[0].value_ms == pytest.approx(50, rel=0.001)


def test_the_maximum_in_flight_of_many_requests_equals_a_full_count() -> None:
    rows, draw = blank(20_000), np.random.default_rng(1)
    rows["sent_ns"] = draw.integers(0, 10**6, len(rows))
    rows["done_ns"] = rows["sent_ns"] + draw.integers(1, 10**6, len(rows))
    steps = np.repeat([1, -1], len(rows))
    order = np.lexsort(
        (steps, np.concatenate([rows["sent_ns"], rows["done_ns"]]))
    )  # at one instant ends come first
    most = int(np.cumsum(steps[order]).max())

    assert (
        count_in_flight([Columns(rows)], Span(start_s=0, end_s=0.002, duration_s=0.002))[1] == most
    )


@settings(max_examples=30)
@given(st.lists(st.sampled_from(range(4)), min_size=1, max_size=30))
def test_selected_columns_equal_the_selected_records(stages: list[int]) -> None:
    rows = blank(len(stages))
    rows["stage"] = stages
    chosen = rows["stage"] < 2
    columns = Columns(rows, chosen)
    assert len(columns) == chosen.sum()
    assert columns["slot"].tolist() == rows["slot"][chosen].tolist()


def test_any_selection_of_rows_in_a_file_equals_that_in_memory(tmp_path: Path) -> None:
    """Constant row groups are cached, and a selection reads only the groups that contain it."""
    rows, draw = blank(1_000), np.random.default_rng(1)
    rows["slot"] = rows["due_ns"] = draw.permutation(1_000)
    rows["stage"], rows["status"] = rows["slot"] >= 100, draw.integers(0, 2, 1_000)
    rows["text"] = np.where(rows["slot"] % 7 == 0, rows["slot"] % 3, -1)
    rows["output_tokens"][300:] = 50
    rows["sent_ns"], rows["done_ns"] = (
        rows["due_ns"] + 5,
        np.where(rows["slot"] > 990, -1, rows["due_ns"] + 10**12),
    )
    texts = ["one", "two", "three"]
    write_tables(
        tmp_path / "rows.parquet",
        [to_table(rows[at : at + 300], texts) for at in range(0, 1_000, 300)],
    )
    frame = Frame([tmp_path / "rows.parquet"])
    chosen, manifest = (
        rows["stage"] == 1,
        RunManifest(stages=(StagePlan(measured=False), StagePlan())),
    )
    late = draw.integers(0, int(chosen.sum()), 20)
    for _ in range(2):
        for name in set(ROW.names or ()) - {"text"}:
            assert (frame[name] == rows[name]).all()
            assert all(
                (frame.read_range(name, *at) == rows[name][slice(*at)]).all()
                for at in ((0, 1), (299, 601), (7, 7))
            )
            assert (Columns(frame, chosen)[name] == rows[name][chosen]).all()
            assert (Columns(frame, chosen).take(name, late) == rows[name][chosen][late]).all()
            assert len(Columns(frame, rows["slot"] < 0)[name]) == 0
        row_texts = np.array([*frame.texts, ""])[frame["text"]]
        assert (row_texts == np.array([*texts, ""])[rows["text"]]).all()
        assert (frame.read_range("text", 250, 650) == frame["text"][250:650]).all()

    assert summarize(manifest, frame) == summarize(manifest, rows)


def test_a_summary_of_a_file_caches_few_columns_and_reads_none_twice(
    tmp_path: Path,
) -> None:
    rows = sent_rows(3_000, 3)
    write_tables(
        tmp_path / "rows.parquet",
        [to_table(rows[at : at + 1_000], []) for at in range(0, 3_000, 1_000)],
    )
    frame = CountedFrame([tmp_path / "rows.parquet"])
    manifest = RunManifest(stages=(StagePlan(measured=False), StagePlan()))

    assert summarize(manifest, cast("NDArray[np.void]", frame)) == summarize(manifest, rows)
    assert frame.most_kept <= CACHED_BYTES_PER_ROW * len(rows)
    read = {name for name, _ in frame.reads}
    assert not read & {
        "output_tokens",
        "finish_reason",
        "reused",
    }  # one value: the statistics say it
    assert [len(read & same) for same in SAME] == [1, 1]
    repeated_reads = {name for (name, _), times in frame.reads.items() if times > 1}
    assert repeated_reads <= {"stage"}, "a column was read again"
    sizes = {name: frame._cache[name].values.itemsize for name in ("request", "max_gap_ns")}
    assert sizes == {"request": 2, "max_gap_ns": 4}


def test_columns_of_equal_size_in_a_file_are_read_separately(tmp_path: Path) -> None:
    """Numbers that do not compress: each column has the same number of bytes, and other ones."""
    rows, draw = blank(500), np.random.default_rng(1)
    for name in FIELDS:
        rows[name] = draw.integers(0, 1 << 62, 500)
    write_tables(tmp_path / "r.parquet", [to_table(rows, [])])
    row_group = pq.ParquetFile(tmp_path / "r.parquet").metadata.row_group(0)
    chunks = [row_group.column(at) for at in range(row_group.num_columns)]

    assert len(
        {chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema in FIELDS}
    ) < len(FIELDS)
    frame = Frame([tmp_path / "r.parquet"])
    assert all(frame[name].tolist() == rows[name].tolist() for name in FIELDS)
    frame.close()


def test_rows_of_a_file_sorted_by_stage_are_selected_without_a_copy(tmp_path: Path) -> None:
    rows, draw = blank(1_000), np.random.default_rng(1)
    rows["stage"] = np.where(
        np.arange(1_000) < 700, draw.integers(0, 3, 1_000), 1
    )  # the last group is of one
    rows["slot"], rows["due_ns"] = np.arange(1_000), draw.integers(-(2**40), 2**40, 1_000)
    rows["input_tokens"], rows["status"] = (
        draw.integers(-1, 40_000, 1_000),
        draw.integers(0, 2, 1_000),
    )
    rows["text"] = np.where(rows["slot"] % 7 == 0, rows["slot"] % 3, -1)
    write_tables(
        tmp_path / "rows.parquet",
        [to_table(rows[at : at + 300], ["a", "b", "c"]) for at in range(0, 1_000, 300)],
    )
    frame = Frame([tmp_path / "rows.parquet"], by_stage=True)
    expected = rows[np.argsort(rows["stage"], kind="stable")]

    for name in set(ROW.names or ()) - {"text"}:
        assert (frame[name] == expected[name]).all() and frame[name].dtype == ROW[name]
        assert (frame.read_range(name, 250, 650) == expected[name][250:650]).all()
    assert (
        np.array([*frame.texts, ""])[frame["text"]]
        == np.array(["a", "b", "c", ""])[expected["text"]]
    ).all()

    for stage in range(3):
        of_stage = Columns(cast("NDArray[np.void]", frame), frame["stage"] == stage)
        assert np.shares_memory(of_stage["due_ns"], frame["due_ns"])
        places = np.array([5, 0, 90])
        assert (of_stage.take("slot", places) == rows["slot"][rows["stage"] == stage][places]).all()


def test_blocks_of_columns_are_read_without_gathering_rows() -> None:
    """A row has all of its fields: to gather them for each figure was half of a run of a rack."""

    class ColumnsOnly(RecordColumns):
        def __getitem__(self, which: Any) -> Any:
            assert isinstance(which, str), "rows were made"
            return super().__getitem__(which)

    due = np.arange(BLOCK_ROWS + 5)
    chosen = due % 7 > 0
    columns = Columns(cast(Any, ColumnsOnly(len(due), {"due_ns": due})), chosen)
    assert [len(part["due_ns"]) for part in columns.blocks()][1:] == [
        int(chosen[BLOCK_ROWS:].sum())
    ]


def test_blocks_contain_the_selected_rows_in_order() -> None:
    rows = sent_rows(2 * BLOCK_ROWS + 5, 2)
    for chosen in (None, rows["slot"] % 100 > 0, rows["slot"] % 100 == 0, rows["slot"] < 0):
        columns = Columns(rows, chosen)
        parts = list(columns.blocks())
        assert [part["slot"].tolist() for part in parts if len(part)] != [] or not len(columns)
        assert np.concatenate([part["slot"] for part in parts]).tolist() == columns["slot"].tolist()
        assert max(map(len, parts)) <= BLOCK_ROWS
        metric_accumulator, by_block = MetricAccumulator(), MetricAccumulator()
        metric_accumulator.add(Columns(rows, chosen, keep_all=True), [], is_open_loop=True)
        by_block.add(columns, [], is_open_loop=True)
        assert (
            metric_accumulator.sums,
            metric_accumulator.minima,
            metric_accumulator.maxima,
            metric_accumulator.failures,
        ) == (
            by_block.sums,
            by_block.minima,
            by_block.maxima,
            by_block.failures,
        )


SAME = (
    {"first_event_ns", "first_answer_ns", "first_token_ns"},
    {"last_token_ns", "end_ns", "done_ns"},
)
"""Columns of `sent_rows` that are the same, as those of a simulated run are."""


def test_a_file_without_rows_has_empty_columns(tmp_path: Path) -> None:
    pq.write_table(to_table(sent_rows(5, 3)[:0], []), tmp_path / "rows.parquet")
    frame = Frame([tmp_path / "rows.parquet"], by_stage=True)
    assert [len(frame[name]) for name in ROW.names or ()] == [0] * len(ROW.names or ())


def test_successful_requests_without_a_scheduled_time_are_refused(tmp_path: Path) -> None:
    """A lost column in a run of millions was once reported as an internal error."""
    rows = sent_rows(500, 3)
    (tmp_path / "requests").mkdir()
    (tmp_path / "run.json").write_bytes(encode_manifest(RunManifest(run="r")))
    write_tables(
        tmp_path / "requests" / "requests.parquet", [to_table(rows, []).drop_columns(["due_ns"])]
    )

    for most in (math.inf, 0):
        with pytest.raises(UserError) as exc_info:
            store.read_run(tmp_path, max_rows=most)
        assert exc_info.value.code == "damaged_file"


class CountedFrame(Frame):
    """A frame that counts how often each group of a column is read, and how much it keeps."""

    def __init__(self, files: list[Path]) -> None:
        self.reads: Counter[tuple[str, int]] = Counter()
        self.most_kept = 0
        super().__init__(files, by_stage=True)

    def _read_group(self, name: str, group: Any) -> NDArray[Any]:
        self.reads[name, group] += 1
        self.most_kept = max(
            self.most_kept, sum(column.values.nbytes for column in self._cache.values())
        )
        return super()._read_group(name, group)


def sent_rows(count: int, seed: int) -> NDArray[np.void]:
    """Answers of many lengths of time, some failed, in two stages, in no order."""
    rows, draw = blank(count), np.random.default_rng(seed)
    rows["slot"] = rows["request"] = np.arange(count)
    rows["stage"] = rows["slot"] >= count // 10
    rows["due_ns"] = rows["ready_ns"] = draw.permutation(count) * 1_000
    at = rows["due_ns"].copy()
    for name in ("sent_ns", "first_byte_ns", "first_token_ns", "last_token_ns"):
        at += draw.integers(1, 10**9, count)
        rows[name] = at
    rows["first_event_ns"] = rows["first_answer_ns"] = rows["first_token_ns"]
    rows["end_ns"] = rows["done_ns"] = rows["last_token_ns"]
    rows["output_tokens"], rows["output_events"], rows["max_gap_ns"] = (
        50,
        50,
        draw.integers(1, 10**9, count),
    )
    rows["status"] = np.where(rows["slot"] % 11 == 0, STATUSES.index("failed"), 0)
    rows["kind"] = np.where(rows["slot"] % 11 == 0, KINDS.index("connect"), 0)
    return rows


def test_contiguous_rows_are_selected_without_a_copy() -> None:
    rows = blank(100)
    rows["due_ns"], rows["stage"][:10] = np.arange(100), 1
    columns = RecordColumns(100, {name: rows[name].copy() for name in ROW.names or ()})
    part = Columns(cast(Any, columns), columns["stage"] == 0)

    assert np.shares_memory(part["due_ns"], columns["due_ns"]) and part["due_ns"].tolist() == [
        *range(10, 100)
    ]
    assert Columns(rows, rows["due_ns"] == 5)["due_ns"].tolist() == [5]
    assert not len(Columns(rows, rows["due_ns"] < 0)["due_ns"])


def test_columns_of_instants_are_stored_without_a_dictionary(tmp_path: Path) -> None:
    """A dictionary of timestamps would fill up, double the writing time and enlarge the file."""
    rows = blank(50)
    rows["due_ns"] = np.arange(50) * S
    write_tables(tmp_path / "a.parquet", [to_table(rows, [])])
    group = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0)
    has = {
        column.path_in_schema: column.has_dictionary_page
        for column in map(group.column, range(group.num_columns))
    }

    assert not has["due_ns"] and not has["slot"] and has["status"] and has["text"]
    assert Frame([tmp_path / "a.parquet"])["due_ns"].tolist() == rows["due_ns"].tolist()


def test_parquet_statistics_that_contradict_the_values_are_an_error(tmp_path: Path) -> None:
    """A value would be cut to the type that they ask for, without a word."""
    rows, path = blank(50), tmp_path / "a.parquet"
    rows["due_ns"] = np.arange(50) * S
    write_tables(path, [to_table(rows, [])])
    largest = (49 * S).to_bytes(8, "little")
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer = content[start:]

    assert largest in footer
    path.write_bytes(content[:start] + footer.replace(largest, (100).to_bytes(8, "little")))
    with pytest.raises(UserError, match="due_ns has values outside the range 0 to 100"):
        Frame([path])["due_ns"]


def test_parquet_files_are_read_through_a_pool_that_releases_memory(tmp_path: Path) -> None:
    """The default pool of Arrow keeps what it reads ahead, 38 MB for the records of a rack."""
    rows = blank(50_000)
    rows["due_ns"] = np.random.default_rng(1).integers(0, 2**62, len(rows))
    write_tables(tmp_path / "rows.parquet", [to_table(rows, [])])
    frame = Frame([tmp_path / "rows.parquet"])
    before = allocated_elsewhere()
    assert (frame["due_ns"] == rows["due_ns"]).all()
    assert allocated_elsewhere() - before < 0.5 * 8 * len(rows)


def allocated_elsewhere() -> int:
    """Return the bytes allocated by the memory pools that do not return memory."""
    names = set(pa.supported_memory_backends()) - {"system"}
    pools = [getattr(pa, f"{name}_memory_pool")() for name in sorted(names)]
    if not all(hasattr(pool, "total_bytes_allocated") for pool in pools):
        pytest.skip("an older pyarrow does not count them")
    return sum(pool.total_bytes_allocated() for pool in pools)


@pytest.mark.parametrize("largest", [1 << 30, (1 << 53) - 1, 1 << 62])
def test_quotients_are_computed_from_integers(largest: int) -> None:
    """Small spans are divided as floats, which is faster, and must come out the same."""
    rng = np.random.default_rng(7)
    tokens = rng.integers(1, 5000, 20_000)
    spans = rng.integers(0, largest, 20_000) // tokens * tokens - rng.integers(
        0, 2, 20_000
    )  # at whole quotients
    spans[:2], tokens[2:4] = (UNDEFINED, largest - 1), (0, -1)
    quotients = request_metrics._divide(spans, tokens)
    expected = np.array(
        [
            s // t if t > 0 and s != UNDEFINED else UNDEFINED
            for s, t in zip(spans, tokens, strict=True)
        ]
    )

    assert quotients.tolist() == expected.tolist()


def test_joining_a_single_array_does_not_copy_it() -> None:
    numbers = np.arange(3)
    assert metrics.join_arrays([np.zeros(0), numbers]) is numbers
    assert metrics.join_arrays([numbers, numbers]).tolist() == [0, 1, 2, 0, 1, 2] and not len(
        metrics.join_arrays([])
    )
