"""`loadgen bundle`: writes a result and its raw data into one file that others can check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli import completion
from loadgen.cli.output import say
from loadgen.core import format
from loadgen.core.errors import OK


def bundle(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder of a run, repeats, a sweep, a search, a validation, answers.",
            autocompletion=completion.complete_result,
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The file to write: poc.zip.")
    ],
    sign: Annotated[
        Path | None,
        typer.Option(
            "--sign",
            metavar="FILE",
            help="A private key of OpenSSH: sign what is in it (ssh-keygen -Y sign).",
        ),
    ] = None,
    keep_content: Annotated[
        bool,
        typer.Option(
            "--keep-content",
            help="Also the texts of prompts and answers, where the folder has them.",
        ),
    ] = False,
) -> int:
    """Write a result with its records, contract, prices, facts and hashes into one file; `loadgen
    verify` checks it.

    Exit: 0, 2 not a result, or one that was changed since.

    Example: loadgen bundle results/poc -o poc.zip
    """
    write_and_report(folder, out, sign, keep_content=keep_content)
    return OK


def write_and_report(
    folder: Path, out: Path, sign: Path | None = None, *, keep_content: bool = False
) -> None:
    """Write a bundle and print what is in it.

    Args:
        folder: The folder of the result.
        out: The file to write.
        sign: A private key of OpenSSH to sign the bundle with, or None.
        keep_content: True to include the texts of prompts and answers.
    """
    from loadgen.bundle.bundle_writer import write_bundle

    manifest = write_bundle(folder, out, key=sign, content=keep_content)
    signed = "signed" if sign is not None else "not signed"
    say(
        f"bundle of {manifest.kind} {manifest.name}: {out}, {format.size(out.stat().st_size)}, "
        f"{signed}"
    )
    for name, reason in manifest.left_out.items():
        say(f"left out: {name} ({reason})")
