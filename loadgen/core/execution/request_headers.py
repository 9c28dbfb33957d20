"""The HTTP headers that a request has besides those of the run: of its class, and its SLO."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from loadgen.core import slo
from loadgen.core.requests.mix import MixPrompts
from loadgen.core.requests.prompts import Prompts
from loadgen.core.workload import Mix, Workload


def create_header_function(
    workload: Workload, prompts: Prompts, *, sends_slos: bool
) -> Callable[[int], bytes] | None:
    """Return a function that returns the header lines of a request for its id.

    They are the headers that depend on the class of the request. Return None if there are none.

    Args:
        workload: The workload, which sets the headers.
        prompts: The requests, which know the class of each.
        sends_slos: Whether each request states its SLO in headers, for a gateway.
    """
    lines_by_class = [
        _encode_headers(headers) for headers in _headers_by_class(workload, sends_slos=sends_slos)
    ]
    if not any(lines_by_class):
        return None

    def lines_of_all(_request_id: int) -> bytes:
        return lines_by_class[0]

    if not isinstance(prompts, MixPrompts):
        return lines_of_all

    def lines_of_class(request_id: int) -> bytes:
        # Requests are numbered by session: each session has as many ids as the longest has turns.
        session = request_id // prompts.turns
        return lines_by_class[prompts.class_of(session)]

    return lines_of_class


def _headers_by_class(workload: Workload, *, sends_slos: bool) -> list[Mapping[str, str]]:
    """Return the headers of each request class, in the order of the classes.

    A workload without classes has a single entry, for all requests. A class may set headers itself,
    which replace those of its SLO.

    Args:
        workload: The workload.
        sends_slos: Whether headers state the SLO of a request: that of its class, or else that of
            the workload. A gateway can then prefer requests with little time left.
    """
    workload_slo_headers = slo.sent_headers(workload.slo) if sends_slos else {}
    if not isinstance(workload.requests, Mix):
        return [workload_slo_headers]

    headers_by_class: list[Mapping[str, str]] = []
    for request_class in workload.requests.classes.values():
        has_own_slo = request_class.slo is not None
        if sends_slos and has_own_slo:
            slo_headers = slo.sent_headers(request_class.slo)
        else:
            slo_headers = workload_slo_headers
        headers_by_class.append(slo_headers | request_class.sent_headers())

    return headers_by_class


def _encode_headers(headers: Mapping[str, str]) -> bytes:
    """Return headers as the lines of an HTTP request."""
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")
