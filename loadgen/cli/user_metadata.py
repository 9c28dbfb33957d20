"""The metadata of a run: `--metadata KEY=VALUE`, stored with the results and shown.

No secret may be stored in a results folder. Keys that name a secret and values that are one are
refused, and no error message repeats a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from loadgen_sdk.transport.target import header_secrets

from loadgen.core.errors import LoadgenError, UserError

MAX_PAIRS = 64
MAX_VALUE_LENGTH = 500
MIN_SECRET_LENGTH = 4  # a shorter key would be found in harmless values
_KEY = r"[A-Za-z][A-Za-z0-9._-]{0,63}"
_SECRET_KEY = (
    r"(?i)(^|[._-])(x?api[._-]?key|apikey|key|token|secret|password|passwd|passphrase|"
    r"authorization|auth|bearer|credentials?|cookie)($|[._-])|(secret|password|apikey|credential)"
)
"""A key of metadata that names a secret, such as `api_key`."""

_SECRET_HEADER = r"(?i)auth|cookie|token|secret|key"
"""A name of an HTTP header whose value is likely a secret."""

_SECRET_VALUE = (
    r"(?i)\b(sk-[a-z0-9_-]{12,}|hf_[a-z0-9]{16,}|gh[pousr]_[a-z0-9]{20,}|bearer\s+\S{8,}|"
    r"eyJ\S+\.\S+)"
)
"""A value that looks like a key or token of a well-known service, or like a JSON Web Token."""

_EXAMPLE = "write --metadata driver=580.65"


class Metadata(NamedTuple):
    """The valid pairs of keys and values of some metadata, and an error for each invalid one."""

    pairs: tuple[tuple[str, str], ...]
    errors: list[LoadgenError]


def parse_metadata(
    metadata: Mapping[str, object] | Iterable[str], secrets: Sequence[str] = ()
) -> Metadata:
    """Return the pairs of a mapping, or of texts like KEY=VALUE, and every error in them.

    A value that contains one of the `secrets` is an error.
    """
    pairs: dict[str, str] = {}
    errors: list[LoadgenError] = []
    for key, value in _split_pairs(metadata):
        error = _check_pair(key, value, pairs, secrets)
        if error is not None:
            errors.append(error)
        elif value is not None:
            pairs[key] = value

    if len(pairs) > MAX_PAIRS:
        errors.append(
            UserError(
                "too_large",
                f"{len(pairs)} pairs exceed the limit of {MAX_PAIRS}",
                "--metadata",
                "leave some out",
            )
        )

    return Metadata(tuple(pairs.items()), errors)


def collect_secrets(
    api_keys: Iterable[str | None], headers: Iterable[tuple[str, str]]
) -> list[str]:
    """Return the texts that no metadata may contain: API keys, and credentials in headers."""
    secret_headers = [
        (name, value)
        for name, value in headers
        if re.search(_SECRET_KEY, name) or re.search(_SECRET_HEADER, name)
    ]
    return [*(key for key in api_keys if key), *header_secrets(secret_headers)]


def _split_pairs(
    metadata: Mapping[str, object] | Iterable[str],
) -> Iterator[tuple[str, str | None]]:
    """Yield keys and values; the value of a text without = is None."""
    if isinstance(metadata, Mapping):
        for key, value in metadata.items():
            yield str(key), str(value)
        return
    for text in metadata:
        key, equals, value = text.partition("=")
        yield key.strip(), value.strip() if equals else None


def _check_pair(
    key: str, value: str | None, earlier_pairs: Mapping[str, str], secrets: Sequence[str]
) -> UserError | None:
    """Return why a pair cannot be stored, or None if it can.

    Args:
        key: The key.
        value: The value; None if the user wrote no `=`.
        earlier_pairs: The pairs before it, whose keys must not occur again.
        secrets: Texts that the value must not contain.
    """
    if not re.fullmatch(_KEY, key):
        message = "a key must be at most 64 letters, digits, dots, underscores or dashes"
        return UserError("invalid_value", message, "--metadata", _EXAMPLE)

    if value is None:
        return UserError("invalid_value", "the key has no value", f"--metadata {key}", _EXAMPLE)

    if re.search(_SECRET_KEY, key) or _is_secret(value, secrets):
        return UserError(
            "secret",
            "looks like a secret; metadata is stored and shown in plain text",
            f"--metadata {key}=***",
            "leave it out; use --api-key-file or an environment variable for keys",
        )

    option = f"--metadata {key}=..."
    if key in earlier_pairs:
        return UserError("duplicate", "the key is specified twice", option, "specify each key once")

    if not value or len(value) > MAX_VALUE_LENGTH or not value.isprintable():
        message = f"a value must be one line of 1 to {MAX_VALUE_LENGTH} characters"
        return UserError("invalid_value", message, option, _EXAMPLE)

    return None


def _is_secret(value: str, secrets: Sequence[str]) -> bool:
    """Return True if a value looks like a key or a token, or contains one of the secrets."""
    if re.search(_SECRET_VALUE, value):
        return True
    return any(len(secret) >= MIN_SECRET_LENGTH and secret in value for secret in secrets)
