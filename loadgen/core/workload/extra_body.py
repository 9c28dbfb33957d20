"""Body fields that are refused in `--extra-body` and in the `extra_body` of a row.

Records and metrics assume that a request asks for one completion of a known length, and that all
requests of a run are streamed or none. A field that changes this would make them wrong, so the
option that does the same for the whole run must be used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

LIMIT_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
PROMPT_FIELDS = ("messages", "prompt", "input")
COUNT_FIELDS = ("n", "best_of")


class RefusedField(NamedTuple):
    """A field that may not be given, and what is wrong with it.

    Attributes:
        name: The name of the field.
        problem: Why it is refused.
        hint: What to write in its place on the command line.
        row_hint: What to write in its place in a row of a data set.
    """

    name: str
    problem: str
    hint: str
    row_hint: str


def find_refused_fields(extra_body: Mapping[str, object]) -> Iterator[RefusedField]:
    """Yield the fields of an extra body that are not allowed, with the reason and hints.

    These fields would change what is measured: the output length, the number of completions, the
    prompt or streaming.
    """
    for name in LIMIT_FIELDS:
        if name in extra_body:
            yield _refused_limit(name)

    for name in COUNT_FIELDS:
        # A count of 1 completion is allowed, because it changes nothing.
        if extra_body.get(name) not in (None, 1):
            yield _refused_count(name)

    for name in PROMPT_FIELDS:
        if name in extra_body:
            yield _refused_prompt(name)

    if "stream" in extra_body:
        yield REFUSED_STREAM


def _refused_limit(name: str) -> RefusedField:
    """Return why a field that limits the output length is refused."""
    return RefusedField(
        name,
        problem=f"{name} changes the output length that the workload sets",
        hint="use --osl N to set it for every request",
        row_hint="use output_tokens: N in the row to set it",
    )


def _refused_count(name: str) -> RefusedField:
    """Return why a field that requests several completions is refused."""
    return RefusedField(
        name,
        problem=(
            f"{name} requests several completions in one response, for which TPOT is not defined"
        ),
        hint=f"leave {name} out, and send more requests (--concurrency, --request-rate, -n)",
        row_hint=f"leave {name} out, and repeat the row",
    )


def _refused_prompt(name: str) -> RefusedField:
    """Return why a field that has a prompt is refused."""
    return RefusedField(
        name,
        problem=f"{name} replaces the prompts of the workload, whose tokens are counted",
        hint="use --dataset FILE to send your own prompts",
        row_hint="use the row's own `prompt` or `messages`",
    )


REFUSED_STREAM = RefusedField(
    "stream",
    problem="stream applies to the whole run",
    hint="use --no-stream to turn streaming off; it is on by default",
    row_hint="use --no-stream on the command line",
)
