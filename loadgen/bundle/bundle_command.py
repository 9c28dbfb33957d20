"""The command `loadgen bundle`: write a result and its raw data into one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli import completion
from loadgen.cli.output import print_status
from loadgen.core import format
from loadgen.core.errors import OK


def bundle(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder of a run, repeats, a sweep, a search, a validation or answers.",
            autocompletion=completion.complete_result,
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="File to write, such as poc.zip.")
    ],
    sign: Annotated[
        Path | None,
        typer.Option(
            "--sign",
            metavar="FILE",
            help="Sign the bundle with this private OpenSSH key.",
        ),
    ] = None,
    keep_content: Annotated[
        bool,
        typer.Option(
            "--keep-content",
            help="Include the texts of prompts and responses.",
        ),
    ] = False,
) -> int:
    """Write a result and its raw data into one file, which others can check.

    The file has the records, contract, prices and hashes of the result, so that `loadgen verify`
    can recompute every number in it.

    Exit: 0, 2 not a result, or its files were changed.

    Example: loadgen bundle results/poc -o poc.zip
    """
    write_and_report(folder, out, sign, keep_content=keep_content)
    return OK


def write_and_report(
    folder: Path, out: Path, sign: Path | None = None, *, keep_content: bool = False
) -> None:
    """Write a bundle and print its size and the files that it omits.

    Args:
        folder: The folder of the result.
        out: The file to write.
        sign: A private key of OpenSSH to sign the bundle with, or None.
        keep_content: True to include the texts of prompts and answers.
    """
    from loadgen.bundle.bundle_writer import write_bundle

    manifest = write_bundle(folder, out, key=sign, with_texts=keep_content)
    signed = "signed" if sign is not None else "not signed"
    print_status(
        f"Bundle: {out} ({manifest.kind} {manifest.name}, "
        f"{format.size(out.stat().st_size)}, {signed})"
    )

    for name, reason in manifest.omitted_files.items():
        print_status(f"Omitted: {name} ({reason})")
