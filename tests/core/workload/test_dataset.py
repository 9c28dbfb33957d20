"""Datasets of the user are sent as written; errors are reported as file:line:column."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from expected_errors import refused
from hypothesis import given
from hypothesis import strategies as st

from loadgen.cli.app import main
from loadgen.core.errors import MAX_ERRORS, CombinedError, UserError
from loadgen.core.requests import tokenizer
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.file_prompts import MAX_CACHED_FILE_BYTES
from loadgen.core.workload import (
    FixedTokens,
    FromFile,
    data_files,
    dataset,
    dataset_rows,
    row_errors,
)
from loadgen.core.workload.fingerprints import recipe_fingerprint
from loadgen.core.workload.loading import workload_from_dataset

CHAT = {"messages": [{"role": "user", "content": "hello world"}]}


@pytest.fixture
def written(tmp_path):
    def write(content, **requests):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(
            content if isinstance(content, bytes) else b"".join(jsonl(row) for row in content)
        )
        model = FromFile.model_construct(path=path, **requests)
        return build_prompts(SimpleNamespace(requests=model), 1, 2, tokenizer.load_tokenizer(None))

    return write


def jsonl(row):
    return json.dumps(row).encode() + b"\n"


def test_rows_are_sent_as_written(written):
    tools = [{"type": "function", "function": {"name": "f"}}]
    prompts = written(
        [
            {"prompt": "one", "output_tokens": 7},
            {
                **CHAT,
                "tools": tools,
                "temperature": 0.5,
                "max_tokens": 9,
                "extra_body": {"top_logprobs": 1},
            },
            {"prompt": [1, 2, 3]},
        ],
        output_tokens=FixedTokens(value=30),
    )
    first_request, two, three = (prompts[number] for number in range(3))

    assert (
        first_request.prompt,
        first_request.messages,
        first_request.max_tokens,
        first_request.exact_output,
    ) == ("one", None, 7, True)
    assert (two.messages, two.max_tokens, two.exact_output) == (CHAT["messages"], 9, False)
    assert two.extra == {"tools": tools, "temperature": 0.5, "top_logprobs": 1}
    assert (three.prompt, three.max_tokens, three.exact_output) == ([1, 2, 3], 30, True)
    assert len({prompts[number].id for number in range(6)}) == 6


def test_input_is_counted_only_on_demand(written):
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello world"}]}]
    prompts = written(
        [
            CHAT,
            {"prompt": [5, 6, 7]},
            {"messages": parts},
            {"messages": [{"role": "user", "content": [picture]}]},
        ]
    )

    assert [prompts[number].input_tokens for number in range(4)] == [None] * 4
    assert [prompts.input_tokens(number) for number in range(4)] == [2, 3, 2, None]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_datasets_may_have_a_bom_crlf_and_blank_lines(written, bom, end):
    lines = [
        b'{"prompt": "a"}',
        b"",
        b'  {"prompt": "b\\nb \xe2\x80\xa8"}  ',
        b"",
        b'{"prompt": "c"}',
    ]
    for last in (b"", end, end + end):
        prompts = written(bom + end.join(lines) + last)
        assert [prompts[number].prompt for number in range(3)] == ["a", "b\nb \u2028", "c"]
        assert len(prompts.rows) == 3


def test_rows_are_used_in_file_order_or_in_one_order_shuffled_by_the_seed(written):
    rows = [{"prompt": str(i)} for i in range(50)]
    plain, shuffled = written(rows, order="sequential"), written(rows, order="shuffled")
    inorder, other = (
        [prompts[number].prompt for number in range(100)] for prompts in (plain, shuffled)
    )

    assert inorder == [str(i) for i in range(50)] * 2
    assert other != inorder
    assert sorted(other[:50]) == sorted(inorder[:50])
    assert other[:50] == other[50:]


def test_ignored_fields_of_a_data_set_are_named_in_a_note(written):
    prompts = written(
        [{"prompt": "a", "topic": "b"}, {"prompt": "c", "id": 3}],
        output_tokens=FixedTokens(value=30),
    )
    assert [note.partition(": ")[2] for note in prompts.warnings(2)] == ["topic, id"]


@pytest.mark.parametrize(
    ("row", "where", "code"),
    [
        (b'{"prompt": "a"', ":1", "invalid_syntax"),
        (b'{"prompt": "a",}', ":1:16", "invalid_syntax"),
        (b'{"prompt": "\xff"}', ":1:13", "wrong_encoding"),
        (b"[1]", ": row 1", "wrong_type"),
        (b'[{"prompt": "a"},\n{"prompt": }]', ":2", "invalid_syntax"),
        pytest.param(b'{"prompt": ' + b"[" * 100_000, ":1", "too_large", id="deep"),
        (b'"text"', ":1", "wrong_type"),
        (b"{}", ":1", "missing_key"),
        (b'{"body": {}, "url": "/v1/embeddings"}', ":1", "unsupported"),
        (b'{"conversations": [{"from": "alien", "value": "a"}]}', ":1", "unknown_name"),
        (b'{"conversations": [{"from": "human"}]}', ":1", "wrong_type"),
        (b'{"conversations": []}', "", "empty_file"),
        (b'{"timestamp": 1, "input_length": 2, "output_length": 3}', ":1", "wrong_format"),
        (b'{"promt": "a"}', ":1", "missing_key"),
        (b'{"prompt": "a", "messages": []}', ":1", "conflict"),
        (b'{"prompt": ""}', ":1", "wrong_type"),
        (b'{"prompt": 5}', ":1", "wrong_type"),
        (b'{"prompt": [1, true]}', ":1", "wrong_type"),
        (b'{"messages": []}', ":1", "wrong_type"),
        (b'{"messages": ["hi"]}', ":1", "wrong_type"),
        (b'{"messages": [{"content": "hi"}]}', ":1", "wrong_type"),
        (b'{"messages": [{"role": "user", "content": 1}]}', ":1", "wrong_type"),
        (b'{"prompt": "a", "output_tokens": 0}', ":1", "wrong_type"),
        (b'{"prompt": "a", "max_tokens": "9"}', ":1", "wrong_type"),
        (b'{"prompt": "a", "max_tokens": 1.5}', ":1", "wrong_type"),
        (b'{"prompt": "a", "max_tokens": 1, "output_tokens": 2}', ":1", "conflict"),
        (b'{"prompt": "a", "temperature": "hot"}', ":1", "wrong_type"),
        (b'{"prompt": "a", "stop": [1]}', ":1", "wrong_type"),
        (b'{"prompt": "a", "extra_body": []}', ":1", "wrong_type"),
        (b'{"prompt": "a", "extra_body": {"n": 2}}', ":1", "unsupported"),
        (b'{"prompt": "a", "extra_body": {"max_tokens": 2}}', ":1", "unsupported"),
        (b'{"prompt": "a", "extra_body": {"stream": false}}', ":1", "unsupported"),
        (b"", "", "empty_file"),
        (b"\n\r\n", "", "empty_file"),
        (b"\xff\xfe{\x00", "", "wrong_encoding"),
        (b"PAR1\x15", "", "damaged_file"),
    ],
)
def test_an_invalid_row_is_refused_with_its_position(written, row, where, code):
    with refused((CombinedError, UserError), code) as exc_info:
        written(row)
    assert f"rows.jsonl{where}\n" in f"{exc_info.value}\n"


def test_all_errors_of_a_data_set_are_reported_up_to_a_limit(written):
    with pytest.raises(CombinedError) as exc_info:
        written(b'{"prompt": 1}\n{"prompt": "good"}\n{no}\n')
    assert [fault.where.rsplit("rows.jsonl", 1)[1] for fault in exc_info.value.errors] == [
        ":1",
        ":3:2",
    ]
    with pytest.raises(CombinedError) as exc_info:
        written(b"no\n" * 1000)
    assert len(exc_info.value.errors) == MAX_ERRORS + 1


def test_a_missing_and_a_changed_file_are_errors(written, tmp_path):
    with refused(UserError, "missing_file"):
        dataset.read_rows(tmp_path / "none.jsonl")
    with refused(UserError, "unreadable_file"):
        dataset.read_rows(tmp_path)
    prompts = written([CHAT, CHAT])
    prompts.rows.path.write_bytes(b"\x00" * 5)
    with refused(UserError, "changed_file", where="rows.jsonl"):
        prompts[1]


def test_a_row_of_a_small_file_is_read_by_its_first_request_alone(written):
    small, large = [CHAT, CHAT], [{"prompt": "long " * (MAX_CACHED_FILE_BYTES // 5)}, CHAT]
    for rows, is_in_memory in (small, True), (large, False):
        prompts = written(rows)
        first = prompts[0], prompts[1]
        prompts.rows.path.write_bytes(b"")
        if is_in_memory:
            assert [prompts[n].messages for n in (2, 3, 4)] == [
                first[n % 2].messages for n in (2, 3, 4)
            ]
        else:
            with refused(UserError, "changed_file"):
                prompts[2]


@given(st.binary(max_size=80) | st.text(max_size=40).map(str.encode))
def test_any_line_is_parsed_into_a_row_or_refused_with_a_reason(line):
    try:
        row = dataset_rows.parse_row(line)
    except row_errors.BadRowError as error:
        assert str(error)
    else:
        assert (row.prompt is None) != (row.messages is None)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content"]) | st.text(max_size=5), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(dataset_rows.KNOWN_FIELDS), JSON, max_size=4))
def test_any_json_object_is_parsed_into_a_row_or_refused_with_a_reason(row):
    test_any_line_is_parsed_into_a_row_or_refused_with_a_reason.hypothesis.inner_test(
        json.dumps(row).encode()
    )


DATA_SET_QUESTIONS = ["What is 2 + 2?", "And, so, 3 + 3?"]
SHAREGPT = [
    {
        "id": str(number),
        "conversations": [
            {"from": "system", "value": "Be short."},
            {"from": "human", "value": text},
            {"from": "gpt", "value": "hello world"},
            {"from": "human", "value": "Why?"},
        ],
    }
    for number, text in enumerate(DATA_SET_QUESTIONS)
]
BATCH = [
    {
        "custom_id": str(number),
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 9},
    }
    for number, text in enumerate(DATA_SET_QUESTIONS)
]


def parquet(path, rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)


def arrow(path, rows):
    import pyarrow as pa

    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def text(path, rows):
    path.write_text(rows)


QUESTIONS = [
    {"question": text, "answer": "hello world", "tags": None} for text in DATA_SET_QUESTIONS
]


@pytest.mark.parametrize(
    ("name", "write", "rows", "lengths", "expected_text"),
    [
        (
            "share.json",
            text,
            json.dumps(SHAREGPT, indent=1),
            [2, 2],
            "the first question of each conversation (`conversations`)",
        ),
        (
            "share.jsonl",
            text,
            "\n".join(map(json.dumps, SHAREGPT)),
            [2, 2],
            "with the length of its recorded response",
        ),
        (
            "batch.jsonl",
            text,
            "\n".join(map(json.dumps, BATCH)),
            [9, 9],
            "rows of an OpenAI batch: the field `body` is sent",
        ),
        ("batch.json", text, json.dumps(BATCH), [9, 9], "rows of an OpenAI batch"),
        (
            "q.csv",
            text,
            f'question,max_tokens,x\n{DATA_SET_QUESTIONS[0]},7,\n"{DATA_SET_QUESTIONS[1]}",,1\n',
            [7, 1024],
            "prompts are `question`",
        ),
        (
            "q.tsv",
            text,
            f"instruction\tinput\n{DATA_SET_QUESTIONS[0]}\t\n\t{DATA_SET_QUESTIONS[1]}\n",
            [1024, 1024],
            "prompts are `in",
        ),
        (
            "q.parquet",
            parquet,
            QUESTIONS,
            [2, 2],
            "prompts are `question`, output lengths from `answer`",
        ),
        ("q.arrow", arrow, QUESTIONS, [2, 2], "prompts are `question`"),
        (
            "m.parquet",
            parquet,
            [{"messages": [{"role": "user", "content": q}]} for q in DATA_SET_QUESTIONS],
            [1024, 1024],
            "1,024",
        ),
    ],
)
def test_data_sets_of_other_formats_are_read(tmp_path, name, write, rows, lengths, expected_text):
    path = tmp_path / name
    write(path, rows)
    prompts = build_prompts(
        SimpleNamespace(requests=FromFile.model_construct(path=path)),
        1,
        2,
        tokenizer.load_tokenizer(None),
    )
    requests = [prompts[number] for number in range(2)]

    assert [
        request.prompt or request.messages[-1]["content"] for request in requests
    ] == DATA_SET_QUESTIONS
    assert [request.max_tokens for request in requests] == lengths
    notes = prompts.warnings(2)
    assert expected_text in " ".join(notes)
    assert dataset.read_rows(path).sha256 == prompts.rows.sha256


@pytest.mark.parametrize(
    ("name", "content", "where", "code"),
    [
        ("a.csv", 'question\n"a\nb"\n""\nlast\n""\n', ":4", "missing_key"),
        ("a.csv", "question\na,b\n", ":2", "invalid_syntax"),
        ("a.csv", 'question\n"a\n', ":", "invalid_syntax"),
        ("a.csv", "", "", "empty_file"),
        ("a.json", '[{"prompt": "a"}, {"promt": "b"}]', ": row 2", "missing_key"),
        ("a.arrow", "ARROW1..", "", "damaged_file"),
    ],
)
def test_an_error_in_a_converted_file_names_its_row(tmp_path, name, content, where, code):
    path = tmp_path / name
    path.write_text(content)
    with refused((CombinedError, UserError), code) as exc_info:
        dataset.read_rows(path)
    assert f"{path}{where}" in str(exc_info.value)


def damaged_footer(data):
    size = int.from_bytes(data[-8:-4], "little")
    return data[: -8 - size] + b"\xee" * size + data[-8:]


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (damaged_footer, "damaged_file"),
        (lambda data: data[:-4] + b"PARE", "damaged_file"),
        (lambda data: data[:-6], "damaged_file"),
        (lambda data: data[:-8] + b"\xff\xff\xff\xff" + data[-4:], "damaged_file"),
    ],
)
def test_damaged_parquet_is_refused_with_a_readable_message(tmp_path, damage, code):
    """Arrow raises OSError for some of it, which a caller would take for a fault of the disk."""
    parquet(tmp_path / "a.parquet", QUESTIONS)
    path = tmp_path / "a.parquet"
    path.write_bytes(damage(path.read_bytes()))
    with refused(UserError, code) as exc_info:
        list(dataset.read_located_rows(path))
    assert "not Parquet: " in str(exc_info.value) and "None" not in str(exc_info.value)


def test_a_huge_list_in_a_small_file_is_refused_before_it_is_read(tmp_path):
    """Of nulls it takes no room at all, as Arrow counts."""
    import pyarrow as pa

    numbers = pa.ListArray.from_arrays(pa.array([0, 1 << 30], pa.int32()), pa.nulls(1 << 30))
    table = pa.table({"prompt": ["why?"], "more": pa.StructArray.from_arrays([numbers], ["n"])})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    with refused(UserError, "too_large", where="row 1"):
        list(dataset.read_located_rows(tmp_path / "a.arrow"))


def test_text_that_is_stored_as_bytes_is_text_and_other_bytes_are_no_prompt(tmp_path):
    parquet(tmp_path / "a.parquet", [{"prompt": "höre".encode(), "image": b"\xff\xd8"}])
    assert [row for _, row in dataset.read_located_rows(tmp_path / "a.parquet")] == [
        {"prompt": "höre"}
    ]
    parquet(tmp_path / "b.parquet", [{"prompt": b"\xff\xd8"}])
    with pytest.raises(CombinedError, match="the row has neither `prompt` nor `messages`"):
        dataset.read_rows(tmp_path / "b.parquet")


def test_data_sets_of_hugging_face_are_read_from_its_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for variable in ("HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    snapshot = tmp_path / "hub" / "datasets--some--sums" / "snapshots" / "abc"
    for split, rows in (("train", QUESTIONS), ("test", QUESTIONS[:1])):
        (snapshot / "main").mkdir(parents=True, exist_ok=True)
        parquet(snapshot / "main" / f"{split}-00000-of-00001.parquet", rows)
    prepared = tmp_path / "datasets" / "some___sums2" / "default" / "0.0.0" / "abc"
    prepared.mkdir(parents=True)
    arrow(prepared / "sums2-train.arrow", QUESTIONS)
    (prepared / "dataset_info.json").write_text("{}")
    sizes = {
        name: len(dataset.read_rows(name))
        for name in ("hf:some/sums", "hf:some/sums:test", "hf:some/sums/main:test", "hf:some/sums2")
    }

    assert list(sizes.values()) == [2, 1, 1, 2], sizes
    assert (
        dataset.read_rows("hf:some/sums").notes[0]
        == "some/sums at abc, split train: train-00000-of-00001.parquet"
    )
    for name, code in (("hf:some/sums:dev", "unknown_name"), ("hf:", "invalid_value")):
        with refused(UserError, code):
            dataset.read_rows(name)


def test_a_user_without_a_home_directory_has_no_cached_data_set(monkeypatch):
    """Such a user runs it in .ci/surroundings: a number without a name, as in a container."""
    for variable in ("HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    assert data_files._find_cached_files("nobody/has-this-data-set") == []


def test_a_data_set_needs_no_workload_file(tmp_path, capsys):
    (tmp_path / "share.json").write_text(json.dumps([*SHAREGPT * 10, {"conversations": []}]))
    out = tmp_path / "out"

    def run(*flags):
        with pytest.raises(SystemExit) as exc_info:
            main(["run", *flags, "--url", "sim:gb300-vm"])
        captured = capsys.readouterr()
        return exc_info.value.code, captured.out + captured.err

    code, output = run("--dataset", str(tmp_path / "share.json"), "-c", "1", "-o", str(out))
    assert code == 0 and "left out 1 conversation" in output
    requests = json.loads((out / "summary.json").read_bytes())["requests"]
    assert requests["ok"] == 20, "every row once"
    code, output = run("qa", "--dataset", str(tmp_path / "share.json"), "--dry-run")
    assert (code, "prompt tokens, 2 output tokens" in output) == (0, True)
    code, output = run(str(tmp_path / "share.json"))
    assert (code, f"hint: use --dataset {tmp_path}/share.json" in output) == (2, True)
    (tmp_path / "bad.json").write_text("[1]")
    code, output = run("--dataset", str(tmp_path / "bad.json"), "-c", "1")
    assert (code, output.count("error:")) == (2, 1), output


def snapshot_of(home, name, commit, rows):
    folder = home / "hub" / f"datasets--{name.replace('/', '--')}" / "snapshots" / commit / "main"
    folder.mkdir(parents=True)
    parquet(folder / "train-00000-of-00001.parquet", rows)
    parquet(folder / "test-00000-of-00001.parquet", rows[:1])


FORMS = {
    "a.jsonl": (
        text,
        "\n".join(json.dumps({"prompt": q, "output_tokens": 5}) for q in DATA_SET_QUESTIONS),
    ),
    "a.json": (text, json.dumps([{"prompt": q} for q in DATA_SET_QUESTIONS])),
    "a.csv": (text, f"prompt,max_tokens\n{DATA_SET_QUESTIONS[0]},7\n"),
    "a.tsv": (text, f"question\tx\n{DATA_SET_QUESTIONS[0]}\t1\n"),
    "a.parquet": (parquet, QUESTIONS),
    "a.arrow": (arrow, QUESTIONS),
    "openai.jsonl": (text, json.dumps(CHAT | {"max_tokens": 9})),
    "batch.jsonl": (text, "\n".join(map(json.dumps, BATCH))),
    "share.json": (text, json.dumps(SHAREGPT)),
    "others.jsonl": (
        text,
        json.dumps({"instruction": "say", "input": "this", "system": "be brief", "output": "this"}),
    ),
}
"""A file of each form in the table of docs/reference/workload-file.md."""
HUB_NAMES = ("hf:some/sums", "hf:some/sums:test", "hf:some/sums/main:test")


@pytest.mark.parametrize("name", [*FORMS, *HUB_NAMES])
def test_a_run_accepts_every_documented_form_of_a_data_set(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for variable in ("HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    snapshot_of(tmp_path, "some/sums", "0123abcd", QUESTIONS)
    source = name
    if name in FORMS:
        write, rows = FORMS[name]
        write(tmp_path / name, rows)
        source = str(tmp_path / name)

    with pytest.raises(SystemExit) as exc_info:
        main(
            [
                "run",
                "--dataset",
                source,
                "-c",
                "1",
                "-n",
                "40",
                "--url",
                "sim:gb300-vm",
                "-o",
                str(tmp_path / "out"),
            ]
        )
    assert exc_info.value.code == 0
    requests = json.loads((tmp_path / "out" / "summary.json").read_bytes())["requests"]
    assert requests["ok"] == 40


def test_the_commit_of_a_snapshot_is_in_the_fingerprint(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    fingerprints = {}
    for commit, rows in (("one", QUESTIONS), ("two", QUESTIONS), ("one", QUESTIONS[:1])):
        home = tmp_path / f"{commit}{len(rows)}"
        snapshot_of(home, "some/sums", commit, rows)
        monkeypatch.setenv("HF_HOME", str(home))
        for split in ("train", "test"):
            checked = workload_from_dataset(f"hf:some/sums:{split}", base="qa")
            fingerprints[commit, len(rows), split] = recipe_fingerprint(checked, "server")
        assert f"at {commit}, split train" in dataset.read_rows("hf:some/sums").notes[0]

    assert fingerprints["one", 2, "test"] == fingerprints["one", 1, "test"], (
        "the same file of the same commit"
    )
    assert len(set(fingerprints.values())) == 4, "by commit and content, not by name"


def test_body_fields_of_servers_are_sent_and_the_model_is_not() -> None:
    row = (
        b'{"prompt": "a", "priority": 2, "min_tokens": 5, '
        b'"guided_json": {"type": "object"}, "model": "other"}'
    )
    parsed = dataset_rows.parse_row(row)

    assert parsed.extra == {"priority": 2, "min_tokens": 5, "guided_json": {"type": "object"}}
    assert parsed.ignored_fields == ("model",)
    with pytest.raises(row_errors.BadRowError, match="priority"):
        dataset_rows.parse_row(b'{"prompt": "a", "priority": "high"}')
