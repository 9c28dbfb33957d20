"""The table of servers: what may be sent to whom, what each one adds, and what it never says.

Rules are data, so that they can be audited line by line against each server's own documents; code that reads the table
knows no server by name. Pure: nothing here is computed at run time except by `msgspec.structs.replace`, when a probe
learns better than the table.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

Api = Literal["chat", "completions"]
APIS: tuple[Api, ...] = ("chat", "completions")

MAX_FIELDS = ("max_tokens", "max_completion_tokens")
"""The two spellings of the output limit. trtllm-serve holds them for one field and answers 400 to both at once."""

REASONING_MODEL = re.compile(r"(?:^|[/:])(?:o\d|gpt-5(?!-chat))", re.IGNORECASE)
"""Model names of OpenAI that refuse `max_tokens` in chat and take `max_completion_tokens` instead."""


class Quirk(msgspec.Struct, frozen=True, kw_only=True):
    """One row: everything the client does differently for one kind of server.

    `chat` and `completions` are the *only* fields ever sent unasked, in this order; the user's own extra body comes on
    top. A field not listed is never sent, because half of these servers answer 400 or 422 to a field they do not know.
    """

    name: str  # what `--server` takes
    title: str  # what people call it
    chat: tuple[str, ...]
    completions: tuple[str, ...]
    stream_options: tuple[tuple[str, bool], ...] = (("include_usage", True),)  # inside `stream_options`, when streaming
    max_field: str = "max_tokens"
    reasoning_max_field: str = "max_tokens"  # in chat, for models that REASONING_MODEL matches
    forces: tuple[str, ...] = ()  # the fields among those above that force the exact output length; () = it cannot be
    continuous_usage: bool = False  # takes stream_options.continuous_usage_stats: cumulative usage on every event
    prompt_ids: bool = True  # completions take a list of token ids as prompt
    checks_model: bool = True  # an unknown model name is an error; False: any name is served
    unknown_field: Literal["reject", "ignore", "forward"] = "ignore"
    cached_tokens: Literal["always", "option", "unknown", "never"] = "unknown"  # says usage how much was cached
    reuse_s: float = 4.0  # do not reuse a connection idle for longer: most of these servers close theirs at 5 s
    auth: Literal["bearer", "api-key"] = "bearer"
    timing_headers: tuple[tuple[str, str], ...] = ()  # to send when the server's own timing is wanted, only then
    timing_body: dict[str, Any] = {}  # likewise, to be merged into the body
    timing_found: tuple[str, ...] = ()  # where that timing then is: `header:NAME`, `event:NAME`, `body:PATH`

    def fields(self, api: Api) -> tuple[str, ...]:
        """Names of the fields that `body` may send to this API, in order."""
        return self.chat if api == "chat" else self.completions

    def limit_field(self, api: Api, model: str) -> str:
        """Name of the field that limits the output of `model` on `api`."""
        reasoning = api == "chat" and self.reasoning_max_field != self.max_field and REASONING_MODEL.search(model)
        return self.reasoning_max_field if reasoning else self.max_field


_COMMON = ("stream", "stream_options", "max_tokens")
_CHAT = ("model", "messages", *_COMMON)
_COMPLETIONS = ("model", "prompt", *_COMMON)
_EXACT = ("ignore_eos", "min_tokens")

_ROWS = (
    Quirk(
        name="trtllm",
        title="TensorRT-LLM trtllm-serve",
        chat=(*_CHAT, *_EXACT),
        completions=(*_COMPLETIONS, *_EXACT),
        forces=_EXACT,
        continuous_usage=True,
        checks_model=False,
        unknown_field="reject",
        cached_tokens="always",
        timing_headers=(("X-TRTLLM-return-metrics", "1"),),
        timing_found=("event:trtllm.perf_metrics", "header:server-timing"),
    ),
    Quirk(
        name="vllm",
        title="vLLM",
        chat=(*_CHAT, *_EXACT),
        completions=(*_COMPLETIONS, *_EXACT),
        forces=_EXACT,
        continuous_usage=True,
        cached_tokens="option",  # --enable-prompt-tokens-details
        timing_found=("body:metrics",),  # --enable-per-request-metrics
    ),
    Quirk(
        name="sglang",
        title="SGLang",
        chat=(*_CHAT, *_EXACT),
        completions=(*_COMPLETIONS, *_EXACT),
        forces=_EXACT,
        continuous_usage=True,
        checks_model=False,
        cached_tokens="option",  # --enable-cache-report
    ),
    Quirk(
        name="dynamo",
        title="NVIDIA Dynamo",
        chat=(*_CHAT, *_EXACT),
        completions=(*_COMPLETIONS, *_EXACT),
        forces=_EXACT,
        continuous_usage=True,
        unknown_field="reject",
        cached_tokens="always",
        timing_body={"nvext": {"extra_fields": ["timing"]}},
        timing_found=("body:nvext.timing",),
    ),
    Quirk(
        name="llamacpp",
        title="llama.cpp llama-server",
        chat=(*_CHAT, "ignore_eos"),
        completions=(*_COMPLETIONS, "ignore_eos"),
        forces=("ignore_eos",),  # it has no min_tokens
        checks_model=False,
        cached_tokens="always",
        timing_found=("body:timings",),  # always there
    ),
    Quirk(
        name="transformers",
        title="transformers serve",
        chat=_CHAT,
        completions=_COMPLETIONS,
        prompt_ids=False,
        unknown_field="reject",
        cached_tokens="never",
    ),
    Quirk(
        name="openai",
        title="OpenAI",
        chat=_CHAT,
        completions=_COMPLETIONS,
        stream_options=(("include_usage", True), ("include_obfuscation", False)),  # padding of random length otherwise
        reasoning_max_field="max_completion_tokens",
        unknown_field="reject",
        cached_tokens="always",
        timing_found=("header:openai-processing-ms",),
    ),
    Quirk(
        name="azure",
        title="Azure OpenAI",
        chat=_CHAT,
        completions=_COMPLETIONS,
        reasoning_max_field="max_completion_tokens",
        unknown_field="reject",
        auth="api-key",
    ),
    Quirk(
        name="generic",
        title="an OpenAI-compatible server of unknown make",
        chat=_CHAT,
        completions=_COMPLETIONS,
        reasoning_max_field="max_completion_tokens",
        unknown_field="forward",  # most often a gateway: what it does with a field depends on who is behind it
    ),
)

QUIRKS: dict[str, Quirk] = {row.name: row for row in _ROWS}
"""Every server there is a row for, by name. `generic` is what `auto` falls back to: it sends the common fields only."""

NAMES: tuple[str, ...] = ("auto", *QUIRKS)
"""What `--server` takes."""
