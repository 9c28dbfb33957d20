"""Find out what kind of server a target is, by the detection rules of the server profiles. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..wire_formats.server_profiles import DETECTION_SOURCES, SERVERS, ServerProfile
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


def detection_texts(model_list: HttpResponse, version: HttpResponse) -> dict[str, str]:
    """Return the texts of the first two pages by their sources."""
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
    return detect_builtin_server(texts) or match_profiles(tuple(SERVERS.plugin_rows()), texts)


def detect_builtin_server(texts: Mapping[str, str]) -> DetectedServer | None:
    """Return the built-in server whose rule matches, or None."""
    return match_profiles(SERVERS.own, texts)


def match_profiles(
    profiles: Sequence[ServerProfile], texts: Mapping[str, str]
) -> DetectedServer | None:
    """Return the first profile with a rule that matches a text, or None.

    An earlier source wins, and at one source the rule with the lowest rank.
    """
    for source in DETECTION_SOURCES:
        text = texts.get(source, "")
        rules = [
            (rule, profile.name)
            for profile in profiles
            for rule in profile.detection_rules
            if rule.source == source
        ]
        for rule, name in sorted(rules, key=lambda pair: pair[0].rank):
            match = re.search(rule.pattern, text)
            if match:
                return DetectedServer(name, source, match.group().replace("\n", " "))
    return None


def server_of_host(host: str) -> str:
    """Return the name of the hosted service at this host, or an empty string."""
    for profile in SERVERS.own:
        if host in profile.hosts:
            return profile.name
    return ""
