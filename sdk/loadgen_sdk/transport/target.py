"""Parses the URL of a target: where to connect, the request paths, and the form that may be shown. Pure: no DNS.

Files, logs and screen output name a target by `Target.redacted`. Texts from a server pass through `redact` first,
because servers echo keys.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import Iterable
from urllib.parse import quote, unquote, urlsplit

import msgspec

from ..errors import TargetUnusable
from ..redaction import HIDDEN, redact, shown
from ..wire_formats.server_profiles import Api

_SHOWN_QUERY = frozenset(("api-version",))
_AZURE_HOSTS = (".openai.azure.com", ".cognitiveservices.azure.com", ".services.ai.azure.com")
_ENDPOINTS = (
    "/chat/completions",
    "/completions",
    "/responses",
    "/messages",
    "/embeddings",
    "/rerank",
    "/models",
)
MESSAGES_HOST, MESSAGES_VERSION = "api.anthropic.com", "2023-06-01"
_DEPLOYMENT = re.compile(r"^(?P<root>.*?)/openai/deployments/(?P<name>[^/]+)$")
_VERSION = re.compile(r"/v\d+(?:alpha|beta)?\d*$")


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint. Paths are complete request targets: prefix, API and query, ready for a request line."""

    host: str  # as `getaddrinfo` takes it: no brackets, IDNA
    port: int
    tls: bool
    api: Api
    root: str  # path prefix of the server ("" or "/x/y"), under which /version and /health are
    base: str  # path prefix of the API: `/v1`, `/x/y/v1`, `/openai/deployments/D`
    query: str  # with the leading "?", or ""
    azure: bool
    deployment: str  # Azure's older URL form names the model in the path; else ""
    basic: str  # value of an Authorization header from the URL's user and password, or ""
    secrets: tuple[str, ...]  # parts of the URL that must never be shown, in every spelling
    redacted: str  # the URL as it may be shown

    @classmethod
    def parse(
        cls, url: str, *, api: Api = "chat", server: str | None = None, deployment: str = ""
    ) -> Target:
        """Read `http[s]://[user:password@]host[:port][/prefix][/v1][?query]`; a full endpoint path is accepted too.

        With `server="azure"` or an Azure host, the path is `/openai/deployments/D?api-version=...` (also built from
        `deployment` and an api-version in the query), else the newer `/openai/v1`. Raises TargetUnusable; its text has
        no secret.
        """
        url = url.strip()
        if not url:
            raise TargetUnusable(
                "invalid_url", "the URL is empty", "give one, such as http://localhost:8000"
            )
        shown_url = url if not re.search(r"[@?#]", url) else "the URL"
        if match := re.search(r"[\s\x00-\x1f\x7f\\]", url):
            raise TargetUnusable(
                "invalid_url",
                f"{shown_url!r} has {_character_name(match.group())} in it",
                "write it percent-encoded, or remove it",
            )
        scheme, colon, _ = url.partition("://")
        if not colon:
            like = f": http://{url}" if shown_url == url else ""
            hint = f"begin it with http:// or https://{like}"
            raise TargetUnusable("invalid_url", f"{shown_url!r} has no scheme", hint)
        if scheme.lower() not in ("http", "https"):
            scheme_text = (
                f"scheme {scheme!r}"
                if re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]{0,15}", scheme)
                else "scheme"
            )
            hint = "use http:// or https://"
            if "unix" in scheme.lower():
                hint = "let the server listen on a port, or: socat TCP-LISTEN:8000,fork UNIX-CONNECT:/path"
            raise TargetUnusable(
                "invalid_url", f"the URL's {scheme_text} is not one this client speaks", hint
            )
        if "#" in url:
            raise TargetUnusable(
                "invalid_url",
                "the URL has a # in it",
                "write it as %23 where it belongs to a password, else remove it",
            )
        if "@" in re.sub(
            r"^[^/?]*", "", url.partition("://")[2]
        ):  # part of a password would be shown as the host
            raise TargetUnusable(
                "invalid_url",
                "the URL has an @ behind its host",
                "write / ? @ inside a password as %2F %3F %40",
            )
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:  # the exception's own text quotes the URL
            raise TargetUnusable(
                "invalid_url",
                f"{shown_url!r} has no valid host and port",
                "write http://host:8000, IPv6 as http://[::1]:8000",
            ) from None
        if not host:
            raise TargetUnusable(
                "invalid_url", f"{shown_url!r} names no host", "write http://host:8000"
            )
        host = _idna(host)
        tls = scheme.lower() == "https"
        if port is None:
            port = 443 if tls else 80
        if not port:
            raise TargetUnusable(
                "invalid_url",
                "port 0 cannot be connected to",
                "give the port the server listens on",
            )
        basic, secrets = parse_userinfo(parts.netloc)
        shown_query, query_secrets = _query(parts.query)
        path = quote(parts.path, safe="/%:@!$&'()*+,;=~-._").rstrip("/")
        for endpoint in _ENDPOINTS:
            if path.endswith(endpoint):
                path = path.removesuffix(endpoint)
                break
        azure = server == "azure" or (server in (None, "auto") and host.endswith(_AZURE_HOSTS))
        root, base, name = _prefixes(path, azure, deployment, parts.query)
        authority = _authority(host, None if port == (443 if tls else 80) else port)
        return cls(
            host=host,
            port=port,
            tls=tls,
            api=api,
            root=root,
            base=base,
            query=f"?{parts.query}" if parts.query else "",
            azure=azure or bool(name),
            deployment=unquote(name),
            basic=basic,
            secrets=_spellings((*secrets, *query_secrets)),
            redacted=f"{'https' if tls else 'http'}://{HIDDEN + '@' if basic else ''}{authority}{base}"
            + (f"?{shown_query}" if shown_query else ""),
        )

    def __repr__(self) -> str:
        return f"Target({self.redacted})"

    @property
    def path(self) -> str:
        """Request path of the API for which this target was parsed."""
        return self.chat_path if self.api == "chat" else f"{self.base}/{self.api}{self.query}"

    @property
    def chat_path(self) -> str:
        return f"{self.base}/chat/completions{self.query}"

    @property
    def completions_path(self) -> str:
        return f"{self.base}/completions{self.query}"

    @property
    def models_path(self) -> str:
        base = (
            f"{self.root}/openai" if self.deployment else self.base
        )  # a deployment has no list of models of its own
        return f"{base}/models{self.query}"

    def server_path(self, name: str) -> str:
        """Request path of a page outside the API: `/version`, `/health`, `/props`."""
        return f"{self.root}{name}{self.query}"

    @property
    def host_header(self) -> str:
        return _authority(
            self.host.partition("%")[0],
            None if self.port == (443 if self.tls else 80) else self.port,
        )

    @property
    def address(self) -> str:
        """host:port in the usual notation (IPv6 in brackets)."""
        return _authority(self.host, self.port)

    @property
    def tls_hint(self) -> str:
        """A hint for an http:// URL whose port may expect TLS."""
        return f"the port may expect TLS: try https://{self.address}"

    @property
    def base_url(self) -> str:
        """The API's URL for other clients, without user and query."""
        return f"{'https' if self.tls else 'http'}://{self.host_header}{self.base}"

    def auth_headers(self, api_key: str | None) -> tuple[tuple[str, str], ...]:
        """The authentication headers: the key as `api-key` on Azure, else as a bearer token. For messages with the
        version of the API, and the key also as `x-api-key`.

        User and password in the URL are more specific and take precedence over a bearer token. A key that begins with
        `Bearer ` is sent as a bearer token everywhere (Azure's Entra tokens). Raises TargetUnusable for a key with
        characters that a header cannot carry.
        """
        key = (api_key or "").strip()
        if not key.isascii() or not (key.isprintable()):
            raise TargetUnusable(
                "invalid_value",
                "the API key has characters that a header cannot carry",
                "check the file or variable",
            )
        headers = [("Authorization", self.basic)] if self.basic else []
        if self.api == "messages":
            headers.append(("anthropic-version", MESSAGES_VERSION))
            if key and key[:7].lower() != "bearer ":
                headers.append(("x-api-key", key))
                if (
                    self.host == MESSAGES_HOST
                ):  # it takes a bearer token for something else than a key
                    return tuple(headers)
        if key[:7].lower() == "bearer ":
            key = key[7:].strip()
        elif key and self.azure:
            return (*headers, ("api-key", key))
        if key and not self.basic:
            headers.append(("Authorization", f"Bearer {key}"))
        return tuple(headers)

    def redact(self, text: str, *more: str | None) -> str:
        """What a server said, as it may be shown: on one line, and nothing in it that a terminal would obey.

        The secrets of this URL, the given ones and everything that looks like a key are hidden.
        """
        return shown(
            redact(text, (*self.secrets, *_spellings(secret for secret in more if secret)))
        )


