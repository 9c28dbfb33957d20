"""Finds the parser of a server's account of its time, by the name of the form, in the table of servers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ..errors import WrongUse
from ..plugins import check_type
from .server_profiles import SERVERS
from .server_timing import NO_SERVER_TIMING, UNKNOWN, ServerTiming, TimingParser


def parse_server_timing(timing: Mapping[str, Any]) -> ServerTiming:
    """Return the account in the timing of a response (`Completion.server_timing`), or NO_ACCOUNT.

    If there are several forms, each field has the value of the first form that knows it.
    """
    accounts = []
    for name, form in timing.items():
        if not isinstance(form, Mapping | str):
            continue
        parse = find_timing_parser(name)
        timing_parsers = NO_SERVER_TIMING if parse is None else parse(form)
        if timing_parsers != NO_SERVER_TIMING:
            accounts.append(timing_parsers)
    if not accounts:
        return NO_SERVER_TIMING
    return ServerTiming(*map(_first_known, *accounts)) if len(accounts) > 1 else accounts[0]


# Bounded, because the names of forms come from servers.
@lru_cache(maxsize=64)
def find_timing_parser(form: str) -> TimingParser | None:
    """Return the parser of a form, or None. Plug-ins are loaded only for a form of no built-in server."""
    for row in SERVERS.own:
        if form in row.timing_parsers:
            return row.timing_parsers[form]
    for row in SERVERS.plugin_rows():
        if form in row.timing_parsers:
            return _PluginParser(
                SERVERS.guard(row, row.timing_parsers[form], check_type(ServerTiming))
            )
    return None


class _PluginParser:
    """A parser of a plug-in. If it fails, that is reported once, and the load goes on without accounts."""

    def __init__(self, parse: TimingParser) -> None:
        self._parse = parse
        self._reported: set[str] = set()

    def __call__(self, form: Mapping[str, Any] | str) -> ServerTiming:
        try:
            return self._parse(form)
        except WrongUse as error:
            if not self._reported:
                print(f"{error.what}: such answers have no account", file=sys.stderr)
            self._reported.add(error.what)
            return NO_SERVER_TIMING


def _first_known(*values: int) -> int:
    return next((value for value in values if value >= 0), UNKNOWN)
