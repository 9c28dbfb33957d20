"""Reading a contract file: its errors are reported all at once, with their positions."""

from __future__ import annotations

from pathlib import Path

import pytest
from expected_errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.cli.app import main
from loadgen.contracts import (
    level_plan,
)
from loadgen.contracts.loading import load_contract
from loadgen.contracts.schema import parse_contract
from loadgen.core.errors import CombinedError, UserError
from loadgen.core.workload.workload_files import packaged_files

CONTRACT_WITH_ERRORS = """\
name: bad
gpu: 4
levels:
  - name: a
    workload: qaa
    rate: 10/s
    duration: 20s
    must:
      - tttf: 2s
      - ttft: 2s
      - errors: 0%
      - ttft: {limit: 3s, at: p50}
  - name: a
    workload: qa
    rate: 10/s
    duration: 20s
    must:
      - ttft: 2s
      - ttft: 1s
      - requests: 12/s
      - cost: 0.40 USD
      - output_per_gpu: 900/s
      - drift: {of: ttft, limit: 10%, window: 1h}
      - itl: 50ms
      - against: {level: b, of: ttft, limit: 50%}
    should:
      - ttft: 4s
      - tpot: {limit: 1x}
"""


EXPECTED_ERRORS = """
2:1 unknown_key gpu
5:15 unknown_name levels[0].workload
9:9 unknown_name levels[0].must[0]
11:17 out_of_range levels[0].must[2].errors
12:9 conflict levels[0].must[3]
13:11 duplicate levels[1].name
18:9 too_few levels[1].must[0]
19:9 duplicate levels[1].must[1]
20:9 out_of_range levels[1].must[2]
21:9 no_price levels[1].must[3]
22:9 missing_option levels[1].must[4]
23:9 too_few levels[1].must[5]
24:9 too_few levels[1].must[6]
25:9 unknown_name levels[1].must[7]
27:9 no_effect levels[1].should[0]
28:23 invalid_value levels[1].should[1].tpot.limit
"""


def test_all_errors_of_a_contract_are_reported_with_their_positions(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(CONTRACT_WITH_ERRORS)

    with pytest.raises(CombinedError) as exc_info:
        load_contract(file)

    errors = [
        f"{error.where.removeprefix(f'{file}:').partition(' ')[0]} {error.code} {error.key}"
        for error in exc_info.value.errors
    ]

    assert errors == EXPECTED_ERRORS.strip().splitlines()


def test_a_load_that_is_too_short_has_a_hint_with_the_needed_duration(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(CONTRACT_WITH_ERRORS)
    with pytest.raises(CombinedError) as exc_info:
        load_contract(tmp_path / "bad.yaml")
    hints = [error.hint for error in exc_info.value.errors if error.code == "too_few"]
    assert "duration: 2656s or more" in hints[0]


def contract(*level_lines: str, workload: str = "qa", header: str = "name: c") -> str:
    """Return a contract with one level of this workload and with these further lines."""
    lines = [header, "levels:", "  - name: a", f"    workload: {workload}"]
    return "\n".join([*lines, *(f"    {line}" for line in level_lines)]) + "\n"


def agent_contract(must: str, *, workload: str = "coding-agent", header: str = "name: c") -> str:
    """Return a contract with one level of 60 tasks and these must terms."""
    load = ("rate: 0.5/s", "requests: 60")
    return contract(*load, f"must: [{must}]", workload=workload, header=header)


SHORT_HORIZON = "name: c\nhorizon: 5s"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "empty_file"),
        ("- 1", "wrong_type"),
        ("name: c\nlevels: []", "missing_value"),
        ("name: c", "missing_key"),
        ("name: c\nlevels:\n  - 5\n  - {workload: qa}\n  - {workload: qa}\n", "wrong_type"),
        (contract("rate: 5/s", "concurrency: 4", "requests: 9"), "conflict"),
        (contract("rate: 5"), "invalid_value"),
        (contract(workload="../nowhere.yaml"), "unknown_name"),
        (contract(workload="7"), "unknown_name"),
        (contract().replace("name: a", "name: ../evil"), "invalid_value"),
        (contract("must: {ttft: 2s}"), "wrong_type"),
        (contract("must: [ttft]"), "wrong_type"),
        (contract("must: [{ttft: 2s, tpot: 3ms}]"), "conflict"),
        (contract("must: [{ttft: {limit: 2s, at: p101}}]"), "invalid_value"),
        (contract("must: [{sustained: {share: 120%, window: 1m}}]"), "out_of_range"),
    ],
)
def test_an_invalid_value_in_a_contract_has_its_error_code(
    tmp_path: Path, text: str, code: str
) -> None:
    assert_refused(tmp_path, text, code)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (contract("\tmust: []"), "invalid_syntax"),
        ("name: c\nlevels: []\n---\nname: d\n", "invalid_syntax"),
        ("name: a\0b\nlevels: []\n", "wrong_encoding"),
        ("a: &x [*x]\nname: c\nlevels: *x\n", "cycle"),
        ("name: c\nlevels: " + "[" * 900, "too_large"),
        ("name: ${UNSET_FOR_SURE}\nlevels: []", "unset_variable"),
        ("name: c\nprices: 5\nlevels: []", "missing_file"),
        (contract("must: []", header="name: c\nprices: none.yaml"), "missing_file"),
    ],
)
def test_an_unreadable_text_has_its_error_code(tmp_path: Path, text: str, code: str) -> None:
    assert_refused(tmp_path, text, code)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (contract("rate: 5/s", "requests: 900", "must: [{goodput: 100%}]"), "out_of_range"),
        (contract("rate: 5/s", "requests: 900", "must: [{ttft: 3s}, {e2e: 2s}]"), "conflict"),
        (contract("rate: 5/s", "requests: 900", "must: [{cost: cheap}]"), "invalid_value"),
        (contract("rate: 5/s", "requests: 900", "must: [{task_time: 60s}]"), "mismatch"),
        (agent_contract("{tasks: 2/s}"), "out_of_range"),
        (agent_contract("{requests: 9/s}"), "out_of_range"),
        (
            agent_contract("{task_time: {limit: 1s, at: p50}}, {task_wait: {limit: 2s, at: p50}}"),
            "conflict",
        ),
        (agent_contract("{task_goodput: 90%}", workload="agentic"), "no_slo"),
        (
            agent_contract("{task_time: {limit: 9s, at: p50, class: qa}}", workload="mixed"),
            "mismatch",
        ),
    ],
)
def test_a_contradiction_in_a_contract_has_its_error_code(
    tmp_path: Path, text: str, code: str
) -> None:
    assert_refused(tmp_path, text, code)


