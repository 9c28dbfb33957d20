"""Requests that the end of the drain cuts off are unfinished, not failed, in every command.

Search, report, cost and capacity are run in turn for every profile, and no step may contradict the
one before it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from command_line import exits
from make_examples import blank, stream
from numpy.typing import NDArray
from run_fixtures import says

from loadgen.core.errors import INCONCLUSIVE, INTERRUPTED, OK, SLO_MISSED, UNSOUND
from loadgen.core.execution.events import Counters
from loadgen.core.metrics import columns, outcomes
from loadgen.core.metrics.columns import UNFINISHED, Columns
from loadgen.core.metrics.summary import Summary, exit_code, load_summary
from loadgen.core.results import store
from loadgen.core.results.manifest import (
    RunManifest,
    StagePlan,
    TargetFacts,
    decode_manifest,
    encode_manifest,
)
from loadgen.core.results.parquet import read_records, to_table
from loadgen.core.results.record import KINDS, SOURCES, STATUSES
from loadgen.core.run_summary import summarize
from loadgen.core.slo import Slo, Term
from loadgen.runs import text
from loadgen.runs.progress import Progress, describe_progress
from loadgen.runs.slo_text import describe_result
from loadgen.search.goal import Goal

pytestmark = pytest.mark.commands

MS, S = 1_000_000, 1_000_000_000
SLO = Slo(
    terms=(
        Term(metric="ttft", limit_ns=2 * S, quantile=0.95),
        Term(metric="e2e", limit_ns=60 * S, quantile=0.95),
    )
)
MANIFEST = RunManifest(
    run="r",
    state="finished",
    stages=(StagePlan(name="load", arrival="poisson 10/s"),),
    slo=SLO,
    targets=(TargetFacts(url="http://h", gpus=4),),
    grace_s=30.0,
    timeout_s=600.0,
)


def records_with_unfinished(ok: int, unfinished: int, over: int = 0) -> NDArray[np.void]:
    """Return requests that are scheduled every 100 ms.

    Of the unfinished ones, all cut at 100 s, `over` never got a first token.
    """
    rows = blank(ok + unfinished)
    rows["due_ns"] = np.arange(len(rows)) * 100 * MS
    rows["output_events"] = rows["output_tokens"] = rows["asked_output"] = 20
    rows["input_tokens"], rows["built_tokens"] = 50, 45
    rows["input_source"] = rows["output_source"] = SOURCES.index("server")
    stream(
        rows, np.full(len(rows), 100 * MS), np.full(len(rows), 10 * MS), np.full(len(rows), 30_000)
    )
    cut_records = rows[ok:]
    cut_records["status"], cut_records["kind"] = (
        STATUSES.index("unfinished"),
        KINDS.index("unfinished"),
    )
    cut_records["end_ns"], cut_records["finish_reason"], cut_records["done_ns"] = -1, 0, 100 * S
    cut_records["due_ns"] = 70 * S + np.arange(unfinished) * 10 * MS
    for name in ("sent_ns", "ready_ns"):
        cut_records[name] = cut_records["due_ns"]
    for name in ("first_token_ns", "first_answer_ns", "first_byte_ns", "first_event_ns"):
        cut_records[name] = cut_records["due_ns"] + 100 * MS
    cut_records["last_token_ns"] = 99 * S
    for name in ("first_token_ns", "first_answer_ns", "last_token_ns"):
        cut_records[name][:over] = -1
    return rows


def summary_of(ok: int, unfinished: int, over: int = 0, **changes: Any) -> Summary:
    return summarize(
        msgspec.structs.replace(MANIFEST, **changes), records_with_unfinished(ok, unfinished, over)
    )


def single_request(**fields: int) -> Columns:
    row = blank(1)
    row["status"], row["finish_reason"] = UNFINISHED, 0
    for name in row.dtype.names:
        if name.endswith("_ns") and name not in ("max_gap_ns",):
            row[name] = -1
    row["due_ns"], row["sent_ns"], row["done_ns"], row["asked_output"] = 0, 0, 10 * S, 101
    for name, value in fields.items():
        row[name] = value
    return Columns(row)


STREAMING = {
    "first_token_ns": S,
    "first_answer_ns": S,
    "last_token_ns": 9 * S,
    "max_gap_ns": 500 * MS,
}


@pytest.mark.parametrize(
    ("metric", "limit_ns", "fields", "over"),
    [
        ("ttft", 9 * S, {}, True),  # 10 s without a first token
        ("ttft", 11 * S, {}, False),
        ("ttft", 2 * S, STREAMING, False),
        ("ttft", S // 2, STREAMING, True),
        ("ttft", S, {"sent_ns": -1, "done_ns": -1}, False),  # never sent: nothing is known
        ("ttft_from_sent", 9 * S, {"sent_ns": 2 * S}, False),
        (
            "first_answer",
            9 * S,
            STREAMING | {"first_answer_ns": -1},
            True,
        ),  # it has only reasoned so far
        ("e2e", 9 * S, STREAMING, True),
        ("e2e", 11 * S, STREAMING, False),
        (
            "e2e",
            9 * S,
            STREAMING | {"finish_reason": 1, "end_ns": 8 * S},
            False,
        ),  # only the end of the body is missing
        ("tpot", 80 * MS, STREAMING, True),  # 9 s for at most 100 more tokens
        ("tpot", 100 * MS, STREAMING, False),
        ("tpot", 80 * MS, STREAMING | {"asked_output": -1}, False),  # no bound is known
        ("tpot_mlperf", 80 * MS, STREAMING, True),
        ("max_gap", 400 * MS, STREAMING, True),
        ("max_gap", 900 * MS, STREAMING, True),  # the gap that was open at the cut
        ("max_gap", 2 * S, STREAMING, False),
        ("itl", 1, STREAMING, False),
    ],
)
def test_an_unfinished_request_misses_a_term_if_its_least_value_exceeds_the_limit(
    metric: str, limit_ns: int, fields: dict[str, int], over: bool
) -> None:
    is_over = outcomes.is_over_when_cut(
        single_request(**fields), Term(metric=metric, limit_ns=limit_ns)
    )
    assert is_over.tolist() == [over]
    assert not outcomes.is_over_when_cut(
        single_request(**fields, status=1), Term(metric=metric, limit_ns=limit_ns)
    ).any()


def test_unfinished_requests_are_neither_ok_nor_failed() -> None:
    summary = summary_of(1000, 10, 4)
    counts = summary.requests

    assert (counts.ok, counts.failed, counts.unfinished, counts.scheduled) == (1000, 0, 10, 1010)
    assert counts.decided == 1000 and not counts.by_error
    assert summary.verdict.valid and exit_code(summary) == OK
    ttft, e2e = summary.goodput.slo
    assert (ttft.over, ttft.count, ttft.unfinished, ttft.met) == (4, 1004, 6, True)
    assert (e2e.over, e2e.count, e2e.unfinished, e2e.met) == (
        0,
        1000,
        10,
        True,
    )  # 30 s at the cut, the limit is 60 s
    assert (summary.goodput.good, summary.goodput.counted, summary.goodput.unfinished) == (
        1000,
        1004,
        6,
    )
    assert says(
        summary.verdict.warning_codes, "unfinished", unfinished=10, requests=1010, drain_s=30
    )
    printed = text.render(summary)
    assert "10 unfinished" in printed and "0 failed" in printed
    assert "6 unfinished excluded" in " ".join(printed.split())


def test_above_one_percent_unfinished_requests_no_term_is_met() -> None:
    summary = summary_of(1000, 11)

    assert summary.goodput.met is None and [term.met for term in summary.goodput.slo] == [
        None,
        None,
    ]
    assert summary.goodput.has_slo and summary.verdict.valid and exit_code(summary) == OK
    assert says(summary.verdict.warning_codes, "unfinished_undecided", timeout_s=600)
    printed = text.render(summary)
    assert "SLO UNDECIDED" in printed and "MISSED" not in printed
    assert describe_result(summary).startswith("SLO undecided: 11 of 1,011 ")


def test_a_term_missed_however_unfinished_requests_end_is_missed() -> None:
    """100 of 1,100 requests have waited for 30 s, so p95 of TTFT exceeds 2 s in any case."""
    summary = summary_of(1000, 100, 100)
    ttft, e2e = summary.goodput.slo
    assert (ttft.met, e2e.met, summary.goodput.met) == (False, None, False)
    assert exit_code(summary) == SLO_MISSED


def test_an_attainment_that_unfinished_requests_decide_is_undecided() -> None:
    promised_slo = Slo(terms=SLO.terms[:1], goodput_share=0.985)
    assert summary_of(1000, 20, slo=promised_slo).goodput.met is None
    assert summary_of(1000, 5, slo=promised_slo).goodput.met is True
    assert summary_of(1000, 40, 40, slo=promised_slo).goodput.met is False


def test_a_run_with_unfinished_requests_only_is_not_valid() -> None:
    summary = summary_of(0, 40)
    assert not summary.verdict.valid and says(
        summary.verdict.codes, "all_unfinished", unfinished=40
    )


def test_a_search_counts_unfinished_requests_as_a_run_does() -> None:
    rows = records_with_unfinished(1000, 10, 4)
    misses = Goal(slo=SLO).find_misses(rows)
    assert misses.sum(axis=1).tolist() == [
        term.over for term in summarize(MANIFEST, rows).goodput.slo
    ]


# -- interrupted runs ------------------------------------------------------------------------------


def test_an_interrupted_run_is_not_valid_and_has_the_code_interrupted() -> None:
    summary = summary_of(1000, 0, state="interrupted")
    assert not summary.verdict.valid and says(summary.verdict.codes, "interrupted")
    assert exit_code(summary) == INTERRUPTED  # of the run itself
    assert summary_of(
        1000, 0, state="decided"
    ).verdict.valid  # a search ended it: nobody broke it off


def test_a_stored_interrupted_run_is_reported_as_not_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"

    assert (
        exits("run", "qa", "--url", "sim:gb300-vm", "-n", "20", "--seed", "1", "-o", str(folder))
        == OK
    )

    manifest = decode_manifest((folder / "run.json").read_bytes())
    (folder / "run.json").write_bytes(
        encode_manifest(msgspec.structs.replace(manifest, state="interrupted"))
    )
    capsys.readouterr()

    assert exits("report", str(folder), "--no-html") == UNSOUND
    out = capsys.readouterr().out
    assert out.startswith("INVALID") and "INTERRUPTED" in out


# -- stored and shown ------------------------------------------------------------------------------


def test_the_status_is_stored_and_an_unknown_status_is_read_as_lost(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    table = to_table(records_with_unfinished(3, 2), [])
    pq.write_table(table, tmp_path / "a.parquet")
    assert read_records([tmp_path / "a.parquet"])[0]["status"].tolist() == [
        0,
        0,
        0,
        UNFINISHED,
        UNFINISHED,
    ]
    statuses = [
        word.replace("unfinished", "of a later version") for word in table["status"].to_pylist()
    ]
    import pyarrow as pa

    later = table.set_column(
        table.schema.get_field_index("status"), "status", pa.array(statuses).dictionary_encode()
    )
    pq.write_table(later, tmp_path / "b.parquet")
    assert read_records([tmp_path / "b.parquet"])[0]["status"].tolist() == [
        0,
        0,
        0,
        columns.LOST,
        columns.LOST,
    ]


def test_the_remaining_drain_time_is_printed_and_the_drain_can_be_ended() -> None:
    progress = Progress(100, 10 * S, drain_ns=600 * S)
    counters = Counters()
    counters.in_flight = 12
    assert "5 s left" in describe_progress(progress.update(counters, progress._start_ns + 5 * S))
    line = describe_progress(progress.update(counters, progress._start_ns + 130 * S))
    assert "at most 8 min 00 s" in line and "Ctrl-C" in line


# -- from the command line -------------------------------------------------------------------------


def run_rag(folder: Path, *flags: str) -> int:
    load = (
        "--request-rate",
        "20",
        "-d",
        "60s",
        "--warmup",
        "0",
        "--slo",
        "ttft:2s:p95",
        "--slo",
        "tpot:60ms:p95",
    )
    return exits(
        "run", "rag", "--url", "sim:gb300-vm", "--seed", "1", *load, "-o", str(folder), *flags
    )


def test_a_run_drains_until_its_responses_are_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers of rag take 50 s and longer at this load: a drain of 30 s called them failed."""
    assert run_rag(tmp_path / "whole") == OK
    summary = load_summary((tmp_path / "whole" / "summary.json").read_bytes())
    assert summary.verdict.valid and summary.requests.ok == summary.requests.scheduled > 1000
    assert summary.goodput.met is True
    assert decode_manifest((tmp_path / "whole" / "run.json").read_bytes()).grace_s == 600.0

    capsys.readouterr()
    assert run_rag(tmp_path / "cut", "--grace", "10s") == OK
    printed = capsys.readouterr().out
    cut_summary = load_summary((tmp_path / "cut" / "summary.json").read_bytes())
    assert cut_summary.requests.unfinished > 100 and cut_summary.requests.failed == 0
    assert (
        cut_summary.requests.ok + cut_summary.requests.unfinished
        == cut_summary.requests.scheduled
        == summary.requests.scheduled
    )
    assert cut_summary.goodput.met is None and "UNDECIDED" in printed and "--grace" in printed
    assert exits("report", str(tmp_path / "cut")) == OK
    page = (tmp_path / "cut" / "report.html").read_text()
    assert "the drain ended" in page and "every one of" not in page and "UNDECIDED" in page
    for form in ("guidellm", "vllm", "aiperf", "mlcommons"):
        capsys.readouterr()
        assert exits("export", str(tmp_path / "cut"), "--as", form) == OK
        assert _failed_of(form, json.loads(capsys.readouterr().out)) == 0


