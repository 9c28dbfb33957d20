"""Runs in virtual time: their records, files and output."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expected_errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from run_fixtures import says

from loadgen.core.errors import UserError
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute
from loadgen.core.metrics.summary import Summary
from loadgen.core.results import store
from loadgen.core.results.record import BIN_NS, KIND, STATUS
from loadgen.core.run_summary import summarize
from loadgen.core.schedule.build import build_schedule
from loadgen.core.stats.histogram import Histogram, bucket_numbers
from loadgen.core.workload import Workload, load, read_flags
from loadgen.sim import event_gaps
from loadgen.sim.engine.fleet import Fleet
from loadgen.sim.engine.replica import Costs, ServerLimits
from loadgen.sim.engine.system import SimulatedSystem
from loadgen.sim.request_lengths import RequestSize
from loadgen.sim.virtual_backend import simulate

MS = 1_000_000
COSTS = Costs(
    overhead_ns=10 * MS, weights_ns=5 * MS, kv_token_ns=20.0, token_ns=30_000.0, attended_ns=0.5
)
TIGHT = ServerLimits(
    max_batch_size=6, max_num_tokens=64, kv_blocks=24, tokens_per_block=16, max_seq_len=320
)
WIDE = ServerLimits(
    max_batch_size=64, max_num_tokens=512, kv_blocks=4096, tokens_per_block=16, max_seq_len=4096
)


def workload(tmp_path: Path, text: str) -> Workload:
    file = tmp_path / "w.yaml"
    file.write_text(f"name: w\n{text}")
    return load(str(file))


def visited(
    rows: np.ndarray[Any, Any],
    sizes: Any,
    limits: ServerLimits,
    speeds: tuple[float, ...],
    interval: int,
) -> dict[int, list[tuple[int, int]]]:
    """Return (time, tokens) of every event over HTTP for requests that arrive at given times."""
    fleet = Fleet(
        SimulatedSystem(costs=COSTS, limits=limits, speeds=speeds, tokens_per_event=interval)
    )
    arrivals = sorted((int(row["due_ns"]), int(row["slot"])) for row in rows)
    events: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def note(until: int) -> None:
        for emission in fleet.advance(until):
            events[emission.key].append((emission.due_ns, emission.tokens))

    for due, number in arrivals:
        note(due - 1)
        size = sizes(number)
        fleet.submit(due, number, size.input_tokens, size.output_tokens, size.blocks)
    while (at := fleet.next_event_ns()) is not None:
        note(at)
    return events


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 180), st.integers(1, 120)), min_size=1, max_size=25),
    rate=st.sampled_from([5, 40, 1000]),
    interval=st.integers(1, 4),
    tight=st.booleans(),
)
def test_records_of_a_virtual_run_equal_those_computed_token_by_token(
    lengths: list[tuple[int, int]],
    rate: int,
    interval: int,
    tight: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Both faces, and the arithmetic of gaps, largest gaps and timelines, pauses included."""
    stage = f"{{arrival: {{poisson: {rate}/s}}, count: {len(lengths)}}}"
    text = f"requests: {{input_tokens: 1, output_tokens: 1}}\nstages: [{stage}]"
    schedule = build_schedule(workload(tmp_path_factory.mktemp("w"), text), 3)
    limits, speeds = (TIGHT if tight else WIDE), (1.0, 0.8)

    def sizes(number: int) -> RequestSize:
        return RequestSize(*lengths[number])

    virtual_records, simulation = simulate(
        schedule,
        sizes,
        SimulatedSystem(costs=COSTS, limits=limits, speeds=speeds, tokens_per_event=interval),
        keep_events=True,
    )
    assert virtual_records.events is not None
    emitted = {
        slot: gap_values.tolist()
        for part in event_gaps.iterate_gaps(virtual_records.events)
        for slot, gap_values in part.each()
    }
    events = visited(virtual_records.records, sizes, limits, speeds, interval)
    expected_gaps, bins = Histogram(), np.zeros(len(virtual_records.timeline[0]), np.int64)
    for row in virtual_records.records:
        times = [at for at, _ in events[int(row["slot"])]]
        assert (
            sum(tokens for _, tokens in events[int(row["slot"])])
            == row["output_tokens"]
            == lengths[row["slot"]][1]
        )
        assert (times[0], times[-1]) == (
            row["first_token_ns"],
            row["last_token_ns"] if interval == 1 else times[-1],
        )
        assert times[-1] == row["end_ns"] == row["done_ns"]
        if not any(replica.pause_count for replica in simulation.replicas):
            assert len(times) == row["output_events"]
        gaps = np.diff(times)
        assert emitted.get(int(row["slot"]), []) == gaps.tolist()
        assert (gaps.max() if len(gaps) else 0) == row["max_gap_ns"]
        expected_gaps.add(gaps)
        bins += np.bincount(np.array(times) // BIN_NS, minlength=len(bins))
    assert (virtual_records.gaps[0].counts == expected_gaps.counts).all()
    assert (virtual_records.gaps[0].total_ns, virtual_records.gaps[0].largest_ns) == (
        expected_gaps.total_ns,
        expected_gaps.largest_ns,
    )
    assert (virtual_records.timeline[0] == bins).all()


def test_a_weighted_histogram_equals_adding_every_value() -> None:
    values, counts = np.array([3, 10**6, 10**9, 5]), np.array([4, 1, 0, 2])
    histogram, other = Histogram(), Histogram()
    histogram.add_repeated(values, counts)
    other.add(np.repeat(values, counts))
    assert histogram.to_bytes() == other.to_bytes()
    assert int(histogram.counts[bucket_numbers(np.array([5]))[0]]) == 2


# -- whole runs ------------------------------------------------------------------------------------

TARGET = "sim:gb300-vm"


def ran(requested_workload: Workload, tmp_path: Path, target: str = TARGET) -> tuple[Summary, Path]:
    return execute(requested_workload, Settings(url=target, out=tmp_path / "out"))


def test_a_virtual_run_writes_a_run_directory_marked_as_simulated(tmp_path: Path) -> None:
    requested_workload = load("qa", read_flags(num_requests="400", request_rate="200", seed="5"))
    summary, folder = ran(requested_workload, tmp_path)
    manifest = json.loads((folder / "run.json").read_bytes())

    assert manifest["targets"][0]["simulated"] is True
    assert manifest["targets"][0]["name"] == "simulated: gb300-vm"
    assert manifest["state"] == "finished" and manifest["targets"][0]["gpus"] == 4
    assert manifest["host"]["python"] and manifest["host"]["hot_path"] == "", "no socket was read"
    assert says(summary.verdict.warning_codes, "virtual_time")
    assert says(summary.verdict.warning_codes, "extrapolated")
    assert summary.target.simulated and summary.verdict.valid
    assert summary.requests.ok == 400 and summary.tokens.output == 400 * 500
    assert summary.itl_ms is not None and summary.itl_ms.count == 400 * 499

    second_summary = summarize(
        *store.read_run(folder)
    )  # Parquet, flows and manifest alone say the same

    assert second_summary == summary
    assert json.loads((folder / "summary.json").read_bytes())["target"]["simulated"] is True


def test_the_same_seed_gives_the_same_records(tmp_path: Path) -> None:
    requested_workload = load("agentic", read_flags(seed="5"))
    first, second = (
        ran(requested_workload, tmp_path / "a")[1],
        ran(requested_workload, tmp_path / "b")[1],
    )
    assert (store.read_run(first).rows == store.read_run(second).rows).all()


def test_conversations_wait_for_tools_and_reuse_cached_history(
    tmp_path: Path,
) -> None:
    text = (
        "requests: {input_tokens: 300, output_tokens: 20, system_tokens: 64,"
        " turns: {count: 3, tool_result_tokens: 100, tool_time: 200ms}}\n"
        "stages: [{arrival: {closed: 2}, count: 6}]"
    )
    summary, folder = ran(workload(tmp_path, text), tmp_path, f"sim:{_single(tmp_path)}")
    rows = np.sort(store.read_run(folder).rows, order="slot").reshape(6, 3)

    assert summary.sessions is not None and summary.sessions.ok == 6
    assert (rows["due_ns"][:, 1:] - rows["done_ns"][:, :-1] == 200 * MS).all()
    assert rows["input_tokens"][0].tolist() == [364, 484, 604]
    # Full blocks of 32: two of the system prompt, then the whole prompt of each earlier turn.
    assert rows["cached_tokens"][-1].tolist() == [64, 352, 480]
    assert (rows["virtual_user"][:, 0] == [0, 1, 0, 1, 0, 1]).all()


def _single(tmp_path: Path) -> Path:
    """One replica, so that every turn comes to the same cache."""
    preset_file = tmp_path / "single.yaml"
    preset_file.write_text("extends: gb300-vm\ngpus_per_vm: 1\n")
    return preset_file


def test_a_shared_prefix_is_cached_by_group(tmp_path: Path) -> None:
    text = (
        "requests: {input_tokens: 200, output_tokens: 2, shared_prefix_tokens: 160, prefixes: 3}\n"
        "stages: [{arrival: {constant: 2/s}, count: 40}]"
    )
    _, folder = ran(workload(tmp_path, text), tmp_path, f"sim:{_single(tmp_path)}")
    cached = np.sort(store.read_run(folder).rows, order="slot")["cached_tokens"]
    assert sorted(set(cached.tolist())) == [0, 160] and (cached == 0).sum() == 3


def test_an_overload_causes_timeouts_and_drops_at_the_limit_in_flight(tmp_path: Path) -> None:
    text = (
        "requests: {input_tokens: 1000, output_tokens: 1000}\n"
        "stages: [{arrival: {poisson: 300/s}, duration: 10s}]\ngrace: 5s\nmax_in_flight: 2000"
    )
    summary, folder = ran(workload(tmp_path, text), tmp_path)
    rows = store.read_run(folder).rows
    cut_records = rows[rows["status"] == STATUS["unfinished"]]

    assert (
        summary.requests.scheduled
        == len(rows)
        == summary.requests.unfinished + summary.requests.dropped
    )
    assert len(cut_records) == 2000 and summary.load.in_flight_max == 2000
    assert (cut_records["kind"] == KIND["unfinished"]).all() and (
        cut_records["done_ns"] == 15 * 10**9
    ).all()
    begun = cut_records[cut_records["first_token_ns"] >= 0]
    assert len(begun) and (begun["output_tokens"] == begun["output_events"]).all()
    assert list(summary.requests.by_error) == ["in_flight_cap"]
    assert "when the drain ended" in store.read_run(folder).texts[rows["text"].max()]
    assert int(made_events(folder)) == int(begun["output_events"].sum())


def test_the_limit_in_prefill_applies_in_virtual_time(tmp_path: Path) -> None:
    text = (
        "requests: {input_tokens: 2000, output_tokens: 100}\nmax_in_prefill: 2\n"
        "stages: [{arrival: {closed: {concurrency: 12, ramp: 0s}}, count: 60}]"
    )
    summary, folder = ran(workload(tmp_path, text), tmp_path)
    rows = store.read_run(folder).rows
    steps = sorted(
        [(at, 1) for at in rows["due_ns"]] + [(at, 0) for at in rows["first_token_ns"]],
        key=lambda s: s,
    )
    most = now = 0
    for _, begins in steps:
        now += 1 if begins else -1
        most = max(most, now)

    assert (summary.requests.ok, summary.load.in_flight_max, most) == (60, 12, 2)
    assert (rows["sent_ns"] == rows["due_ns"]).all()


def made_events(folder: Path) -> int:
    return int(sum(times.sum() for times in store.read_run(folder).timeline))


def test_a_request_is_cancelled_at_its_timeout(tmp_path: Path) -> None:
    requests = "requests: {input_tokens: 100, output_tokens: 1000}"
    text = f"{requests}\nstages: [{{arrival: {{constant: 5/s}}, count: 20}}]\ntimeout: 2s"
    _, folder = ran(workload(tmp_path, text), tmp_path)
    rows = store.read_run(folder).rows

    assert (rows["kind"] == KIND["timeout_total"]).all()
    over = rows["done_ns"] - rows["due_ns"] - 2 * 10**9
    assert (over >= 0).all() and (
        over < 100 * MS
    ).all()  # at the end of the iteration in which its time was over


def test_the_steady_state_of_conversations_ends_with_their_last_start(tmp_path: Path) -> None:
    """Turns that follow after the server's last response belong to the tail of the run."""
    text = (
        "requests: {input_tokens: 100, output_tokens: 500, "
        "turns: {count: 4, tool_result_tokens: 10, tool_time: 1s}}\n"
        "stages: [{arrival: {constant: 2/s}, count: 20}]"
    )
    summary, folder = ran(workload(tmp_path, text), tmp_path)
    rows = store.read_run(folder).rows

    assert summary.window.steady.end_s == rows["due_ns"][rows["turn"] == 0].max() / 1e9
    assert rows["due_ns"].max() / 1e9 > 2 * summary.window.steady.end_s


def test_a_prompt_beyond_the_context_is_refused_and_an_output_clamped(tmp_path: Path) -> None:
    """A load with few such requests is sent as asked; one with more is refused before it begins."""
    text = (
        "requests: {input_tokens: {empirical: {values: [100, 4000, 4096], weights: [8, 1, 1]}}, "
        "output_tokens: 500}\n"
        "stages: [{arrival: {constant: 20/s}, count: 100}]\nlimits: {failure_share: 50%}"
    )
    summary, folder = ran(workload(tmp_path, text), tmp_path)
    rows = store.read_run(folder).rows
    output = {
        prompt_tokens: rows[rows["built_tokens"] == prompt_tokens]["output_tokens"]
        for prompt_tokens in (100, 4000, 4096)
    }

    assert all(len(tokens) for tokens in output.values())
    assert (output[100] == 500).all() and (output[4000] == 96).all()
    assert summary.requests.failed == len(output[4096]) and "http_4xx" in summary.requests.by_error


def test_prompts_of_a_file_are_counted_and_repeated_rows_cached(tmp_path: Path) -> None:
    lines = [{"prompt": "word " * (100 + 50 * i), "output_tokens": 10} for i in range(3)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = "requests: {from: p.jsonl}\nstages: [{arrival: {constant: 2/s}, count: 6}]"
    _, folder = ran(workload(tmp_path, text), tmp_path, f"sim:{_single(tmp_path)}")
    rows = np.sort(store.read_run(folder).rows, order="slot")
    assert (rows["input_tokens"][:3] == rows["input_tokens"][3:]).all()
    assert (rows["cached_tokens"][:3] == 0).all() and (rows["cached_tokens"][3:] >= 64).all()


def test_requests_of_a_trace_share_their_hashed_prefixes(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1000 * i, "input_length": n, "output_length": 5, "hash_ids": hashes}
        for i, (n, hashes) in enumerate(
            [(1500, [1, 2, 3]), (1200, [1, 2, 4]), (600, [1, 5]), (1024, [6, 7])]
        )
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = "requests: {trace: t.jsonl}\nstages: [{arrival: {constant: 2/s}, count: 8}]"
    _, folder = ran(workload(tmp_path, text), tmp_path, f"sim:{_single(tmp_path)}")
    rows = np.sort(store.read_run(folder).rows, order="slot")

    assert (
        rows["input_tokens"].tolist() == [1500, 1200, 600, 1024] * 2
        and (rows["output_tokens"] == 5).all()
    )
    # Hashes of 512 tokens: two in common, then one. A repetition of the trace has other texts.
    assert rows["cached_tokens"].tolist() == [0, 1024, 512, 0] * 2


def test_an_unknown_preset_is_refused_and_leaves_no_directory(tmp_path: Path) -> None:
    with refused(UserError, "unknown_name", "--url"):
        execute(load("qa"), Settings(url="sim:gb900", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.processes
def test_the_first_output_line_of_a_simulated_run_contains_simulated(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "loadgen",
        "run",
        "qa",
        "--url",
        TARGET,
        "--out",
        str(tmp_path / "out"),
    ]
    command[1:3] = ["-m", "loadgen"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)

    assert process.returncode == 0, process.stderr
    assert (
        "SIMULATED" in process.stdout.splitlines()[0]
        and "SIMULATED" in process.stderr.splitlines()[0]
    )


def test_the_first_output_lines_state_the_load_of_conversations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from loadgen.cli.app import main

    command = [
        "run",
        "agentic",
        "--url",
        TARGET,
        "--request-rate",
        "5",
        "-d",
        "4s",
        "--warmup",
        "0",
        "--seed",
        "1",
    ]
    for more in (["--dry-run"], ["-o", str(tmp_path / "run"), "--prometheus", ":9400"]):
        with pytest.raises(SystemExit):
            main([*command, *more])
        output = "".join(capsys.readouterr())
        assert output.count("--prometheus has no effect") == ("--prometheus" in more)
        (line,) = [line for line in output.splitlines() if line.lower().startswith("load: ")]
        assert re.search(r"(\d+) conversations, (\d+) requests, 4 s", line)


def test_a_response_that_is_not_streamed_comes_as_one_event_at_its_end(tmp_path: Path) -> None:
    lengths = "output_tokens: {uniform: {min: 50, max: 200}}"  # some are too long for the timeout
    text = (
        f"requests: {{input_tokens: 100, {lengths}}}\n"
        "stages: [{arrival: {constant: 5/s}, count: 40}]\ntimeout: 3s\nseed: 1"
    )
    written = workload(tmp_path, text)
    _, streamed_dir = execute(written, Settings(url=TARGET, out=tmp_path / "streamed"))
    summary, unstreamed_dir = execute(
        written, Settings(url=TARGET, out=tmp_path / "unstreamed", stream=False)
    )

    streamed = np.sort(store.read_run(streamed_dir).rows, order="slot")
    unstreamed = np.sort(store.read_run(unstreamed_dir).rows, order="slot")
    assert (unstreamed["done_ns"] == streamed["done_ns"]).all(), "the server computes the same"
    assert (unstreamed["server_prefill_ns"] == streamed["server_prefill_ns"]).all()

    is_ok = unstreamed["status"] == STATUS["ok"]
    assert 0 < is_ok.sum() < 40
    for name in ("first_byte_ns", "first_event_ns", "first_token_ns", "first_answer_ns"):
        assert (unstreamed[name] == np.where(is_ok, streamed["last_token_ns"], -1)).all()
    assert (unstreamed["output_events"] == is_ok).all()
    assert (
        unstreamed["first_event_tokens"] == np.where(is_ok, unstreamed["output_tokens"], 0)
    ).all()
    assert (unstreamed["output_tokens"][~is_ok] == -1).all(), "nothing of the response was received"

    assert summary.ttft_ms.p50 == summary.e2e_ms.p50
    assert summary.tpot_ms.count == summary.max_gap_ms.count == summary.inter_chunk_ms.count == 0
