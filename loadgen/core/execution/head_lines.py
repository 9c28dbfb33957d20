"""The header lines that a request has beside those of the run: its class's own, and its SLO for a gateway. Pure."""

from __future__ import annotations

from collections.abc import Callable

from loadgen.core import slo
from loadgen.core.requests.mix import MixPrompts
from loadgen.core.requests.prompts import Prompts
from loadgen.core.workload import Mix, Workload


def head_lines(
    workload: Workload, prompts: Prompts, *, slos: bool
) -> Callable[[int], bytes] | None:
    """Gives the lines of a request by its number, each with its end; what its class says stands over its SLO.

    `slos`: send the SLO of each request, which is that of its class where it has one. None: no request has any line.
    """
    classes = workload.requests.classes.values() if isinstance(workload.requests, Mix) else ()
    of_run = slo.sent_headers(workload.slo) if slos else {}
    sent = [
        (slo.sent_headers(one.slo) if slos and one.slo else of_run) | one.sent_headers()
        for one in classes
    ]
    lines = [
        "".join(f"{k}: {v}\r\n" for k, v in each.items()).encode("latin-1")
        for each in sent or [of_run]
    ]
    if not any(lines):
        return None
    if isinstance(prompts, MixPrompts):
        return lambda number: lines[prompts.class_of(number // prompts.turns)]
    return lambda number: lines[0]
