"""Finish reasons counted from the records of a run and of its parts."""

from __future__ import annotations

from pathlib import Path

import run_fixtures
from queueing import rows

from loadgen.core import run_folder
from loadgen.core.results.record import FINISH, STATUSES
from loadgen.render import html as as_page
from loadgen.render import text as as_text
from loadgen.runs import kind


def test_the_report_counts_finish_reasons_of_successful_requests(tmp_path: Path) -> None:
    records = rows(1, 200)
    records["finish_reason"] = FINISH["length"]
    records["finish_reason"][:40] = FINISH["stop"]
    records["finish_reason"][40:43] = FINISH["content_filter"]
    records["finish_reason"][50:55] = FINISH[""]
    records["status"][0] = STATUSES.index("failed")
    folder = run_fixtures.write(tmp_path / "r", records)
    requests = run_folder.open_run(folder).summary.requests

    assert list(requests.by_finish.items()) == [
        ("length", 152),
        ("stop", 39),
        ("none", 5),
        ("content_filter", 3),
    ]
    assert sum(requests.by_finish.values()) == requests.ok

    report = kind.report(kind.load(folder))
    lines = [" ".join(line.split()) for line in as_text.render(report, full=True).splitlines()]
    assert "Finish reasons" in lines and "stop 39 19.6 %" in lines
    assert "<td>content_filter</td><td>3</td><td>1.5 %</td>" in as_page.render(report)
