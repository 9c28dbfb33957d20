"""`loadgen answers`: whether an endpoint's answers are right, or as right as another's. Parses flags, asks, prints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli.options import TARGET, Given, takes

if TYPE_CHECKING:
    from loadgen.answers.ask import Asked, AskTarget
    from loadgen.answers.questions import Question
    from loadgen.execution.plan import Settings

FILE, TEXTS = "answers.json", "texts.jsonl"


@takes(only=TARGET, without=("stream", "tokenizer"), url="Endpoint A, with or without a path prefix and /v1.")
def answers(
    given: Given,
    dataset: Annotated[Path, typer.Argument(help="JSONL: prompt or messages, and reference, choices, class if known.")],
    against: Annotated[str | None, typer.Option("--against", help="Endpoint B: the same prompts to it.")] = None,
    against_model: Annotated[str | None, typer.Option("--against-model", help="Its model.")] = None,
    against_key_file: Annotated[Path | None, typer.Option("--against-key-file", help="A file with its key.")] = None,
    within: Annotated[
        str | None, typer.Option("--within", help="A may score so much less than B: 1%. Exit 1 where it is more.")
    ] = None,
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="Only the first so many rows.")] = None,
    lanes: Annotated[int, typer.Option("-c", "--concurrency", min=1, max=1000, help="Asked at once.")] = 8,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", "--output-tokens", min=1, help="Of an answer, where its row does not say."),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder for answers.json.")] = None,
    keep_content: Annotated[
        bool, typer.Option("--keep-content", help="Store the texts of the answers too, in the folder.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Score answers against references, and against another endpoint's answers to the same prompts (FP4 against BF16).

    Sends each prompt once, greedily (temperature 0). Scores: ROUGE-1, -2, -L as MLPerf's, exact match, right choice,
    valid JSON; of two endpoints also how alike their answers are. Texts are stored only with --keep-content.

    Exit: 0, 1 beyond --within, 2 wrong usage or data set, 3 not reachable, or --within is undecided.

    Example: loadgen answers questions.jsonl --url http://HOST:8000 --against http://OTHER:8000 --within 1%
    """
    import contextlib

    from loadgen import units
    from loadgen.answers import comparison, questions
    from loadgen.cli.show import print_json, write_file
    from loadgen.errors import OK, SLO_MISSED, UNSOUND, UserError
    from loadgen.execution.options import key_of_file
    from loadgen.report.answers import render
    from loadgen.sim.server import embedded

    settings = given.settings()
    if settings.targets or settings.virtual:
        raise UserError("this command asks one endpoint over HTTP", "--url", "--against is the second one")
    try:
        loss = None if within is None else units.share(within)
    except units.Wrong as wrong:
        raise UserError(f"it {wrong}", f"--within {within}", wrong.hint) from None
    if loss is not None and (against is None or not 0 <= loss < 1):
        raise UserError("a share of B's scores, and there is no B" if against is None else "not a share", "--within",
                        "--against URL --within 1%")  # fmt: skip
    if keep_content and out is None:
        raise UserError("the texts need a folder", "--keep-content", "-o FOLDER")
    asked = questions.read_questions(dataset, rows)
    with contextlib.ExitStack() as stack:
        url = settings.url or stack.enter_context(embedded.start()).url
        first = _ask(_endpoint(settings, url), asked, lanes, max_tokens, "A")
        second = None
        if against is not None:
            key = settings.api_key if against_key_file is None else key_of_file(against_key_file)
            other = _endpoint(settings, against)._replace(model=against_model, api_key=key, server="auto")
            second = _ask(other, asked, lanes, max_tokens, "B")
    result = comparison.AnswersResult(
        dataset=dataset.name,
        url=settings.url or "the embedded simulation",
        model=first.model,
        against=against or "",
        against_model=second.model if second is not None else "",
        prompts=len(asked),
        failed=first.answers.count(None),
        failed_against=second.answers.count(None) if second is not None else 0,
        loss=loss,
        simulated=settings.url is None,
        parts=comparison.judge(asked, first.answers, None if second is None else second.answers, loss),
    )
    if out is not None:
        import msgspec

        out.mkdir(parents=True, exist_ok=True)
        write_file(out / FILE, msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n", "--out")
        if keep_content:
            both = zip(first.answers, second.answers if second is not None else [None] * len(asked), strict=True)
            lines = [msgspec.json.encode({"a": a, "b": b}).decode() for a, b in both]
            write_file(out / TEXTS, "\n".join(lines) + "\n", "--out")
    if as_json:
        print_json(result)
    else:
        print(render(result, first.reasons + (second.reasons if second is not None else [])), end="")
    if result.failed == len(asked):
        return UNSOUND
    return OK if loss is None or result.verdict else UNSOUND if result.verdict is None else SLO_MISSED


def _endpoint(settings: Settings, url: str) -> AskTarget:
    from loadgen.answers.ask import AskTarget

    return AskTarget(
        url=url,
        model=settings.model,
        api=settings.api,
        server=settings.server,
        api_key=settings.api_key,
        headers=settings.headers,
        extra_body=settings.extra_body,
        tls=settings.tls,
    )


def _ask(endpoint: AskTarget, asked: list[Question], lanes: int, max_tokens: int | None, name: str) -> Asked:
    from loadgen.answers.ask import ask

    def tell(done: int) -> None:
        if sys.stderr.isatty() and (done == len(asked) or done % 10 == 0):
            print(f"\r{name}: {done:,} of {len(asked):,}", end="\n" if done == len(asked) else "", file=sys.stderr)

    return ask(endpoint, asked, lanes=lanes, max_tokens=max_tokens, tell=tell)
