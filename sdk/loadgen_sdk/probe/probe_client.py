"""Send the requests of one probe: pages of the server and generations, with retries."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import TargetUnusable
from ..transport.http1 import CREDENTIALS, merge_headers
from ..transport.target import Target, header_secrets
from ..wire_formats.request_body import with_timing_request
from ..wire_formats.server_profiles import ServerProfile
from .http_types import NO_RESPONSE, Headers, HttpResponse, SendRequest, TransientFailure
from .refusals import RefusalExplainer, is_transient, retry_after_s
from .server_info import ServerInfo, parse_server_info

MAX_ATTEMPTS = 4
"""Attempts per request. If a server fails one request in ten, one probe in thousands fails."""

INFO_PAGE_TIMEOUT_S = 5.0
"""The longest wait for the page with the version and precision, which the probe can do without."""

SAMPLES = ((" ".join(["hello"] * 4), 4), (" ".join(["hello"] * 36), 36))
"""Two prompts with their content tokens. The word is one token in every vocabulary in use."""


class OutputLengths(NamedTuple):
    """The range of output lengths that a load requests, in tokens.

    Attributes:
        shortest: The shortest output.
        longest: The longest output, or None if it is not known.
    """

    shortest: int
    longest: int | None = None


@dataclass(frozen=True)
class ProbeOptions:
    """What the requests of a probe have in common with those of the load that follows.

    Attributes:
        model: The model of the load, or None for the only one that the server lists.
        server: The name of the server profile, or "auto" to find it out.
        stream: Generations are requested as streams.
        api_key: The key of the user.
        headers: The headers of the user.
        extra_body: Fields that the user adds to each body.
        server_timing: The server's own timing is requested with each response.
        samples: A short and a longer prompt with their content tokens.
        output_lengths: The output lengths of the load, or None if they are not known. The probe
            requests no longer output.
        sleep: Waits for a number of seconds before a request is tried again.
    """

    model: str | None = None
    server: str = "auto"
    stream: bool = True
    api_key: str | None = None
    headers: Headers = ()
    extra_body: Mapping[str, Any] | None = None
    server_timing: bool = False
    samples: Sequence[tuple[str, int]] = SAMPLES
    output_lengths: OutputLengths | None = None
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep


class ProbeClient:
    """Sends requests to one target with the headers of the user.

    Attributes:
        target: The target.
        stream: Generations are requested as streams.
        extra_body: Fields that are added to the body of each generation.
        explainer: Explains error responses of the target.
        replaced_key_header: The header of the user that is sent in place of the key, or "".
        failures: The messages of generations that failed and were tried again.
    """

    def __init__(self, target: Target, send_request: SendRequest, options: ProbeOptions) -> None:
        """Create a client whose requests have the headers and the API key of the user.

        If one of the user's headers has a credential, such as Authorization, it is sent instead of
        the API key.

        Args:
            target: The server and the path of its API.
            send_request: Sends one request to the target and returns its response.
            options: The options of the user that also hold for the requests of the load.
        """
        api_key = options.api_key
        self.target = target
        self.stream = options.stream
        self.extra_body = options.extra_body
        self.failures: list[str] = []
        self._send_request = send_request
        self._sleep = options.sleep
        self._headers: Headers = merge_headers(target.auth_headers(api_key), options.headers)

        # The user is warned that the key is not sent if this has a name.
        self.replaced_key_header = _find_credential_header(options.headers) if api_key else ""

        # Error messages quote texts of the server, in which these secrets are redacted.
        secrets = (api_key, *header_secrets(tuple(self._headers)))

        # `target.basic` has the user name and password of a URL such as http://user:pw@host.
        has_credential = bool(api_key or target.basic)
        self.explainer = RefusalExplainer(target, has_key=has_credential, secrets=secrets)

    def request_server_timing(self, profile: ServerProfile) -> None:
        """Request the server's own timing with every generation from now on."""
        self._headers, self.extra_body = with_timing_request(
            profile, self._headers, self.extra_body, stream=self.stream
        )

    async def get(self, path: str) -> HttpResponse:
        """Fetch a page and try again after transient failures.

        A broken connection is tried again at once, and an error status after the wait that the
        server requests. The response of the last attempt is returned even if it is an error.

        Raises:
            TargetUnusable: There is no response.
        """
        for _ in range(MAX_ATTEMPTS - 1):
            with contextlib.suppress(TransientFailure):
                response = await self._get_once(path)
                if not is_transient(response.status):
                    return response
                await self._sleep(retry_after_s(response))
        return await self._get_once(path)

    async def get_optional(self, path: str) -> HttpResponse:
        """Fetch a page, or return NO_RESPONSE if that fails or the path is empty."""
        if not path:
            return NO_RESPONSE
        try:
            return await self._get_once(path)
        except TargetUnusable:
            return NO_RESPONSE

    async def get_model_list(self, *, is_required: bool) -> HttpResponse:
        """Fetch the list of models.

        Return NO_RESPONSE if that fails and the list is not required. It is required if the user
        names no model.

        Raises:
            TargetUnusable: The list is required, and there is no response.
        """
        try:
            return await self.get(self.target.models_path)
        except TargetUnusable:
            if is_required:
                raise
            return NO_RESPONSE

    async def get_server_info(
        self, profile: ServerProfile, version: str, *, is_hosted: bool
    ) -> ServerInfo:
        """Return what the server says about itself.

        Its information page is skipped if the server is a hosted service, or if the page takes
        longer than INFO_PAGE_TIMEOUT_S. Then only the version is known.

        Args:
            profile: The server profile, which names the page.
            version: The version that the page /version gave, or "".
            is_hosted: The server is a hosted service, which has no such page.
        """
        page = ""
        if profile.info_path and not is_hosted:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INFO_PAGE_TIMEOUT_S):
                    response = await self.get_optional(self.target.server_path(profile.info_path))
                    page = response.page_text
        return parse_server_info(profile, version, page)

    async def post(self, body: bytes) -> HttpResponse:
        """Send one generation, without retries. Raises TargetUnusable."""
        headers = merge_headers([("Content-Type", "application/json")], self._headers)
        return await self._send_request("POST", self.target.path, headers, body)

    async def wait_after_failure(self, failure: TransientFailure) -> None:
        """Remember the failure of a generation and wait until the next attempt is due."""
        self.failures.append(str(failure))
        await self._sleep(failure.retry_after_s)

    async def _get_once(self, path: str) -> HttpResponse:
        """Fetch a page without retries. Raises TargetUnusable if there is no response."""
        headers = merge_headers([("Accept", "application/json")], self._headers)
        return await self._send_request("GET", path, headers, b"")


def _find_credential_header(headers: Headers) -> str:
    """Return the name of the user's header that is sent instead of the API key, or "".

    Such a header contains another credential, for example `x-api-key`. Two headers are not
    reported: `authorization`, because the key would be sent under the same name, and `api-key`,
    because it contains the API key for Azure.
    """
    for name, _ in headers:
        lower_name = name.lower()
        if lower_name == "api-key":
            return ""
        if lower_name in CREDENTIALS and lower_name != "authorization":
            return name
    return ""
