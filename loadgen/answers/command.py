"""`loadgen answers`: whether an endpoint's answers are right, or as right as another's. Parses flags, asks, prints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from loadgen.cli.invocation import Invocation
from loadgen.cli.option_parsers import parse_option, read_key_file
from loadgen.cli.options import TARGET_OPTIONS, add_options
from loadgen.cli.output import print_answer
from loadgen.core import units
from loadgen.core.errors import UserError

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings

AgainstModel = Annotated[
    str | None, typer.Option("--against-model", metavar="NAME", help="The model of endpoint B.")
]
AgainstKey = Annotated[
    Path | None,
    typer.Option("--against-key-file", metavar="FILE", help="A file with the key of endpoint B."),
]


@add_options(
    only=TARGET_OPTIONS,
    without=("stream", "tokenizer"),
    help_texts={"url": "Endpoint A, with or without a path prefix and /v1."},
)
def answers(
    invocation: Invocation,
    dataset: Annotated[
        Path,
        typer.Argument(help="JSONL: prompt or messages, and reference, choices, class if known."),
    ],
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="URL", help="Endpoint B: the same prompts to it."),
    ] = None,
    against_model: AgainstModel = None,
    against_key_file: AgainstKey = None,
    within: Annotated[
        str | None,
        typer.Option(
            "--within",
            metavar="SHARE",
            help="A may score so much less than B: 1%. Exit 1 where it is more.",
        ),
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", metavar="N", min=1, help="Only the first so many rows.")
    ] = None,
    lanes: Annotated[
        int,
        typer.Option("-c", "--concurrency", metavar="N", min=1, max=1000, help="Asked at once."),
    ] = 8,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "--output-tokens",
            metavar="N",
            min=1,
            help="Of an answer, where its row does not say.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FOLDER", help="Folder for answers.json.")
    ] = None,
    keep_content: Annotated[
        bool,
        typer.Option("--keep-content", help="Store the texts of the answers too, in the folder."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Output", help="Print JSON.")
    ] = False,
) -> int:
    """Score answers against references, and against another endpoint's answers to the same prompts (FP4 against BF16).

    Sends each prompt once, greedily (temperature 0). Scores: ROUGE-1, -2, -L as MLPerf's, exact match, right choice,
    valid JSON; of two endpoints also how alike their answers are. Texts are stored only with --keep-content.

    Exit: 0, 1 beyond --within, 2 wrong usage or data set, 3 not reachable,
    4 --within is undecided.

    Example: loadgen answers questions.jsonl --url http://HOST:8000 --against http://OTHER:8000 --within 1%
    """
    from loadgen.answers import questions
    from loadgen.answers.comparison import exit_code
    from loadgen.answers.run import run
    from loadgen.answers.text import report
    from loadgen.core.execution.backend import serving

    settings = invocation.settings(needs_text="answers are scored as texts")
    if settings.virtual:
        raise UserError(
            "unsupported",
            "a simulation in virtual time generates no texts to score",
            f"--url {settings.url}",
            "start a simulated server with loadgen sim, and give its URL: random words",
        )
    if settings.targets:
        raise UserError(
            "unsupported",
            "this command asks one endpoint over HTTP",
            "--url",
            "--against is the second one",
        )
    loss = parse_option("--within", within, units.share)
    if loss is not None and against is None:
        hint = "--against URL --within 1%"
        raise UserError("no_effect", "a share of B's scores, and there is no B", "--within", hint)
    if loss is not None and not 0 <= loss < 1:
        raise UserError("out_of_range", "not a share", "--within", "--against URL --within 1%")
    if keep_content and out is None:
        raise UserError("missing_option", "the texts need a folder", "--keep-content", "-o FOLDER")
    asked = questions.read_questions(dataset, rows)
    second = other_endpoint(settings, against, against_model, against_key_file)
    with serving(settings) as served:
        try:
            result, reasons = run(
                dataset,
                asked,
                served,
                second,
                lanes=lanes,
                max_tokens=max_tokens,
                tell=lambda name, done: tell(name, done, len(asked)),
                out=out,
                keep_texts=keep_content,
                loss=loss,
                simulated=settings.backend.simulated,
            )
        except OSError as error:
            raise UserError(
                "unwritable_file", f"cannot be written: {error.strerror}", f"--out {out}"
            ) from None
    print_answer(result, report(result, reasons), as_json=as_json)
    return exit_code(result)


def other_endpoint(
    settings: Settings, url: str | None, model: str | None, key_file: Path | None
) -> Settings | None:
    """Endpoint B, with a key and a model of its own; None without a URL. Raises UserError."""
    if url is None:
        if model is not None or key_file is not None:
            flag = "--against-model" if model is not None else "--against-key-file"
            raise UserError(
                "no_effect", "of endpoint B, and there is none", flag, "add --against URL"
            )
        return None
    try:
        key = settings.api_key if key_file is None else read_key_file(key_file)
    except units.Wrong as wrong:
        raise UserError(
            wrong.code, str(wrong), f"--against-key-file {key_file}", wrong.hint
        ) from None
    return replace(settings, url=url, model=model, api_key=key, server="auto")


def tell(name: str, done: int, count: int) -> None:
    """Say on a terminal how many prompts are done."""
    if sys.stderr.isatty() and (done == count or done % 10 == 0):
        print(
            f"\r{name}: {done:,} of {count:,}", end="\n" if done == count else "", file=sys.stderr
        )
