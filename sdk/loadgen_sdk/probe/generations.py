"""Run the two generations of a probe and read their responses as a load does.

A short and a longer generation show how the server counts tokens, how long a token takes, and
whether several tokens come in one event.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ..errors import TargetUnusable
from ..request import Failure, Request, Usage
from ..transport.exchange import (
    compression_error_text,
    feed_whole_body,
    is_event_stream,
    unsupported_encoding,
)
from ..wire_formats.event_fields import error_text
from ..wire_formats.event_timeline import EventTimeline
from ..wire_formats.request_body import BodyFormat, encode_body
from ..wire_formats.response_reader import NOT_STREAMED, ResponseReader
from ..wire_formats.server_profiles import OUTPUT_LIMIT_FIELDS, ServerProfile
from ..wire_formats.server_timing import HEADER
from ..wire_formats.server_timing_lookup import parse_server_timing
from ..wire_formats.sse import EventTooLargeError, SseDecoder
from ..wire_formats.usage import without_doubtful_counts
from .http_types import HttpResponse, TransientFailure
from .model_list import ModelList
from .probe_client import MAX_ATTEMPTS, OutputLengths, ProbeClient
from .refusals import (
    USUAL_MINIMUM_TOKENS,
    is_about_model,
    is_prompt_too_long,
    minimum_output_tokens,
    refusal_text,
)

_NS_PER_MS = 1e6

_FURTHER_TOKENS = 8
"""How many tokens the longer generation has more: enough to see several tokens in one event."""

_MAX_CORRECTIONS = 3
"""One correction each for the name of the output limit, for its minimum according to the server,
and for the shortest output of the load."""

_OTHER_LIMIT_FIELD = OUTPUT_LIMIT_FIELDS[1]
_PINNED_MODEL = re.compile(r"pinned to '([^']+)'")
"""How a server with one fixed model names it when it refuses another, such as `pinned to 'm'`."""

_NONEXISTENT_MODEL = "unnamed"


class OutputLimits(NamedTuple):
    """The output limits of the two generations of a probe, in tokens."""

    short: int
    long: int


class Generation(msgspec.Struct, frozen=True):
    """A successful generation.

    Attributes:
        reader: What was read from the response.
        requested_tokens: The output limit that was requested.
        duration_ns: The time from sending the request to the end of the response.
        ignores_stream: A stream was requested, and one JSON object came.
        reports_server_timing: The response states the server's own timing.
    """

    reader: ResponseReader
    requested_tokens: int
    duration_ns: int
    ignores_stream: bool = False
    reports_server_timing: bool = False

    @property
    def usage(self) -> Usage:
        """The token counts that do not contradict each other."""
        return without_doubtful_counts(self.reader.usage())

    @property
    def tokens_per_event(self) -> float | None:
        """The streamed tokens per event with output, or None if that is not known.

        Reasoning tokens are not counted, because servers that report them do not stream them.
        """
        if self.ignores_stream or not self.reader.output_events:
            return None
        usage = self.usage
        streamed_tokens = (usage.output or 0) - (usage.reasoning or 0)
        if streamed_tokens <= 0:
            return None
        return streamed_tokens / self.reader.output_events


class GenerationPair(NamedTuple):
    """The two generations of a probe."""

    short: Generation
    long: Generation

    @property
    def ignores_stream(self) -> bool:
        """Return True if a response was one JSON object although a stream was requested."""
        return self.short.ignores_stream or self.long.ignores_stream

    @property
    def reports_server_timing(self) -> bool:
        """Return True if a response has the server's own timing."""
        return self.short.reports_server_timing or self.long.reports_server_timing

    @property
    def per_token_ms(self) -> float | None:
        """The time of each further token, or None if the responses do not show it.

        It is the difference of the durations divided by the difference of the output tokens, so
        that the time of the prompt and of the network cancels out. A duration of 0 was not
        measured. A longer generation that took less time by chance gives 0.
        """
        short_ns = self.short.duration_ns
        long_ns = self.long.duration_ns
        output_tokens = self.long.usage.output
        if output_tokens is None:
            output_tokens = self.long.requested_tokens
        further_tokens = output_tokens - self.short.requested_tokens
        if not short_ns or not long_ns or further_tokens < 1:
            return None
        further_ns = max(0, long_ns - short_ns)
        return further_ns / further_tokens / _NS_PER_MS

    @property
    def one_token_response_ms(self) -> float | None:
        """The time of a response of one token, or None if it is not known.

        It is the duration of the short generation without the time of its tokens after the first.
        """
        if not self.short.duration_ns:
            return None
        further_tokens = self.short.requested_tokens - 1
        further_tokens_ms = further_tokens * (self.per_token_ms or 0.0)
        return max(0.0, self.short.duration_ns / _NS_PER_MS - further_tokens_ms)


class LimitFieldRefusedError(Exception):
    """The server requires the other name of the output limit."""


