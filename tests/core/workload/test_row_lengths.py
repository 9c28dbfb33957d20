"""The output length of a row of a data set, and what of a row is an outcome that is not sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadgen.core.errors import CombinedError, UserError
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.prompts import Prompts, PromptTarget
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.workload import FromFile, read_flags
from loadgen.core.workload.dataset_rows import EXACT_LENGTH_FIELDS, LENGTH_LIMIT_FIELDS
from loadgen.core.workload.loading import load_from_options, workload_from_dataset

QUESTION = {"role": "user", "content": "Name a color."}
RESPONSE = {"role": "assistant", "content": "hello world"}


def write_rows(tmp_path: Path, rows: Sequence[Any]) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


def prompts_of(tmp_path: Path, rows: Sequence[Any], api: str = "chat", **requests: Any) -> Prompts:
    model = FromFile.model_construct(path=write_rows(tmp_path, rows), **requests)
    return build_prompts(
        SimpleNamespace(requests=model), 1, 2, load_tokenizer(None), PromptTarget(api=api)
    )


@pytest.mark.parametrize("name", EXACT_LENGTH_FIELDS)
def test_an_exact_length_is_read_under_the_names_of_other_tools(tmp_path: Path, name: str) -> None:
    request = prompts_of(tmp_path, [{"prompt": "a", name: 5}])[0]
    assert (request.max_tokens, request.exact_output) == (5, True)


@pytest.mark.parametrize("name", LENGTH_LIMIT_FIELDS)
def test_an_upper_bound_is_read_under_the_names_of_other_tools(tmp_path: Path, name: str) -> None:
    request = prompts_of(tmp_path, [{"text": "a", name: 12.0}])[0]
    assert (request.max_tokens, request.exact_output) == (12, False)


def test_equal_lengths_of_a_row_under_two_names_are_accepted(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "output_tokens": 5, "max_tokens": 5.0}]
    assert prompts_of(tmp_path, rows)[0].max_tokens == 5


def test_a_length_with_a_fraction_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CombinedError) as exc_info:
        prompts_of(tmp_path, [{"prompt": "a", "output_tokens": 12.5}])
    assert [fault.code for fault in exc_info.value.errors] == ["wrong_type"]


def test_a_row_without_a_length_gets_a_limit_and_a_note(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, [{"prompt": "a"}, {"prompt": "b", "output_tokens": 5}])
    assert (prompts[0].max_tokens, prompts[0].exact_output) == (1024, False)
    assert any("1 row without" in note for note in prompts.warnings(2))


def test_rows_have_no_limit_if_the_output_length_is_unlimited(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "output_tokens": 5}]
    prompts = prompts_of(tmp_path, rows, output_tokens="unlimited")

    assert [prompts[number].max_tokens for number in (0, 1)] == [None, 5]
    assert prompts.warnings(2) == []
    flags = read_flags(output_tokens="unlimited", concurrency=1)
    for workload in (
        workload_from_dataset(tmp_path / "rows.jsonl", flags),
        workload_from_dataset(tmp_path / "rows.jsonl", flags, "qa"),
    ):
        assert isinstance(workload.requests, FromFile)
        assert workload.requests.output_tokens == "unlimited"


def test_embeddings_have_no_output_limit(tmp_path: Path) -> None:
    assert prompts_of(tmp_path, [{"prompt": "a"}], api="embeddings")[0].max_tokens is None


@pytest.mark.parametrize("workload", ["qa", "agentic", None])
def test_an_unlimited_output_length_is_refused_for_generated_requests(workload: str | None) -> None:
    flags = read_flags(
        output_tokens="unlimited", input_tokens=None if workload else 5, concurrency=1, duration=1
    )
    with pytest.raises(CombinedError) as exc_info:
        load_from_options(workload, None, flags)
    assert "conflict" in [fault.code for fault in exc_info.value.errors]


@pytest.mark.parametrize("row", [{"messages": [QUESTION, RESPONSE]}, [QUESTION, RESPONSE]])
def test_a_response_at_the_end_of_messages_is_not_sent_and_sets_the_length(
    tmp_path: Path, row: Any
) -> None:
    request = prompts_of(tmp_path, [row])[0]
    assert request.messages == [QUESTION]
    assert (request.max_tokens, request.exact_output) == (2, True)


@pytest.mark.parametrize(
    "more",
    [
        {"extra_body": {"continue_final_message": True}},
        {"messages": [QUESTION, RESPONSE | {"prefix": True}]},
    ],
)
def test_a_last_message_that_the_server_continues_is_sent(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    request = prompts_of(tmp_path, [{"messages": [QUESTION, RESPONSE]} | more])[0]
    assert request.messages is not None and len(request.messages) == 2


def test_the_completion_of_a_row_sets_the_output_length(tmp_path: Path) -> None:
    request = prompts_of(tmp_path, [{"prompt": "a", "completion": "hello world"}])[0]
    assert (request.prompt, request.max_tokens) == ("a", 2)


def test_a_recorded_finish_reason_is_not_sent_as_a_stop_sequence(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "stop": stop} for stop in ("length", "###", ["stop"])]
    prompts = prompts_of(tmp_path, rows)
    assert [prompts[number].extra.get("stop") for number in range(3)] == [None, "###", ["stop"]]


def test_a_list_of_messages_per_line_is_a_conversation_per_line(tmp_path: Path) -> None:
    talk = [QUESTION, RESPONSE, {"role": "user", "content": "Another one."}]
    prompts = prompts_of(tmp_path, [talk, talk])
    assert prompts[1].messages == talk
    rows_file = tmp_path / "rows.json"
    rows_file.write_text(json.dumps([talk, talk], indent=1), "utf-8")
    model = FromFile.model_construct(path=rows_file)
    of_list = build_prompts(SimpleNamespace(requests=model), 1, 2, load_tokenizer(None))
    assert of_list[1].messages == talk


@pytest.mark.parametrize(("separator", "word"), [(";", "semicolons"), ("\t", "tabs")])
def test_a_csv_file_with_another_separator_is_refused_with_its_name(
    tmp_path: Path, separator: str, word: str
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(f"prompt{separator}output_tokens\na{separator}5\n", "utf-8")
    model = FromFile.model_construct(path=file)
    with pytest.raises(UserError) as exc_info:
        build_prompts(SimpleNamespace(requests=model), 1, 2, load_tokenizer(None))
    assert exc_info.value.code == "wrong_format" and word in exc_info.value.message