@pytest.mark.parametrize(
    "text",
    [
        contract("rate: 5/s", "requests: 100", "must: [{errors: 0.5%}]"),
        contract("rate: 5/s", "duration: 10m", "must: [{tpot: 30ms}]"),
        contract("rate: 5/s", "duration: 1m", "must: [{goodput: 95%}]"),
        contract(
            "rate: 5/s", "duration: 2m", "repeats: 3", "must: [{itl: {limit: 30ms, at: p95}}]"
        ),
        contract("rate: 5/s", "requests: 200", "must: [{ttft: 2s}]", header=SHORT_HORIZON),
        contract("rate: 5/s", "duration: 1h", "apart: 30m", "must: [{tpot: 30ms}]"),
        contract("requests: 240", "must: [{ttft: 1s}]", "must: [{errors: 1%}]"),
        contract("rate: 10/s", "duration: 10m", "must: [{sustained: {share: 95%, window: 5m}}]"),
        agent_contract("{task_time: {limit: 60s, at: p90}}", header=SHORT_HORIZON),
    ],
)
def test_a_load_that_is_too_small_is_an_error(tmp_path: Path, text: str) -> None:
    assert_refused(tmp_path, text, "too_few")


def assert_refused(tmp_path: Path, text: str, code: str) -> None:
    """Assert that a contract has an error with this code, and that its hints are complete."""
    (tmp_path / "c.yaml").write_text(text)
    with refused(CombinedError, code) as exc_info:
        load_contract(tmp_path / "c.yaml", env={})
    assert not any(error.hint.startswith(";") for error in exc_info.value.errors)


def test_a_binary_or_missing_contract_file_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "binary", tmp_path / "missing.yaml"):
        with pytest.raises(UserError):
            load_contract(path)


PACKAGED_CONTRACTS = (
    "chatbot",
    "rag",
    "summarization",
    "agentic",
    "mlperf-server",
    "mlperf-interactive",
)


def test_well_known_contracts_are_packaged() -> None:
    assert set(PACKAGED_CONTRACTS) <= set(packaged_files("contracts"))


@pytest.mark.parametrize("name", sorted(packaged_files("contracts")))
def test_a_packaged_contract_has_no_errors(name: str) -> None:
    checked_contract = load_contract(Path(name))
    planned_levels = [plan.level.name for plan in checked_contract.levels]
    assert planned_levels == [level.name for level in checked_contract.contract.levels]


@settings(max_examples=60, deadline=None)
@given(
    st.text(max_size=200)
    | st.lists(st.sampled_from([*CONTRACT_WITH_ERRORS.splitlines(), "", "{", "- - -"]), max_size=20)
)
def test_any_text_is_parsed_as_a_contract_or_refused_with_its_file(text: str | list[str]) -> None:
    try:
        parse_contract(text if isinstance(text, str) else "\n".join(text), "c.yaml", {})
    except CombinedError as combined:
        assert all(error.where.startswith("c.yaml") for error in combined.errors)


def test_errors_in_options_and_contract_are_reported_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.yaml").write_text(CONTRACT_WITH_ERRORS)
    with pytest.raises(SystemExit) as exc_info:
        main(["validate", str(tmp_path / "bad.yaml"), "--server", "nobody"])
    stderr = capsys.readouterr().err
    assert exc_info.value.code == 2
    assert "unknown value 'nobody'" in stderr
    assert 'unknown term "tttf"' in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("workload", "noun"), [("agentic", "conversations"), ("rag-pipeline", "tasks")]
)
def test_the_plan_of_a_contract_counts_sessions_like_the_run(
    tmp_path: Path, workload: str, noun: str
) -> None:
    """The noun is the one in the summary of the run, which may have a few less or more."""
    level = f"{{name: a, workload: {workload}, rate: 7/s, duration: 1h, must: [{{errors: 1%}}]}}"
    (tmp_path / "c.yaml").write_text(f"name: c\nlevels:\n  - {level}\n")
    (plan,) = load_contract(tmp_path / "c.yaml").levels
    assert f" 25,200 {noun}, " in level_plan.format_plan(plan)
