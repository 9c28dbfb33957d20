"""Asks endpoints the questions of a data set, greedily, a few at a time. Sends no load: nothing is timed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from loadgen.answers.questions import Question

GREEDY = {"temperature": 0, "seed": 1}
OUTPUT_TOKENS = 256  # where neither the row nor --max-tokens says


class AskTarget(NamedTuple):
    """Where to ask. `model`: None: the only one that the server lists."""

    url: str
    model: str | None = None
    api: str = "chat"
    server: str = "auto"
    api_key: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    extra_body: Mapping[str, Any] | None = None
    tls: Any = None
    timeout_s: float = 600.0


class Asked(NamedTuple):
    """The answers in the order of the questions; None where none came, and why: the first few reasons."""

    model: str
    answers: list[str | None]
    reasons: list[str]


def ask(
    endpoint: AskTarget,
    questions: Sequence[Question],
    *,
    lanes: int,
    max_tokens: int | None,
    tell: Callable[[int], None],
) -> Asked:
    """Ask every question once, `lanes` at a time. tell: hears how many are done. Raises TargetError of the probe."""
    return asyncio.run(_ask(endpoint, questions, lanes, max_tokens, tell))


async def _ask(
    endpoint: AskTarget, questions: Sequence[Question], lanes: int, max_tokens: int | None, tell: Callable[[int], None]
) -> Asked:
    from loadgen_sdk import Client, Request, Retry

    answers: list[str | None] = [None] * len(questions)
    reasons: list[str] = []
    waiting = iter(range(len(questions)))
    done = 0
    async with Client(
        endpoint.url,
        model=endpoint.model,
        api=endpoint.api,  # type: ignore[arg-type]  # checked by the command line
        server=endpoint.server,
        api_key=endpoint.api_key,
        headers=endpoint.headers,
        extra_body={**GREEDY, **(endpoint.extra_body or {})},
        tls=endpoint.tls,
        timeout_s=endpoint.timeout_s,
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
                elif len(reasons) < 5:
                    reasons.append(str(completion.failure))
                done += 1
                tell(done)

        await asyncio.gather(*(lane() for _ in range(min(lanes, len(questions)))))
        return Asked(client.model, answers, reasons)
