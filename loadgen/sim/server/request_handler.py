"""Answers the HTTP requests to the simulated server, and injects failures."""

from __future__ import annotations

import hashlib
import time
import traceback
from http import HTTPStatus

from loadgen.core.errors import LoadgenError, UserError, of_reading
from loadgen.sim.server.completions_formatter import CompletionFormatter
from loadgen.sim.server.connection import Connection
from loadgen.sim.server.embeddings_api import (
    EmbeddingsFormatter,
    parse_embeddings_request,
    parse_rerank_request,
)
from loadgen.sim.server.engine_setup import create_engine
from loadgen.sim.server.error_responses import RefusalError, format_error, refusal, unknown_route
from loadgen.sim.server.fault_injection import (
    InjectedFailure,
    choose_failing_token,
    parse_failure,
    parse_failure_plan,
)
from loadgen.sim.server.http_messages import (
    Headers,
    HttpRequest,
    HttpResponse,
    format_response_head,
)
from loadgen.sim.server.messages_api import MessageFormatter, parse_messages_request
from loadgen.sim.server.metrics_pages import ServerMetrics
from loadgen.sim.server.options import Options
from loadgen.sim.server.pages import PLAIN_TEXT, ServerCounters, ServerPages
from loadgen.sim.server.request_parser import change_one_word, parse_completions_request
from loadgen.sim.server.response import ResponseSettings, SimResponse
from loadgen.sim.server.response_sender import ResponseSender
from loadgen.sim.server.responses_api import (
    ResponsesFormatter,
    StoredResponses,
    parse_responses_request,
)
from loadgen.sim.server.right_answers import RightAnswers
from loadgen.sim.server.send_log import LoggedRequest, SendLog
from loadgen.sim.server.speculation_counters import create_speculation_counters
from loadgen.sim.server.wire_format import Api, ParsedRequest, ResponseContext, ResponseFormatter

_API_PATHS: dict[str, Api] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",  # the path of Cohere, which vLLM has too
    "/rerank": "rerank",
}
_HTTP_ERROR_TEXTS = {413: b"the body is too large", 431: b"the head is too large"}
_INVALID_REQUEST_TEXT = b"Invalid HTTP request received."
_STATUS_FAILURE_PREFIX = "http_"  # of failures that are named after a status, such as `http_429`
NS_PER_S = 1_000_000_000


