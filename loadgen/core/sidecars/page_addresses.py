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

    PathsOf: TypeAlias = Callable[[ProbeResult], tuple[str, ...]]

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


def reads_smi(options: MetricsPageOptions, probes: Sequence[ProbeResult]) -> bool:
    """Return True if nvidia-smi of this machine is read.

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
    exclusive: tuple[str, ...] = SERVER_METRICS_KEYWORDS,
) -> UserError | None:
    """Return the error in the values of an option that takes pages, or None.

    The message never repeats a URL, because it may contain a key.

    Args:
        values: The values of the option.
        flag: The option.
        keywords: The values that are not URLs.
        exclusive: The keywords that cannot be combined with other values.
    """
    hint = f"use {', '.join(keywords)}, or URLs of pages"
    conflicting = [value for value in values if value in keywords and value in exclusive]
    if conflicting and len(values) > 1:
        message = f"{conflicting[0]!r} cannot be combined with other values"
        return UserError("conflict", message, flag, hint)
    for value in values:
        if value not in keywords and not _is_page_url(value):
            hint = f"{hint}: http://host:8000/metrics"
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
    """Return the headers of a request to a target: its key, and the headers of the user."""
    key = options.keys[target]
    authorization = probe.target.basic or (f"Bearer {key}" if key else "")
    own_headers = [("Authorization", authorization)] if authorization else []
    return dict(merge_headers(own_headers, options.headers))


def _metrics_addresses(
    options: MetricsPageOptions, probes: Sequence[ProbeResult]
) -> tuple[PageAddress, ...]:
    """Return the metrics pages that the user names, or else those of the targets."""
    if "off" in options.pages:
        return ()
    urls = [page for page in options.pages if page not in SERVER_METRICS_KEYWORDS]
    if urls:
        has_page_per_target = len(urls) == len(probes)
        return tuple(
            _address_of_url(url, index if has_page_per_target else None, options, probes)
            for index, url in enumerate(urls)
        )
    is_emptied_by_read = "drain" in options.pages

    def metrics_paths(probe: ProbeResult) -> tuple[str, ...]:
        profile = probe.server_profile
        if is_emptied_by_read and profile.consumed_metrics_path:
            return (profile.consumed_metrics_path,)
        return profile.metrics_paths

    return _target_addresses(
        options, probes, metrics_paths, "metrics", is_emptied_by_read=is_emptied_by_read
    )


def _energy_addresses(
    options: MetricsPageOptions, probes: Sequence[ProbeResult]
) -> tuple[PageAddress, ...]:
    """Return the energy pages that the user names, and with `auto` those of the targets."""

    def energy_paths(probe: ProbeResult) -> tuple[str, ...]:
        path = probe.server_profile.energy_path
        return (path,) if path else ()

    addresses = []
    for url in options.energy:
        if url not in ENERGY_KEYWORDS:
            address = _address_of_url(url, None, options, probes)
            addresses.append(
                msgspec.structs.replace(address, kind="energy", is_emptied_by_read=False)
            )
    if "auto" in options.energy:
        addresses += _target_addresses(options, probes, energy_paths, "energy")
    return tuple(addresses)


def _breakdown_addresses(
    options: MetricsPageOptions, probes: Sequence[ProbeResult]
) -> tuple[PageAddress, ...]:
    """Return the pages with timing breakdowns of servers whose responses have none.

    Each read of such a page empties it.
    """

    def breakdown_paths(probe: ProbeResult) -> tuple[str, ...]:
        path = probe.server_profile.timing_records_path
        return (path,) if path and not probe.reports_server_timing else ()

    if not options.accounts:
        return ()
    return _target_addresses(options, probes, breakdown_paths, "accounts")


def _target_addresses(
    options: MetricsPageOptions,
    probes: Sequence[ProbeResult],
    paths_of: PathsOf,
    kind: PageKind,
    *,
    is_emptied_by_read: bool = False,
) -> tuple[PageAddress, ...]:
    """Return the pages that the targets serve.

    A server that is a target several times, with several keys, is read once.
    """
    addresses: dict[tuple[str, ...], PageAddress] = {}
    for index, probe in enumerate(probes):
        paths = paths_of(probe)
        if not paths:
            continue
        target = probe.target
        root = f"{'https' if target.tls else 'http'}://{target.address}{target.root}"
        urls = tuple(root + path for path in paths)
        if urls in addresses:
            continue
        addresses[urls] = PageAddress(
            target=index,
            host=target.host,
            port=target.port,
            tls=target.tls,
            is_emptied_by_read=is_emptied_by_read,
            kind=kind,
            paths=tuple(target.server_path(path) for path in paths),
            urls=urls,
            headers=target_headers(options, index, probe),
            names=series.stored_names(probe.server_profile.metrics) if kind == "metrics" else {},
        )
    return tuple(addresses.values())


def _address_of_url(
    url: str, target: int | None, options: MetricsPageOptions, probes: Sequence[ProbeResult]
) -> PageAddress:
    """Return the address of a page that the user names.

    If it is on the host and port of a target, it belongs to this target and gets its headers.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    tls = parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    headers: dict[str, str] = {}
    for index, probe in enumerate(probes):
        if (probe.target.host, probe.target.port) == (host, port):
            headers = target_headers(options, index, probe)
            target = index if target is None else target
            break
    path = parts.path or "/metrics"
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return PageAddress(
        target=target,
        host=host,
        port=port,
        tls=tls,
        paths=(f"{path}?{parts.query}" if parts.query else path,),
        urls=(f"{parts.scheme}://{authority}{path}",),
        headers=headers | _basic_authorization(parts),
        is_emptied_by_read=True,
    )


def _basic_authorization(parts: SplitResult) -> dict[str, str]:
    """Return the header for the user and password in a URL, or nothing if it has none."""
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}
