"""What is known of a target before it is asked, and whether the requests of a load fit its context. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.wire_formats.server_profiles import NON_GENERATIVE_APIS
from msgspec import Struct

from loadgen.core.errors import UserError
from loadgen.core.requests import lengths
from loadgen.core.requests.prompts import Prompts
from loadgen.core.workload import Workload

MOST_TOO_LONG = (
    0.5  # share of requests that a target would refuse, above which nothing is worth measuring
)
LONG = "gb300-vm-128k"  # a preset with a long context


class Context(Struct, frozen=True):
    """How many tokens of prompt and answer together a target takes, and how it counts the prompt."""

    model: str
    tokens: int
    template_tokens: int | None = None
    token_ratio: float | None = None


class KnownTarget(Struct, frozen=True):
    """What is known of a target without asking it, since loadgen starts or simulates it."""

    name: str  # as headers have it, for example "simulated: gb300-vm"
    words: str = ""  # what it is
    context: Context | None = None
    notes: tuple[str, ...] = ()  # of the header of its runs
    virtual_url: str = ""  # of the same target in virtual time; "": there is none
    gpus: int | None = None  # that it has; None: not known
    identity: str = ""  # a digest of all that it is made from; "": not known


class TooLong(Struct, frozen=True):
    """The requests that are longer than the target takes: their share of all, in words, and what can be done."""

    share: float
    words: str
    hint: str

    def refused(self, workload: Workload, where: str) -> UserError | None:
        """The fault that they are; None where they are so few that the run is valid all the same."""
        if self.share <= min(workload.limits.failure_share, MOST_TOO_LONG):
            return None
        return UserError("over_context", self.words, where, self.hint)


def shortest(found: Sequence[ProbeResult]) -> Context | None:
    """The shortest context of the targets that generate and say theirs; None where none does."""
    known = [
        Context(one.model, one.max_context, one.template_tokens, one.token_ratio)
        for one in found
        if one.max_context is not None and one.target.api not in NON_GENERATIVE_APIS
    ]
    return min(known, key=lambda one: one.tokens, default=None)


def too_long(requests: Prompts, count: int | None, context: Context | None) -> TooLong | None:
    """The requests of a load of `count` that do not fit the context; None where all do, or where it is not known."""
    if context is None:
        return None
    first = lengths.first_request_lengths(requests, count)
    contexts = lengths.context_lengths(first, context.template_tokens, context.token_ratio)
    if not contexts:
        return None
    over, largest = sum(tokens > context.tokens for tokens in contexts), max(contexts)
    if not over:
        return None
    of_all = f"the {len(contexts):,}" if len(contexts) == count else f"the first {len(contexts):,}"
    return TooLong(
        share=over / len(contexts),
        words=f"{over:,} of {of_all} requests are longer than the context of {context.model}: with up to {largest:,} "
        f"tokens of prompt and answer, and it takes {context.tokens:,}",
        hint=f"a target with a longer context (vLLM: --max-model-len; simulated: --url sim:{LONG}), or shorter "
        "requests: in the workload lower the max of lengths, or the turns",
    )
