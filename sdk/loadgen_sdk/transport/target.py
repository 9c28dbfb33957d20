"""Parse the URL of a target: where to connect, the request paths, and the form that may be shown.

Files, logs and screen output name a target by `Target.redacted`. Texts from a server pass through
`redact` first, because servers echo keys. This module resolves no names and does no I/O.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import SplitResult, quote, unquote, urlsplit

import msgspec

from ..errors import TargetUnusable
from ..redaction import HIDDEN, escape_controls, redact
from ..wire_formats.server_profiles import Api

MESSAGES_HOST = "api.anthropic.com"
MESSAGES_VERSION = "2023-06-01"
_BEARER_PREFIX = "bearer "
_SHOWN_QUERY_NAMES = frozenset(("api-version",))
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
_CHARACTERS_OF_PATHS = "/%:@!$&'()*+,;=~-._"
_AZURE_DEPLOYMENT = re.compile(r"^(?P<root>.*?)/openai/deployments/(?P<name>[^/]+)$")
_API_VERSION = re.compile(r"/v\d+(?:alpha|beta)?\d*$")
_CREDENTIAL_NAME = re.compile(r"(?i)auth|key|token|secret")


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint. Paths are complete request targets: prefix, API and query.

    Attributes:
        host: The host as `getaddrinfo` takes it, without brackets and in IDNA.
        root: The path prefix of the server, "" or "/x/y", under which /version and /health are.
        base: The path prefix of the API, such as `/v1` or `/openai/deployments/D`.
        query: The query with its leading "?", or "".
        deployment: The model in the path, as in the older form of Azure's URLs, or "".
        basic: The value of an Authorization header from the user and password of the URL, or "".
        secrets: The parts of the URL that must never be shown, in every spelling.
        redacted: The URL as it may be shown.
    """

    host: str
    port: int
    tls: bool
    api: Api
    root: str
    base: str
    query: str
    azure: bool
    deployment: str
    basic: str
    secrets: tuple[str, ...]
    redacted: str

    @classmethod
    def parse(
        cls, url: str, *, api: Api = "chat", server: str | None = None, deployment: str = ""
    ) -> Target:
        """Parse `http[s]://[user:password@]host[:port][/prefix][/v1][?query]`.

        The path of a complete endpoint, such as `/v1/chat/completions`, is accepted too. On Azure,
        the path is `/openai/deployments/D?api-version=...`, which is also built from `deployment`
        and an api-version in the query, or else the newer `/openai/v1`.

        Args:
            url: The URL.
            api: The API to which requests are sent.
            server: The kind of the server. With None or "auto", a host of Azure is recognised.
            deployment: The name of a deployment of Azure, or "".

        Raises:
            TargetUnusable: The URL is not valid. The message contains no secret.
        """
        url = url.strip()
        _check_url(url)
        parts = _split_url(url)
        tls = parts.scheme == "https"
        default_port = _default_port(tls)
        port = default_port if parts.port is None else parts.port
        if not port:
            raise TargetUnusable(
                "invalid_url",
                "port 0 cannot be connected to",
                "use the port that the server listens on",
            )
        host = _to_idna(parts.hostname or "")  # _split_url has made sure that there is one.
        is_azure = server == "azure" or (server in (None, "auto") and host.endswith(_AZURE_HOSTS))
        prefixes = _find_prefixes(_path_of_api(parts.path), is_azure, deployment, parts.query)
        user_info = parse_userinfo(parts.netloc)
        query = _redact_query(parts.query)
        authority = _authority(host, None if port == default_port else port)
        redacted_user = f"{HIDDEN}@" if user_info.authorization else ""
        redacted_query = f"?{query.text}" if query.text else ""
        return cls(
            host=host,
            port=port,
            tls=tls,
            api=api,
            root=prefixes.root,
            base=prefixes.base,
            query=f"?{parts.query}" if parts.query else "",
            azure=is_azure or bool(prefixes.deployment),
            deployment=unquote(prefixes.deployment),
            basic=user_info.authorization,
            secrets=_spellings((*user_info.secrets, *query.secrets)),
            redacted=f"{parts.scheme}://{redacted_user}{authority}{prefixes.base}{redacted_query}",
        )

    def __repr__(self) -> str:
        return f"Target({self.redacted})"

    @property
    def path(self) -> str:
        """The request path of the API for which this target was parsed."""
        return self.chat_path if self.api == "chat" else f"{self.base}/{self.api}{self.query}"

    @property
    def chat_path(self) -> str:
        """The request path of chat completions."""
        return f"{self.base}/chat/completions{self.query}"

    @property
    def completions_path(self) -> str:
        """The request path of completions."""
        return f"{self.base}/completions{self.query}"

    @property
    def models_path(self) -> str:
        """The request path of the list of models. A deployment of Azure has no list of its own."""
        base = f"{self.root}/openai" if self.deployment else self.base
        return f"{base}/models{self.query}"

    def server_path(self, path: str) -> str:
        """Return the request path of a page outside the API, such as `/version` or `/health`."""
        return f"{self.root}{path}{self.query}"

    @property
    def host_header(self) -> str:
        """The value of the Host header. It has no zone of an IPv6 address and no default port."""
        host_without_zone = self.host.partition("%")[0]
        is_default_port = self.port == _default_port(self.tls)
        return _authority(host_without_zone, None if is_default_port else self.port)

    @property
    def address(self) -> str:
        """`host:port` in the usual notation, with an IPv6 address in brackets."""
        return _authority(self.host, self.port)

    @property
    def tls_hint(self) -> str:
        """A hint for an http:// URL whose port may expect TLS."""
        return f"the port may expect TLS: try https://{self.address}"

    @property
    def base_url(self) -> str:
        """The URL of the API for other clients, without user and query."""
        return f"{'https' if self.tls else 'http'}://{self.host_header}{self.base}"

    def auth_headers(self, api_key: str | None) -> tuple[tuple[str, str], ...]:
        """Return the headers that authenticate a request.

        The key is sent as `api-key` on Azure and else as a bearer token. The messages API also
        gets the version of the API and the key as `x-api-key`. User and password in the URL take
        precedence over a bearer token, because they are more specific. A key that begins with
        `Bearer ` is sent as a bearer token everywhere, as Entra tokens of Azure are.

        Raises:
            TargetUnusable: The key has characters that a header cannot carry.
        """
        key = (api_key or "").strip()
        if not (key.isascii() and key.isprintable()):
            raise TargetUnusable(
                "invalid_value",
                "the API key has characters that an HTTP header cannot contain",
                "check the file or the environment variable of the key",
            )
        is_bearer_token = key.lower().startswith(_BEARER_PREFIX)
        if is_bearer_token:
            key = key[len(_BEARER_PREFIX) :].strip()
        headers = [("Authorization", self.basic)] if self.basic else []
        is_complete = not key
        if self.api == "messages":
            headers.append(("anthropic-version", MESSAGES_VERSION))
            if key and not is_bearer_token:
                headers.append(("x-api-key", key))
                # Other servers with this API may expect the key as a bearer token too.
                is_complete = self.host == MESSAGES_HOST
        if is_complete:
            return tuple(headers)
        if self.azure and not is_bearer_token:
            headers.append(("api-key", key))
        elif not self.basic:
            headers.append(("Authorization", f"Bearer {key}"))
        return tuple(headers)

    def redact(self, text: str, *secrets: str | None) -> str:
        """Return the text of a server as it may be shown.

        It is one line without anything that a terminal would obey. The secrets of this URL, the
        given ones and everything that looks like a key are hidden.
        """
        spellings = _spellings(secret for secret in secrets if secret)
        return escape_controls(redact(text, (*self.secrets, *spellings)))


