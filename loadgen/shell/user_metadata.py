"""`--metadata key=value`: what the user says of a run beside its load. Checked here, stored as it stands. Pure.

No secret may get into a results folder, so keys that name one are refused, and values that are one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from loadgen_sdk.transport.target import header_secrets

from loadgen.core.errors import Fault, UserError

MOST = 64  # pairs
LONGEST = 500  # characters of a value
# compiled where they are used: most runs have nothing to check
_KEY = r"[A-Za-z][A-Za-z0-9._-]{0,63}"
_SECRET_KEY = (
    r"(?i)(^|[._-])(x?api[._-]?key|apikey|key|token|secret|password|passwd|passphrase|authorization|auth|bearer|"
    r"credentials?|cookie)($|[._-])|(secret|password|apikey|credential)"
)
_AUTH = r"(?i)auth|cookie|token|secret|key"
_SECRET_VALUE = r"(?i)\b(sk-[a-z0-9_-]{12,}|hf_[a-z0-9]{16,}|gh[pousr]_[a-z0-9]{20,}|bearer\s+\S{8,}|eyJ\S+\.\S+)"
_HINT = "write --metadata driver=580.65"


def parse(
    given: Mapping[str, object] | Iterable[str], secrets: Sequence[str | None] = ()
) -> tuple[tuple[tuple[str, str], ...], list[Fault]]:
    """The pairs, and what is wrong with them. `given`: a mapping, or texts `key=value`. No fault repeats a value."""
    faults: list[Fault] = []
    pairs: dict[str, str] = {}
    items: Iterable[tuple[str, str | None]]
    if isinstance(given, Mapping):
        items = ((str(key), str(value)) for key, value in given.items())
    else:
        parts = (text.partition("=") for text in given)
        items = ((key.strip(), value.strip() if equals else None) for key, equals, value in parts)
    for key, value in items:
        if not re.fullmatch(_KEY, key):
            faults.append(
                UserError(
                    "invalid_value",
                    "no key of metadata: letters, digits, . _ -, at most 64",
                    "--metadata",
                    _HINT,
                )
            )
        elif value is None:
            faults.append(
                UserError("invalid_value", "a key without a value", f"--metadata {key}", _HINT)
            )
        elif re.search(_SECRET_KEY, key) or _is_secret(value, secrets):
            what = "this looks like a secret, and metadata are stored and shown as they stand"
            hint = "leave it out; keys belong into --api-key-file or the environment"
            faults.append(UserError("secret", what, f"--metadata {key}=***", hint))
        elif key in pairs:
            faults.append(
                UserError(
                    "duplicate",
                    "the key is given twice",
                    f"--metadata {key}=...",
                    "give each key once",
                )
            )
        elif not value or len(value) > LONGEST or not value.isprintable():
            what = f"a value is one line of 1 to {LONGEST} characters"
            faults.append(UserError("invalid_value", what, f"--metadata {key}=...", _HINT))
        else:
            pairs[key] = value
    if len(pairs) > MOST:
        faults.append(
            UserError(
                "too_large", f"{len(pairs)} pairs are too many", "--metadata", f"{MOST} at most"
            )
        )
    return tuple(pairs.items()), faults


def secrets_of(keys: Iterable[str | None], headers: Iterable[tuple[str, str]]) -> list[str]:
    """What no value of metadata may contain: the API keys, and credentials and cookies in the user's headers."""
    credentials = [
        (name, value)
        for name, value in headers
        if re.search(_SECRET_KEY, name) or re.search(_AUTH, name)
    ]
    return [*(key for key in keys if key), *header_secrets(credentials)]


def _is_secret(value: str, secrets: Sequence[str | None]) -> bool:
    return bool(re.search(_SECRET_VALUE, value)) or any(
        secret and len(secret) >= 4 and secret in value for secret in secrets
    )
