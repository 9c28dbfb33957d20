"""The HTTP types of the probe, independent of what carries the requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from ..errors import TargetUnusable


class HttpResponse(msgspec.Struct, frozen=True):
    """A complete HTTP response.

    Attributes:
        status: The status code. It is 0 for an optional page that could not be fetched.
        headers: The headers by their names in lower case.
        body: The decoded body.
        duration_ns: The time from sending the request to the end of the response.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    duration_ns: int = 0

    @property
    def page_text(self) -> str:
        """Return the text of a page, or an empty string if the page could not be fetched."""
        return self.body.decode("utf-8", "replace") if self.status == 200 else ""


NO_RESPONSE = HttpResponse(0, {}, b"")
"""Stands for an optional page that could not be fetched."""

Headers = Sequence[tuple[str, str]]

SendRequest = Callable[[str, str, Headers, bytes], Awaitable[HttpResponse]]
"""Sends a request with (method, request target, headers, body).

Raises TargetUnusable if there is no response, and its subclass TransientFailure if the connection
broke, so that the next request may get a response.
"""

Connect = Callable[[], Awaitable[int]]
"""Opens a TCP connection and returns how many ns that took. Raises TargetUnusable."""


class TransientFailure(TargetUnusable):
    """A request of the probe failed in a way in which single requests of a load may fail, too.

    The request is tried again, because a server that fails now and then is to be measured.

    Attributes:
        retry_after_s: How long to wait before the next attempt.
    """

    retry_after_s = 0.0
