"""`loadgen answers`: whether answers are right, or as right as those of another endpoint."""

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

PROGRESS_STEP = 10
"""Prompts after which progress is shown again."""

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
    from loadgen.answers.answers_text import report
    from loadgen.answers.comparison import exit_code
    from loadgen.answers.completions import SendOptions
    from loadgen.answers.questions import read_questions
    from loadgen.answers.scoring_run import ScoringOptions, run_scoring
    from loadgen.core.execution.backend import serving

    settings = invocation.settings(needs_text="answers are scored as texts")
    _check_target(settings)
    loss = _parse_loss(within, against)
    if keep_content and out is None:
        raise UserError("missing_option", "the texts need a folder", "--keep-content", "-o FOLDER")
    questions = read_questions(dataset, rows)
    second = other_endpoint(settings, against, against_model, against_key_file)
    options = ScoringOptions(
        SendOptions(lanes, max_tokens),
        out=out,
        keep_texts=keep_content,
        loss=loss,
        simulated=settings.backend.simulated,
    )
    with serving(settings) as served:
        try:
            scored = run_scoring(
                dataset,
                questions,
                served,
                second,
                options,
                lambda name, done: show_progress(name, done, len(questions)),
            )
        except OSError as error:
            raise UserError(
                "unwritable_file", f"cannot be written: {error.strerror}", f"--out {out}"
            ) from None
    print_answer(scored.result, report(scored.result, scored.failures), as_json=as_json)
    return exit_code(scored.result)


def _check_target(settings: Settings) -> None:
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


def _parse_loss(within: str | None, against: str | None) -> float | None:
    """Return the allowed loss as a fraction, or None if no loss is given."""
    loss = parse_option("--within", within, units.share)
    if loss is None:
        return None
    if against is None:
        hint = "--against URL --within 1%"
        raise UserError("no_effect", "a share of B's scores, and there is no B", "--within", hint)
    if not 0 <= loss < 1:
        raise UserError("out_of_range", "not a share", "--within", "--against URL --within 1%")
    return loss


def other_endpoint(
    settings: Settings, url: str | None, model: str | None, key_file: Path | None
) -> Settings | None:
    """Return endpoint B, or None without a URL.

    Args:
        settings: The settings of endpoint A, which endpoint B shares.
        url: The URL of endpoint B, or None.
        model: The model of endpoint B, or None for the one that its server names.
        key_file: A file with the key of endpoint B, or None for the key of endpoint A.

    Raises:
        UserError: A model or key is given without a URL, or the file cannot be read.
    """
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


def show_progress(name: str, done: int, count: int) -> None:
    """Show on a terminal how many prompts are done."""
    is_last = done == count
    if sys.stderr.isatty() and (is_last or done % PROGRESS_STEP == 0):
        print(f"\r{name}: {done:,} of {count:,}", end="\n" if is_last else "", file=sys.stderr)