def _failed_of(form: str, document: dict[str, Any]) -> int:
    if form == "guidellm":
        totals = document["benchmarks"][0]["metrics"]["request_totals"]
        assert totals["incomplete"] > 100
        return int(totals["errored"])
    if form == "aiperf":
        return int(document["error_request_count"]["avg"])
    return int(document["failed" if form == "vllm" else "n_samples_failed"])


CONTRACT = """
name: short
horizon: 1s
levels:
  - name: peak
    workload: rag
    rate: 20/s
    duration: 60s
    warmup: 0
    {grace}
    must:
      - ttft: {{limit: 2s, at: p95}}
      - errors: 10%
"""


def test_a_contract_is_inconclusive_if_its_grace_cut_too_many_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contract = tmp_path / "c.yaml"
    contract.write_text(CONTRACT.format(grace="grace: 10s"))

    assert (
        exits(
            "validate", str(contract), "--url", "sim:gb300-vm", "-o", str(tmp_path / "a"), "--json"
        )
        == INCONCLUSIVE
    )
    verdict = json.loads(capsys.readouterr().out)
    for term in verdict["levels"][0]["terms"]:
        assert (
            term["verdict"] == "INCONCLUSIVE"
            and "unfinished" in term["reason"]
            and "grace" in term["reason"]
        )

    contract.write_text(CONTRACT.format(grace=""))
    exits("validate", str(contract), "--url", "sim:gb300-vm", "-o", str(tmp_path / "b"), "--json")
    verdict = json.loads(capsys.readouterr().out)

    assert verdict["levels"][0]["ok"] == verdict["levels"][0]["requests"]
    assert {term["term"].split()[0]: term["verdict"] for term in verdict["levels"][0]["terms"]}[
        "errors"
    ] == "PASS"


