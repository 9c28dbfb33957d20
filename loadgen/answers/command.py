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

    def on_progress(endpoint_name: str, done: int) -> None:
        show_progress(endpoint_name, done, len(questions))

    with running_server(settings) as first:
        try:
            scored = run_scoring(dataset, questions, first, second, options, on_progress)
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            raise UserError("unwritable_file", problem, f"--out {scoring.out}") from None

    print_result(scored.result, report(scored.result, scored.failures), as_json=as_json, full=full)
    return exit_code(scored.result)


def _check_recording(comparison: ComparisonArguments, scoring: ScoringArguments) -> None:
    """Check that no option is specified that has no effect if responses are only recorded.

    Raises:
        UserError: There is such an option.
    """
    value_of_option = {
        "--against": comparison.against,
        "--within": comparison.within,
        "--out": scoring.out,
    }
    for option, value in value_of_option.items():
        if value is not None:
            problem = "--record only records the responses of --url"
            raise UserError("conflict", problem, option, f"leave {option} or --record out")


def _record(
    file: Path, settings: Settings, questions: Sequence[Question], options: SendOptions
) -> int:
    """Write the responses of an endpoint to a file, print how many, and return the exit code."""
    from loadgen.answers.recording import RECORDINGS, record_reference
    from loadgen.core import format
    from loadgen.core.execution.backend import running_server

    def on_progress(recording_name: str, done: int) -> None:
        show_progress(recording_name, done, len(questions))

    with running_server(settings) as server_settings:
        recorded = record_reference(server_settings, questions, options, file, on_progress)

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
    """Check the options of the command line, and return them as options of a scoring run.

    Args:
        comparison: The options about endpoint B and the loss that is allowed.
        scoring: The options about sending prompts and storing results.
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
    """Check that the settings have one endpoint, and that this endpoint generates text.

    Raises:
        UserError: The endpoint is simulated without real time, or there are several endpoints.
    """
    if settings.virtual:
        problem = "a simulation in virtual time generates no text to score"
        hint = "start a simulated server with loadgen sim and use its URL"
        raise UserError("unsupported", problem, f"--url {settings.url}", hint)

    if settings.targets:
        problem = "only one endpoint A can be scored"
        hint = "use --against for the second one"
        raise UserError("unsupported", problem, "--url", hint)


def _parse_allowed_loss(within: str | None, against: str | None) -> float | None:
    """Return the loss that an option allows as a fraction: "1%" gives 0.01.

    Args:
        within: The text of the option `--within`, or None without the option.
        against: The URL of endpoint B, or None.

    Raises:
        UserError: The text is no fraction from 0 to below 1, or there is no endpoint B.
    """
    option = "--within"
    loss = parse_option(option, within, units.share)
    if loss is None:
        return None

    if against is None:
        problem = "--within needs an endpoint B to compare with"
        raise UserError("no_effect", problem, option, _WITHIN_EXAMPLE)

    if not 0 <= loss < 1:
        problem = "must be at least 0% and below 100%"
        raise UserError("out_of_range", problem, option, _WITHIN_EXAMPLE)

    return loss


def other_endpoint(
    settings: Settings, url: str | None, model: str | None, key_file: Path | None
) -> Settings | None:
    """Return the settings of endpoint B, or None if there is no URL of endpoint B.

    Args:
        settings: The settings of endpoint A, which endpoint B also uses.
        url: The URL of endpoint B, or None.
        model: The model of endpoint B, or None for the one that its server names.
        key_file: A file with the key of endpoint B, or None for the key of endpoint A.

    Raises:
        UserError: There is a model or a key file of endpoint B without its URL, or the key file
            cannot be read.
    """
    if url is None:
        has_model = model is not None
        has_key_file = key_file is not None
        if has_model or has_key_file:
            option = "--against-model" if has_model else "--against-key-file"
            problem = f"{option} needs an endpoint B to compare with"
            raise UserError("no_effect", problem, option, "add --against URL")
        return None

    api_key = settings.api_key
    if key_file is not None:
        try:
            api_key = read_key_file(key_file)
        except units.InvalidValueError as error:
            location = f"--against-key-file {key_file}"
            raise UserError(error.code, str(error), location, error.hint) from None

    return replace(settings, url=url, model=model, api_key=api_key, server="auto")


def show_progress(endpoint: str, done: int, count: int) -> None:
    """Show on a terminal how many responses of an endpoint have arrived."""
    is_last = done == count
    if sys.stderr.isatty() and (is_last or done % PROGRESS_STEP == 0):
        print(f"\r{endpoint}: {done:,} of {count:,}", end="\n" if is_last else "", file=sys.stderr)
