"""Tests of target URLs: every form leads to the right place, and no secret is shown."""

from __future__ import annotations

import base64
from urllib.parse import quote

import pytest
from expected_errors import refused
from hypothesis import given
from hypothesis import strategies as st
from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.redaction import redact
from loadgen_sdk.transport.target import Target, header_secrets

AZURE = "https://me.openai.azure.com"


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "chat", "host_header"),
    [
        ("http://host:8000", "host", 8000, False, "/v1/chat/completions", "host:8000"),
        ("http://host:8000/", "host", 8000, False, "/v1/chat/completions", "host:8000"),
        (" http://host\n", "host", 80, False, "/v1/chat/completions", "host"),
        ("HTTPS://Host/v1", "host", 443, True, "/v1/chat/completions", "host"),
        ("https://host:443/v1/", "host", 443, True, "/v1/chat/completions", "host"),
        ("http://host:443/v1", "host", 443, False, "/v1/chat/completions", "host:443"),
        ("http://host/x/y", "host", 80, False, "/x/y/v1/chat/completions", "host"),
        ("http://host/x/y/v1//", "host", 80, False, "/x/y/v1/chat/completions", "host"),
        (
            "http://host/v1beta/chat/completions",
            "host",
            80,
            False,
            "/v1beta/chat/completions",
            "host",
        ),
        ("http://host/v1/models", "host", 80, False, "/v1/chat/completions", "host"),
        ("http://[::1]:8000/v1", "::1", 8000, False, "/v1/chat/completions", "[::1]:8000"),
        ("http://[fe80::1%eth0]", "fe80::1%eth0", 80, False, "/v1/chat/completions", "[fe80::1]"),
        (
            "http://bücher.example",
            "xn--bcher-kva.example",
            80,
            False,
            "/v1/chat/completions",
            "xn--bcher-kva.example",
        ),
        ("http://host?key=abc&x", "host", 80, False, "/v1/chat/completions?key=abc&x", "host"),
    ],
)
def test_urls_are_parsed_in_every_form(
    url: str, host: str, port: int, *, tls: bool, chat: str, host_header: str
) -> None:
    target = Target.parse(url)
    assert (target.host, target.port, target.tls, target.chat_path) == (host, port, tls, chat)
    assert (target.path, target.host_header) == (chat, host_header)


def test_paths_outside_the_api_are_derived_from_the_url() -> None:
    target = Target.parse("http://h/x/v1?token=abcd", api="completions")
    assert target.path == "/x/v1/completions?token=abcd"
    assert target.models_path == "/x/v1/models?token=abcd"
    assert target.server_path("/version") == "/x/version?token=abcd"
    assert target.base_url == "http://h/x/v1"


@pytest.mark.parametrize(
    ("url", "options", "chat", "deployment"),
    [
        (
            f"{AZURE}/openai/deployments/D?api-version=1",
            {},
            "/openai/deployments/D/chat/completions?api-version=1",
            "D",
        ),
        (
            f"{AZURE}/openai/deployments/D/chat/completions?api-version=1",
            {},
            "/openai/deployments/D/chat/completions?api-version=1",
            "D",
        ),
        (
            f"{AZURE}?api-version=1",
            {"deployment": "D"},
            "/openai/deployments/D/chat/completions?api-version=1",
            "D",
        ),
        (
            f"{AZURE}/openai/?api-version=1",
            {"deployment": "D"},
            "/openai/deployments/D/chat/completions?api-version=1",
            "D",
        ),
        (f"{AZURE}/openai/v1/", {"deployment": "D"}, "/openai/v1/chat/completions", ""),
        (AZURE, {}, "/openai/v1/chat/completions", ""),
        ("http://gate/az", {"server": "azure"}, "/az/openai/v1/chat/completions", ""),
    ],
)
def test_azure_urls_are_parsed(
    url: str, options: dict[str, str], chat: str, deployment: str
) -> None:
    target = Target.parse(url, **options)  # type: ignore[arg-type]
    assert (target.chat_path, target.deployment, target.azure) == (chat, deployment, True)
    assert target.auth_headers("k" * 8) == (("api-key", "k" * 8),)
    assert target.auth_headers("Bearer entra") == (("Authorization", "Bearer entra"),)


def test_azure_models_have_a_url_outside_of_the_deployment() -> None:
    assert (
        Target.parse(f"{AZURE}/openai/deployments/D?api-version=1").models_path
        == "/openai/models?api-version=1"
    )
    with pytest.raises(TargetUnusable) as exc_info:
        Target.parse(f"{AZURE}/openai/deployments/D")
    assert "api-version" in exc_info.value.hint


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:8000",
        "localhost",
        "ftp://host",
        "http+unix://%2Frun%2Fvllm.sock",
        "http://",
        "http://:8000",
        "http:///v1",
        "http://a b",
        "http://host:80x",
        "http://host:99999",
        "http://host:0",
        "http://[::1",
        "http://host\\v1",
        "http://host/\r\nX: y",
        "http://host/#frag",
        "http://user:pa/ss@host",
        "http://user?pass@host",
    ],
)
def test_invalid_urls_are_refused_with_their_code(url: str) -> None:
    with refused(TargetUnusable, "invalid_url") as exc_info:
        Target.parse(url)
    assert exc_info.value.hint


