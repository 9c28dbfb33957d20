"""Counting without a network, and the promise that words add up: n words are n tokens."""

from __future__ import annotations

import base64
import hashlib
import inspect
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiktoken_ext.openai_public
from expected_errors import refused
from tiny_tokenizer import train

from loadgen.core.errors import UserError
from loadgen.core.requests import tokenizer
from loadgen.data import pack

CL100K = tokenizer.load_tokenizer(None)


def _unpacked_ranks() -> dict[bytes, int]:
    encoding = CL100K.load_encode().__self__  # type: ignore[attr-defined]
    return {encoding.decode_single_token_bytes(rank): rank for rank in range(100_256)}


def test_the_packaged_ranks_equal_the_published_file():
    published = b"".join(
        base64.b64encode(token) + b" %d\n" % rank for token, rank in _unpacked_ranks().items()
    )
    assert hashlib.sha256(published).hexdigest() == pack.PUBLISHED_SHA256
    assert pack.PUBLISHED_SHA256 in inspect.getsource(tiktoken_ext.openai_public)


def test_the_packaged_words_equal_those_of_the_pack_script():
    selected_words = pack.select_words(list(_unpacked_ranks()))
    assert [" " + word for word in selected_words] == list(CL100K.inner_words)
    assert selected_words[: pack.FIRST_WORD_COUNT] == list(CL100K.start_words)


def test_pattern_and_special_tokens_equal_those_of_tiktoken(monkeypatch):
    monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
    theirs = tiktoken_ext.openai_public.cl100k_base()
    assert (theirs["pat_str"], theirs["special_tokens"]) == (tokenizer.PATTERN, tokenizer.SPECIAL)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        ("hello world", [15339, 1917]),
        ("tiktoken is great!", [83, 1609, 5963, 374, 2294, 0]),
        (
            "<|endoftext|>",
            [27, 91, 8862, 728, 428, 91, 29],
        ),  # a text that looks like a special token is only a text
        ("'rer", [2351, 81]),  # the rest are rows of tiktoken's own tests
        ("today\n ", [31213, 198, 220]),
        ("today\n \n", [31213, 27907]),
        (" \x850", [220, 126, 227, 15]),
    ],
)
def test_packaged_tokenizer_encodes_like_cl100k(text, ids):
    assert CL100K.encode(text) == ids
    assert CL100K.count(text) == len(ids)


def test_every_inner_word_and_every_first_word_is_one_token():
    encode = CL100K.load_encode()
    assert all(len(encode(word)) == 1 for word in CL100K.inner_words)
    assert all(len(encode(word)) == len(encode(" " + word)) == 1 for word in CL100K.start_words)


def test_a_text_of_n_packaged_words_has_n_tokens():
    rng = random.Random(7)
    for _ in range(500):
        n = rng.choice((1, 2, 3, 4, 5, rng.randint(6, 400)))
        text = rng.choice(CL100K.start_words) + "".join(rng.choices(CL100K.inner_words, k=n - 1))
        assert CL100K.count(text) == n
        assert CL100K.count(f"\n\n{text}") - CL100K.count("\n\n") == n  # as chat templates put it


@pytest.mark.processes
def test_counting_tokens_needs_neither_network_nor_http_library():
    script = """if True:
        import socket, sys
        def forbidden(*_, **__): raise AssertionError("network")
        socket.socket = socket.create_connection = socket.getaddrinfo = forbidden
        from loadgen.core.requests import synthetic_prompts
        from loadgen.core.requests.tokenizer import load_tokenizer
        tokenizer = load_tokenizer()
        assert not {"tiktoken", "tokenizers", "pyarrow", "openai", "pydantic"} & sys.modules.keys()
        assert tokenizer.count("hello world") == 2
        assert not {"requests", "urllib.request"} & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("tiny") / "tokenizer.json")


def test_a_local_tokenizer_counts_content_only_and_never_truncates(tmp_path):
    plain, dressed = (
        tokenizer.load_tokenizer(str(train(tmp_path / "a.json"))),
        tokenizer.load_tokenizer(str(train(tmp_path / "b.json", True))),
    )
    text = "return the value of the argument and the name of the function " * 5
    assert plain.tag == "tokenizer"
    assert dressed.count(text) == plain.count(text) > 40
    assert plain.sha256 != dressed.sha256


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_reading_a_local_tokenizer_starts_no_thread(tiny):
    """Without threads a builder process can be forked, so a closed loop starts sooner."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from loadgen.core import child_process\n"
        "from loadgen.core.requests.tokenizer import read_tokenizer_file\n"
        "assert child_process.can_fork()\n"
        "read_tokenizer_file(Path(sys.argv[1]))\n"
        "assert child_process.can_fork()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny)], check=True)


def test_a_directory_is_accepted_instead_of_its_tokenizer_json(tiny):
    assert (
        tokenizer.load_tokenizer(str(tiny.parent)).sha256
        == tokenizer.load_tokenizer(str(tiny)).sha256
    )


def test_words_of_a_local_tokenizer_are_one_token_each(tiny):
    local = tokenizer.load_tokenizer(str(tiny))
    assert len(local.inner_words) > 100
    anchor = local.start_words[0]
    assert {local.count(anchor + word) for word in local.inner_words} == {2}
    assert {local.count(start) for start in local.start_words} == {1}


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "missing_file"),
        (b"", "wrong_format"),
        (b"\xff\xfe\x00", "wrong_format"),
        (b'{"model_max_length": 4096}', "wrong_format"),
        (
            b'{"version":"1.0","model":{"type":"WordLevel","vocab":{"?":0},"unk_token":"?"}}',
            "unsupported",
        ),
    ],
)
def test_an_invalid_tokenizer_is_refused_with_its_path_and_a_hint(tmp_path, content, code):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with refused(UserError, code) as exc_info:
        tokenizer.load_tokenizer(str(path))
    assert str(path) in str(exc_info.value)
    assert "hint:" in str(exc_info.value)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda _data: b"", lambda data: data[::-1]]
)
def test_damaged_packaged_data_is_refused_with_its_file_name(tmp_path, damage):
    path = tmp_path / "cl100k.words.gz"
    path.write_bytes(damage((tokenizer.DATA / path.name).read_bytes()))
    with pytest.raises(UserError, match=r"--> .*cl100k\.words\.gz"):
        tokenizer.packaged_tokenizer(tmp_path)


def test_packaged_data_with_another_hash_is_refused(tmp_path):
    for name in ("cl100k.words.gz", "cl100k.ranks.gz"):  # the words as ranks too
        shutil.copy(tokenizer.DATA / "cl100k.words.gz", tmp_path / name)
    with pytest.raises(UserError, match=r"--> .*cl100k\.ranks\.gz"):
        tokenizer.packaged_tokenizer(tmp_path).encode("x")


def test_a_hugging_face_tokenizer_is_loaded_from_the_cache_with_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    file = train(snapshot / "tokenizer.json")
    loaded_tokenizer = tokenizer.load_tokenizer("some/model")

    assert loaded_tokenizer.name == "some/model@0123abcd" and loaded_tokenizer.tag == "tokenizer"
    assert loaded_tokenizer.sha256 == tokenizer.load_tokenizer(str(file)).sha256
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with refused(UserError, "not_downloaded", where="--tokenizer nobody/has-this"):
        tokenizer.load_tokenizer("nobody/has-this")
    with refused(UserError, "missing_file"):
        tokenizer.load_tokenizer("./nobody/has-this.json")
