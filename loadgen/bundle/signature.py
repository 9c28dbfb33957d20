"""Signatures of a bundle by OpenSSH: `ssh-keygen -Y` signs and checks, with the keys that people have already. IO.

What is signed is SHA256SUMS, and with it every file. A signature says that the holder of a key has vouched for these
bytes; it does not say that a measurement was made well, or by whom.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from loadgen.core.errors import UserError

NAMESPACE = "loadgen-bundle"
_INSTALL = "ssh-keygen (OpenSSH 8.2 or later) signs and checks: install openssh-client"


def sign(key: Path, data: bytes) -> bytes:
    """The signature of `data` by a private key of OpenSSH, or by the agent's key of a `.pub` file. Raises UserError."""
    if not key.is_file():
        raise UserError(
            "missing_file",
            "no such key",
            f"--sign {key}",
            "make one: ssh-keygen -t ed25519 -f poc.key",
        )
    with tempfile.TemporaryDirectory(prefix="loadgen-") as folder:
        file = Path(folder) / "data"
        file.write_bytes(data)
        done = _ssh_keygen("--sign", "sign", "-f", str(key), "-n", NAMESPACE, str(file))
        if done.returncode:
            raise UserError(
                "not_signed",
                f"ssh-keygen did not sign: {_last(done)}",
                f"--sign {key}",
                "a private key of OpenSSH",
            )
        return file.with_name("data.sig").read_bytes()


def signer(signature: bytes, data: bytes) -> str:
    """The key of a sound signature, as `ED25519 SHA256:...`; "" of one that does not fit. Whose key, it cannot say."""
    with tempfile.TemporaryDirectory(prefix="loadgen-") as folder:
        file = Path(folder) / "sig"
        file.write_bytes(signature)
        done = _ssh_keygen(
            "SHA256SUMS.sig", "check-novalidate", "-n", NAMESPACE, "-s", str(file), data=data
        )
    found = re.search(r"with (\S+) key (\S+)", done.stdout.decode(errors="replace"))
    return f"{found[1]} {found[2]}" if found and not done.returncode else ""


def is_by(public_key: Path, signature: bytes, data: bytes) -> bool:
    """Whether the holder of this key (a `.pub` file) has signed. Raises UserError for what is no key."""
    try:
        kind, key = public_key.read_text(encoding="utf-8").split()[:2]
    except (OSError, ValueError):
        hint = "the .pub file of the key, as the other side has published it"
        raise UserError(
            "missing_file", "no public key", f"--signed-by {public_key}", hint
        ) from None
    with tempfile.TemporaryDirectory(prefix="loadgen-") as folder:
        allowed, file = Path(folder) / "allowed", Path(folder) / "sig"
        allowed.write_text(f'signer namespaces="{NAMESPACE}" {kind} {key}\n', encoding="utf-8")
        file.write_bytes(signature)
        files = ("-f", str(allowed), "-I", "signer", "-n", NAMESPACE, "-s", str(file))
        return not _ssh_keygen(f"--signed-by {public_key}", "verify", *files, data=data).returncode


def _ssh_keygen(
    where: str, what: str, *arguments: str, data: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["ssh-keygen", "-Y", what, *arguments], input=data, capture_output=True, check=False
        )
    except FileNotFoundError:
        raise UserError(
            "not_installed", "ssh-keygen is not installed here", where, _INSTALL, key="ssh-keygen"
        ) from None


def _last(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit {done.returncode}"