def test_user_and_password_become_basic_auth() -> None:
    target = Target.parse("http://us%40er:p%3Ass@host/v1?key=topsecret&api-version=7")
    assert target.auth_headers("ignored-key") == (
        ("Authorization", "Basic " + base64.b64encode(b"us@er:p:ss").decode()),
    )
    assert target.redacted == "http://***@host/v1?key=***&api-version=7"
    assert target.base_url == "http://host/v1"
    assert target.redact("no p%3Ass, no p:ss, no topsecret") == "no ***, no ***, no ***"
    assert target.hide_secrets("no p:ss,\n\tno topsecret") == "no ***,\n\tno ***"


@pytest.mark.parametrize("key", ["a\nb", "schlüssel", "a\x00b"])
def test_keys_that_no_header_can_carry_are_refused(key: str) -> None:
    with pytest.raises(TargetUnusable) as exc_info:
        Target.parse("http://h").auth_headers(key)
    assert key not in str(exc_info.value)
    assert Target.parse("http://h").auth_headers(" key\n") == (("Authorization", "Bearer key"),)
    assert Target.parse("http://h").auth_headers(None) == ()


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("Incorrect API key provided: sk-abcdefgh12345678.", "Incorrect API key provided: ***."),
        ('{"Authorization": "Bearer abc.def-1"}', '{"Authorization": "Bearer ***"}'),
        ('api-key: "deadbeefdeadbeef"', 'api-key: "***"'),
        ('a \\"quoted\\" one', "a *** one"),
        ("task-force, basic", "task-force, basic"),
    ],
)
def test_keys_are_redacted_from_texts(text: str, clean: str) -> None:
    assert redact(text, ('\\"quoted\\"',)) == clean


secret = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), min_size=4, max_size=12).map(
    lambda text: f"zQ{text}"
)
raw = st.text(alphabet="zQ:/?#@[]%&=. \\é\x07aB9", max_size=12).map(lambda text: f"zQzQ{text}")


@given(secret, secret, secret)
def test_no_secret_of_a_valid_url_is_printed(user: str, password: str, key: str) -> None:
    coded = [quote(text, safe="") for text in (user, password, key)]
    target = Target.parse("http://{}:{}@host.example/pre/v1?api-version=3&k={}".format(*coded))
    token = base64.b64encode(f"{user}:{password}".encode()).decode()

    assert target.auth_headers(None) == (("Authorization", f"Basic {token}"),)

    redacted_text = target.redacted + repr(target)
    echoed = target.redact(" ".join((user, password, key, token, *coded)), None)
    for hidden in (user, password, key, token, *coded):
        assert hidden not in redacted_text
        assert hidden not in echoed


@given(raw, raw)
def test_no_userinfo_of_any_url_is_printed_even_in_errors(user: str, password: str) -> None:
    try:
        target = Target.parse(f"http://{user}:{password}@host:80/v1")
        redacted_text = target.redacted + repr(target) + target.base_url
    except TargetUnusable as error:
        redacted_text = f"{error} {error.hint} {error!r}"
    assert "zq" not in redacted_text.lower()


@pytest.mark.parametrize(
    ("name", "value", "echoed"),
    [
        ("Authorization", "Bearer k3y-0123456789", "k3y-0123456789"),
        ("authorization", "Token tok-0123456789", "tok-0123456789"),
        ("Proxy-Authorization", "Basic dXNlcjpwYXNzd29yZA==", "dXNlcjpwYXNzd29yZA=="),
        ("Authorization", "Basic dXNlcjpwYXNzd29yZA==", "user:password"),
        ("Authorization", "Basic dXNlcjpwYXNzd29yZA==", "password"),
        ("Cookie", "a=1; session=c00kie-value", "c00kie-value"),
        ("X-Api-Key", "plain-0123456789", "plain-0123456789"),
        ("X-Note", "a secret note", "a secret note"),
    ],
)
def test_header_values_are_redacted_even_if_echoed_in_parts(
    name: str, value: str, echoed: str
) -> None:
    target = Target.parse("http://127.0.0.1:9")
    secrets = header_secrets([(name, value)])
    assert echoed not in target.redact(f"wrong credentials: {echoed}, sorry", *secrets)


def test_a_text_that_ends_within_a_secret_is_redacted() -> None:
    key = "abcdefghijklmnop"
    text = f"no such key: {key}"
    for length in range(4, len(key) + 1):
        cut = text[: len(text) - len(key) + length]
        assert redact(cut, [key]) == "no such key: ***"
    assert redact("an innocent ab", [key]) == "an innocent ab"


def test_a_text_cut_at_any_position_reveals_at_most_three_characters_of_a_secret() -> None:
    """However a text of the server is cut, at most three characters of the key are shown."""
    key = "key-4f81aa-90b2"
    target = Target.parse("http://h")
    echo = f"the header was Authorization: {key} and more"
    for end in range(len(echo)):
        for text in (echo[:end], repr(echo[:end]), repr(echo[:end].encode())):
            redacted_text = target.redact(text, key)
            assert not [n for n in range(4, len(key)) if key[:n] in redacted_text], redacted_text


def test_control_characters_of_a_server_text_are_escaped() -> None:
    redacted_text = Target.parse("http://h").redact(
        "\x1b]0;owned\x07 a\nVALID\t\u202egpj.exe \x9b2J tür"
    )
    assert redacted_text == "\\x1b]0;owned\\x07 a VALID \\u202egpj.exe \\x9b2J tür"
