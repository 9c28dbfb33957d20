"""Records read back from the log and from Parquet are those written, also if cut short."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from loadgen_sdk.request import Completion, Failure, Usage

from loadgen.core.errors import UserError
from loadgen.core.results import store
from loadgen.core.results.manifest import RunManifest, StagePlan, WorkerSample, encode_manifest
from loadgen.core.results.parquet import read_records, unreadable
from loadgen.core.results.record import (
    FIELDS,
    ROW,
    RecordKey,
    RequestFacts,
    encode_sent_record,
    encode_unsent_record,
)
from loadgen.core.results.record_log import RecordLog
from loadgen.core.sidecars.compactor_process import Compactor
from loadgen.core.stats.histogram import Histogram


def completion(i: int) -> Completion:
    failure = Failure("http_5xx", f"overloaded {i % 3}", 503) if i % 5 == 0 else None
    return Completion(
        request=None,
        due=1000 + i,
        ready=1001 + i,
        sent=1002 + i,
        first_byte=1100,
        first_event=1100,
        first_token=1200,
        first_answer=1200,
        last_token=1900,
        end=1900,
        done=2000,
        output_events=7,
        finish_reason="length",
        usage=Usage(input=11, output=7, cached=0) if i % 2 else Usage(),
        failure=failure,
        kernel_stamp=True,
    )


def written(folder: Path, workers: int = 2, each: int = 50) -> None:
    (folder / "run.json").write_bytes(
        encode_manifest(RunManifest(stages=(StagePlan(), StagePlan())))
    )
    for worker in range(workers):
        record_log = RecordLog(folder, worker)
        for i in range(each):
            response_completion = completion(i)
            text = (
                record_log.store_text(response_completion.failure.text + f" w{worker}")
                if response_completion.failure
                else -1
            )
            place = RecordKey(i * workers + worker, i, i % 2, worker, 0, -1, 0, -1)
            record_log.add_record(
                encode_sent_record(
                    place,
                    response_completion,
                    1000,
                    text_index=text,
                    request_facts=RequestFacts(10, "estimate", 7),
                )
            )
        record_log.add_record(
            encode_unsent_record(
                RecordKey(999 + worker, 1, 1, worker, 0, 3, 1, -1),
                5,
                "in_flight_cap",
                "dropped",
                RequestFacts(1, "", 2),
            )
        )
        record_log.add_sample(WorkerSample(t_s=1.0, worker=worker))
        gaps = Histogram()
        gaps.add(np.array([1_000_000 * (worker + 1)] * 10))
        record_log.write_event_counts(1, gaps, np.arange(worker + 2))
        record_log.close()


def by_slot(rows: np.ndarray) -> np.ndarray:
    return rows[np.argsort(rows["slot"], kind="stable")]


def error_texts(stored: store.Stored) -> list[str]:
    rows = by_slot(stored.rows)
    return [stored.texts[i] if i >= 0 else "" for i in rows["text"].tolist()]


@pytest.mark.processes
@pytest.mark.parametrize("long_s", [0.0, 20.0])
def test_record_log_and_parquet_have_the_same_records(tmp_path: Path, long_s: float) -> None:
    """Made by the process beside a long run, and by the command itself after a short one."""
    written(tmp_path)
    spooled = store.read_run(tmp_path)
    recorder = Compactor(tmp_path, long_s)

    assert recorder.finish()
    store.delete_record_log(tmp_path)
    assert [file.name for file in (tmp_path / "requests").iterdir()] == ["requests.parquet"]

    stored_run = store.read_run(tmp_path)
    left, right = by_slot(spooled.rows), by_slot(stored_run.rows)
    assert len(left) == 102
    for name, *_ in FIELDS:
        if name != "text":
            assert (left[name] == right[name]).all(), name
    assert error_texts(spooled) == error_texts(stored_run)
    assert error_texts(stored_run)[:2] == ["overloaded 0 w0", "overloaded 0 w1"]
    assert spooled.gaps[1].count == stored_run.gaps[1].count == 20
    assert stored_run.timeline[1].tolist() == [0, 2, 2]
    assert [second_worker_sample.worker for second_worker_sample in stored_run.seconds] == [0, 1]


@pytest.mark.processes
def test_rows_are_written_without_pandas(tmp_path: Path) -> None:
    """Pyarrow imports it, where it is installed, for arrays that it could make without."""
    written(tmp_path)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from loadgen.core.results.store import read_run\n"
        "from loadgen.core.sidecars.compactor import compact_records\n"
        "run_dir = Path(sys.argv[1])\n"
        "compact_records(run_dir)\n"
        "assert len(read_run(run_dir).rows) == 102\n"
        "assert not {'pandas', 'pyarrow.compute'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_a_record_has_every_field_of_its_completion() -> None:
    values = np.frombuffer(
        encode_sent_record(
            RecordKey(5, 6, 1, 2, 3, 4, 7, 8),
            completion(1),
            1000,
            text_index=-1,
            request_facts=RequestFacts(10, "estimate", 9),
        ),
        ROW,
    )[0]
    seen = {name: values[name].item() for name in ROW.names or ()}
    expected = {
        "slot": 5,
        "request": 6,
        "stage": 1,
        "worker": 2,
        "target": 3,
        "session": 4,
        "turn": 7,
        "virtual_user": 8,
    }
    expected |= {
        "status": 0,
        "due_ns": 1,
        "ready_ns": 2,
        "sent_ns": 3,
        "first_token_ns": 200,
        "end_ns": 900,
    }
    expected |= {
        "done_ns": 1000,
        "input_tokens": 11,
        "output_tokens": 7,
        "cached_tokens": 0,
        "reasoning_tokens": -1,
    }
    expected |= {
        "built_tokens": 10,
        "asked_output": 9,
        "input_source": 1,
        "output_source": 1,
        "finish_reason": 2,
    }

    assert {name: seen[name] for name in expected} == expected

    estimated = np.frombuffer(
        encode_sent_record(
            RecordKey(*range(8)),
            completion(2),
            0,
            text_index=-1,
            request_facts=RequestFacts(10, "estimate", 9),
        ),
        ROW,
    )[0]

    assert (estimated["input_tokens"], estimated["input_source"]) == (10, 3)
    assert (estimated["output_tokens"], estimated["output_source"]) == (7, 4)


@pytest.mark.processes
def test_an_incomplete_row_at_the_end_of_a_record_log_is_ignored(tmp_path: Path) -> None:
    written(tmp_path, workers=1)
    file = tmp_path / "spool" / "w0.rows"
    file.write_bytes(file.read_bytes()[:-7])
    assert len(store.read_run(tmp_path).rows) == 50
    recorder = Compactor(tmp_path)
    assert recorder.finish()
    assert len(read_records(list((tmp_path / "requests").glob("*.parquet")))[0]) == 50


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"schema": 99}', b"\xff\xfe"])
def test_a_folder_without_a_run_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(UserError) as error:
        store.read_run(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_an_error_of_pyarrow_is_reported_in_one_line() -> None:
    """Its sentences may end in a line break."""
    fault = unreadable(
        "records", ValueError("Couldn't deserialize thrift: Invalid data\n"), Path("r.parquet"), ""
    )
    assert str(fault).splitlines()[1] == "  --> r.parquet"
