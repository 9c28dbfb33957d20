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
_PLAUSIBLE_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,15}")
_UNIX_SOCKET_HINT = (
    "let the server listen on a TCP port, or run: socat TCP-LISTEN:8000,fork UNIX-CONNECT:/path"
)


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
        port = _port_of(parts)
        host = _to_idna(parts.hostname or "")  # _split_url has made sure that there is one.
        is_azure = _is_azure(host, server)
        prefixes = _find_prefixes(_path_of_api(parts.path), is_azure, deployment, parts.query)
        userinfo = parse_userinfo(parts.netloc)
        redacted_query = _redact_query(parts.query)

        return cls(
            # Where to connect
            host=host,
            port=port,
            tls=_uses_tls(parts),
            # The API and its request paths
            api=api,
            root=prefixes.root,
            base=prefixes.base,
            query=f"?{parts.query}" if parts.query else "",
            azure=is_azure or prefixes.deployment != "",
            deployment=unquote(prefixes.deployment),
            # User and password, and what may be shown of the URL
            basic=userinfo.authorization,
            secrets=_spellings((*userinfo.secrets, *redacted_query.secrets)),
            redacted=_redacted_form(parts, host, prefixes.base, redacted_query.text),
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
        """Return the headers that authenticate a request, as (name, value) pairs.

        The key is sent as `api-key` on Azure and else as `Authorization: Bearer KEY`. User and
        password in the URL replace a bearer token, because they are more specific. The messages API
        also gets its version, and the key as `x-api-key`.

        Args:
            api_key: The API key, or None. One that begins with `Bearer ` is sent as a bearer token
                everywhere, as Entra tokens of Azure are.

        Raises:
            TargetUnusable: The key has characters that a header cannot carry.
        """
        key = _parse_api_key(api_key)
        headers: list[tuple[str, str]] = []
        if self.basic:
            headers.append(("Authorization", self.basic))

        if self.api == "messages":
            headers.append(("anthropic-version", MESSAGES_VERSION))
            if self._sends_x_api_key(key):
                headers.append(("x-api-key", key.text))

        key_header = self._key_header(key)
        if key_header is not None:
            headers.append(key_header)

        return tuple(headers)

    def _sends_x_api_key(self, key: _ApiKey) -> bool:
        """Return True if a key is sent in the header `x-api-key` of the messages API."""
        return self.api == "messages" and key.text != "" and not key.is_bearer_token

    def _key_header(self, key: _ApiKey) -> tuple[str, str] | None:
        """Return the header with an API key, as most servers expect it, or None to send none.

        Azure expects a key as `api-key`, and other servers as a bearer token. No such header is
        sent in three cases:

        - There is no key.
        - The target is Anthropic's own server, which gets the key as `x-api-key`. Other servers
          with the same API may not know that header, and get both.
        - User and password in the URL take the place of a bearer token, in the same header.
        """
        if not key.text:
            return None

        is_anthropic = self.host == MESSAGES_HOST
        if is_anthropic and self._sends_x_api_key(key):
            return None
        if self.azure and not key.is_bearer_token:
            return ("api-key", key.text)
        if self.basic:
            return None

        return ("Authorization", f"Bearer {key.text}")

    def redact(self, text: str, *secrets: str | None) -> str:
        """Return the text of a server as it may be shown to users.

        The secrets of this URL, those in `secrets`, and everything that looks like a key are
        hidden. Control characters are escaped, so that the text is one line and harmless to a
        terminal.
        """
        return escape_controls(self.hide_secrets(text, *secrets))

    def hide_secrets(self, text: str, *secrets: str | None) -> str:
        """Return the text of a server without secrets, and with its line breaks.

        The secrets of this URL, those in `secrets`, and everything that looks like a key are
        hidden. The text must be escaped before it is shown on a terminal.
        """
        spellings = _spellings(secret for secret in secrets if secret)
        return redact(text, (*self.secrets, *spellings))


# -- checking and splitting a URL --------------------------------------------------------------


class _ApiKey(NamedTuple):
    """An API key without white space and without `Bearer `.

    Attributes:
        text: The key, or "" for none.
        is_bearer_token: The user has written `Bearer ` before the key, so it is sent like that.
    """

    text: str
    is_bearer_token: bool


def _parse_api_key(api_key: str | None) -> _ApiKey:
    """Parse an API key as the user specifies it, such as `sk-123` or `Bearer sk-123`.

    Raises:
        TargetUnusable: The key has characters that a header cannot carry.
    """
    key = (api_key or "").strip()
    can_be_header = key.isascii() and key.isprintable()
    if not can_be_header:
        raise TargetUnusable(
            "invalid_value",
            "the API key has characters that an HTTP header cannot contain",
            "check the environment variable, or the file of --api-key-file, that contains the key",
        )

    if key.lower().startswith(_BEARER_PREFIX):
        return _ApiKey(key[len(_BEARER_PREFIX) :].strip(), is_bearer_token=True)

    return _ApiKey(key, is_bearer_token=False)


def _check_url(url: str) -> None:
    """Raise TargetUnusable if a URL has a common mistake, so that the user gets a precise hint.

    The URL is quoted in a message only if no part of it can be a secret.
    """
    if not url:
        raise TargetUnusable(
            "invalid_url", "the URL is empty", "use a URL such as http://localhost:8000"
        )

    _check_characters(url)
    _check_scheme(url)

    if "#" in url:
        raise TargetUnusable(
            "invalid_url",
            "the URL contains a #",
            "write it as %23 if it belongs to a password; otherwise remove it",
        )

    _check_at_sign(url)


def _check_characters(url: str) -> None:
    """Raise TargetUnusable if a URL contains white space, a control character or a backslash."""
    bad_character = re.search(r"[\s\x00-\x1f\x7f\\]", url)
    if bad_character:
        name = _character_name(bad_character.group())
        raise TargetUnusable(
            "invalid_url",
            f"{_redact_url(url)} contains {name}",
            "write it percent-encoded, or remove it",
        )


def _check_at_sign(url: str) -> None:
    """Raise TargetUnusable if a URL has an @ in its path or query.

    A `/` or `?` within a password ends the host too early: `http://user:pa/ss@host` has the host
    `user` and a path with an @. Such a URL is refused, because a part of the password would be
    shown as the host.
    """
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

    The message does not quote what may be a secret: a URL with a user or a query, or text before
    `://` that does not look like a scheme.
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

    looks_like_scheme = _PLAUSIBLE_SCHEME.fullmatch(scheme) is not None
    scheme_text = f"scheme {scheme!r}" if looks_like_scheme else "scheme"
    is_unix_socket = "unix" in scheme.lower()
    hint = _UNIX_SOCKET_HINT if is_unix_socket else "use http:// or https://"
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


def _is_azure(host: str, server: str | None) -> bool:
    """Return True if a server is Azure, as the user specified or, without that, by its host."""
    is_kind_specified = server not in (None, "auto")
    return server == "azure" if is_kind_specified else host.endswith(_AZURE_HOSTS)


def _uses_tls(parts: SplitResult) -> bool:
    """Return True for a URL with https."""
    return parts.scheme == "https"


def _port_of(parts: SplitResult) -> int:
    """Return the port of a URL, or the default port of its scheme.

    Raises:
        TargetUnusable: The port is 0.
    """
    if parts.port is None:
        return _default_port(_uses_tls(parts))

    if parts.port == 0:
        raise TargetUnusable(
            "invalid_url",
            "port 0 cannot be connected to",
            "use the port that the server listens on",
        )

    return parts.port


def _redacted_form(parts: SplitResult, host: str, base: str, redacted_query: str) -> str:
    """Return the URL as it may be shown, such as `https://***@host/v1?key=***`.

    Args:
        parts: The parts of the URL.
        host: Its host in ASCII.
        base: The path of the API.
        redacted_query: Its query without secrets, or "".
    """
    user = f"{HIDDEN}@" if parse_userinfo(parts.netloc).authorization else ""
    port = _port_of(parts)
    is_default_port = port == _default_port(_uses_tls(parts))
    authority = _authority(host, None if is_default_port else port)
    query = f"?{redacted_query}" if redacted_query else ""
    return f"{parts.scheme}://{user}{authority}{base}{query}"


def _path_of_api(path: str) -> str:
    """Return the path of a URL, percent-encoded and without the name of an endpoint at its end.

    For example, `/v1/chat/completions` becomes `/v1`.
    """
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

    The first of these rules that applies decides:

    1. The path names a deployment of Azure (`/openai/deployments/NAME`), or the user named one
       besides the URL: the path of the deployment.
    2. The path ends with a version, such as `/x/v1`: the path of the API.
    3. Any other path: the path of the server, to which `/v1` is added, or `/openai/v1` on Azure.

    Args:
        path: The path of the URL without the name of an endpoint.
        is_azure: The server is Azure.
        deployment: The deployment that the user named besides the URL, or "".
        query: The query of the URL.

    Raises:
        TargetUnusable: A URL of a deployment of Azure lacks the api-version.
    """
    deployment_path = path
    if is_azure and deployment:
        deployment_path = _add_deployment(path, deployment, query)

    deployment_match = _AZURE_DEPLOYMENT.match(deployment_path)
    if deployment_match is not None:
        _require_api_version(query)
        return _Prefixes(
            root=deployment_match["root"],
            base=deployment_path,
            deployment=deployment_match["name"],
        )

    version_match = _API_VERSION.search(path)
    if version_match is not None:
        return _Prefixes(root=path[: version_match.start()], base=path, deployment="")

    if is_azure:
        azure_root = path.removesuffix("/openai")
        return _Prefixes(root=azure_root, base=f"{azure_root}/openai/v1", deployment="")

    return _Prefixes(root=path, base=f"{path}/v1", deployment="")


def _add_deployment(path: str, deployment: str, query: str) -> str:
    """Return the path of a deployment of Azure that the user named besides the URL.

    For the path `/x` it is `/x/openai/deployments/NAME`. A path that names a deployment or a
    version itself stays as it is. So does any path without an api-version in the query, which
    requests to a deployment need.
    """
    names_version = _API_VERSION.search(path) is not None
    names_deployment = _AZURE_DEPLOYMENT.match(path) is not None
    if names_version or names_deployment or not _has_api_version(query):
        return path
    root = path.removesuffix("/openai")
    return f"{root}/openai/deployments/{quote(deployment, safe='')}"


def _has_api_version(query: str) -> bool:
    """Return True if a query has a value for `api-version`."""
    return bool(re.search(r"(?:^|&)api-version=[^&]", query))


def _require_api_version(query: str) -> None:
    """Raise TargetUnusable if a query lacks the api-version that Azure's deployments need."""
    if not _has_api_version(query):
        raise TargetUnusable(
            "invalid_url",
            "the deployment URL of Azure needs an api-version",
            "add ?api-version=2024-10-21, or use https://NAME.openai.azure.com/openai/v1/",
        )


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
    spellings: list[str] = []
    for secret in secrets:
        json_string = json.dumps(secret)
        spellings += (
            secret,
            secret.strip(),
            unquote(secret),
            quote(secret, safe=""),
            json_string[1:-1],  # without its quotes
        )

    unique_spellings = dict.fromkeys(spellings)
    return tuple(spelling for spelling in unique_spellings if spelling)


class UserInfo(NamedTuple):
    """The user and password of a URL.

    Attributes:
        authorization: The value of an Authorization header, or "" without a user.
        secrets: The texts that must not be shown, because they contain the user or the password.
    """

    authorization: str
    secrets: tuple[str, ...]


def parse_userinfo(netloc: str) -> UserInfo:
    """Parse the user and password before the host of a URL, for HTTP's Basic authentication.

    Args:
        netloc: The part between `://` and the path, such as `user:password@host:8000`.

    Returns:
        The header value `Basic BASE64`, and the texts to hide in messages and files. Both are empty
        if there is no user.
    """
    userinfo, separator, _ = netloc.rpartition("@")
    if not separator or not userinfo:
        return UserInfo(authorization="", secrets=())

    user, _, password = userinfo.partition(":")
    user_and_password = f"{unquote(user)}:{unquote(password)}"
    token = base64.b64encode(user_and_password.encode()).decode()

    return UserInfo(
        authorization=f"Basic {token}",
        # A server may echo any of them.
        secrets=(userinfo, user, password, token),
    )


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
