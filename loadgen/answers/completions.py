"""Send questions to endpoints at temperature 0, a few at a time. Nothing is timed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from loadgen.answers.questions import Question
from loadgen.core.errors import TargetError, UserError
from loadgen.core.execution.plan import Settings
from loadgen.core.workload.dataset_rows import DatasetRow

if TYPE_CHECKING:
    from loadgen_sdk import Client, Completion, Request

ENDPOINT_A = "A"
ENDPOINT_B = "B"

GREEDY_SAMPLING = {"temperature": 0, "seed": 1}
DEFAULT_OUTPUT_TOKENS = 256
"""Limit of a response if neither its row nor --max-tokens has one."""
TIMEOUT_S = 600.0
MAX_FAILURES = 5
"""Failures that are reported."""

TOKENIZER_PROBE = (
    "Antidisestablishmentarianism: 31,415.926 caf\u00e9, \u4f60\u597d, def f(x): return x**2\n" * 4
)
"""A text that two tokenizers hardly split into the same number of tokens."""


class Completions(NamedTuple):
    """The responses of one endpoint, in the order of the questions.

    Attributes:
        model: The name of the model.
        texts: The text of each response, or None if it failed.
        prompt_tokens: The tokens of each prompt as the server counts them, or None.
        failures: Why requests failed: the first few reasons.
        output_tokens: The tokens of each response as the server counts them, or None.
        simulated: True if the server is simulated.
    """

    model: str
    texts: list[str | None]
    prompt_tokens: list[int | None]
    failures: list[str]
    output_tokens: list[int | None]
    simulated: bool = False


class SendOptions(NamedTuple):
    """How questions are sent.

    Attributes:
        concurrency: The number of requests in flight.
        max_tokens: Limit of a response if its row has none, or None for the default.
    """

    concurrency: int = 1
    max_tokens: int | None = None


def send_questions(
    endpoint: Settings,
    questions: Sequence[Question],
    options: SendOptions,
    on_progress: Callable[[int], None],
) -> Completions:
    """Send every question once and return the responses.

    Args:
        endpoint: The endpoint.
        questions: The questions.
        options: How they are sent.
        on_progress: Called with the number of responses so far.

    Raises:
        TargetError: The endpoint cannot be used.
    """
    from loadgen_sdk.errors import TargetUnusable

    sender = _Sender(questions, options, on_progress)
    try:
        return asyncio.run(sender.send_all(endpoint))
    except TargetUnusable as error:
        raise TargetError(error.code, str(error), redacted_url(endpoint), error.hint) from None


class CompletionPair(NamedTuple):
    """The responses of endpoint A, and those of endpoint B if there is one."""

    a: Completions
    b: Completions | None = None

    @property
    def texts_b(self) -> list[str | None] | None:
        """The text of each response of endpoint B, or None if there is no endpoint B."""
        return None if self.b is None else self.b.texts

    @property
    def failures(self) -> list[str]:
        """The first few reasons why requests failed, those of endpoint A first."""
        return self.a.failures if self.b is None else [*self.a.failures, *self.b.failures]


def send_to_both(
    first: Settings,
    second: Settings | None,
    questions: Sequence[Question],
    options: SendOptions,
    on_progress: Callable[[str, int], None],
) -> CompletionPair:
    """Send every question to endpoint A, and then to endpoint B, if there is one.

    Args:
        first: Endpoint A.
        second: Endpoint B, or None.
        questions: The questions.
        options: How they are sent.
        on_progress: Called with "A" or "B" and the number of responses so far.

    Raises:
        TargetError: An endpoint cannot be used.
        UserError: Prompts are token ids, and the endpoints have different tokenizers.
    """
    if second is not None:
        check_same_tokenizer(first, second, questions)

    on_progress_a = partial(on_progress, ENDPOINT_A)
    completions_a = send_questions(first, questions, options, on_progress_a)
    if second is None:
        return CompletionPair(completions_a)

    on_progress_b = partial(on_progress, ENDPOINT_B)
    completions_b = send_questions(second, questions, options, on_progress_b)
    return CompletionPair(completions_a, completions_b)


def redacted_url(endpoint: Settings) -> str:
    """Return the URL of an endpoint without its password, for output.

    A URL that cannot be parsed is returned unchanged.
    """
    from loadgen_sdk.errors import TargetUnusable
    from loadgen_sdk.transport.target import Target

    url = endpoint.url or ""
    try:
        return Target.parse(url).redacted
    except TargetUnusable:
        return url


def check_same_tokenizer(first: Settings, second: Settings, questions: Sequence[Question]) -> None:
    """Check that two endpoints have the same tokenizer, if prompts are token ids.

    Each tokenizer has different ids for the same words. Two tokenizers count as the same if both
    servers count the same number of tokens in one text that tokenizers split differently.

    Raises:
        UserError: Prompts are token ids, and the endpoints count different tokens in one text.
    """
    has_token_ids = any(isinstance(question.row.prompt, list) for question in questions)
    if not has_token_ids:
        return

    first_tokens = _count_probe_tokens(first)
    second_tokens = _count_probe_tokens(second)
    is_count_missing = first_tokens is None or second_tokens is None
    if is_count_missing or first_tokens == second_tokens:
        return

    raise UserError(
        "mismatch",
        f"prompts are token ids, but the tokenizers differ: A counts {first_tokens} tokens in a "
        f"text, B counts {second_tokens}",
        f"{redacted_url(first)} and {redacted_url(second)}",
        "give the prompts as texts in the data set",
    )


def _count_probe_tokens(endpoint: Settings) -> int | None:
    """Return how many tokens a server counts in a fixed text, or None if the server counts none.

    The text is sent as a prompt, and the response is limited to one token.
    """
    question = Question(row=DatasetRow(prompt=TOKENIZER_PROBE))
    options = SendOptions(max_tokens=1)

    # With the chat API, a chat template would add tokens to the prompt.
    completions_endpoint = replace(endpoint, api="completions")
    completions = send_questions(
        completions_endpoint, [question], options, on_progress=lambda _: None
    )
    return completions.prompt_tokens[0]


def describe_token_difference(first: Completions, second: Completions) -> str:
    """Return a note for the user if two endpoints count different tokens in the same prompts.

    Return "" if all counts are equal. Prompts that a server did not count are left out.
    """
    counts_a = []
    counts_b = []
    for count_a, count_b in zip(first.prompt_tokens, second.prompt_tokens, strict=True):
        if count_a is not None and count_b is not None:
            counts_a.append(count_a)
            counts_b.append(count_b)

    if counts_a == counts_b:
        return ""

    total_a = sum(counts_a)
    total_b = sum(counts_b)
    return (
        f"A counts {total_a:,} tokens in {len(counts_a):,} prompts and B counts "
        f"{total_b:,}, so they use different tokenizers or chat templates. Compare "
        "scores instead of equality, because the limit of output tokens cuts their "
        "responses at different places"
    )


def _open_client(endpoint: Settings) -> Client:
    """Return an HTTP client of an endpoint, to be used as an async context manager.

    Requests have temperature 0, unless the user's parameters (`extra_body`) set a temperature.
    Requests that fail are retried, because their latency is not measured.
    """
    from loadgen_sdk import Client, Retry

    user_parameters = endpoint.extra_body or {}
    return Client(
        endpoint.url or "",
        model=endpoint.model,
        api=endpoint.api,
        server=endpoint.server,
        api_key=endpoint.api_key,
        headers=endpoint.headers,
        extra_body={**GREEDY_SAMPLING, **user_parameters},
        tls=endpoint.tls,
        timeout_s=TIMEOUT_S,
        retry=Retry(),
    )


class _Sender:
    """Sends questions to one endpoint and collects the responses.

    A few workers take the next question from a common iterator. So the responses may arrive in any
    order, and each is stored at the index of its question.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        options: SendOptions,
        on_progress: Callable[[int], None],
    ) -> None:
        self._questions = questions
        self._options = options
        self._on_progress = on_progress
        self._unsent = iter(range(len(questions)))
        self._done = 0
        self._texts: list[str | None] = [None] * len(questions)
        self._prompt_tokens: list[int | None] = [None] * len(questions)
        self._output_tokens: list[int | None] = [None] * len(questions)
        self._failures: list[str] = []

    async def send_all(self, endpoint: Settings) -> Completions:
        """Send every question, several at the same time, and return the responses."""
        worker_count = min(self._options.concurrency, len(self._questions))
        async with _open_client(endpoint) as client:
            workers = [self._send_until_done(client) for _ in range(worker_count)]
            await asyncio.gather(*workers)
            return Completions(
                model=client.model,
                texts=self._texts,
                prompt_tokens=self._prompt_tokens,
                failures=self._failures,
                output_tokens=self._output_tokens,
                simulated=client.is_simulated,
            )

    async def _send_until_done(self, client: Client) -> None:
        """Send one question after the other until no question is left.

        Several of these coroutines run at the same time. All take the next question from the same
        iterator, so each question is sent once.
        """
        for index in self._unsent:
            request = self._create_request(index)
            completion = await client.complete(request)
            self._store(index, completion)
            self._done += 1
            self._on_progress(self._done)

    def _create_request(self, index: int) -> Request:
        """Return the request of one question.

        The limit of output tokens is that of the question's row, else `--max-tokens`, else a
        default.
        """
        from loadgen_sdk import Request

        row = self._questions[index].row
        default_max_tokens = self._options.max_tokens or DEFAULT_OUTPUT_TOKENS
        return Request(
            id=f"q{index}",
            messages=row.messages,
            prompt=row.prompt,
            max_tokens=row.output_tokens or default_max_tokens,
            # Do not force the server to generate exactly so many tokens: the text is scored.
            exact_output=False,
            extra=row.extra,
        )

    def _store(self, index: int, completion: Completion) -> None:
        """Store the text and the token counts of a response, or why the request failed.

        Only the first few reasons of failures are stored, because most failures have one reason.
        """
        from loadgen_sdk.wire_formats.usage import without_doubtful_counts

        if completion.failure is None:
            usage = without_doubtful_counts(completion.usage)
            self._texts[index] = completion.text
            self._prompt_tokens[index] = usage.input
            self._output_tokens[index] = usage.output
        elif len(self._failures) < MAX_FAILURES:
            self._failures.append(str(completion.failure))