def header_secrets(headers: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """What of a user's headers must not be shown: every value; of credentials and cookies also each part by itself (the
    token without its scheme, user and password of a Basic one, the value of a cookie), since a server may echo that.
    """
    found: list[str] = []
    for name, value in headers:
        found.append(value)
        if name.lower() in ("cookie", "set-cookie"):
            found += (part.partition("=")[2].strip() for part in value.split(";"))
        elif _CREDENTIAL_NAME.search(name):
            scheme, _, token = value.strip().partition(" ")
            found.append(token.strip())
            if scheme.lower() == "basic":
                with contextlib.suppress(ValueError):  # no pair is in it
                    pair = base64.b64decode(token).decode()
                    found += (pair, *pair.split(":", 1))
    return tuple(secret for secret in found if secret)


_CREDENTIAL_NAME = re.compile(r"(?i)auth|key|token|secret")


def _spellings(secrets: Iterable[str]) -> tuple[str, ...]:
    """Each secret unchanged, trimmed, percent-decoded, percent-encoded, and as in a JSON string."""
    spellings: dict[str, None] = {}
    for secret in secrets:
        for spelling in (
            secret,
            secret.strip(),
            unquote(secret),
            quote(secret, safe=""),
            json.dumps(secret)[1:-1],
        ):
            if spelling:
                spellings[spelling] = None
    return tuple(spellings)


def parse_userinfo(netloc: str) -> tuple[str, tuple[str, ...]]:
    parse_userinfo, at, _ = netloc.rpartition("@")
    if not at or not parse_userinfo:
        return "", ()
    user, _, password = parse_userinfo.partition(":")
    token = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    return f"Basic {token}", (parse_userinfo, user, password, token)


def _query(query: str) -> tuple[str, tuple[str, ...]]:
    """(the query as it may be shown, its secrets). Every value may be a key, so all but known plain ones are hidden."""
    shown_pairs, secrets = [], []
    for pair in filter(None, query.split("&")):
        name, equals, value = pair.partition("=")
        if name.lower() in _SHOWN_QUERY:
            shown_pairs.append(pair)
            continue
        shown_pairs.append(f"{name}={HIDDEN}" if equals else HIDDEN)
        secrets.append(value if equals else name)
    return "&".join(shown_pairs), tuple(secrets)


def _prefixes(path: str, azure: bool, deployment: str, query: str) -> tuple[str, str, str]:
    """(path of the server, path of the API, Azure's deployment or "") for the path of a URL."""
    has_api_version = bool(re.search(r"(?:^|&)api-version=[^&]", query))
    match = _DEPLOYMENT.match(path)
    if azure and not match and deployment and has_api_version and not _VERSION.search(path):
        path = f"{path.removesuffix('/openai')}/openai/deployments/{quote(deployment, safe='')}"
        match = _DEPLOYMENT.match(path)
    if match:
        if not has_api_version:
            raise TargetUnusable(
                "invalid_url",
                "Azure's deployment URL needs an api-version",
                "add ?api-version=2024-10-21, or use https://NAME.openai.azure.com/openai/v1/",
            )
        return match["root"], path, match["name"]
    if version := _VERSION.search(path):
        return path[: version.start()], path, ""
    if azure:
        root = path.removesuffix("/openai")
        return root, f"{root}/openai/v1", ""
    return path, f"{path}/v1", ""


def _authority(host: str, port: int | None) -> str:
    name = f"[{host}]" if ":" in host else host
    return name if port is None else f"{name}:{port}"


def _idna(host: str) -> str:
    if host.isascii():
        return host
    try:
        return host.encode("idna").decode("ascii")
    except UnicodeError:
        raise TargetUnusable(
            "invalid_url", "the URL's host is not a valid name", "write it in ASCII (punycode)"
        ) from None


def _character_name(character: str) -> str:
    return {" ": "a space", "\t": "a tab", "\\": "a backslash"}.get(
        character, "a control character"
    )
