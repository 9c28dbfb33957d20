"""Runs of millions of requests are judged from columns in their files, not from rows in memory."""

from pathlib import Path

import numpy as np
import runs
from queueing import rows

from loadgen.contracts.recorded_run import RecordedRun
from loadgen.contracts.stored_validation import read_run
from loadgen.core.metrics.columns import DROPPED
from loadgen.core.metrics.summary import dump_summary
from loadgen.core.results import store
from loadgen.core.results.manifest import ClassPlan
from loadgen.core.results.parquet import Frame, to_table, write
from loadgen.core.run_summary import summarize


def test_a_recorded_run_makes_no_rows_of_a_file(tmp_path: Path) -> None:
    """Its requests, those of a class and those that were not dropped are the same as of rows in memory."""
    found = rows(3, 700)
    found["status"][::7] = DROPPED
    classes = (ClassPlan(name="a", share=0.5), ClassPlan(name="b", share=0.5))
    folder = runs.write(tmp_path / "r", found, classes=classes)
    (folder / "requests").mkdir()
    write(folder / "requests" / store.MERGED, [to_table(found, [])])
    (folder / "summary.json").write_bytes(dump_summary(summarize(*store.read_run(folder))))
    whole = read_run(folder, tmp_path)
    streamed = read_run(folder, tmp_path, max_rows_in_memory=0)
    assert isinstance(streamed.rows, Frame)

    def chosen(run: RecordedRun) -> list[RecordedRun]:
        return [
            run,
            run.without_dropped(),
            run.only_class("a"),
            run.only_class("b").without_dropped(),
        ]

    for mine, theirs in zip(chosen(streamed), chosen(whole), strict=True):
        assert not isinstance(mine.rows, np.ndarray), "rows were made"
        for name in ("slot", "due_ns", "first_token_ns", "status", "output_tokens"):
            assert mine.columns()[name].tolist() == theirs.columns()[name].tolist()
        assert mine.columns().measure("ttft").tolist() == theirs.columns().measure("ttft").tolist()
    assert (
        0 < len(streamed.only_class("a").rows) < len(streamed.without_dropped().rows) < len(found)
    )
