"""The user's own requests: sent as written, every fault found before the run with file:line:column."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import FAULTS_SHOWN, Faults, UserError
from loadgen.requests import dataset, tokenizer
from loadgen.requests.build import build
from loadgen.workload import Fixed, FromFile

CHAT = {"messages": [{"role": "user", "content": "hello world"}]}


@pytest.fixture
def written(tmp_path):
    def write(content, **requests):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else b"".join(jsonl(row) for row in content))
        model = FromFile.model_construct(path=path, **requests)
        return build(SimpleNamespace(requests=model), 1, 2, tokenizer.load_tokenizer(None))

    return write


def jsonl(row):
    return json.dumps(row).encode() + b"\n"


def test_rows_are_sent_as_written(written):
    tools = [{"type": "function", "function": {"name": "f"}}]
    made = written(
        [
            {"prompt": "one", "output_tokens": 7},
            {**CHAT, "tools": tools, "temperature": 0.5, "max_tokens": 9, "extra_body": {"top_logprobs": 1}},
            {"prompt": [1, 2, 3]},
        ],
        output_tokens=Fixed(value=30),
    )
    one, two, three = (made[number] for number in range(3))
    assert (one.prompt, one.messages, one.max_tokens, one.exact_output) == ("one", None, 7, True)
    assert (two.messages, two.max_tokens, two.exact_output) == (CHAT["messages"], 9, False)
    assert two.extra == {"tools": tools, "temperature": 0.5, "top_logprobs": 1}
    assert (three.prompt, three.max_tokens, three.exact_output) == ([1, 2, 3], 30, True)
    assert len({made[number].id for number in range(6)}) == 6


def test_input_is_counted_only_on_demand(written):
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello world"}]}]
    made = written(
        [CHAT, {"prompt": [5, 6, 7]}, {"messages": parts}, {"messages": [{"role": "user", "content": [picture]}]}]
    )
    assert [made[number].input_tokens for number in range(4)] == [None] * 4
    assert [made.input_tokens(number) for number in range(4)] == [2, 3, 2, None]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_bom_line_ends_and_blank_lines(written, bom, end):
    lines = [b'{"prompt": "a"}', b"", b'  {"prompt": "b\\nb \xe2\x80\xa8"}  ', b"", b'{"prompt": "c"}']
    for last in (b"", end, end + end):
        made = written(bom + end.join(lines) + last)
        assert [made[number].prompt for number in range(3)] == ["a", "b\nb \u2028", "c"]
        assert len(made.rows) == 3


def test_order_is_the_files_or_shuffled_once_by_the_seed(written):
    rows = [{"prompt": str(i)} for i in range(50)]
    plain, shuffled = written(rows, order="sequential"), written(rows, order="shuffled")
    inorder, other = ([made[number].prompt for number in range(100)] for made in (plain, shuffled))
    assert inorder == [str(i) for i in range(50)] * 2
    assert other != inorder
    assert sorted(other[:50]) == sorted(inorder[:50])
    assert other[:50] == other[50:]


def test_repeats_and_ignored_fields_are_said(written):
    made = written([{"prompt": "a", "answer": "b"}, {"prompt": "c", "id": 3}])
    assert made.warnings(2) == ["fields of rows.jsonl that are not sent: answer, id"]
    assert "3 requests from 2 rows" in made.warnings(3)[0]


@pytest.mark.parametrize(
    ("row", "where", "what"),
    [
        (b'{"prompt": "a"', ":1", "not JSON"),
        (b'{"prompt": "a",}', ":1:16", "not JSON"),
        (b'{"prompt": "\xff"}', ":1:13", "not UTF-8"),
        (b"[1]", "", "JSON list"),
        pytest.param(b'{"prompt": ' + b"[" * 9000, ":1", "nested too deeply", id="deep"),
        (b'"text"', ":1", "not a JSON object"),
        (b"{}", ":1", "neither `prompt` nor `messages`"),
        (b'{"promt": "a"}', ":1", 'did you mean "prompt"?'),
        (b'{"prompt": "a", "messages": []}', ":1", "both"),
        (b'{"prompt": ""}', ":1", 'prompt is ""'),
        (b'{"prompt": 5}', ":1", "prompt is 5"),
        (b'{"prompt": [1, true]}', ":1", "prompt is [1,true]"),
        (b'{"messages": []}', ":1", "messages is []"),
        (b'{"messages": ["hi"]}', ":1", 'messages[0] is "hi"'),
        (b'{"messages": [{"content": "hi"}]}', ":1", "messages[0].role is null"),
        (b'{"messages": [{"role": "user", "content": 1}]}', ":1", "messages[0].content is 1"),
        (b'{"prompt": "a", "output_tokens": 0}', ":1", "output_tokens is 0"),
        (b'{"prompt": "a", "max_tokens": "9"}', ":1", 'max_tokens is "9"'),
        (b'{"prompt": "a", "max_tokens": 1.5}', ":1", "max_tokens is 1.5"),
        (b'{"prompt": "a", "max_tokens": 1, "output_tokens": 1}', ":1", "output_tokens and max_tokens together"),
        (b'{"prompt": "a", "temperature": "hot"}', ":1", "a number"),
        (b'{"prompt": "a", "stop": [1]}', ":1", "a text or a list of texts"),
        (b'{"prompt": "a", "extra_body": []}', ":1", "extra_body is []"),
        (b"", "", "no requests"),
        (b"\n\r\n", "", "no requests"),
        (b"\xff\xfe{\x00", "", "UTF-16"),
        (b"PAR1\x15", "", "Parquet"),
    ],
)
def test_what_is_wrong_with_a_row(written, row, where, what):
    with pytest.raises((Faults, UserError)) as caught:
        written(row)
    assert f"rows.jsonl{where}\n" in f"{caught.value}\n"
    assert what in str(caught.value)


def test_all_faults_at_once_but_not_without_end(written):
    with pytest.raises(Faults) as caught:
        written(b'{"prompt": 1}\n{"prompt": "good"}\n{no}\n')
    assert [fault.where.rsplit("rows.jsonl", 1)[1] for fault in caught.value.faults] == [":1", ":3:2"]
    with pytest.raises(Faults) as caught:
        written(b"no\n" * 1000)
    assert len(caught.value.faults) == FAULTS_SHOWN + 1


def test_no_file_and_a_changed_file_are_named(written, tmp_path):
    with pytest.raises(UserError, match="cannot read the requests"):
        dataset.read_rows(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="cannot read the requests"):
        dataset.read_rows(tmp_path)
    made = written([CHAT, CHAT])
    made.rows.path.write_bytes(b"\x00" * 5)
    with pytest.raises(UserError, match="changed during the run"):
        made[1]


@given(st.binary(max_size=80) | st.text(max_size=40).map(str.encode))
def test_no_line_ends_in_anything_but_a_row_or_wrong(line):
    try:
        row = dataset.parse_row(line)
    except dataset.BadRow as wrong:
        assert str(wrong)
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
        | st.dictionaries(st.sampled_from(["role", "content"]) | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(dataset.KNOWN), JSON, max_size=4))
def test_no_object_ends_in_anything_but_a_row_or_wrong(row):
    test_no_line_ends_in_anything_but_a_row_or_wrong.hypothesis.inner_test(json.dumps(row).encode())
