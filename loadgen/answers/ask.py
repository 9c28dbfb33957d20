"""Asks endpoints the questions of a data set, greedily, a few at a time. Sends no load: nothing is timed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.answers.questions import Question
from loadgen.core.errors import TargetError, UserError
from loadgen.core.execution.plan import Settings
from loadgen.core.workload.dataset_rows import DatasetRow

GREEDY = {"temperature": 0, "seed": 1}
OUTPUT_TOKENS = 256  # where neither the row nor --max-tokens says
SPLIT_OTHERWISE = (
    "Antidisestablishmentarianism: 31,415.926 caf\u00e9, \u4f60\u597d, def f(x): return x**2\n" * 4
)
"""A text that two tokenizers hardly split into the same number of tokens."""


class Asked(NamedTuple):
    """The answers in the order of the questions; None where none came, and why: the first few reasons."""

    model: str
    answers: list[str | None]
    tokens: list[
        int | None
    ]  # of each prompt, as the server counts them; None where it does not say
    reasons: list[str]
    output_tokens: list[int | None]  # of each answer, likewise
    simulated: bool = False  # a simulated server answered


def ask(
    endpoint: Settings,
    questions: Sequence[Question],
    *,
    lanes: int,
    max_tokens: int | None,
    tell: Callable[[int], None],
) -> Asked:
    """Ask every question once at the URL of these settings, `lanes` at a time. tell: hears how many are done.

    Raises TargetError for an endpoint that cannot be used.
    """
    from loadgen_sdk.errors import TargetUnusable

    try:
        return asyncio.run(_ask(endpoint, questions, lanes, max_tokens, tell))
    except TargetUnusable as error:
        raise TargetError(error.code, str(error), shown(endpoint), error.hint) from None


def ask_all(
    first: Settings,
    second: Settings | None,
    questions: Sequence[Question],
    *,
    lanes: int,
    max_tokens: int | None,
    tell: Callable[[str, int], None],
) -> tuple[Asked, Asked | None]:
    """Ask one endpoint, then the other one. tell: hears of A and B how many are done.

    Raises TargetError for an endpoint that cannot be used, UserError for token ids that mean other words to the other.
    """
    if second is not None:
        refuse_other_tokenizer(first, second, questions)
    of_first = ask(first, questions, lanes=lanes, max_tokens=max_tokens, tell=partial(tell, "A"))
    if second is None:
        return of_first, None
    return of_first, ask(
        second, questions, lanes=lanes, max_tokens=max_tokens, tell=partial(tell, "B")
    )


def shown(endpoint: Settings) -> str:
    """Its URL without a password in it."""
    from loadgen_sdk.errors import TargetUnusable
    from loadgen_sdk.transport.target import Target

    url = endpoint.url or ""
    try:
        return Target.parse(url).redacted
    except TargetUnusable:
        return url


def refuse_other_tokenizer(
    endpoint: Settings, other: Settings, questions: Sequence[Question]
) -> None:
    """Raise UserError where prompts are token ids and the two servers split one text into unequal numbers of tokens."""
    if not any(isinstance(question.row.prompt, list) for question in questions):
        return
    text = Question(row=DatasetRow(prompt=SPLIT_OTHERWISE))
    of_one, of_other = (
        ask(
            replace(one, api="completions"), [text], lanes=1, max_tokens=1, tell=lambda _: None
        ).tokens[0]
        for one in (endpoint, other)
    )
    if of_one is not None and of_other is not None and of_one != of_other:
        what = f"prompts are token ids, and the tokenizers differ: one text is {of_one} tokens here, {of_other} there"
        hint = "give the prompts as texts: the ids of one tokenizer are other words in another"
        raise UserError("mismatch", what, f"{shown(endpoint)} and {shown(other)}", hint)


def unequal_tokens(first: Asked, second: Asked) -> str:
    """What there is to say where two endpoints count the same prompts differently; "" where they do not."""
    both = [
        (a, b)
        for a, b in zip(first.tokens, second.tokens, strict=True)
        if a is not None and b is not None
    ]
    if all(a == b for a, b in both):
        return ""
    of_one, of_other = (sum(pair[i] for pair in both) for i in (0, 1))
    return (
        f"A and B count the same {len(both):,} prompts as {of_one:,} and {of_other:,} tokens: another tokenizer or "
        "chat template. A limit of output tokens cuts their answers at different places: judge by scores, not by "
        "equality"
    )


async def _ask(
    endpoint: Settings,
    questions: Sequence[Question],
    lanes: int,
    max_tokens: int | None,
    tell: Callable[[int], None],
) -> Asked:
    from loadgen_sdk import Client, Request, Retry
    from loadgen_sdk.wire_formats.usage import without_doubtful_counts

    answers: list[str | None] = [None] * len(questions)
    tokens: list[int | None] = [None] * len(questions)
    output_tokens: list[int | None] = [None] * len(questions)
    reasons: list[str] = []
    waiting = iter(range(len(questions)))
    done = 0
    async with Client(
        endpoint.url or "",
        model=endpoint.model,
        api=endpoint.api,
        server=endpoint.server,
        api_key=endpoint.api_key,
        headers=endpoint.headers,
        extra_body={**GREEDY, **(endpoint.extra_body or {})},
        tls=endpoint.tls,
        timeout_s=600.0,
        retry=Retry(),
    ) as client:

        async def lane() -> None:
            nonlocal done
            for i in waiting:
                row = questions[i].row
                request = Request(
                    id=f"q{i}",
                    messages=row.messages,
                    prompt=row.prompt,
                    max_tokens=row.output_tokens or max_tokens or OUTPUT_TOKENS,
                    exact_output=False,
                    extra=row.extra,
                )
                completion = await client.complete(request)
                if completion.failure is None:
                    answers[i] = completion.text
                    usage = without_doubtful_counts(completion.usage)
                    tokens[i] = usage.input
                    output_tokens[i] = usage.output
                elif len(reasons) < 5:
                    reasons.append(str(completion.failure))
                done += 1
                tell(done)

        await asyncio.gather(*(lane() for _ in range(min(lanes, len(questions)))))
        return Asked(
            client.model, answers, tokens, reasons, output_tokens, simulated=client.is_simulated
        )
