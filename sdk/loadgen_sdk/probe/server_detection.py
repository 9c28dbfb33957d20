"""Find out what kind of server a target is, by the detection rules of the server profiles. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..wire_formats.server_profiles import (
    DETECTION_SOURCES,
    SERVERS,
    DetectionRule,
    ServerProfile,
)
from .http_types import HttpResponse

VERSION_PATH = "/version"

FURTHER_PAGES = {"health": "/health", "props": "/props", "openapi": "/openapi.json"}
"""Pages that are requested only if no rule matches the list of models and the version."""

_SHOWN_PATHS = {"version": VERSION_PATH, **FURTHER_PAGES}


class DetectedServer(NamedTuple):
    """A server profile whose detection rule matched.

    Attributes:
        name: The name of the profile.
        source: Where the rule matched, one of DETECTION_SOURCES.
        matched_text: The text that the rule matched, on one line.
    """

    name: str
    source: str
    matched_text: str

    @property
    def page(self) -> str:
        """Return the path of the page where the rule matched, as the user sees it."""
        return _SHOWN_PATHS.get(self.source, "/models")


class _Candidate(NamedTuple):
    """A detection rule and the name of its server profile."""

    rule: DetectionRule
    server_name: str


def detection_texts(model_list: HttpResponse, version: HttpResponse) -> dict[str, str]:
    """Return the texts in which detection rules look for the name of the server software.

    Each text has the source (DETECTION_SOURCES) that rules refer to:

    - "models": the list of models
    - "head": the headers of that response, one per line. They often name the server, even if the
      server has no list of models.
    - "version": the page with the version
    """
    header_lines = [f"{name}: {value}" for name, value in model_list.headers.items()]
    return {
        "models": model_list.page_text,
        "head": "\n".join(header_lines),
        "version": version.page_text,
    }


def detect_server(texts: Mapping[str, str]) -> DetectedServer | None:
    """Return the server whose rule matches, built-in profiles first, or None.

    Profiles of plug-ins are loaded only if no built-in profile matches.
    """
    builtin_server = detect_builtin_server(texts)
    if builtin_server is not None:
        return builtin_server
    return match_profiles(tuple(SERVERS.plugin_rows()), texts)


def detect_builtin_server(texts: Mapping[str, str]) -> DetectedServer | None:
    """Return the built-in server whose rule matches, or None."""
    return match_profiles(SERVERS.builtin_rows, texts)


def match_profiles(
    profiles: Sequence[ServerProfile], texts: Mapping[str, str]
) -> DetectedServer | None:
    """Return the server whose detection rule matches a text, or None.

    If several rules match, the earlier source in DETECTION_SOURCES wins, because the pages that
    come first say most clearly what the server is. At one source, the rule with the lowest rank
    wins, and among equal ranks the first profile.

    Args:
        profiles: The profiles whose rules are tried.
        texts: The text of each page by its source. A page that is missing has no text.
    """
    for source in DETECTION_SOURCES:
        text = texts.get(source, "")
        for rule, server_name in _rules_of_source(profiles, source):
            match = re.search(rule.pattern, text)
            if match:
                matched_line = match.group().replace("\n", " ")
                return DetectedServer(server_name, source, matched_line)
    return None


def _rules_of_source(profiles: Sequence[ServerProfile], source: str) -> list[_Candidate]:
    """Return the detection rules for one source, by rank and then in the order of the profiles."""
    candidates = [
        _Candidate(rule, profile.name)
        for profile in profiles
        for rule in profile.detection_rules
        if rule.source == source
    ]
    return sorted(candidates, key=_rank_of)


def _rank_of(candidate: _Candidate) -> int:
    return candidate.rule.rank


def server_of_host(host: str) -> str:
    """Return the name of the hosted service at this host, or an empty string."""
    for profile in SERVERS.builtin_rows:
        if host in profile.hosts:
            return profile.name
    return ""
