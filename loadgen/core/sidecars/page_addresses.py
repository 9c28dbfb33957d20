"""Decide which metrics pages a run reads: those of the targets, and those that the user names.

Pure. The key of a target is sent only to pages on the target's own host and port.
"""

from __future__ import annotations

import base64
import ipaddress
import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec
from loadgen_sdk.transport.http1 import merge_headers

from loadgen.core.errors import UserError
from loadgen.core.server_metrics import series

if TYPE_CHECKING:
    from loadgen_sdk.probe.probe import ProbeResult
    from loadgen_sdk.transport.tls import Tls

    GetPaths: TypeAlias = Callable[[ProbeResult], tuple[str, ...]]

SERVER_METRICS_KEYWORDS = ("auto", "off", "drain")
"""The values of `--server-metrics` that are not URLs."""
ENERGY_KEYWORDS = ("auto", "off", "nvidia-smi")
"""The values of `--energy` that are not URLs."""

PageKind = Literal["metrics", "accounts", "energy"]
PAGE_KINDS: tuple[PageKind, ...] = get_args(PageKind)
"""What is read from a page: all series, timing breakdowns of requests, or power and energy."""


class PageAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where one metrics page may be.

    Attributes:
        target: The index of the target that it belongs to, or None.
        host: The host.
        port: The port.
        tls: Whether TLS is used.
        paths: Possible paths. The first that responds with a page is used.
        urls: The URLs of `paths`, without secrets.
        headers: The request headers, which may contain keys.
        is_emptied_by_read: Whether the page may be JSON statistics that each read empties. The user
            has to request that, because other readers then miss these statistics.
        kind: What is read from it.
        names: The names under which some of its series are stored.
    """

    target: int | None
    host: str
    port: int
    tls: bool
    paths: tuple[str, ...]
    urls: tuple[str, ...]
    headers: dict[str, str] = {}
    is_emptied_by_read: bool = False
    kind: PageKind = "metrics"
    names: dict[str, str] = {}


class MetricsPageOptions(msgspec.Struct, frozen=True):
    """Which pages a run reads.

    Attributes:
        pages: The values of `--server-metrics`.
        keys: The API key of each target, or None.
        headers: The request headers that the user gives.
        tls: The TLS options.
        energy: The values of `--energy`.
        accounts: Whether pages with timing breakdowns of requests are read.
    """

    pages: tuple[str, ...]
    keys: tuple[str | None, ...]
    headers: tuple[tuple[str, str], ...]
    tls: Tls
    energy: tuple[str, ...] = ("auto",)
    accounts: bool = False


def find_page_addresses(
    options: MetricsPageOptions, probes: Sequence[ProbeResult]
) -> tuple[PageAddress, ...]:
    """Return the addresses of the pages to read, without duplicates."""
    return (
        *_metrics_addresses(options, probes),
        *_energy_addresses(options, probes),
        *_breakdown_addresses(options, probes),
    )


def should_read_smi(options: MetricsPageOptions, probes: Sequence[ProbeResult]) -> bool:
    """Return True if nvidia-smi of this machine should be read.

    That is the case if the user requests it, or if it is installed and a target is on this machine.
    """
    if "nvidia-smi" in options.energy:
        return True
    has_local_target = any(_is_local(probe.target.host) for probe in probes)
    return "auto" in options.energy and has_local_target and shutil.which("nvidia-smi") is not None


def _is_local(host: str) -> bool:
    """Return True if a host is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_page_options(
    values: Sequence[str],
    flag: str = "--server-metrics",
    keywords: tuple[str, ...] = SERVER_METRICS_KEYWORDS,
    exclusive_keywords: tuple[str, ...] = SERVER_METRICS_KEYWORDS,
) -> UserError | None:
    """Return the error in the values of an option such as `--server-metrics`, or None.

    A value is the URL of a metrics page or a keyword, such as `off`. The message never repeats a
    URL, because it may contain a key.

    Args:
        values: The values of the option.
        flag: The option.
        keywords: The values that are not URLs.
        exclusive_keywords: Those of the keywords that cannot be combined with other values.
    """
    usage = f"use {', '.join(keywords)}, or URLs of pages"
    conflicting = [value for value in values if value in exclusive_keywords]
    if conflicting and len(values) > 1:
        message = f"{conflicting[0]!r} cannot be combined with other values"
        return UserError("conflict", message, flag, usage)

    is_valid = all(value in keywords or _is_page_url(value) for value in values)
    if not is_valid:
        hint = f"{usage}: http://host:8000/metrics"
        return UserError("invalid_url", "must be the URL of a metrics page", flag, hint)

    return None


