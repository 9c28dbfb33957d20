"""The table of machines of a cluster adds up to the run in text, page and JSON."""

from __future__ import annotations

import json

import numpy as np
import run_page
from queueing import rows
from run_fixtures import manifest

from loadgen.core.metrics.columns import LOST
from loadgen.core.metrics.machines import MachineSummary
from loadgen.core.metrics.summary import Summary, dump_summary, load_summary
from loadgen.core.results.manifest import Cluster, PlacedWorker, WorkerSample
from loadgen.core.run_summary import summarize
from loadgen.runs import text

MS = 1_000_000


def place_worker(worker: int, node: str, *, lost: bool = False) -> PlacedWorker:
    return PlacedWorker(worker=worker, node=node, address="10.0.0.1", lost=lost)


def summary_of_machines(*workers: PlacedWorker, lost: tuple[str, ...] = ()) -> Summary:
    """Of four workers; the last one is 50 ms late with each request, and loses every tenth."""
    records = rows(1, 400)
    records["worker"] = np.arange(400) % 4
    last = records["worker"] == 3
    records["sent_ns"][last] = records["due_ns"][last] + 50 * MS
    gone = last & (np.arange(400) >= 360)
    records["status"][gone], records["sent_ns"][gone] = LOST, -1
    seconds = [
        WorkerSample(t_s=float(t), worker=w, cpu_share=0.1 * (w + 1))
        for t in range(2, 30)
        for w in range(4)
    ]
    cluster = Cluster(address="auto", nodes=3, workers=workers, lost=lost)
    return summarize(
        manifest("r", 400, workers=4, cluster=cluster), records, worker_samples=seconds
    )


SEVERAL = (
    place_worker(0, "a"),
    place_worker(1, "a"),
    place_worker(2, "b"),
    place_worker(3, "c #1", lost=True),
)


def test_each_machine_reports_its_requests_send_delay_and_cores() -> None:
    summary = summary_of_machines(*SEVERAL, lost=("d (10.0.0.4)",))
    first_machine_summary, second_machine_summary, third_machine_summary, gone_machine_summary = (
        summary.machines
    )

    assert [machine_summary.name for machine_summary in summary.machines] == [
        "a (10.0.0.1)",
        "b (10.0.0.1)",
        "c #1 (10.0.0.1)",
        "d (10.0.0.4)",
    ]
    assert (
        first_machine_summary.workers,
        first_machine_summary.requests,
        first_machine_summary.lost,
        first_machine_summary.late,
    ) == (2, 200, 0, 0)
    assert (
        third_machine_summary.requests,
        third_machine_summary.lost,
        third_machine_summary.late,
        third_machine_summary.send_lag_ms.p50,
    ) == (100, 10, 90, 50.0)
    assert (
        sum(machine_summary.requests or 0 for machine_summary in summary.machines)
        == summary.requests.scheduled
    )
    assert (
        sum(machine_summary.lost or 0 for machine_summary in summary.machines)
        == summary.requests.lost
    )
    assert (
        first_machine_summary.cores is not None
        and abs(first_machine_summary.cores - 0.3) < 1e-9
        and first_machine_summary.cpu_share_max == 0.2
    )
    assert second_machine_summary.state == "" and third_machine_summary.state == "lost under load"
    assert gone_machine_summary == MachineSummary(
        name="d (10.0.0.4)", workers=0, state="lost before the load"
    )


def test_text_page_and_json_agree_on_the_machines() -> None:
    summary = summary_of_machines(*SEVERAL, lost=("d (10.0.0.4)",))
    rendered_text = text.render(summary)
    name = "c #1 (10.0.0.1), lost under load"
    cells = " ".join(
        line.removeprefix(name) for line in rendered_text.splitlines() if line.startswith(name)
    ).split()

    assert cells == ["1", "100", "10", "90", "50.0", "~50.0", "0.400", "40.0", "%"]
    assert "d (10.0.0.4), lost before the load" in rendered_text
    assert "c #1 (10.0.0.1), lost under load" in run_page.render(summary)
    written_document = json.loads(dump_summary(summary))["machines"]
    assert [machine["requests"] for machine in written_document] == [200, 100, 100, None]
    assert load_summary(dump_summary(summary)).machines == summary.machines


def test_a_run_of_one_machine_has_no_table_of_machines() -> None:
    assert summary_of_machines(*(place_worker(worker, "a") for worker in range(4))).machines == ()
    assert "lost under load" not in text.render(
        summary_of_machines(*(place_worker(worker, "a") for worker in range(4)))
    )
