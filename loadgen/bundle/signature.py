"""Sign bundles and check their signatures with `ssh-keygen -Y`, because people have such keys.

SHA256SUMS is signed, and with it every file. A signature says that the holder of a key vouches for
these bytes. It does not say that a measurement was made well, or by whom.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from loadgen.core.errors import UserError

NAMESPACE = "loadgen-bundle"
"""The purpose of the signatures. A signature made for another purpose is not valid for a bundle."""
ALLOWED_SIGNER = "signer"
"""The name of the signer in the file that is written for ssh-keygen. Any name would do."""
_INSTALL_HINT = "install openssh-client (8.2 or later)"


def sign(key: Path, data: bytes) -> bytes:
    """Return the signature of data.

    Args:
        key: A private key of OpenSSH, or a public key whose private key an agent holds.
        data: What is signed.

    Raises:
        UserError: There is no such key, or ssh-keygen fails.
    """
    if not key.is_file():
        raise UserError(
            "missing_file",
            "no such file",
            f"--sign {key}",
            "to create a key: ssh-keygen -t ed25519 -f poc.key",
        )
    with tempfile.TemporaryDirectory(prefix="loadgen-") as folder:
        file = Path(folder) / "data"
        file.write_bytes(data)
        arguments = ["-f", str(key), "-n", NAMESPACE, str(file)]

        process = _run_ssh_keygen("sign", arguments, option="--sign")
        if process.returncode:
            raise UserError(
                "not_signed",
                f"ssh-keygen failed: {_last_line(process)}",
                f"--sign {key}",
                "use a private OpenSSH key",
            )

        return file.with_name("data.sig").read_bytes()


def describe_valid_key(signature: bytes, data: bytes) -> str:
    """Return the type and fingerprint of the key that signed data, such as "ED25519 SHA256:...".

    The result is "" if the signature is not valid for the data. Whose key it is, ssh-keygen cannot
    tell: see `is_signed_by`.
    """
    with tempfile.TemporaryDirectory(prefix="loadgen-") as folder:
        file = Path(folder) / "sig"
        file.write_bytes(signature)
        arguments = ["-n", NAMESPACE, "-s", str(file)]
        process = _run_ssh_keygen("check-novalidate", arguments, option="SHA256SUMS.sig", data=data)

    # ssh-keygen prints, for example: Good "loadgen" signature with ED25519 key SHA256:...
    match = re.search(r"with (\S+) key (\S+)", process.stdout.decode(errors="replace"))
    if match is None or process.returncode:
        return ""

    return f"{match[1]} {match[2]}"


def is_signed_by(public_key: Path, signature: bytes, data: bytes) -> bool:
    """Return True if the holder of a public key (a `.pub` file) signed the data.

    `ssh-keygen -Y verify` checks a signature against a file of allowed signers, and one signer in
    it (`-I`). So a file is written that allows only this key, under the name ALLOWED_SIGNER.

    Raises:
        UserError: The file is no public key.
    """
    key = _read_public_key(public_key)
    with tempfile.TemporaryDirectory(prefix="loadgen-") as folder:
        allowed_signers_file = Path(folder) / "allowed"
        allowed_signers_file.write_text(
            f'{ALLOWED_SIGNER} namespaces="{NAMESPACE}" {key}\n', encoding="utf-8"
        )
        signature_file = Path(folder) / "sig"
        signature_file.write_bytes(signature)
        arguments = ["-f", str(allowed_signers_file), "-I", ALLOWED_SIGNER]
        arguments += ["-n", NAMESPACE, "-s", str(signature_file)]
        process = _run_ssh_keygen(
            "verify", arguments, option=f"--signed-by {public_key}", data=data
        )

    return process.returncode == 0


def _read_public_key(file: Path) -> str:
    """Return the type and the base64 text of a public key, such as "ssh-ed25519 AAAAC3...".

    A `.pub` file may have a comment after them, which is left out.

    Raises:
        UserError: The file cannot be read, or has no two words.
    """
    try:
        key_type, key_base64 = file.read_text(encoding="utf-8").split()[:2]
    except (OSError, ValueError):
        raise UserError(
            "missing_file",
            "not a public key",
            f"--signed-by {file}",
            "use the .pub file that the signer has published",
        ) from None
    return f"{key_type} {key_base64}"


def _run_ssh_keygen(
    operation: str, arguments: list[str], *, option: str, data: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run `ssh-keygen -Y`, which signs and checks files with SSH keys.

    Args:
        operation: What it does: "sign", "verify" or "check-novalidate".
        arguments: Further arguments.
        option: The option of loadgen that an error message names.
        data: The standard input.

    Raises:
        UserError: ssh-keygen is not installed.
    """
    try:
        return subprocess.run(
            ["ssh-keygen", "-Y", operation, *arguments],
            input=data,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        raise UserError(
            "not_installed",
            "ssh-keygen is not installed",
            option,
            _INSTALL_HINT,
            key="ssh-keygen",
        ) from None


def _last_line(process: subprocess.CompletedProcess[bytes]) -> str:
    lines = process.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit {process.returncode}"