# -- checking and splitting a URL --------------------------------------------------------------


def _check_url(url: str) -> None:
    """Raise TargetUnusable if a URL has a common mistake.

    The URL is quoted in the message only if no part of it can be a secret.
    """
    if not url:
        raise TargetUnusable(
            "invalid_url", "the URL is empty", "use a URL such as http://localhost:8000"
        )
    bad_character = re.search(r"[\s\x00-\x1f\x7f\\]", url)
    if bad_character:
        name = _character_name(bad_character.group())
        raise TargetUnusable(
            "invalid_url",
            f"{_redact_url(url)} contains {name}",
            "write it percent-encoded, or remove it",
        )
    _check_scheme(url)
    if "#" in url:
        raise TargetUnusable(
            "invalid_url",
            "the URL contains a #",
            "write it as %23 if it belongs to a password; otherwise remove it",
        )
    # A "/" or "?" within a password ends the host too early, so that a part of the password would
    # be shown as the host.
    after_scheme = url.partition("://")[2]
    path_and_query = re.sub(r"^[^/?]*", "", after_scheme)
    if "@" in path_and_query:
        raise TargetUnusable(
            "invalid_url",
            "the URL has an @ after its host",
            "write / ? @ inside a password as %2F %3F %40",
        )


def _check_scheme(url: str) -> None:
    """Raise TargetUnusable if a URL has no scheme, or another one than http and https.

    What is before `://` is quoted only if it looks like a scheme, since it may be anything.
    """
    scheme, separator, _ = url.partition("://")
    if not separator:
        example = "" if _may_have_secret(url) else f": http://{url}"
        raise TargetUnusable(
            "invalid_url",
            f"{_redact_url(url)} has no scheme",
            f"start it with http:// or https://{example}",
        )
    if scheme.lower() in ("http", "https"):
        return
    is_plausible = re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]{0,15}", scheme)
    scheme_text = f"scheme {scheme!r}" if is_plausible else "scheme"
    hint = "use http:// or https://"
    if "unix" in scheme.lower():
        hint = (
            "let the server listen on a TCP port, or run: socat "
            "TCP-LISTEN:8000,fork UNIX-CONNECT:/path"
        )
    raise TargetUnusable("invalid_url", f"the URL's {scheme_text} is not supported", hint)


