"""Builds the requests of a workload of any kind: synthetic, from a file, or from a trace. Pure except for reading."""

from __future__ import annotations

from typing import Any

from loadgen.requests.prompts import FilePrompts, Prompts, SyntheticPrompts
from loadgen.requests.tokenizer import Tokenizer
from loadgen.requests.trace_prompts import TracePrompts
from loadgen.workload.traces import read_trace


def build(workload: Any, seed: int, salt: int, tokenizer: Tokenizer, template_tokens: int = 0) -> Prompts:
    """Return the requests of a workload. `seed` decides lengths and choices; seed and salt together decide the text.

    template_tokens: tokens that the server adds to a prompt. Only traces use it, because their lengths include them.
    """
    if hasattr(workload.requests, "trace"):
        return TracePrompts(read_trace(workload.requests.trace), seed, salt, tokenizer, template_tokens)
    if hasattr(workload.requests, "path"):
        return FilePrompts(workload.requests, seed, tokenizer)
    return SyntheticPrompts(workload.requests, seed, salt, tokenizer)
