"""Responses of the chat and completions APIs of the simulated server.

Keys and their order are those of trtllm-serve (its protocol, post-processing and metrics sources),
or of OpenAI's public API. `request_parser.py` reads the requests.
"""

from __future__ import annotations

from typing import Any

import msgspec

from loadgen.sim.server.error_responses import format_error_event
from loadgen.sim.server.server_timing import RequestTiming, sglang_meta_info, vllm_metrics
from loadgen.sim.server.wire_format import (
    DONE_EVENT,
    PLACEHOLDER_BYTES,
    TEXT_PLACEHOLDER,
    TOOL_ARGUMENTS_END,
    TOOL_ARGUMENTS_START,
    ParsedRequest,
    ResponseContext,
    ResponseFormatter,
    format_sse_event,
    split_at_placeholder,
    split_chunk_around_word,
    token_ids,
    token_text,
)

JsonObject = dict[str, Any]

_DECODED_TOKENS_PER_ITERATION = {"avg_decoded_tokens_per_iter": 1.0}
_NULL_USAGE_AT_END = b'"usage":null}\n\n'


class CompletionFormatter(ResponseFormatter):
    """Formats the response to one chat or completions request."""

    end_marker = DONE_EVENT

    def __init__(self, request: ParsedRequest, context: ResponseContext) -> None:
        self.flavor = context.flavor
        self._request = request
        self._is_chat = request.api == "chat"
        self._is_trtllm = context.flavor == "trtllm"
        request_number = context.request_number
        self._common_fields = {
            "id": f"chatcmpl-{request_number}" if self._is_chat else f"cmpl-{request_number}",
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": context.created_s,
            "model": request.model,
        }
        self._null_usage = {"usage": None} if self._announces_usage() else {}
        # OpenAI's API sends the finish reason of a chat in a separate event, trtllm-serve and both
        # completions APIs in the last event that has text.
        self._has_finish_event = self._is_chat and not self._is_trtllm
        self._before_text, self._after_text = self._event_around_text(finish_reason=None)
        self._after_last_text = self._after_text
        if not self._has_finish_event:
            _, self._after_last_text = self._event_around_text(request.finish_reason)
        self.head, self.tail = split_chunk_around_word(self._before_text, self._after_text)

    def format_opening(self) -> list[bytes]:
        """Return the event with the role of a chat, or nothing for a completion.

        In both API flavors, it is sent immediately before the event of the first token.
        """
        if not self._is_chat:
            return []
        if self._is_trtllm:
            return [self._trtllm_role_event()]
        delta = self._first_delta({"role": "assistant", "content": "", "refusal": None})
        return [self._choice_event(_openai_chat_choice(delta, finish_reason=None))]

    def _trtllm_role_event(self) -> bytes:
        """Return the first event of a chat stream of trtllm-serve.

        Its choice has fewer fields than those of the later events, and trtllm-serve writes a space
        before the end of this event only.
        """
        delta = self._first_delta({"role": "assistant"})
        value: JsonObject = {**self._common_fields, "choices": [{"index": 0, "delta": delta}]}
        if self._request.continuous_usage:
            value["usage"] = self._usage(output_tokens=0)
        return b"data: " + msgspec.json.encode(value) + b" \n\n"

    def format_event(self, start: int, stop: int, *, is_last: bool, filler: bytes = b"") -> bytes:
        """Return the event with tokens `start` to `stop` (exclusive), counted over the completion.

        The event is put together from bytes that were encoded once per response, because encoding
        JSON once per token would limit the load that the server can simulate.

        Args:
            start: The number of the first token.
            stop: The number after the last token. If it equals `start`, the event has no token.
            is_last: Whether this is the last token event, which may carry the finish reason.
            filler: Additional text.
        """
        content = self._content(start, stop)
        if self._request.called_tool:
            if start == 0:
                content = TOOL_ARGUMENTS_START + content
            if is_last:
                content += TOOL_ARGUMENTS_END
        after_text = self._after_last_text if is_last else self._after_text
        event = self._before_text + content + filler + after_text
        if self._request.continuous_usage:
            return _with_usage(event, self._usage(stop))
        return event

    def format_closing(
        self, usage_tokens: int, timing: RequestTiming, *, with_finish: bool = True
    ) -> list[bytes]:
        """Return the events after the last token: a separate finish reason, and the usage.

        There is a separate finish reason only in the chat API of OpenAI. The usage is what the
        request asks for with `stream_options`.
        """
        events = []
        if self._has_finish_event and with_finish:
            choice = _openai_chat_choice({}, self._request.finish_reason)
            events.append(self._choice_event(choice))
        if self._request.include_usage:
            value: JsonObject = {
                **self._common_fields,
                "choices": [],
                "usage": self._usage(usage_tokens),
            }
            if self._request.include_metrics:
                value["metrics"] = vllm_metrics(timing)
            events.append(format_sse_event(value))
        return events

    def format_body(
        self, usage_tokens: int, timing: RequestTiming, *, with_finish: bool = True
    ) -> bytes:
        """Return the JSON body of a response that is not streamed.

        API, flavor and the options of the request decide which fields it has.
        """
        request = self._request
        choice: JsonObject = {"index": 0, **self._whole_content()}
        choice["logprobs"] = None
        choice["finish_reason"] = request.finish_reason if with_finish else None
        if self._is_trtllm:
            choice |= {"stop_reason": None, "disaggregated_params": None}
            choice |= _DECODED_TOKENS_PER_ITERATION
        if request.return_meta_info:
            meta_info = sglang_meta_info(timing)
            choice["meta_info"] = {**meta_info, "cached_tokens": request.cached_tokens}
        value: JsonObject = {
            **self._common_fields,
            "choices": [choice],
            "usage": self._usage(usage_tokens),
        }
        if request.include_metrics:
            value["metrics"] = vllm_metrics(timing)
        if self._is_chat:
            value["object"] = "chat.completion"
        return msgspec.json.encode(value)

    def format_engine_failure(self) -> tuple[list[bytes], bool]:
        """Return the events after a failure of the engine, and whether the body ends properly.

        trtllm-serve cuts a chat stream. After the error event of a completion it sends `[DONE]`
        twice.
        """
        if self._is_trtllm and self._is_chat:
            return [], False
        end_markers = [DONE_EVENT, DONE_EVENT] if self._is_trtllm else [DONE_EVENT]
        return [format_error_event("the simulated engine failed"), *end_markers], True

    def _announces_usage(self) -> bool:
        """Return whether the token events have `"usage": null`.

        Servers with OpenAI's API write it if the usage follows at the end of the stream.
        trtllm-serve always writes it in completions, and never in chats.
        """
        if self._is_trtllm:
            return not self._is_chat
        return self._request.include_usage

    def _event_around_text(self, finish_reason: str | None) -> tuple[bytes, bytes]:
        """Return the bytes that precede and follow the text in a token event.

        The whole event is encoded once with a placeholder instead of the text, and is split there.
        """
        choice = self._token_choice(TEXT_PLACEHOLDER, finish_reason)
        value = {**self._common_fields, "choices": [choice], **self._null_usage}
        encoded = msgspec.json.encode(value)
        # With `detokenize` false, the placeholder stands for the token ids in a list. Ids are
        # numbers, so the quotes around it are removed.
        encoded = encoded.replace(
            b'["' + PLACEHOLDER_BYTES + b'"]', b"[" + PLACEHOLDER_BYTES + b"]"
        )
        before, after = split_at_placeholder(encoded)
        return b"data: " + before, after + b"\n\n"

    def _token_choice(self, text: str, finish_reason: str | None) -> JsonObject:
        """Return the choice (OpenAI's word for one completion of a request) of a token event.

        API and flavor decide which keys it has, and whether a null is written or left out.
        """
        if self._request.called_tool:
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
            return {"index": 0, "delta": delta, "finish_reason": finish_reason}
        if self._is_chat and self._is_trtllm:
            return _trtllm_chat_choice(text, finish_reason)
        if self._is_chat:
            return _openai_chat_choice({"content": text}, None)
        if self._is_trtllm:
            return _trtllm_completion_choice(text, finish_reason, self._request.detokenize)
        return {"text": text, "index": 0, "logprobs": None, "finish_reason": finish_reason}

    def _choice_event(self, choice: JsonObject) -> bytes:
        """Return an event with this choice and the fields that all events have."""
        return format_sse_event({**self._common_fields, "choices": [choice], **self._null_usage})

    def _content(self, start: int, stop: int) -> bytes:
        """Return the text of tokens, or their ids if the request has `detokenize` false.

        Both are ready to be put into JSON: the words need no escapes, and the ids are separated by
        commas.
        """
        digest = self._request.digest
        if self._request.detokenize:
            return token_text(digest, start, stop)
        return b",".join([b"%d" % token_id for token_id in token_ids(digest, start, stop)])

    def _usage(self, output_tokens: int) -> JsonObject:
        """Return the usage object. It always contains `cached_tokens`, as in trtllm-serve.

        OpenAI's API has this field, too.
        """
        input_tokens = self._request.input_tokens
        return {
            "prompt_tokens": input_tokens,
            "total_tokens": input_tokens + output_tokens,
            "completion_tokens": output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._request.cached_tokens},
        }

    def _first_delta(self, delta: JsonObject) -> JsonObject:
        """Return the first delta of a chat, with the id and the name of the called tool if any.

        A delta is what an event adds to the message. The arguments of a tool call follow in the
        deltas of the tokens.
        """
        if not self._request.called_tool:
            return delta
        call = {
            "index": 0,
            "id": self._tool_call_id(),
            "type": "function",
            "function": {"name": self._request.called_tool},
        }
        return {**delta, "content": None, "tool_calls": [call]}

    def _tool_call_id(self) -> str:
        return f"call_{self._request.digest[:8].hex()}"

    def _whole_content(self) -> JsonObject:
        """Return the fields of a choice that contain the whole completion.

        Completions have a text or token ids, chats a message. The arguments of a tool call are JSON
        inside a JSON string, as in OpenAI's API.
        """
        request = self._request
        if not request.detokenize:
            ids = token_ids(request.digest, 0, request.output_tokens)
            return {"text": "", "token_ids": ids}
        text = token_text(request.digest, 0, request.output_tokens).decode()
        if not self._is_chat:
            return {"text": text}
        message: JsonObject = {"role": "assistant", "content": text}
        if self._is_trtllm:
            message |= {"reasoning_content": "", "reasoning": None, "tool_calls": []}
        else:
            message["refusal"] = None
        if request.called_tool:
            arguments = msgspec.json.encode({"input": text}).decode()
            call = {
                "id": self._tool_call_id(),
                "type": "function",
                "function": {"name": request.called_tool, "arguments": arguments},
            }
            message |= {"content": None, "tool_calls": [call]}
        return {"message": message}


