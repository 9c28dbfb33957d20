"""Find the parser of a server's own timing, by the name of its format in a response."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache

from ..errors import WrongUse
from ..plugins import check_type
from .server_profiles import SERVERS
from .server_timing import NO_SERVER_TIMING, ServerTiming, TimingParser

_MAX_CACHED_FORMATS = 64
"""The cache is bounded, because the names of formats come from servers."""


def parse_server_timing(timing: Mapping[str, object]) -> ServerTiming:
    """Return the server's own timing of a response, or NO_SERVER_TIMING.

    `timing` is `Completion.server_timing`: the name of each format with its value. If a response
    has several formats, each field has the value of the first format that states it.
    """
    parsed: list[ServerTiming] = []
    for format_name, value in timing.items():
        if not isinstance(value, Mapping | str):
            continue
        parse = find_timing_parser(format_name)
        if parse is not None:
            parsed.append(parse(value))

    if not parsed:
        return NO_SERVER_TIMING

    return parsed[0] if len(parsed) == 1 else _combine(parsed)


@lru_cache(maxsize=_MAX_CACHED_FORMATS)
def find_timing_parser(format_name: str) -> TimingParser | None:
    """Return the parser of a format, or None if no server has a format with this name.

    Plug-ins are loaded only for a format that no built-in server has, because importing them takes
    time. The result is cached, because this function is called for each request.
    """
    for profile in SERVERS.builtin_rows:
        if format_name in profile.timing_parsers:
            return profile.timing_parsers[format_name]

    for profile in SERVERS.plugin_rows():
        if format_name in profile.timing_parsers:
            parse = profile.timing_parsers[format_name]
            return _PluginParser(SERVERS.guard(profile, parse, check_type(ServerTiming)))

    return None


class _PluginParser:
    """The parser of a plug-in.

    If it fails, that is reported once, and the load goes on without the server's timing.
    """

    def __init__(self, parse: TimingParser) -> None:
        """Keep the parser of the plug-in, which raises WrongUse if it fails."""
        self._parse = parse
        self._has_failed = False

    def __call__(self, timing: Mapping[str, object] | str) -> ServerTiming:
        """Parse a timing. Return NO_SERVER_TIMING if the plug-in fails."""
        try:
            return self._parse(timing)
        except WrongUse as error:
            if not self._has_failed:
                print(f"{error.message}; its responses have no server timing", file=sys.stderr)
            self._has_failed = True
            return NO_SERVER_TIMING


def _combine(timings: list[ServerTiming]) -> ServerTiming:
    """Return a timing in which each field has the first value that any of the timings states."""
    first_known_values: dict[str, int] = {}
    for timing in timings:
        for field, value in timing._asdict().items():
            if value is not None:
                first_known_values.setdefault(field, value)
    return ServerTiming(**first_known_values)