def test_a_search_stops_at_a_trial_that_its_grace_left_undecided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = exits(
        "search",
        "rag",
        "--url",
        "sim:gb300-vm",
        "--slo",
        "ttft:2s:p95",
        "--seed",
        "1",
        "-d",
        "40s",
        "--grace",
        "1s",
        "--start",
        "8",
        "-o",
        str(tmp_path / "v"),
    )
    printed = capsys.readouterr().out

    assert code == UNSOUND and "unfinished" in printed and "--grace" in printed


FIRST_LOADS = {"qa": "100", "rag": "30", "summarization": "22", "agentic": "8"}
TRIAL_LENGTHS = {"agentic": "150s"}  # of few requests in flight, shorter trials show no growth


@pytest.mark.parametrize("profile", FIRST_LOADS)
def test_search_report_cost_and_capacity_file_agree_on_the_rate(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "v"

    def run_command(*arguments: str) -> str:
        capsys.readouterr()
        assert exits(*arguments) == OK
        return capsys.readouterr().out

    output = run_command(
        "search",
        profile,
        "--url",
        "sim:gb300-vm",
        "--slo",
        "ttft:2s:p95",
        "--slo",
        "tpot:60ms:p95",
        "-o",
        str(folder),
        "--gpus",
        "4",
        "--seed",
        "1",
        "-d",
        TRIAL_LENGTHS.get(profile, "45s"),
        "--precision",
        "0.2",
        "--start",
        FIRST_LOADS[profile],
        "--full",
    )
    unit = " conversations/s" if profile == "agentic" else " req/s"
    load = _number(rf"^50 % pass +([\d.]+){unit}", output)
    confirmed = _number(rf"^(?:Confirmed|Passed once) +([\d.]+){unit}", output)
    steady = _number(rf"^Sustained +([\d.]+){unit}", output)
    of_steady = output.partition("\nSustained")[2].partition("\n50 % pass")[0]
    assert "loadgen cost" in of_steady

    reported = run_command("report", str(folder), "--full")
    assert _number(rf"^50 % pass +([\d.]+){unit}", reported) == load
    assert _number(rf"^(?:Confirmed|Passed once) +([\d.]+){unit}", reported) == confirmed
    page = (folder / "report.html").read_text()
    assert f": {steady:g}{unit} (" in page
    assert f"{confirmed:g}" in page
    assert f"{load:g}" in page

    stored = json.loads((folder / "capacity.json").read_text())
    evidence = store.read_run(folder / stored["evidence"])
    assert not (evidence.rows["status"] != STATUSES.index("ok")).any()
    for pattern, line in zip(
        (r"capacity by search: ([\d.]+)", r"([\d.]+) \w+/s on \d+ GPUs,\s+capacity"),
        (
            run_command(
                "cost",
                "--full",
                str(folder),
                "--accept-sample-prices",
                "--price",
                f"{folder.name}=oracle-gb300",
            ),
            run_command(
                "size",
                "--full",
                profile,
                str(folder),
                "--request-rate",
                "100",
                "-o",
                str(tmp_path / "sized"),
            ),
        ),
        strict=True,
    ):
        priced = _number(pattern, line)
        assert priced == pytest.approx(stored["rate_per_s"], rel=0.01)
        assert priced == pytest.approx(steady, rel=0.01)
        assert "failed" not in line.replace("failed ones are paid for but not counted", "")


def _number(pattern: str, printed: str) -> float:
    match = re.search(pattern, printed, re.MULTILINE)
    assert match, (pattern, printed)
    return float(match[1])


def test_an_attainment_that_the_unfinished_request_could_just_reach_is_undecided() -> None:
    """9 of 19 requests are good. With the unfinished one, 10 of 20 would be: exactly the limit."""
    rows = records_with_unfinished(ok=19, unfinished=1)
    rows["first_token_ns"][:10] += 5 * S
    easy_term = Term(metric="ttft", limit_ns=2 * S, quantile=0.1)

    def met(share: float) -> bool | None:
        slo = Slo(terms=(easy_term,), goodput_share=share)
        return summarize(msgspec.structs.replace(MANIFEST, slo=slo), rows).goodput.met

    assert met(0.5) is None
    assert met(0.51) is False
