"""Runs of millions of requests are judged from columns in their files, not from rows in memory."""

from pathlib import Path

import numpy as np
import run_fixtures
from queueing import rows

from loadgen.contracts.recorded_run import RecordedRun
from loadgen.contracts.stored_validation import read_run
from loadgen.core.metrics.columns import DROPPED
from loadgen.core.metrics.summary import dump_summary
from loadgen.core.results import store
from loadgen.core.results.manifest import ClassPlan
from loadgen.core.results.parquet import Frame, to_table, write_tables
from loadgen.core.run_summary import summarize


def test_views_of_a_recorded_run_read_their_records_from_the_file(tmp_path: Path) -> None:
    """The requests of each view of a run are the same as with its records in memory."""
    records = rows(3, 700)
    records["status"][::7] = DROPPED
    classes = (ClassPlan(name="a", share=0.5), ClassPlan(name="b", share=0.5))
    run_dir = run_fixtures.write(tmp_path / "r", records, classes=classes)
    (run_dir / "requests").mkdir()
    write_tables(run_dir / "requests" / store.MERGED, [to_table(records, [])])
    (run_dir / "summary.json").write_bytes(dump_summary(summarize(*store.read_run(run_dir))))
    in_memory_run = read_run(run_dir, tmp_path)
    streamed_run = read_run(run_dir, tmp_path, max_rows_in_memory=0)
    assert isinstance(streamed_run.rows, Frame)

    def views_of(run: RecordedRun) -> list[RecordedRun]:
        return [
            run,
            run.exclude_dropped(),
            run.select_class("a"),
            run.select_class("b").exclude_dropped(),
        ]

    for from_file, in_memory in zip(views_of(streamed_run), views_of(in_memory_run), strict=True):
        assert not isinstance(from_file.rows, np.ndarray)
        for name in ("slot", "due_ns", "first_token_ns", "status", "output_tokens"):
            assert from_file.columns()[name].tolist() == in_memory.columns()[name].tolist()
        assert (
            from_file.columns().measure("ttft").tolist()
            == in_memory.columns().measure("ttft").tolist()
        )
    assert (
        0
        < len(streamed_run.select_class("a").rows)
        < len(streamed_run.exclude_dropped().rows)
        < len(records)
    )
