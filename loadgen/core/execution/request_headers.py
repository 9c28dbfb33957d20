"""The HTTP headers that a request has besides those of the run: of its class, and its SLO."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from loadgen.core import slo
from loadgen.core.requests.mix import MixPrompts
from loadgen.core.requests.prompts import Prompts
from loadgen.core.workload import Mix, Workload


def request_header_lines(
    workload: Workload, prompts: Prompts, *, sends_slos: bool
) -> Callable[[int], bytes] | None:
    """Return a function from the id of a request to its header lines, or None without any.

    With `sends_slos`, each request states its SLO, which is that of its class if the class has one.
    Headers that a class sets replace those of the SLO.
    """
    lines_by_class = [
        _encode_headers(headers) for headers in _headers_by_class(workload, sends_slos)
    ]
    if not any(lines_by_class):
        return None
    if isinstance(prompts, MixPrompts):
        return lambda request_id: lines_by_class[prompts.class_of(request_id // prompts.turns)]
    return lambda _request_id: lines_by_class[0]


def _headers_by_class(workload: Workload, sends_slos: bool) -> list[Mapping[str, str]]:
    """Return the headers of each request class, or one entry for a workload without classes.

    A gateway that is told the SLO of a request can prefer those with little time left.
    """
    run_headers = slo.sent_headers(workload.slo) if sends_slos else {}
    if not isinstance(workload.requests, Mix):
        return [run_headers]
    headers_by_class: list[Mapping[str, str]] = []
    for request_class in workload.requests.classes.values():
        slo_headers = run_headers
        if sends_slos and request_class.slo:
            slo_headers = slo.sent_headers(request_class.slo)
        headers_by_class.append(slo_headers | request_class.sent_headers())
    return headers_by_class


def _encode_headers(headers: Mapping[str, str]) -> bytes:
    """Return headers as the lines of an HTTP request."""
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")
