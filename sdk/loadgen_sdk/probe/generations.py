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

_UNKNOWN_ARRIVAL = 0
"""The timestamp of all events. The probe gets a body as a whole, and does not use their times."""


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
        """The time that the server takes for each token after the first, or None if not known.

        It is the difference of the two durations divided by the difference of the output tokens, so
        that the time for the prompt and the network cancels out. If the longer generation took less
        time by chance, it is 0.
        """
        short_ns = self.short.duration_ns
        long_ns = self.long.duration_ns
        are_durations_known = short_ns > 0 and long_ns > 0

        # The short generation is taken to have reached its limit. The longer one may have ended
        # before its limit, so that the server's count is used if there is one.
        short_output_tokens = self.short.requested_tokens
        long_output_tokens = self.long.usage.output
        if long_output_tokens is None:
            long_output_tokens = self.long.requested_tokens

        additional_tokens = long_output_tokens - short_output_tokens
        if not are_durations_known or additional_tokens < 1:
            return None

        additional_ms = max(0, long_ns - short_ns) / _NS_PER_MS
        return additional_ms / additional_tokens

    @property
    def one_token_response_ms(self) -> float | None:
        """How long a response with a single token takes, or None if no duration is known.

        It is the duration of the short generation without the time of its tokens after the first.
        If the time per token is not known, nothing is subtracted.
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
        """Create a generator whose first requests have the usual output limits.

        Args:
            client: The client that sends the requests.
            profile: The server profile, which names the field of the output limit.
            models: The models that the server lists.
            output_lengths: The shortest and the longest output that the load requests. The load is
                the run that follows the probe. None if it is not known.
        """
        self.profile = profile
        self.corrections: list[str] = []  # The server has refused no output limit yet.
        self._client = client
        self._models = models
        self._output_lengths = output_lengths or OutputLengths(shortest=USUAL_MINIMUM_TOKENS)

        # Most servers accept USUAL_MINIMUM_TOKENS. A lower limit is used if the load also has one.
        short_limit = min(self._output_lengths.shortest, USUAL_MINIMUM_TOKENS)
        self._limits = self._limits_from(short_limit)

    async def find_pinned_model(self) -> str:
        """Return the only model of a server that names it in an error message, or "".

        Some servers without a list of models serve a single ("pinned") model. They refuse any other
        name with HTTP 400 and a message such as "Server is pinned to 'llama'". A model that does
        not exist is therefore requested, and the name is read from the message. Nothing is sent to
        a server that has a list of models or accepts any name.
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

        server_text = error_text(response.body)
        pinned_model = _PINNED_MODEL.search(server_text)
        return pinned_model[1] if pinned_model else ""

    async def run(self, model: str, prompts: Sequence[str]) -> GenerationPair:
        """Run a short generation for the first prompt and a longer one for the second.

        If the server refuses the output limit because of its field name or because it is too low,
        that is corrected, and both generations are run again.

        Raises:
            TargetUnusable: The server refuses the generations.
        """
        for _ in range(_MAX_CORRECTIONS):
            try:
                return await self._run_both(model, prompts)
            except LimitFieldRefusedError:
                self._use_other_limit_field()
            except OutputLimitTooLowError as error:
                self._limits = self._limits_from(error.minimum)
                self.corrections.append(
                    f"the server accepts no output limit below {error.minimum} tokens"
                )
        # All possible corrections were made.
        return await self._run_both(model, prompts)

    def _use_other_limit_field(self) -> None:
        """Send the output limit in the field `max_completion_tokens` from now on."""
        self.profile = msgspec.structs.replace(
            self.profile,
            output_limit_field=_OTHER_LIMIT_FIELD,
            reasoning_output_limit_field=_OTHER_LIMIT_FIELD,
        )
        self.corrections.append(f"the server refuses max_tokens and accepts {_OTHER_LIMIT_FIELD}")

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

    async def _generate(self, model: str, prompt: str, output_limit: int) -> Generation:
        """Run one generation and try again after transient failures."""
        for _ in range(MAX_ATTEMPTS - 1):
            try:
                return await self._generate_once(model, prompt, output_limit)
            except TransientFailure as failure:
                await self._client.wait_after_failure(failure)
        return await self._generate_once(model, prompt, output_limit)

    async def _generate_once(self, model: str, prompt: str, output_limit: int) -> Generation:
        """Send one generation and read its response, without retries.

        Args:
            model: The model to request.
            prompt: The prompt.
            output_limit: The output limit in tokens.

        Raises:
            TransientFailure: The response is one that a load counts as failed.
            TargetUnusable: The server refuses the request, or its response cannot be read.
            LimitFieldRefusedError: The server requires the other name of the output limit.
            OutputLimitTooLowError: A higher output limit, which the load requests, may work.
        """
        client = self._client
        request = Request(id="probe", prompt=prompt, max_tokens=output_limit)
        body_format = BodyFormat(
            self.profile, client.target.api, model, client.stream, client.extra_body
        )
        response = await client.post(encode_body(request, body_format))
        is_success = response.status < 300
        if is_success:
            return self._read_generation(response, output_limit)

        self._raise_if_other_limit_may_work(response, model, output_limit)
        if _is_limit_reached_in_reasoning(response):
            # The request is valid. The model has only used up its limit before its answer.
            return _generation_without_output(response, output_limit)

        raise client.explainer.create_error(response, model, self._models)

    def _read_generation(self, response: HttpResponse, output_limit: int) -> Generation:
        """Return what a response with a successful status contains.

        Raises:
            TransientFailure: The response contains an error, or its end is missing.
            TargetUnusable: The response cannot be read.
        """
        self._check_encoding(response)
        is_stream = is_event_stream(response.status, response.headers)
        reader = self._read_body(response.body, is_stream=is_stream)

        # The fetcher has already checked the HTTP framing: it returns only complete responses.
        failure = reader.find_failure(
            is_framing_complete=True, ends_with_connection=False, is_stream=is_stream
        )
        if failure is not None:
            raise self._generation_error(failure, output_limit)

        # A server may state its own timing in the header Server-Timing, in the body, or in both.
        timing_in_body = reader.server_timing or {}
        timing = {HEADER: response.headers.get(HEADER), **timing_in_body}

        # The reader remarks that one JSON object came although a stream was requested.
        ignores_stream = reader.remark == NOT_STREAMED
        return Generation(
            reader,
            requested_tokens=output_limit,
            duration_ns=response.duration_ns,
            ignores_stream=ignores_stream,
            reports_server_timing=parse_server_timing(timing).has_durations,
        )

    def _generation_error(self, failure: Failure, output_limit: int) -> TransientFailure:
        """Return the exception for a response with an error or without its end."""
        requested = "1 token" if output_limit == 1 else f"{output_limit} tokens"
        text = self._client.explainer.redact(failure.text)
        message = f"a preflight request to {requested} failed: {failure.kind}: {text}"
        return TransientFailure("invalid_answer", message, "see the server's log")

    def _raise_if_other_limit_may_work(
        self, response: HttpResponse, model: str, output_limit: int
    ) -> None:
        """Raise an exception that says which other output limit the server may accept.

        Servers name the field of the output limit differently, and some require a minimum. `run`
        catches the exception, changes the field or the limit, and sends the request again. Return
        without an exception if the refusal has another reason.

        Args:
            response: The refusal, which is any response with a status of 300 or more.
            model: The model that was requested.
            output_limit: The output limit that was requested, in tokens.

        Raises:
            LimitFieldRefusedError: The server requires the other name of the output limit.
            OutputLimitTooLowError: A higher output limit, which the load requests, may work.
        """
        is_about_request_body = response.status in (400, 422)
        if not is_about_request_body:
            return

        names_other_field = _OTHER_LIMIT_FIELD in refusal_text(response)
        was_other_field_sent = self.profile.output_limit_field == _OTHER_LIMIT_FIELD
        if names_other_field and not was_other_field_sent:
            raise LimitFieldRefusedError

        higher_limit = self._higher_output_limit(response, model, output_limit)
        if higher_limit is not None:
            raise OutputLimitTooLowError(higher_limit)

    def _higher_output_limit(
        self, response: HttpResponse, model: str, refused_limit: int
    ) -> int | None:
        """Return a higher output limit to try after a refusal, or None if none may help.

        It is the minimum that the server states in its refusal. Some servers refuse a low limit
        without giving the reason. If no other reason is obvious either, the shortest output that
        the load (the run after the probe) requests is tried. The limit is never higher than the
        longest output of the load: a probe with such a limit would not show that the load works.

        Args:
            response: The refusal.
            model: The model that was requested.
            refused_limit: The output limit that was requested, in tokens.
        """
        load_outputs = self._output_lengths
        higher_limit = minimum_output_tokens(response)
        if higher_limit is None:
            if _has_other_reason(response, model):
                return None
            higher_limit = load_outputs.shortest

        is_higher = higher_limit > refused_limit
        is_above_load = load_outputs.longest is not None and higher_limit > load_outputs.longest
        return higher_limit if is_higher and not is_above_load else None

    def _check_encoding(self, response: HttpResponse) -> None:
        """Raise TargetUnusable if the response is compressed. A load does not decompress."""
        encoding = unsupported_encoding(response.headers)
        if encoding:
            message = f"{self._client.target.redacted} sends {compression_error_text(encoding)}"
            hint = "turn compression off in the server or in the proxy before it"
            raise TargetUnusable("invalid_answer", message, hint)

    def _read_body(self, body: bytes, *, is_stream: bool) -> ResponseReader:
        """Parse the body of a response with the reader that a load also uses.

        Args:
            body: The complete body.
            is_stream: The body is a stream of server-sent events. Otherwise it is one JSON object.

        Raises:
            TargetUnusable: An event is too large.
        """
        reader = ResponseReader(EventTimeline())
        if not is_stream:
            was_stream_requested = self._client.stream
            feed_whole_body(reader, body, _UNKNOWN_ARRIVAL, was_stream_requested)
            return reader

        decoder = SseDecoder()
        try:
            events = [*decoder.feed(body), *decoder.end()]
            reader.feed(events, _UNKNOWN_ARRIVAL)
        except EventTooLargeError as error:
            message = f"{self._client.target.path} streams {error}"
            hint = "check that this is the URL of the API"
            raise TargetUnusable("invalid_answer", message, hint) from None

        return reader


def _generation_without_output(response: HttpResponse, output_limit: int) -> Generation:
    """Return the result of a generation whose response has no output and no token counts."""
    reader_without_events = ResponseReader(EventTimeline())
    return Generation(reader_without_events, output_limit, response.duration_ns)


def _has_other_reason(refusal: HttpResponse, model: str) -> bool:
    """Return True if a refusal is about the length of the prompt or about the model."""
    if is_prompt_too_long(refusal):
        return True
    return is_about_model(refusal, refusal_text(refusal), model)


def _is_limit_reached_in_reasoning(response: HttpResponse) -> bool:
    """Return True if a reasoning model has reached its output limit before its answer.

    OpenAI responds with 400 in this case, although the request is valid.
    """
    return response.status == 400 and "output limit was reached" in refusal_text(response)