def _is_page_url(text: str) -> bool:
    """Return True if a text is an HTTP URL with a host and a valid port."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def target_headers(options: MetricsPageOptions, target: int, probe: ProbeResult) -> dict[str, str]:
    """Return the headers of a request to a target: its authorization, and those of the user.

    Args:
        options: The options of the run, with the API key of each target.
        target: The index of the target.
        probe: What the probe found out about it. A URL with a user and password takes precedence
            over the key.
    """
    key = options.keys[target]
    authorization = probe.target.basic or (f"Bearer {key}" if key else "")
    key_headers = [("Authorization", authorization)] if authorization else []
    return dict(merge_headers(key_headers, options.headers))


def _metrics_addresses(
    options: MetricsPageOptions, probes: Sequence[ProbeResult]
) -> tuple[PageAddress, ...]:
    """Return the metrics pages that the user names, or else those of the targets.

    `options.pages` has the values of `--server-metrics`, which are URLs or one of these keywords:

    - `off`: No page is read.
    - `drain`: Pages that a read empties are read, too. Some servers have such a page. Another
      program that reads it would miss what loadgen has read, so this is not the default.
    - `auto`: The usual pages of the targets are read.
    """
    if "off" in options.pages:
        return ()

    urls = [page for page in options.pages if page not in SERVER_METRICS_KEYWORDS]
    if urls:
        return _named_metrics_addresses(urls, options, probes)
    if "drain" in options.pages:
        return _target_addresses(
            options, probes, _drained_metrics_paths, "metrics", is_emptied_by_read=True
        )

    return _target_addresses(options, probes, _metrics_paths, "metrics")


def _named_metrics_addresses(
    urls: Sequence[str], options: MetricsPageOptions, probes: Sequence[ProbeResult]
) -> tuple[PageAddress, ...]:
    """Return the metrics pages with the URLs that the user gives.

    If there are as many URLs as targets, they belong to the targets in the same order.
    """
    has_page_per_target = len(urls) == len(probes)
    return tuple(
        _address_of_url(url, index if has_page_per_target else None, options, probes)
        for index, url in enumerate(urls)
    )


def _metrics_paths(probe: ProbeResult) -> tuple[str, ...]:
    """Return the paths at which this kind of server may have its metrics page."""
    return probe.server_profile.metrics_paths


def _drained_metrics_paths(probe: ProbeResult) -> tuple[str, ...]:
    """Return the path of statistics that each read empties, or else the usual paths."""
    path = probe.server_profile.consumed_metrics_path
    return (path,) if path else probe.server_profile.metrics_paths


def _energy_addresses(
    options: MetricsPageOptions, probes: Sequence[ProbeResult]
) -> tuple[PageAddress, ...]:
    """Return the pages about power and energy to read.

    They are those whose URLs the user gives to `--energy`, and with the value `auto` also those of
    the targets. The other keywords, `off` and `nvidia-smi`, stand for no page.
    """
    urls = [value for value in options.energy if value not in ENERGY_KEYWORDS]
    addresses = [
        _address_of_url(url, None, options, probes, kind="energy", is_emptied_by_read=False)
        for url in urls
    ]
    if "auto" in options.energy:
        addresses += _target_addresses(options, probes, _energy_paths, "energy")

    return tuple(addresses)


def _energy_paths(probe: ProbeResult) -> tuple[str, ...]:
    """Return the path at which this kind of server reports its energy, or nothing."""
    path = probe.server_profile.energy_path
    return (path,) if path else ()


def _breakdown_addresses(
    options: MetricsPageOptions, probes: Sequence[ProbeResult]
) -> tuple[PageAddress, ...]:
    """Return the pages with timing breakdowns of requests, if the user requests these.

    Each read of such a page empties it. A server whose responses contain the breakdowns needs no
    such page, so it is left out.
    """
    if not options.accounts:
        return ()
    return _target_addresses(options, probes, _breakdown_paths, "accounts")


def _breakdown_paths(probe: ProbeResult) -> tuple[str, ...]:
    """Return the path of the page with timing breakdowns that a server has, or nothing."""
    path = probe.server_profile.timing_records_path
    return (path,) if path and not probe.reports_server_timing else ()


def _target_addresses(
    options: MetricsPageOptions,
    probes: Sequence[ProbeResult],
    get_paths: GetPaths,
    kind: PageKind,
    *,
    is_emptied_by_read: bool = False,
) -> tuple[PageAddress, ...]:
    """Return the pages of one kind that the targets serve.

    The same server may be a target several times, with several API keys. Its page is read once.

    Args:
        options: The options of the run.
        probes: What the probe found out about each target.
        get_paths: Returns the paths at which the page of a target may be. Usually there is one, and
            none if this kind of server has no such page.
        kind: What is read from the pages.
        is_emptied_by_read: Whether reading a page removes its content from the server.
    """
    address_by_urls: dict[tuple[str, ...], PageAddress] = {}
    for target_index, probe in enumerate(probes):
        paths = get_paths(probe)
        if not paths:
            continue

        address = _target_address(
            paths,
            target_index,
            probe,
            kind=kind,
            headers=target_headers(options, target_index, probe),
            is_emptied_by_read=is_emptied_by_read,
        )
        address_by_urls.setdefault(address.urls, address)

    return tuple(address_by_urls.values())


def _target_address(
    paths: tuple[str, ...],
    target_index: int,
    probe: ProbeResult,
    *,
    kind: PageKind,
    headers: dict[str, str],
    is_emptied_by_read: bool,
) -> PageAddress:
    """Return the address of a page that a target serves at one of several possible paths.

    Servers of different kinds report the same quantity under different names. The field `names` of
    the address says under which other name a metric of this server is stored.

    Args:
        paths: The possible paths of the page.
        target_index: The index of the target among the targets of the run.
        probe: What the probe found out about the target, such as its host and its kind of server.
        kind: What is read from the page.
        headers: The headers of each request for the page.
        is_emptied_by_read: Whether reading the page removes its content from the server.
    """
    target = probe.target
    scheme = "https" if target.tls else "http"
    root_url = f"{scheme}://{target.address}{target.root}"
    metrics_of_server = probe.server_profile.metrics if kind == "metrics" else {}

    return PageAddress(
        target=target_index,
        host=target.host,
        port=target.port,
        tls=target.tls,
        is_emptied_by_read=is_emptied_by_read,
        kind=kind,
        paths=tuple(target.server_path(path) for path in paths),
        urls=tuple(root_url + path for path in paths),
        headers=headers,
        names=series.stored_names(metrics_of_server),
    )


def _address_of_url(
    url: str,
    target: int | None,
    options: MetricsPageOptions,
    probes: Sequence[ProbeResult],
    *,
    kind: PageKind = "metrics",
    is_emptied_by_read: bool = True,
) -> PageAddress:
    """Return the address of a page that the user gave as a URL. The default path is `/metrics`.

    A page on the host and port of a target gets the headers of this target, such as its API key. A
    user and password in the URL are sent as basic authorization instead.

    Args:
        url: The URL.
        target: The index of the target that the page belongs to. If it is None, the page belongs to
            the target on the same host and port, if there is one.
        options: The options of the run.
        probes: What the probe found out about each target.
        kind: What is read from the page.
        is_emptied_by_read: Whether reading the page may remove its content from the server. That is
            allowed for a page that the user has named.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    is_tls = parts.scheme == "https"
    default_port = 443 if is_tls else 80
    port = parts.port or default_port
    path = parts.path or "/metrics"
    path_and_query = f"{path}?{parts.query}" if parts.query else path

    # The URL in reports has no query, which may contain a secret.
    reported_url = f"{parts.scheme}://{_format_authority(host, port)}{path}"

    same_host_target = _find_target(host, port, probes)
    headers: dict[str, str] = {}
    if same_host_target is not None:
        headers = target_headers(options, same_host_target, probes[same_host_target])

    return PageAddress(
        target=target if target is not None else same_host_target,
        host=host,
        port=port,
        tls=is_tls,
        paths=(path_and_query,),
        urls=(reported_url,),
        headers=headers | _basic_authorization(parts),
        kind=kind,
        is_emptied_by_read=is_emptied_by_read,
    )


def _format_authority(host: str, port: int) -> str:
    """Return "host:port" as in a URL, which has an IPv6 address in brackets."""
    is_ipv6 = ":" in host
    return f"[{host}]:{port}" if is_ipv6 else f"{host}:{port}"


def _find_target(host: str, port: int, probes: Sequence[ProbeResult]) -> int | None:
    """Return the index of the first target with this host and port, or None."""
    for index, probe in enumerate(probes):
        if probe.target.host == host and probe.target.port == port:
            return index
    return None


def _basic_authorization(parts: SplitResult) -> dict[str, str]:
    """Return the header for the user and password in a URL, or nothing if it has none."""
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}
