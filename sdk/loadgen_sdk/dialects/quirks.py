"""The table of servers: which fields each kind accepts, and what it reports.

The rules are data, so that each line can be checked against the server's own documents. Code that reads the table does
not depend on the name of a server. Pure. A row changes at run time only through `msgspec.structs.replace`, when a probe
finds that the server at hand differs from the table.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

Api = Literal["chat", "completions", "responses", "embeddings", "rerank"]
APIS: tuple[Api, ...] = ("chat", "completions", "responses", "embeddings", "rerank")
VALUES: tuple[Api, ...] = ("embeddings", "rerank")
"""Those that answer with numbers at once: no tokens come out, so there is no TTFT and nothing is streamed."""

MAX_FIELDS = ("max_tokens", "max_completion_tokens")
"""The two names of the output limit. trtllm-serve takes them for one field and answers 400 to both at once."""

REASONING_MODEL = re.compile(r"(?:^|[/:])(?:o\d|gpt-5(?!-chat))", re.IGNORECASE)
"""Model names of OpenAI that refuse `max_tokens` in chat and take `max_completion_tokens` instead."""


class Quirk(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table: everything that the client does differently for one kind of server.

    A body has model, prompt, stream, stream_options, the output limit, the fields of `forces`, and what the user adds.
    No other field is sent, because half of these servers answer 400 or 422 to an unknown field.
    """

    name: str  # the value for `--server`
    title: str  # name for people
    stream_options: tuple[tuple[str, bool], ...] = (("include_usage", True),)  # inside `stream_options`, when streaming
    max_field: str = "max_tokens"
    reasoning_max_field: str = "max_tokens"  # in chat, for models that REASONING_MODEL matches
    forces: tuple[str, ...] = ()  # the fields that force the exact output length; (): not possible
    continuous_usage: bool = False  # accepts stream_options.continuous_usage_stats: cumulative usage on every event
    prompt_ids: bool = True  # completions accept a list of token ids as prompt
    chat_ids: bool = False  # a chat accepts token ids in the place of its messages, as `prompt_token_ids`
    checks_model: bool = True  # an unknown model name is an error; False: any name is served
    timing_headers: tuple[tuple[str, str], ...] = ()  # ask for its own account of a request (server_account.py)
    timing_fields: dict[str, Any] = {}  # the same as fields of the body; neither: it gives one unasked, or not at all
    reset_path: str = ""  # POST to this path empties the prefix cache; "": there is no such request
    reset_hint: str = ""  # what to do where that is refused
    timing_streams: bool = True  # False: a stream that asks for it is refused, only whole answers have it
    reuse_s: float = 4.0  # reuse no connection that was idle for longer: most of these servers close it after 5 s

    def limit_field(self, api: Api, model: str) -> str:
        """Name of the field that limits the output of `model` on `api`."""
        reasoning = api == "chat" and self.reasoning_max_field != self.max_field and REASONING_MODEL.search(model)
        return self.reasoning_max_field if reasoning else self.max_field


_EXACT = ("ignore_eos", "min_tokens")
_COMPLETION = "max_completion_tokens"
_QUIET = (("include_usage", True), ("include_obfuscation", False))  # else random padding

# fmt: off
_ROWS = (
    Quirk(  # the header has no effect unless the server runs with return_perf_metrics: true
        name="trtllm", title="TensorRT-LLM trtllm-serve", forces=_EXACT, continuous_usage=True, checks_model=False,
        chat_ids=True, timing_headers=(("X-TRTLLM-return-metrics", "1"),), reset_path="/reset_prefix_cache",
        reset_hint="only some versions of trtllm-serve have it (NVIDIA/TensorRT-LLM#14970, #15313): else restart it",
    ),
    Quirk(  # the field has no effect unless the server runs with --enable-per-request-metrics
        name="vllm", title="vLLM", forces=_EXACT, continuous_usage=True, timing_fields={"include_metrics": True},
        reset_path="/reset_prefix_cache",
        reset_hint="start it with VLLM_SERVER_DEV_MODE=1; requests in flight keep their blocks",
    ),
    Quirk(  # its times are in the answer only where the server runs with --enable-metrics
        name="sglang", title="SGLang", forces=_EXACT, continuous_usage=True, checks_model=False,
        timing_fields={"return_meta_info": True}, timing_streams=False,
        reset_path="/flush_cache", reset_hint="it flushes only while no request runs or waits",
    ),
    Quirk(
        name="dynamo", title="NVIDIA Dynamo", forces=_EXACT, continuous_usage=True,
        timing_fields={"nvext": {"extra_fields": ["timing"]}},
    ),
    Quirk(  # it has no min_tokens
        name="llamacpp", title="llama.cpp llama-server", forces=("ignore_eos",), checks_model=False
    ),
    Quirk(name="transformers", title="transformers serve", prompt_ids=False),
    Quirk(name="openai", title="OpenAI", stream_options=_QUIET, reasoning_max_field=_COMPLETION),
    Quirk(name="azure", title="Azure OpenAI", reasoning_max_field=_COMPLETION),
    Quirk(  # usually a gateway: the server behind it decides what a field does
        name="generic", title="an OpenAI-compatible server of unknown make", reasoning_max_field=_COMPLETION
    ),
)

# fmt: on
QUIRKS: dict[str, Quirk] = {row.name: row for row in _ROWS}
"""The rows by server name. `auto` falls back to `generic`, which sends only the common fields."""

NAMES: tuple[str, ...] = ("auto", *QUIRKS)
"""The values for `--server`."""