def _may_have_secret(url: str) -> bool:
    """Return True if a URL has a character that comes with a user, a query or a fragment."""
    return bool(re.search(r"[@?#]", url))


def _redact_url(url: str) -> str:
    """Return the URL as an error message may quote it."""
    return "'the URL'" if _may_have_secret(url) else repr(url)


def _split_url(url: str) -> SplitResult:
    """Split a URL that names a host and a valid port.

    Raises:
        TargetUnusable: The host is missing, or the host or port is invalid.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname
        _ = parts.port  # This raises ValueError if it is no port.
    except ValueError:  # Its text quotes the URL, which may have a secret in it, so it is not used.
        raise TargetUnusable(
            "invalid_url",
            f"{_redact_url(url)} has no valid host and port",
            "write http://host:8000, or http://[::1]:8000 for IPv6",
        ) from None
    if not host:
        raise TargetUnusable(
            "invalid_url", f"{_redact_url(url)} contains no host", "write http://host:8000"
        )
    return parts


def _path_of_api(path: str) -> str:
    """Return the path of a URL, percent-encoded and without the name of an endpoint at its end."""
    path = quote(path, safe=_CHARACTERS_OF_PATHS).rstrip("/")
    for endpoint in _ENDPOINTS:
        if path.endswith(endpoint):
            return path.removesuffix(endpoint)
    return path


class _Prefixes(NamedTuple):
    """The beginnings of the request paths of a server.

    Attributes:
        root: The path of the server, such as "" or "/x/y".
        base: The path of its API, such as "/x/y/v1".
        deployment: The deployment of Azure in the path, or "".
    """

    root: str
    base: str
    deployment: str


def _find_prefixes(path: str, is_azure: bool, deployment: str, query: str) -> _Prefixes:
    """Return the prefixes of the request paths for the path of a URL.

    A path that ends with a version, such as `/x/v1`, is the path of the API. A deployment of Azure
    is looked for first. Without both, `/v1` is added, on Azure `/openai/v1`.

    Args:
        path: The path of the URL without the name of an endpoint.
        is_azure: The server is Azure.
        deployment: The deployment that the user named besides the URL, or "".
        query: The query of the URL.

    Raises:
        TargetUnusable: A URL of a deployment of Azure lacks the api-version.
    """
    has_api_version = bool(re.search(r"(?:^|&)api-version=[^&]", query))
    deployment_match = _AZURE_DEPLOYMENT.match(path)
    version_match = _API_VERSION.search(path)
    names_neither = not deployment_match and not version_match
    if is_azure and deployment and has_api_version and names_neither:
        path = f"{path.removesuffix('/openai')}/openai/deployments/{quote(deployment, safe='')}"
        deployment_match = _AZURE_DEPLOYMENT.match(path)
    if deployment_match:
        if not has_api_version:
            raise TargetUnusable(
                "invalid_url",
                "the deployment URL of Azure needs an api-version",
                "add ?api-version=2024-10-21, or use https://NAME.openai.azure.com/openai/v1/",
            )
        return _Prefixes(
            root=deployment_match["root"], base=path, deployment=deployment_match["name"]
        )
    if version_match:
        return _Prefixes(root=path[: version_match.start()], base=path, deployment="")
    if is_azure:
        root = path.removesuffix("/openai")
        return _Prefixes(root, base=f"{root}/openai/v1", deployment="")
    return _Prefixes(root=path, base=f"{path}/v1", deployment="")


def _default_port(tls: bool) -> int:
    """Return the port of https or http."""
    return 443 if tls else 80


def _authority(host: str, port: int | None) -> str:
    """Return `host:port`, or only the host without a port. An IPv6 address gets brackets."""
    name = f"[{host}]" if ":" in host else host
    return name if port is None else f"{name}:{port}"


def _to_idna(host: str) -> str:
    """Return a host name in ASCII, such as `xn--bcher-kva.example` for `bücher.example`.

    Raises:
        TargetUnusable: The name is not valid.
    """
    if host.isascii():
        return host
    try:
        return host.encode("idna").decode("ascii")
    except UnicodeError:
        raise TargetUnusable(
            "invalid_url", "the host in the URL is not a valid name", "write it in ASCII (punycode)"
        ) from None


def _character_name(character: str) -> str:
    """Return the name of a character that a URL must not have, for an error message."""
    names = {" ": "a space", "\t": "a tab", "\\": "a backslash"}
    return names.get(character, "a control character")


# -- secrets -----------------------------------------------------------------------------------


def header_secrets(headers: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return what must not be shown of a user's headers.

    Every value is secret. The parts of credentials and cookies are secrets by themselves too, since
    a server may echo them: the token without its scheme, the user and the password of a Basic one,
    or the value of a cookie.
    """
    secrets: list[str] = []
    for name, value in headers:
        secrets.append(value)
        if name.lower() in ("cookie", "set-cookie"):
            secrets += (cookie.partition("=")[2].strip() for cookie in value.split(";"))
        elif _CREDENTIAL_NAME.search(name):
            secrets += _credential_parts(value)
    return tuple(secret for secret in secrets if secret)


