"""The table of servers: which fields each kind accepts, and what it reports.

The rules are data, so that each line can be checked against the server's own documents. Code that reads the table does
not depend on the name of a server. Pure. A row changes at run time only through `msgspec.structs.replace`, when a probe
finds that the server at hand differs from the table.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

Api = Literal["chat", "completions"]
APIS: tuple[Api, ...] = ("chat", "completions")

MAX_FIELDS = ("max_tokens", "max_completion_tokens")
"""The two names of the output limit. trtllm-serve takes them for one field and answers 400 to both at once."""

REASONING_MODEL = re.compile(r"(?:^|[/:])(?:o\d|gpt-5(?!-chat))", re.IGNORECASE)
"""Model names of OpenAI that refuse `max_tokens` in chat and take `max_completion_tokens` instead."""


class Quirk(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table: everything that the client does differently for one kind of server.

    `chat` and `completions` list the *only* fields that are sent by default, in this order; the user's extra body is
    added to them. No other field is sent, because half of these servers answer 400 or 422 to an unknown field.
    """

    name: str  # the value for `--server`
    title: str  # name for people
    chat: tuple[str, ...]
    completions: tuple[str, ...]
    stream_options: tuple[tuple[str, bool], ...] = (("include_usage", True),)  # inside `stream_options`, when streaming
    max_field: str = "max_tokens"
    reasoning_max_field: str = "max_tokens"  # in chat, for models that REASONING_MODEL matches
    forces: tuple[str, ...] = ()  # those of the fields above that force the exact output length; (): not possible
    continuous_usage: bool = False  # accepts stream_options.continuous_usage_stats: cumulative usage on every event
    prompt_ids: bool = True  # completions accept a list of token ids as prompt
    checks_model: bool = True  # an unknown model name is an error; False: any name is served
    unknown_field: Literal["reject", "ignore", "forward"] = "ignore"
    cached_tokens: Literal["always", "option", "unknown", "never"] = "unknown"  # usage counts cached tokens
    reuse_s: float = 4.0  # reuse no connection that was idle for longer: most of these servers close it after 5 s
    auth: Literal["bearer", "api-key"] = "bearer"
    timing_headers: tuple[tuple[str, str], ...] = ()  # sent only to request the server's own timing
    timing_body: dict[str, Any] = {}  # the same for the body, into which it is merged
    timing_found: tuple[str, ...] = ()  # where that timing is found: `header:NAME`, `event:NAME`, `body:PATH`

    def fields(self, api: Api) -> tuple[str, ...]:
        """Names of the fields that `body.body` may send to this API, in order."""
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
        stream_options=(
            ("include_usage", True),
            ("include_obfuscation", False),
        ),  # else random padding
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
        unknown_field="forward",  # usually a gateway: the server behind it decides what a field does
    ),
)

QUIRKS: dict[str, Quirk] = {row.name: row for row in _ROWS}
"""The rows by server name. `auto` falls back to `generic`, which sends only the common fields."""

NAMES: tuple[str, ...] = ("auto", *QUIRKS)
"""The values for `--server`."""
