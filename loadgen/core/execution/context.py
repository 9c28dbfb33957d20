"""Tell what is known of a target before it is probed, and which requests do not fit its context."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.wire_formats.server_profiles import NON_GENERATIVE_APIS
from msgspec import Struct

from loadgen.core.errors import UserError
from loadgen.core.requests import lengths
from loadgen.core.requests.prompts import Prompts
from loadgen.core.workload import Workload

# If a target refuses a larger share of all requests than this, nothing is worth measuring.
_MAX_REFUSED_SHARE = 0.5
_PRESET_WITH_LONG_CONTEXT = "gb300-vm-128k"


class Context(Struct, frozen=True):
    """How many tokens prompt and response may have together, and how a prompt is counted."""

    model: str
    tokens: int
    template_tokens: int | None = None
    """Tokens that the chat template of the model adds to a prompt."""
    token_ratio: float | None = None
    """Tokens of the server for each token of the local tokenizer."""


class KnownTarget(Struct, frozen=True):
    """What is known of a target without probing it, because loadgen starts or simulates it."""

    name: str
    """The name in manifests of runs, for example "simulated: gb300-vm"."""
    description: str = ""
    context: Context | None = None
    notes: tuple[str, ...] = ()
    """Notes for the manifests of its runs."""
    virtual_url: str = ""
    """The URL of the same target in virtual time; empty if there is none."""
    gpus: int | None = None
    identity: str = ""
    """A digest of everything that the target is made from; empty if it is not known."""
    provisioned_kw: float | None = None
    """The power that a site reserves for it; None if it is not known."""


class OversizedRequests(Struct, frozen=True):
    """The requests of a load that do not fit the context of the target."""

    share: float
    """Share of all requests."""
    text: str
    hint: str

    def to_error(self, workload: Workload, where: str) -> UserError | None:
        """Return an error, or None if so few requests are too long that the run is still valid."""
        if self.share <= min(workload.limits.failure_share, _MAX_REFUSED_SHARE):
            return None
        return UserError("over_context", self.text, where, self.hint)


def shortest_context(probe_results: Sequence[ProbeResult]) -> Context | None:
    """Return the shortest context that a generative target reports, or None if none reports one."""
    contexts = [
        Context(result.model, result.max_context, result.template_tokens, result.token_ratio)
        for result in probe_results
        if result.max_context is not None and result.target.api not in NON_GENERATIVE_APIS
    ]
    return min(contexts, key=lambda context: context.tokens, default=None)


def find_oversized_requests(
    prompts: Prompts, count: int | None, context: Context | None
) -> OversizedRequests | None:
    """Return the requests of a load that do not fit the context of its target.

    The context is how many tokens a prompt and its response may have together. Only the first
    requests are checked, because drawing the lengths of all would take too long.

    Args:
        prompts: The requests of the load.
        count: The number of requests, or None if the load has no end.
        context: The context of the target, or None if it is not known.

    Returns:
        The requests that do not fit, or None if all fit or the context is not known.
    """
    if context is None:
        return None

    first_lengths = lengths.first_request_lengths(prompts, count)
    request_tokens = lengths.context_lengths(
        first_lengths, context.template_tokens, context.token_ratio
    )
    oversized_count = sum(tokens > context.tokens for tokens in request_tokens)
    if not oversized_count:
        return None

    return OversizedRequests(
        share=oversized_count / len(request_tokens),
        text=_describe_oversized_requests(oversized_count, request_tokens, count, context),
        hint=(
            "use a server with a longer context (vLLM: --max-model-len; simulated: "
            f"--url sim:{_PRESET_WITH_LONG_CONTEXT}), or lower the maximum of the "
            "lengths or turns in the workload"
        ),
    )


def _describe_oversized_requests(
    oversized_count: int, request_tokens: Sequence[int], count: int | None, context: Context
) -> str:
    """Return how many of the checked requests exceed the context, and by how much, as text.

    Args:
        oversized_count: The number of requests that exceed it.
        request_tokens: The tokens of each checked request, prompt and response together.
        count: The number of requests of the load, of which perhaps only the first were checked.
        context: The context of the target.
    """
    checked_count = len(request_tokens)
    checked = f"the {checked_count:,}" if checked_count == count else f"the first {checked_count:,}"
    return (
        f"{oversized_count:,} of {checked} requests exceed the context length of "
        f"{context.model}: up to {max(request_tokens):,} tokens of prompt and "
        f"output together, {context.tokens:,} allowed"
    )