def _credential_parts(value: str) -> list[str]:
    """Return the parts of a credential, such as `Bearer TOKEN` or `Basic BASE64`."""
    scheme, _, token = value.strip().partition(" ")
    parts = [token.strip()]
    if scheme.lower() == "basic":
        with contextlib.suppress(ValueError):  # The token is no pair in base64.
            user_and_password = base64.b64decode(token).decode()
            parts += (user_and_password, *user_and_password.split(":", 1))
    return parts


def _spellings(secrets: Iterable[str]) -> tuple[str, ...]:
    """Return each secret as it is, trimmed, percent-decoded, percent-encoded and as in JSON.

    A server may echo a secret in any of these forms. None is repeated, and the order stays.
    """
    spellings: dict[str, None] = {}  # a set that keeps the order
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


class UserInfo(NamedTuple):
    """The user and password of a URL.

    Attributes:
        authorization: The value of an Authorization header, or "" without a user.
        secrets: What of it must not be shown.
    """

    authorization: str
    secrets: tuple[str, ...]


def parse_userinfo(netloc: str) -> UserInfo:
    """Parse the user and password before the host of a URL.

    Args:
        netloc: The part between `://` and the path, such as `user:password@host:8000`.
    """
    userinfo, separator, _ = netloc.rpartition("@")
    if not separator or not userinfo:
        return UserInfo("", ())
    user, _, password = userinfo.partition(":")
    token = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    return UserInfo(f"Basic {token}", (userinfo, user, password, token))


class _RedactedQuery(NamedTuple):
    """A query as it may be shown, and the secrets in it."""

    text: str
    secrets: tuple[str, ...]


def _redact_query(query: str) -> _RedactedQuery:
    """Hide the values of a query. Every value may be a key, so only known plain ones are shown.

    A value without a name, as in `?sk-123`, may be a key too.
    """
    redacted_pairs: list[str] = []
    secrets: list[str] = []
    for pair in query.split("&"):
        if not pair:
            continue
        name, equals, value = pair.partition("=")
        if name.lower() in _SHOWN_QUERY_NAMES:
            redacted_pairs.append(pair)
            continue
        redacted_pairs.append(f"{name}={HIDDEN}" if equals else HIDDEN)
        secrets.append(value if equals else name)
    return _RedactedQuery("&".join(redacted_pairs), tuple(secrets))
