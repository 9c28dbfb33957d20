"""The command `loadgen answers`: score the responses of one endpoint or two."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from loadgen.cli.invocation import Invocation
from loadgen.cli.option_parsers import parse_option, read_key_file
from loadgen.cli.options import TARGET_OPTIONS, FullOption, add_options
from loadgen.cli.output import print_result
from loadgen.core import units
from loadgen.core.errors import OK, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.answers.completions import SendOptions
    from loadgen.answers.questions import Question
    from loadgen.answers.scoring_run import ScoringOptions
    from loadgen.core.execution.plan import Settings

PROGRESS_STEP = 10
"""Progress is printed after so many prompts."""

AgainstModel = Annotated[
    str | None, typer.Option("--against-model", metavar="NAME", help="Model of endpoint B.")
]
AgainstKey = Annotated[
    Path | None,
    typer.Option("--against-key-file", metavar="FILE", help="File with the API key of endpoint B."),
]
_WITHIN_EXAMPLE = "for example --against URL --within 1%"


@dataclass(frozen=True, kw_only=True)
class ComparisonArguments:
    """The options that name endpoint B and the loss that is allowed."""

    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="URL",
            help="Send the same prompts to this endpoint, B, and compare.",
        ),
    ] = None
    against_model: AgainstModel = None
    against_key_file: AgainstKey = None
    within: Annotated[
        str | None,
        typer.Option(
            "--within",
            metavar="PERCENT",
            help=(
                "Largest allowed loss: scores of A may be this much lower than "
                "those of B, for example 1%. A larger loss exits with 1."
            ),
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ScoringArguments:
    """The options that say which prompts are sent, how, and what is stored."""

    rows: Annotated[
        int | None, typer.Option("--rows", metavar="N", min=1, help="Use only the first N rows.")
    ] = None
    concurrency: Annotated[
        int,
        typer.Option(
            "-c", "--concurrency", metavar="N", min=1, max=1000, help="Requests in flight."
        ),
    ] = 8
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "--output-tokens",
            metavar="N",
            min=1,
            help="Output token limit of a response whose row has none.",
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FOLDER", help="Folder for answers.json."),
    ] = None
    keep_content: Annotated[
        bool,
        typer.Option("--keep-content", help="Also store the texts of the responses."),
    ] = False
    record: Annotated[
        Path | None,
        typer.Option(
            "--record",
            metavar="FILE",
            help=(
                "Send each prompt twice and write the responses to this file, for "
                "loadgen run --check-answers FILE. Nothing is scored."
            ),
        ),
    ] = None


@add_options(
    only=TARGET_OPTIONS,
    without=("stream", "tokenizer"),
    help_texts={"url": "Endpoint A, with or without a path prefix and /v1."},
)
def answers(
    invocation: Invocation,
    dataset: Annotated[
        Path,
        typer.Argument(
            help="JSONL file: prompt or messages, and optionally reference, choices and class."
        ),
    ],
    comparison: ComparisonArguments,
    scoring: ScoringArguments,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Output", help="Print JSON.")
    ] = False,
    full: FullOption = False,
) -> int:
    """Score responses against references and against those of another endpoint.

    For example, compare a model in FP4 with the same model in BF16. Each prompt is sent once, with
    temperature 0. Scores: ROUGE-1, -2 and -L as in MLPerf, exact match, right choice, valid JSON,
    and the similarity of the responses of two endpoints.

    Exit: 0, 1 the loss exceeds --within, 2 wrong usage or data set, 3 not reachable, 4 too few
    prompts to decide --within.

    Example: loadgen answers questions.jsonl --url http://HOST:8000 --against http://OTHER:8000
    --within 1%
    """
    from loadgen.answers.answers_text import report
    from loadgen.answers.comparison import exit_code
    from loadgen.answers.questions import read_questions
    from loadgen.answers.scoring_run import run_scoring
    from loadgen.core.execution.backend import running_server

    settings = invocation.settings(needs_text="responses are scored as texts")
    _check_target(settings)
    options = _create_scoring_options(comparison, scoring, settings)
    questions = read_questions(dataset, scoring.rows)

    if scoring.record is not None:
        _check_recording(comparison, scoring)
        return _record(scoring.record, settings, questions, options.send)

    second = other_endpoint(
        settings, comparison.against, comparison.against_model, comparison.against_key_file
    )
    with running_server(settings) as served:
        try:
            scored = run_scoring(
                dataset,
                questions,
                served,
                second,
                options,
                lambda endpoint, done: show_progress(endpoint, done, len(questions)),
            )
        except OSError as error:
            raise UserError(
                "unwritable_file", f"cannot be written: {error.strerror}", f"--out {scoring.out}"
            ) from None

    print_result(scored.result, report(scored.result, scored.failures), as_json=as_json, full=full)
    return exit_code(scored.result)


def _check_recording(comparison: ComparisonArguments, scoring: ScoringArguments) -> None:
    """Raise UserError for an option that has no effect if responses are only recorded."""
    specified = {
        "--against": comparison.against,
        "--within": comparison.within,
        "--out": scoring.out,
    }
    for option, value in specified.items():
        if value is not None:
            problem = "--record only records the responses of --url"
            raise UserError("conflict", problem, option, f"leave {option} or --record out")


def _record(
    file: Path, settings: Settings, questions: Sequence[Question], options: SendOptions
) -> int:
    """Record the responses of an endpoint, say how many they are, and return the exit code."""
    from loadgen.answers.recording import RECORDINGS, record_reference
    from loadgen.core import format
    from loadgen.core.execution.backend import running_server

    with running_server(settings) as served:
        recorded = record_reference(
            served,
            questions,
            options,
            file,
            lambda name, done: show_progress(name, done, len(questions)),
        )

    prompts = format.counted(recorded.prompts, "prompt")
    print(f"{prompts} with {RECORDINGS} responses each written to {file}.")
    print(f"{recorded.varying:,} of them have two different responses.")
    if recorded.failed:
        print(f"{recorded.failed:,} left out, because a request failed: {recorded.failures[0]}")
    print(f"Check them in a load: loadgen run WORKLOAD --url URL --check-answers {file}")
    return OK


def _create_scoring_options(
    comparison: ComparisonArguments, scoring: ScoringArguments, settings: Settings
) -> ScoringOptions:
    """Convert the options of the command line to the options of a scoring run, and check them.

    Args:
        comparison: The options about endpoint B and the loss that is allowed.
        scoring: The options about sending and storing.
        settings: The settings of endpoint A.

    Raises:
        UserError: An option has no effect or an invalid value.
    """
    # Imported here, because a command line that is not run must not load these modules.
    from loadgen.answers.completions import SendOptions
    from loadgen.answers.scoring_run import ScoringOptions

    allowed_loss = _parse_allowed_loss(comparison.within, comparison.against)
    if scoring.keep_content and scoring.out is None:
        raise UserError(
            "missing_option",
            "--keep-content needs a results folder: add -o FOLDER",
            "--keep-content",
            "--out",
        )

    return ScoringOptions(
        send=SendOptions(concurrency=scoring.concurrency, max_tokens=scoring.max_tokens),
        out=scoring.out,
        keep_texts=scoring.keep_content,
        allowed_loss=allowed_loss,
        simulated=settings.backend.simulated,
    )


def _check_target(settings: Settings) -> None:
    """Check that there is one endpoint which generates text.

    Raises:
        UserError: It is a simulation in virtual time, or there are several endpoints.
    """
    if settings.virtual:
        raise UserError(
            "unsupported",
            "a simulation in virtual time generates no text to score",
            f"--url {settings.url}",
            "start a simulated server with loadgen sim and use its URL",
        )
    if settings.targets:
        raise UserError(
            "unsupported",
            "only one endpoint A can be scored",
            "--url",
            "use --against for the second one",
        )


def _parse_allowed_loss(within: str | None, against: str | None) -> float | None:
    """Return the allowed loss as a fraction, or None if no loss is specified.

    Raises:
        UserError: It is not a fraction, or there is no endpoint B.
    """
    loss = parse_option("--within", within, units.share)
    if loss is None:
        return None
    if against is None:
        raise UserError(
            "no_effect", "--within needs an endpoint B to compare with", "--within", _WITHIN_EXAMPLE
        )
    if not 0 <= loss < 1:
        raise UserError(
            "out_of_range", "must be at least 0% and below 100%", "--within", _WITHIN_EXAMPLE
        )

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
        UserError: A model or a key of endpoint B is given without its URL, or the key file cannot
            be read.
    """
    if url is None:
        if model is not None or key_file is not None:
            option = "--against-model" if model is not None else "--against-key-file"
            raise UserError(
                "no_effect",
                "--within needs an endpoint B to compare with",
                option,
                "add --against URL",
            )
        return None

    try:
        key = settings.api_key if key_file is None else read_key_file(key_file)
    except units.InvalidValueError as error:
        raise UserError(
            error.code, str(error), f"--against-key-file {key_file}", error.hint
        ) from None

    return replace(settings, url=url, model=model, api_key=key, server="auto")


def show_progress(endpoint: str, done: int, count: int) -> None:
    """Show on a terminal how many responses of an endpoint have arrived."""
    is_last = done == count
    if sys.stderr.isatty() and (is_last or done % PROGRESS_STEP == 0):
        print(f"\r{endpoint}: {done:,} of {count:,}", end="\n" if is_last else "", file=sys.stderr)