class OutputLimitTooLowError(Exception):
    """The server requires an output limit of at least `minimum` tokens."""

    def __init__(self, minimum: int) -> None:
        """Keep the minimum."""
        super().__init__(minimum)
        self.minimum = minimum


class Generator:
    """Runs generations for one model and corrects their output limit if the server refuses it.

    No generation requests more tokens than the load does. If the server refuses a shorter output
    than the load requests, the shortest output of the load is tried before the probe fails.

    Attributes:
        profile: The server profile with the name of the output limit that the server accepts.
        corrections: What was corrected, as texts for the user.
    """

    def __init__(
        self,
        client: ProbeClient,
        profile: ServerProfile,
        models: ModelList,
        output_lengths: OutputLengths | None,
    ) -> None:
        """Choose the output limits of the first try.

        Most servers accept the usual minimum. A load with shorter outputs is probed with those.

        Args:
            client: The client that sends the requests.
            profile: The server profile, which names the field of the output limit.
            models: The models that the server lists.
            output_lengths: The output lengths of the load, or None if there is no load yet.
        """
        self.profile = profile
        self.corrections: list[str] = []
        self._client = client
        self._models = models
        self._output_lengths = output_lengths or OutputLengths(shortest=USUAL_MINIMUM_TOKENS)
        short_limit = min(self._output_lengths.shortest, USUAL_MINIMUM_TOKENS)
        self._limits = self._limits_from(short_limit)

    async def find_pinned_model(self) -> str:
        """Return the only model of a server that has no list of models, or "" if it is not known.

        Some servers are pinned to one model and name it when they refuse another one, so a request
        for a model that does not exist finds it out. It is not sent if the server has a list of
        models, or accepts any name.
        """
        has_model_list = bool(self._models.ids) or self._models.status == 200
        if has_model_list or not self.profile.rejects_unknown_models:
            return ""
        request = Request(id="probe", prompt="hello", max_tokens=self._limits.short)
        body_format = BodyFormat(
            self.profile, self._client.target.api, model=_NONEXISTENT_MODEL, stream=False
        )
        response = await self._client.post(encode_body(request, body_format))
        if response.status != 400:
            return ""
        match = _PINNED_MODEL.search(error_text(response.body))
        return match[1] if match else ""

    async def run(self, model: str, prompts: Sequence[str]) -> GenerationPair:
        """Run a short generation for the first prompt and a longer one for the second.

        If the server refuses the output limit, it is corrected and both generations are run again.

        Raises:
            TargetUnusable: The server refuses the generations.
        """
        for _ in range(_MAX_CORRECTIONS):
            try:
                return await self._run_both(model, prompts)
            except LimitFieldRefusedError:
                self.profile = msgspec.structs.replace(
                    self.profile,
                    output_limit_field=_OTHER_LIMIT_FIELD,
                    reasoning_output_limit_field=_OTHER_LIMIT_FIELD,
                )
                self.corrections.append(
                    "the server refuses max_tokens and accepts max_completion_tokens"
                )
            except OutputLimitTooLowError as error:
                self._limits = self._limits_from(error.minimum)
                self.corrections.append(
                    f"the server accepts no output limit below {error.minimum} tokens"
                )
        return await self._run_both(model, prompts)

    def _limits_from(self, short_limit: int) -> OutputLimits:
        """Return the limits of both generations. None is above the longest output of the load."""
        long_limit = short_limit + _FURTHER_TOKENS
        longest = self._output_lengths.longest
        if longest is not None:
            long_limit = min(long_limit, longest)
        return OutputLimits(short=short_limit, long=long_limit)

    async def _run_both(self, model: str, prompts: Sequence[str]) -> GenerationPair:
        """Run both generations at the same time and return them, or raise the first one's error.

        Both are awaited even if one fails, so that the error that the user sees does not depend on
        which of them fails first.
        """
        short_prompt, long_prompt = prompts
        short, long = await asyncio.gather(
            self._generate(model, short_prompt, self._limits.short),
            self._generate(model, long_prompt, self._limits.long),
            return_exceptions=True,
        )
        if isinstance(short, BaseException):
            raise short
        if isinstance(long, BaseException):
            raise long
        return GenerationPair(short, long)

    async def _generate(self, model: str, prompt: str, tokens: int) -> Generation:
        """Run one generation and try again after transient failures."""
        for _ in range(MAX_ATTEMPTS - 1):
            try:
                return await self._generate_once(model, prompt, tokens)
            except TransientFailure as failure:
                await self._client.wait_after_failure(failure)
        return await self._generate_once(model, prompt, tokens)

    async def _generate_once(self, model: str, prompt: str, tokens: int) -> Generation:
        """Run one generation without retries.

        Raises:
            TransientFailure: The response is one that a load counts as failed.
            TargetUnusable: The server refuses the request, or its response cannot be read.
            LimitFieldRefusedError: The server requires the other name of the output limit.
            OutputLimitTooLowError: The server may accept a longer output that the load requests.
        """
        client = self._client
        request = Request(id="probe", prompt=prompt, max_tokens=tokens)
        body_format = BodyFormat(
            self.profile, client.target.api, model, client.stream, client.extra_body
        )
        response = await client.post(encode_body(request, body_format))
        if response.status >= 300:
            self._check_refusal(response, model, tokens)
            # The server works, but its reasoning model needs more tokens than were requested.
            empty_reader = ResponseReader(EventTimeline())
            return Generation(empty_reader, tokens, response.duration_ns)

        self._check_encoding(response)
        is_stream = is_event_stream(response.status, response.headers)
        reader = self._read_body(response.body, is_stream=is_stream)
        failure = reader.find_failure(
            is_framing_complete=True, ends_with_connection=False, is_stream=is_stream
        )
        if failure is not None:
            raise self._generation_error(failure, tokens)
        timing = {HEADER: response.headers.get(HEADER), **(reader.server_timing or {})}
        return Generation(
            reader,
            tokens,
            response.duration_ns,
            ignores_stream=reader.remark == NOT_STREAMED,
            reports_server_timing=parse_server_timing(timing).has_durations,
        )

    def _generation_error(self, failure: Failure, tokens: int) -> TransientFailure:
        """Return the exception for a response with an error or without its end."""
        requested = "1 token" if tokens == 1 else f"{tokens} tokens"
        text = self._client.explainer.redact(failure.text)
        message = f"a preflight request to {requested} failed: {failure.kind}: {text}"
        return TransientFailure("invalid_answer", message, "see the server's log")

    def _check_refusal(self, response: HttpResponse, model: str, tokens: int) -> None:
        """Raise the error that says how to go on after a refused generation.

        Return without an error if the refusal shows that the target works: OpenAI responds with
        400 to a reasoning model that reaches its output limit before it has an answer.

        Args:
            response: The refusal, which is any response with a status of 300 or more.
            model: The model that was requested.
            tokens: The output limit that was requested.

        Raises:
            LimitFieldRefusedError: The server requires the other name of the output limit.
            OutputLimitTooLowError: The server may accept a longer output that the load requests.
            TargetUnusable: The server refuses the load.
        """
        text = refusal_text(response)
        if response.status in (400, 422):
            names_other_field = _OTHER_LIMIT_FIELD in text
            was_other_field_sent = self.profile.output_limit_field == _OTHER_LIMIT_FIELD
            if names_other_field and not was_other_field_sent:
                raise LimitFieldRefusedError
            higher_limit = self._higher_output_limit(response, model, tokens)
            if higher_limit is not None:
                raise OutputLimitTooLowError(higher_limit)
        if response.status == 400 and "output limit was reached" in text:
            return
        raise self._client.explainer.create_error(response, model, self._models)

    def _higher_output_limit(self, response: HttpResponse, model: str, tokens: int) -> int | None:
        """Return the output limit to try after a refusal, or None if no other limit may help.

        It is the minimum that the server states. If the refusal states none, and is about neither
        the prompt nor the model, it is the shortest output of the load, because the server may have
        refused the limit without saying so. A limit that the load never requests is not tried.
        """
        shortest, longest = self._output_lengths
        higher_limit = minimum_output_tokens(response)
        if higher_limit is None:
            is_about_prompt = is_prompt_too_long(response)
            if is_about_prompt or is_about_model(response, refusal_text(response), model):
                return None
            higher_limit = shortest
        is_requested_by_load = longest is None or higher_limit <= longest
        if higher_limit > tokens and is_requested_by_load:
            return higher_limit
        return None

    def _check_encoding(self, response: HttpResponse) -> None:
        """Raise TargetUnusable if the response is compressed. A load does not decompress."""
        encoding = unsupported_encoding(response.headers)
        if encoding:
            message = f"{self._client.target.redacted} sends {compression_error_text(encoding)}"
            hint = "turn compression off in the server or in the proxy before it"
            raise TargetUnusable("invalid_answer", message, hint)

    def _read_body(self, body: bytes, *, is_stream: bool) -> ResponseReader:
        """Read the body of a response with the reader of the load.

        Its events have no timestamps of their own, because the body was read as a whole.

        Raises:
            TargetUnusable: An event is too large.
        """
        reader = ResponseReader(EventTimeline())
        timestamp = 0
        if not is_stream:
            feed_whole_body(reader, body, timestamp, self._client.stream)
            return reader
        decoder = SseDecoder()
        try:
            reader.feed([*decoder.feed(body), *decoder.end()], timestamp)
        except EventTooLargeError as error:
            message = f"{self._client.target.path} streams {error}"
            hint = "check that this is the URL of the API"
            raise TargetUnusable("invalid_answer", message, hint) from None
        return reader
