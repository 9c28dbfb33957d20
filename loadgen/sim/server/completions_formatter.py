"""Responses of the chat and completions APIs of the simulated server.

Keys and their order are those of trtllm-serve (its protocol, post-processing and metrics sources),
or of OpenAI's public API. `request_parser.py` reads the requests.
"""

from __future__ import annotations

from typing import Any

import msgspec

from loadgen.sim.server.error_responses import format_error_event
from loadgen.sim.server.server_timing import (
    RequestTiming,
    build_sglang_meta_info,
    build_vllm_metrics,
)
from loadgen.sim.server.wire_format import (
    DONE_EVENT,
    PLACEHOLDER_BYTES,
    TEXT_PLACEHOLDER,
    TOOL_ARGUMENTS_END,
    TOOL_ARGUMENTS_START,
    ParsedRequest,
    ResponseContext,
    ResponseFormatter,
    completion_text,
    escape_json,
    format_chunk_around_word,
    format_sse_event,
    split_at_placeholder,
    token_ids,
    token_text,
)

JsonObject = dict[str, Any]

DECODED_TOKENS_PER_ITERATION = 1.0  # there is no speculative decoding, which gives more
_NULL_USAGE_AT_END = b'"usage":null}\n\n'


class CompletionFormatter(ResponseFormatter):
    """Formats the response to one chat or completions request."""

    end_marker = DONE_EVENT

    def __init__(self, request: ParsedRequest, context: ResponseContext) -> None:
        """Encode the parts of the response that are the same in all its token events.

        The JSON around the text of an event is encoded here, once per response. A token event
        consists of `_before_text`, its text and `_after_text`. The last token event ends with
        `_after_last_text` instead.

        Args:
            request: The request that is answered.
            context: The API flavor, the number of the request and the time.
        """
        self.flavor = context.flavor
        self._request = request
        self._is_chat = request.api == "chat"
        self._is_trtllm = context.flavor == "trtllm"
        self._common_fields = _build_common_fields(request, context)
        self._null_usage = {"usage": None} if self._has_null_usage() else {}

        # OpenAI's API sends the finish reason of a chat in a separate event. trtllm-serve and both
        # completions APIs send it in the last event that has text.
        self._has_finish_event = self._is_chat and not self._is_trtllm

        self._before_text, self._after_text = self._encode_around_text(finish_reason=None)
        self._after_last_text = self._encode_after_last_text()

        # Most events are sent as an HTTP chunk with one word. All its other bytes are known now.
        self.chunk_prefix, self.chunk_suffix = format_chunk_around_word(
            self._before_text, self._after_text
        )

    def _encode_after_last_text(self) -> bytes:
        """Return the bytes after the text in the last token event.

        They include the finish reason, unless that is sent in a separate event.
        """
        if self._has_finish_event:
            return self._after_text

        _before_text, after_text = self._encode_around_text(self._request.finish_reason)
        return after_text

    def format_opening(self) -> list[bytes]:
        """Return the events before the first token: the role of a chat, or none for a completion.

        In both API flavors, the role is sent immediately before the event of the first token.
        """
        if not self._is_chat:
            return []
        if self._is_trtllm:
            return [self._format_trtllm_role_event()]
        delta = self._build_first_delta({"role": "assistant", "content": "", "refusal": None})
        return [self._format_choice_event(_build_openai_chat_choice(delta, finish_reason=None))]

    def _format_trtllm_role_event(self) -> bytes:
        """Return the first event of a chat stream of trtllm-serve.

        Its choice has fewer fields than those of the later events, and trtllm-serve writes a space
        before the end of this event only.
        """
        delta = self._build_first_delta({"role": "assistant"})
        value: JsonObject = {**self._common_fields, "choices": [{"index": 0, "delta": delta}]}
        if self._request.continuous_usage:
            value["usage"] = self._build_usage(output_tokens=0)
        return b"data: " + msgspec.json.encode(value) + b" \n\n"

    def format_event(self, start: int, stop: int, *, is_last: bool, filler: bytes = b"") -> bytes:
        """Return the event with the tokens from index `start` to `stop` (exclusive).

        The JSON before and after the text was encoded in advance, because encoding it once per
        token would limit the load that the server can simulate.

        Args:
            start: The index of the first token in the completion.
            stop: The index after the last token. If it equals `start`, the event has no token.
            is_last: Whether this is the last token event, which may carry the finish reason.
            filler: Additional text after the tokens, for the injected failure `oversized`.
        """
        text = self._encode_tokens(start, stop)
        if self._request.called_tool and not self._request.answer_tokens:
            # The text of the completion is the argument of the tool call: `{"input": "..."}`. The
            # first event begins this JSON object, and the last event ends it.
            if start == 0:
                text = TOOL_ARGUMENTS_START + text
            if is_last:
                text += TOOL_ARGUMENTS_END

        after_text = self._after_last_text if is_last else self._after_text
        event = self._before_text + text + filler + after_text
        if self._request.continuous_usage:
            return _with_usage(event, self._build_usage(stop))

        return event

    def format_closing(
        self, reported_tokens: int, timing: RequestTiming, *, has_finish_reason: bool = True
    ) -> list[bytes]:
        """Return the events after the last token: the finish reason and the usage.

        Only the chat API of OpenAI has a separate event for the finish reason. The usage is sent
        only if the request asks for it with `stream_options`.

        Args:
            reported_tokens: What the usage reports as output tokens.
            timing: The server timing breakdown, for requests that ask for it.
            has_finish_reason: Whether the finish reason is sent at all.
        """
        events = []
        if self._has_finish_event and has_finish_reason:
            choice = _build_openai_chat_choice({}, self._request.finish_reason)
            events.append(self._format_choice_event(choice))

        if self._request.include_usage:
            value: JsonObject = {
                **self._common_fields,
                "choices": [],
                "usage": self._build_usage(reported_tokens),
            }
            if self._request.include_metrics:
                value["metrics"] = build_vllm_metrics(timing)

            events.append(format_sse_event(value))

        return events

    def format_body(
        self, reported_tokens: int, timing: RequestTiming, *, has_finish_reason: bool = True
    ) -> bytes:
        """Return the JSON body of a response that is not streamed.

        Args:
            reported_tokens: What the usage reports as output tokens.
            timing: The server timing breakdown, for requests that ask for it.
            has_finish_reason: Whether the finish reason is sent at all.
        """
        finish_reason = self._request.finish_reason if has_finish_reason else None
        value: JsonObject = {
            **self._common_fields,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "choices": [self._build_whole_choice(finish_reason, timing)],
            "usage": self._build_usage(reported_tokens),
        }
        if self._request.include_metrics:
            value["metrics"] = build_vllm_metrics(timing)

        return msgspec.json.encode(value)

    def _build_whole_choice(self, finish_reason: str | None, timing: RequestTiming) -> JsonObject:
        """Return the choice with the whole completion, for a response that is not streamed.

        A choice is OpenAI's word for one of the completions of a request. trtllm-serve adds three
        fields, whose values here are those of a server that has no special features enabled. SGLang
        adds `meta_info`, with the server timing breakdown, if the request asks for it.

        Args:
            finish_reason: Why the completion has ended, or None to leave this open.
            timing: The server timing breakdown.
        """
        choice: JsonObject = {
            "index": 0,
            **self._build_whole_content(),
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        if self._is_trtllm:
            choice["stop_reason"] = None
            choice["disaggregated_params"] = None  # prefill and decoding are on the same machine
            choice["avg_decoded_tokens_per_iter"] = DECODED_TOKENS_PER_ITERATION

        if self._request.return_meta_info:
            meta_info = build_sglang_meta_info(timing)
            choice["meta_info"] = {**meta_info, "cached_tokens": self._request.cached_tokens}

        return choice

    def format_engine_failure(self) -> tuple[list[bytes], bool]:
        """Return the events after a failure of the engine, and whether the body ends properly.

        The events are those of real servers. trtllm-serve cuts a chat stream without an event, and
        sends `[DONE]` twice after the error event of a completion.
        """
        if self._is_trtllm and self._is_chat:
            return [], False
        end_markers = [DONE_EVENT, DONE_EVENT] if self._is_trtllm else [DONE_EVENT]
        return [format_error_event("the simulated engine failed"), *end_markers], True

    def _has_null_usage(self) -> bool:
        """Return whether the token events have `"usage": null`.

        Servers with OpenAI's API write it if the usage follows at the end of the stream.
        trtllm-serve always writes it in completions, and never in chats.
        """
        if self._is_trtllm:
            return not self._is_chat
        return self._request.include_usage

    def _encode_around_text(self, finish_reason: str | None) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text in a token event.

        To find them, an event is encoded with a placeholder for its text, and split there. Then a
        token event needs no JSON encoding.
        """
        choice = self._build_placeholder_choice(finish_reason)
        value = {**self._common_fields, "choices": [choice], **self._null_usage}
        before, after = split_at_placeholder(msgspec.json.encode(value))
        return b"data: " + before, after + b"\n\n"

    def _build_placeholder_choice(self, finish_reason: str | None) -> JsonObject:
        """Return the choice of a token event, with a placeholder instead of its text.

        A choice is OpenAI's word for one of the completions of a request.
        """
        if self._is_chat:
            return self._build_chat_choice(TEXT_PLACEHOLDER, finish_reason)
        if self._request.detokenize:
            return self._build_completion_choice(TEXT_PLACEHOLDER, finish_reason)

        # Only trtllm-serve can send token ids. They are numbers, so their placeholder has to be
        # encoded without quotes. `Raw` is for bytes that are JSON already, and adds nothing.
        unquoted_placeholder = msgspec.Raw(PLACEHOLDER_BYTES)
        return _build_trtllm_completion_choice(
            finish_reason, text="", token_ids=[unquoted_placeholder]
        )

    def _build_chat_choice(self, text: str, finish_reason: str | None) -> JsonObject:
        """Return the choice of a token event of a chat, as the API flavor writes it."""
        if self._request.called_tool:
            return _build_tool_call_choice(text, finish_reason)
        if self._is_trtllm:
            return _build_trtllm_chat_choice(text, finish_reason)
        # OpenAI's API sends the finish reason of a chat in an event of its own.
        return _build_openai_chat_choice({"content": text}, finish_reason=None)

    def _build_completion_choice(self, text: str, finish_reason: str | None) -> JsonObject:
        """Return the choice of a token event of a completion, as the API flavor writes it."""
        if self._is_trtllm:
            return _build_trtllm_completion_choice(finish_reason, text=text, token_ids=None)
        return {"text": text, "index": 0, "logprobs": None, "finish_reason": finish_reason}

    def _format_choice_event(self, choice: JsonObject) -> bytes:
        """Return an event with this choice and the fields that all events have."""
        return format_sse_event({**self._common_fields, "choices": [choice], **self._null_usage})

    def _encode_tokens(self, start: int, stop: int) -> bytes:
        """Return the bytes of tokens `start` to `stop` as they are in the JSON of an event.

        These are words, which need no escapes, or the text of a right answer. If the request has
        `detokenize` false, they are token ids separated by commas.
        """
        digest = self._request.digest
        if self._request.detokenize and self._request.answer_tokens:
            return escape_json(completion_text(self._request, start, stop))
        if self._request.detokenize:
            return token_text(digest, start, stop)
        return b",".join([b"%d" % token_id for token_id in token_ids(digest, start, stop)])

    def _build_usage(self, output_tokens: int) -> JsonObject:
        """Return the usage object for a completion with this many output tokens.

        It always contains the number of cached prompt tokens, as in trtllm-serve and OpenAI's API.
        """
        input_tokens = self._request.input_tokens
        return {
            "prompt_tokens": input_tokens,
            "total_tokens": input_tokens + output_tokens,
            "completion_tokens": output_tokens,
            "prompt_tokens_details": {"cached_tokens": self._request.cached_tokens},
        }

    def _build_first_delta(self, delta: JsonObject) -> JsonObject:
        """Return the first delta of a chat stream, extended by a tool call if there is one.

        A delta is what an event adds to the message. The first one has the id and the name of the
        called tool. The arguments of the call follow in the deltas of the tokens.
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

    def _build_whole_content(self) -> JsonObject:
        """Return the content fields of a choice with the whole completion.

        A chat has a message. A completion has a text, or token ids instead if the request sets
        `detokenize` to false. Only requests for completions can do that.
        """
        request = self._request
        if not request.detokenize:
            ids = token_ids(request.digest, 0, request.output_tokens)
            return {"text": "", "token_ids": ids}

        text = completion_text(request, 0, request.output_tokens)
        if self._is_chat:
            return {"message": self._build_message(text)}

        return {"text": text}

    def _build_message(self, text: str) -> JsonObject:
        """Return the message of a chat, with a text or with a call of a tool.

        The arguments of a tool call are JSON inside a JSON string, as in OpenAI's API.
        """
        message: JsonObject = {"role": "assistant", "content": text}
        if self._is_trtllm:
            message |= {"reasoning_content": "", "reasoning": None, "tool_calls": []}
        else:
            message["refusal"] = None

        called_tool = self._request.called_tool
        if called_tool:
            # A right answer is complete JSON. Other texts are the value of an argument.
            has_arguments = bool(self._request.answer_tokens)
            arguments = text if has_arguments else msgspec.json.encode({"input": text}).decode()
            call = {
                "id": self._tool_call_id(),
                "type": "function",
                "function": {"name": called_tool, "arguments": arguments},
            }
            message |= {"content": None, "tool_calls": [call]}

        return message


def _build_trtllm_chat_choice(text: str, finish_reason: str | None) -> JsonObject:
    """Return a token choice of trtllm-serve's chat API, which leaves out what is null."""
    choice: JsonObject = {"index": 0, "delta": {"content": text, "reasoning_content": ""}}
    if finish_reason:
        choice["finish_reason"] = finish_reason
    choice["avg_decoded_tokens_per_iter"] = DECODED_TOKENS_PER_ITERATION
    return choice


def _build_trtllm_completion_choice(
    finish_reason: str | None, *, text: str, token_ids: list[msgspec.Raw] | None
) -> JsonObject:
    """Return the choice of a token event of trtllm-serve's completions API, with every key.

    Args:
        finish_reason: Why the completion has ended, or None if this is not its last event.
        text: The text of the event, empty if it has token ids.
        token_ids: The token ids of the event, None if it has a text.
    """
    return {
        "index": 0,
        "text": text,
        "token_ids": token_ids,
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "avg_decoded_tokens_per_iter": DECODED_TOKENS_PER_ITERATION,
    }


def _build_common_fields(request: ParsedRequest, context: ResponseContext) -> JsonObject:
    """Return the fields at the beginning of each event of a stream."""
    is_chat = request.api == "chat"
    id_prefix = "chatcmpl" if is_chat else "cmpl"
    return {
        "id": f"{id_prefix}-{context.request_number}",
        "object": "chat.completion.chunk" if is_chat else "text_completion",
        "created": context.created_s,
        "model": request.model,
    }


def _build_openai_chat_choice(delta: JsonObject, finish_reason: str | None) -> JsonObject:
    """Return the choice of an event of OpenAI's chat API. The delta is its part of the message."""
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _build_tool_call_choice(text: str, finish_reason: str | None) -> JsonObject:
    """Return the choice of a token event of a chat whose completion is a tool call.

    The text is the next part of the JSON arguments of the call.
    """
    delta = {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
    return {"index": 0, "delta": delta, "finish_reason": finish_reason}


def _with_usage(event: bytes, usage: JsonObject) -> bytes:
    """Return an encoded event with a usage object as its last field.

    An event ends with `}` and two line ends. If its last field is a null usage, that is replaced.
    """
    usage_field = b'"usage":' + msgspec.json.encode(usage) + b"}\n\n"
    if event.endswith(_NULL_USAGE_AT_END):
        return event.removesuffix(_NULL_USAGE_AT_END) + usage_field
    return event.removesuffix(b"}\n\n") + b"," + usage_field