def _trtllm_chat_choice(text: str, finish_reason: str | None) -> JsonObject:
    """Return a token choice of trtllm-serve's chat API, which leaves out what is null."""
    choice: JsonObject = {"index": 0, "delta": {"content": text, "reasoning_content": ""}}
    if finish_reason:
        choice["finish_reason"] = finish_reason
    return choice | _DECODED_TOKENS_PER_ITERATION


def _trtllm_completion_choice(text: str, finish_reason: str | None, detokenize: bool) -> JsonObject:
    """Return a token choice of trtllm-serve's completions API, which writes every key.

    `text` is the placeholder for the text or for the token ids.
    """
    return {
        "index": 0,
        "text": text if detokenize else "",
        "token_ids": None if detokenize else [text],
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": None,
        **_DECODED_TOKENS_PER_ITERATION,
    }


def _openai_chat_choice(delta: JsonObject, finish_reason: str | None) -> JsonObject:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _with_usage(event: bytes, usage: JsonObject) -> bytes:
    """Return an event with a usage object as its last field, in the place of a null usage."""
    field = b'"usage":' + msgspec.json.encode(usage) + b"}\n\n"
    if event.endswith(_NULL_USAGE_AT_END):
        return event.removesuffix(_NULL_USAGE_AT_END) + field
    return event.removesuffix(b"}\n\n") + b"," + field