class RequestHandler:
    """Answers the requests of all connections.

    The request headers `X-Request-Id` (names the request in the log) and `X-Sim-Fault` (injects a
    failure) and the paths starting with `/_` exist only in this server.
    """

    def __init__(self, options: Options) -> None:
        """Create the engine, the pages and the sender of responses that the options describe.

        Raises UserError or CombinedError if the options are not valid.
        """
        setup = create_engine(options)
        self.counters = ServerCounters()
        self.log = SendLog(options.log_events)
        self._metrics = ServerMetrics(create_speculation_counters(options))
        self._pages = ServerPages(options, setup, self.counters, self._metrics, self.log)
        self.sender = ResponseSender(setup, self.counters, self._metrics, self.log)

        self._options = options
        self._rules = setup.rules  # which requests are accepted
        self._tokens_per_event = setup.tokens_per_event
        self._failure_plan = parse_failure_plan(options.faults, options.seed)
        self._authorization = _read_authorization(options.api_key_file)
        self._stored_responses = StoredResponses()
        self._right_answers = RightAnswers(options.answers, setup.rules)

    def handle(self, connection: Connection, http_request: HttpRequest) -> None:
        """Answer a request, or start its response.

        A refusal or a bug is answered with an error response, and the server goes on.
        """
        try:
            self._route(connection, http_request)
        except RefusalError as error:
            self._count_and_log_request(http_request, error.status)
            response = HttpResponse(error.status, error.body, headers=error.headers)
            self._reply(connection, http_request, response)
        except Exception:  # a bug of this server must not end the streams of other clients
            traceback.print_exc()
            body = format_error(self._rules.flavor, "a bug of the simulation", 500)
            self._reply(connection, http_request, HttpResponse(500, body))

    def _route(self, connection: Connection, http_request: HttpRequest) -> None:
        """Answer a request according to its path. Raises RefusalError.

        A request to an inference API gets a response whose bytes are sent as its tokens become due.
        A page, such as the metrics, is sent at once. The API key is checked for inference APIs and
        for all pages under `/v1/`.
        """
        if http_request.error_status:
            self._reply_to_invalid_request(connection, http_request)
            return

        path = http_request.path.rstrip("/") or "/"
        api = _API_PATHS.get(path)
        if api is not None:
            self._check_method(http_request.method, allowed_method="POST")
            self._check_authorization(http_request)
            self._start_response(connection, http_request, api)
            return

        self._check_method(http_request.method, self._pages.allowed_method(path))
        if path.startswith("/v1/"):
            self._check_authorization(http_request)

        self._reply(connection, http_request, self._pages.answer(path))

    def _reply_to_invalid_request(self, connection: Connection, http_request: HttpRequest) -> None:
        """Send the HTTP error with which the connection has refused a request."""
        status = http_request.error_status
        text = _HTTP_ERROR_TEXTS.get(status, _INVALID_REQUEST_TEXT)
        self._reply(connection, http_request, HttpResponse(status, text, PLAIN_TEXT))

    def _check_method(self, method: str, allowed_method: str) -> None:
        """Raise RefusalError if the path does not exist or does not allow the method."""
        if not allowed_method:
            raise unknown_route(self._rules.flavor, 404)
        is_head_of_page = method == "HEAD" and allowed_method == "GET"
        if method != allowed_method and not is_head_of_page:
            raise unknown_route(self._rules.flavor, 405, allowed_method)

    def _check_authorization(self, http_request: HttpRequest) -> None:
        """Raise RefusalError if the server requires an API key that a request does not have."""
        if not self._authorization:
            return
        if http_request.headers.get(b"authorization") != self._authorization:
            text = (
                "Incorrect API key provided. You can obtain a key from whoever runs this endpoint."
            )
            raise refusal("openai", text, status=401)

    def _reply(
        self, connection: Connection, http_request: HttpRequest, response: HttpResponse
    ) -> None:
        """Send a complete response at once.

        A request with the method HEAD gets the head only, as HTTP requires.
        """
        head = format_response_head(
            response.status,
            response.content_type if response.body else "",
            len(response.body),
            headers=response.headers,
            keep_alive=http_request.keep_alive,
        )
        is_head_only = http_request.method == "HEAD"
        connection.write(head if is_head_only else head + response.body)
        connection.finish_response(http_request.keep_alive)

    def _start_response(self, connection: Connection, http_request: HttpRequest, api: Api) -> None:
        """Parse a request to an inference API and start its response. Raises RefusalError.

        Four kinds of injected failures are carried out here: those that replace the whole response,
        `corrupt`, which changes a word of it, `clamp`, which shortens it, and `slow_first_byte`,
        which delays it. All others change the bytes of the response, and are carried out by
        `response.SimResponse`.
        """
        number = self.counters.requests
        request = self._parse_request(http_request.body, api)
        failure = self._choose_failure(connection, http_request, request)
        if failure is not None and _replaces_response(failure):
            self._fail_without_response(connection, http_request, request, failure)
            return

        is_corrupt = failure is not None and failure.name == "corrupt"
        self._right_answers.answer(request, number, is_corrupt=is_corrupt)
        if is_corrupt and not request.answer_tokens:
            seed = self._options.seed
            request.digest = change_one_word(request.digest, request.output_tokens, seed, number)

        if failure is not None and failure.name == "clamp":
            _shorten_completion(request, failure.token_count)

        response = self._create_response(connection, http_request, request, failure)
        connection.response = response
        self._count_and_log_request(http_request, 200, request, response.failure_name)

        if failure is not None and failure.name == "slow_first_byte":
            start_ns = http_request.arrival_ns + failure.duration_ns
            self.sender.start_later(response, start_ns)
        else:
            self.sender.start(response, http_request.arrival_ns)

    def _fail_without_response(
        self,
        connection: Connection,
        http_request: HttpRequest,
        request: ParsedRequest,
        failure: InjectedFailure,
    ) -> None:
        """Carry out an injected failure that takes the place of the response.

        `idle_reset` resets the connection. All others send an error response, such as `http_429`.
        """
        if failure.name == "idle_reset":
            self._count_and_log_request(http_request, 0, request, failure.name)
            connection.reset()
        else:
            self._reply_with_injected_status(connection, http_request, request, failure)

    def _create_response(
        self,
        connection: Connection,
        http_request: HttpRequest,
        request: ParsedRequest,
        failure: InjectedFailure | None,
    ) -> SimResponse:
        """Return the response to a request, of which nothing is sent yet.

        A response of the Responses API is also stored, unless the request forbids it (`store`),
        because a later request may continue it.
        """
        request_number = self.counters.requests
        formatter = self._create_formatter(request, request_number)
        if isinstance(formatter, ResponsesFormatter) and formatter.is_stored:
            self._stored_responses.add(formatter.response_id, request)

        settings = ResponseSettings(
            formatter=formatter,
            request_number=request_number,
            tokens_per_event=self._tokens_per_event,
            can_report_timing=self._pages.reports_timing_in_response,
            failure=failure,
        )
        return SimResponse(connection, http_request, request, settings)

    def _parse_request(self, body: bytes, api: Api) -> ParsedRequest:
        """Parse the body of a request to an inference API. Raises RefusalError.

        Chat and completions share a parser; each of the other APIs has its own.
        """
        if api == "responses":
            return parse_responses_request(body, self._rules, self._stored_responses)
        if api == "embeddings":
            return parse_embeddings_request(body, self._rules)
        if api == "rerank":
            return parse_rerank_request(body, self._rules)
        if api == "messages":
            return parse_messages_request(body, self._rules)

        return parse_completions_request(body, api, self._rules)

    def _create_formatter(self, request: ParsedRequest, request_number: int) -> ResponseFormatter:
        """Return the formatter of the response to a request, according to its API."""
        context = ResponseContext(self._rules.flavor, request_number, int(time.time()))
        match request.api:
            case "embeddings" | "rerank":
                return EmbeddingsFormatter(request, context)
            case "messages":
                return MessageFormatter(request, context)
            case "responses":
                return ResponsesFormatter(request, context)
            case "chat" | "completions":
                return CompletionFormatter(request, context)

    def _choose_failure(
        self, connection: Connection, http_request: HttpRequest, request: ParsedRequest
    ) -> InjectedFailure | None:
        """Return the failure to inject into the response, or None.

        It is the one that the header `X-Sim-Fault` asks for, or else the one that is drawn for the
        request. The failure `idle_reset` imitates a server that closes idle connections, so it has
        no effect on the first request of a connection. The failure `corrupt` can be limited to a
        high load.

        Raises RefusalError if the header is not valid.
        """
        header = http_request.headers.get(b"x-sim-fault")
        if header is None:
            failure = self._failure_plan.draw_failure(self.counters.requests, request.output_tokens)
        else:
            failure = self._parse_requested_failure(header, request.output_tokens)

        is_first_request = connection.responses_sent == 0
        if failure is not None and failure.name == "idle_reset" and is_first_request:
            return None
        if failure is not None and not failure.happens_at(self.sender.in_flight):
            return None

        return failure

    def _parse_requested_failure(self, header: bytes, output_tokens: int) -> InjectedFailure:
        """Return the failure in the header `X-Sim-Fault`. Raises RefusalError if it is not valid.

        Args:
            header: The value of the header, such as `truncate@3`.
            output_tokens: The length of the completion, to which the failure is adapted.
        """
        try:
            failure = parse_failure(header.decode("latin-1"), "X-Sim-Fault")
        except LoadgenError as error:
            raise refusal(self._rules.flavor, str(error), "X-Sim-Fault") from None
        return choose_failing_token(
            failure, output_tokens, self._options.seed, self.counters.requests
        )

    def _reply_with_injected_status(
        self,
        connection: Connection,
        http_request: HttpRequest,
        request: ParsedRequest,
        failure: InjectedFailure,
    ) -> None:
        """Send the error response of an injected failure, whose name has the status: `http_429`.

        A response 429 has the header `Retry-After`, in whole seconds, as HTTP requires.
        """
        status = int(failure.name.removeprefix(_STATUS_FAILURE_PREFIX))
        self._count_and_log_request(http_request, status, request, failure.name)

        headers: Headers = ()
        if status == 429:
            retry_after_s = max(1, round(failure.duration_ns / NS_PER_S))
            headers = (("retry-after", f"{retry_after_s}"),)

        body = format_error(self._rules.flavor, f"simulated {status}", status)
        self._reply(connection, http_request, HttpResponse(status, body, headers=headers))

    def _count_and_log_request(
        self,
        http_request: HttpRequest,
        status: int,
        request: ParsedRequest | None = None,
        failure_name: str = "",
    ) -> None:
        """Count a request and its error status, if any, and add it to the log.

        Args:
            http_request: The request on the level of HTTP.
            status: The status of the response, or 0 if the connection is reset without one.
            request: The parsed request, or None if it was refused before.
            failure_name: The injected failure, or "".
        """
        request_number = self.counters.requests
        self.counters.requests += 1

        is_error = status >= HTTPStatus.BAD_REQUEST
        if is_error:
            self._metrics.add_error(status)

        logs_requests = self.log.logs_events or self._options.log_bodies
        if logs_requests:
            logged_request = self._describe_for_log(request_number, http_request, status, request)
            logged_request.fault = failure_name
            self.log.requests.append(logged_request)

    def _describe_for_log(
        self,
        request_number: int,
        http_request: HttpRequest,
        status: int,
        request: ParsedRequest | None,
    ) -> LoggedRequest:
        """Return a request as it is logged, without an injected failure.

        The numbers of tokens are 0 if the request was refused before it was parsed. The option
        `log_bodies` adds a hash of the body, by which a test can tell bodies apart.
        """
        logged_request = LoggedRequest(
            number=request_number,
            id=http_request.headers.get(b"x-request-id", b"").decode("latin-1"),
            arrival_ns=http_request.arrival_ns,
            path=http_request.path,
            status=status,
        )
        if request is not None:
            logged_request.input_tokens = request.input_tokens
            logged_request.output_tokens = request.output_tokens

        if self._options.log_bodies:
            logged_request.body_sha256 = hashlib.sha256(http_request.body).hexdigest()

        return logged_request


def _replaces_response(failure: InjectedFailure) -> bool:
    """Return whether an injected failure takes the place of the whole response."""
    return failure.name == "idle_reset" or failure.name.startswith(_STATUS_FAILURE_PREFIX)


def _shorten_completion(request: ParsedRequest, max_tokens: int) -> None:
    """Limit the length of a completion, as the injected failure `clamp` does.

    A completion has at least one token.
    """
    request.output_tokens = min(request.output_tokens, max(1, max_tokens))


def _read_authorization(path: str) -> bytes:
    """Return the Authorization header that requests must have, or b"" if no key is required.

    Args:
        path: The path of the file with the API key, or "" if no key is required.

    Raises:
        UserError: The file cannot be read.
    """
    if not path:
        return b""

    try:
        with open(path, "rb") as file:
            api_key = file.read().strip()
    except OSError as error:
        problem = f"cannot be opened: {error.strerror}"
        raise UserError(of_reading(error), problem, str(error.filename)) from None

    return b"Bearer " + api_key
