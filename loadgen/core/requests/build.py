"""Builds the requests of a workload of any kind: synthetic, of tasks, from a file or a trace, or several classes.

Pure except for reading.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from loadgen_sdk.wire_formats.server_profiles import NON_GENERATIVE_APIS

from loadgen.core import seeds
from loadgen.core.errors import UserError
from loadgen.core.requests.mix import MixPrompts
from loadgen.core.requests.prompts import FilePrompts, Prompts, SyntheticPrompts
from loadgen.core.requests.task_prompts import TaskPrompts
from loadgen.core.requests.tokenizer import Tokenizer


def build_prompts(
    workload: Any,
    seed: int,
    salt: int,
    tokenizer: Tokenizer,
    template_tokens: int = 0,
    api: str = "chat",
    models: Collection[str] = (),
) -> Prompts:
    """Return the requests of a workload. `seed` decides lengths and choices; seed and salt together decide the text.

    template_tokens: tokens that the server adds to a prompt. Lengths that are asked for include them. api: embeddings
    and rerank ask for no output, and rerank sends retrieved chunks as its documents. models: that the server lists.
    """
    requests = workload.requests
    if hasattr(requests, "classes"):
        parts = [
            build_prompts(
                one,
                seed,
                seeds.derived(salt, "class", index),
                tokenizer,
                template_tokens,
                api,
                models,
            )
            for index, one in enumerate(requests.classes.values())
        ]
        return MixPrompts(requests.classes, seed, parts)
    if api in NON_GENERATIVE_APIS and (
        hasattr(requests, "steps") or getattr(requests, "turns", None) is not None
    ):
        hint = (
            "kind: embed or kind: rerank in a step of a task"
            if hasattr(requests, "steps")
            else "leave out turns"
        )
        raise UserError(
            "unsupported",
            f"an answer of {api} is no text that a later request could go on from",
            f"--api {api}",
            hint,
        )
    if hasattr(requests, "trace") and api != "rerank":
        from loadgen.core.requests.trace_prompts import TracePrompts
        from loadgen.core.workload import trace_sessions, traces

        trace = traces.read_replayed_trace(requests)
        sessions = trace_sessions.build_sessions(trace) if requests.replay == "sessions" else None
        return TracePrompts(trace, seed, salt, tokenizer, template_tokens, api, sessions, models)
    if hasattr(requests, "path"):
        return FilePrompts(requests, seed, tokenizer, api)
    if hasattr(requests, "steps"):
        return TaskPrompts(requests, seed, salt, tokenizer, template_tokens)
    if api == "rerank" and getattr(requests, "chunks", None) is None:
        hint = "chunks: {count: 20, tokens: 300} in requests, or rows of a file with extra_body: {documents: [...]}"
        raise UserError("missing_key", "there are no documents to rerank", "requests", hint)
    if requests.images is not None and api not in ("chat", "responses", "messages"):
        raise UserError(
            "unsupported",
            f"images cannot be sent to {api}",
            "requests.images",
            "--api chat, responses or messages",
        )
    return SyntheticPrompts(requests, seed, salt, tokenizer, template_tokens, api)
