"""Reads the servers' metrics pages during a run, about once a second. IO, in a process of its own.

The workers do not know about it. It has its own connections. Its first read is before the load and its last read after
it. A page that fails is counted and requested again a second later; it never ends a run. Keys arrive on standard input
and are written nowhere.
"""

from __future__ import annotations

import base64
import os
import select
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from io import RawIOBase
from pathlib import Path
from time import monotonic, monotonic_ns, process_time, sleep
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec
from loadgen_sdk.transport.http1 import merged

from loadgen import child_process
from loadgen.errors import UserError
from loadgen.server_metrics import series
from loadgen.server_metrics.series import MetricSample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen_sdk.probe.probe import ProbeResult
    from loadgen_sdk.transport.wire import Tls

EVERY_S = 1.0
CPU_SHARE = 0.05  # of one core, for reading and parsing; to keep it, many long pages are read less often
SLOWER = 3600  # every 2 s after an hour, every 11 s after ten hours: a run of days must not write gigabytes
TIMEOUT_S = 2.0
FOUND_S = 4.0  # how long a run, while it prepares, waits for the first reads
SETTLE_S = 0.1  # between the last response and the last read: counters are updated with a delay
MOST_BYTES = 16 << 20  # of one page; a longer page is an error
WORDS = ("auto", "off", "drain")


class PageAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where one metrics page may be: of `paths`, the first that answers with a page is used."""

    target: int | None
    host: str
    port: int
    tls: bool
    paths: tuple[str, ...]
    shown: tuple[str, ...]  # the URLs of `paths`, without secrets
    headers: dict[str, str] = {}
    drains: bool = False  # also read JSON statistics that each read empties; only if the user asks for it


class ScrapeJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job of the scraper process: the first line on its standard input, as JSON."""

    places: tuple[PageAddress, ...]
    verify: bool = True
    ca: str | None = None
    cert: str | None = None
    key: str | None = None


class PagesAsked(NamedTuple):
    """Which pages a run reads: `pages` as given to `--server-metrics`, and a key (or None) per target."""

    pages: tuple[str, ...]
    keys: tuple[str | None, ...]
    headers: tuple[tuple[str, str], ...]
    tls: Tls


def places(asked: PagesAsked, probes: Sequence[ProbeResult]) -> tuple[PageAddress, ...]:
    """The pages to read, without duplicates. Empty for `off`.

    The key of a target is sent only to pages on the target's own host and port.
    """
    if "off" in asked.pages:
        return ()
    urls = [page for page in asked.pages if page not in WORDS]
    if urls:
        each = len(urls) == len(probes)
        return tuple(_address_of_url(url, i if each else None, asked, probes) for i, url in enumerate(urls))
    addresses: list[PageAddress] = []
    for i, probe in enumerate(probes):
        paths = series.AUTO.get(probe.server, ())
        if "drain" in asked.pages and probe.server == "trtllm":
            paths = ("/metrics",)
        if paths:
            target = probe.target
            root = f"{'https' if target.tls else 'http'}://{target.address}{target.root}"
            shown = tuple(root + path for path in paths)
            if any(place.shown == shown for place in addresses):
                continue  # the same server with another key: read its page once
            addresses.append(
                PageAddress(
                    target=i, host=target.host, port=target.port, tls=target.tls, headers=_headers(asked, i, probe),
                    paths=tuple(target.beside(path) for path in paths), shown=shown,
                    drains="drain" in asked.pages,
                )
            )  # fmt: skip
    return tuple(addresses)


def check(asked: Sequence[str]) -> UserError | None:
    """The fault in the values of `--server-metrics`, or None. The message never repeats a URL: it may contain a key."""
    words = [value for value in asked if value in WORDS]
    if words and len(asked) > 1:
        return UserError(f"{words[0]!r} stands alone", "--server-metrics", "auto, off, drain, or URLs of pages")
    for url in asked:
        if url not in words:
            try:
                parts = urlsplit(url)
                valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            except ValueError:
                valid = False
            if not valid:
                hint = "auto, off, drain, or the URL of a page: http://host:8000/metrics"
                return UserError("no URL of a metrics page", "--server-metrics", hint)
    return None


def _address_of_url(url: str, target: int | None, asked: PagesAsked, probes: Sequence[ProbeResult]) -> PageAddress:
    parts = urlsplit(url)
    host, tls = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    addresses = [(probe.target.host, probe.target.port) for probe in probes]
    own_target = addresses.index((host, port)) if (host, port) in addresses else None
    headers = _headers(asked, own_target, probes[own_target]) if own_target is not None else {}
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers = {**headers, "Authorization": f"Basic {base64.b64encode(pair).decode()}"}
    path = parts.path or "/metrics"
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return PageAddress(
        target=own_target if target is None else target,
        host=host,
        port=port,
        tls=tls,
        paths=(f"{path}?{parts.query}" if parts.query else path,),
        shown=(f"{parts.scheme}://{authority}{path}",),
        headers=headers,
        drains=True,
    )


def _headers(asked: PagesAsked, target: int, probe: ProbeResult) -> dict[str, str]:
    key = asked.keys[target]
    value = probe.target.basic or (f"Bearer {key}" if key else "")
    return dict(merged([("Authorization", value)] if value else [], asked.headers))


# -- the process ---------------------------------------------------------------------------------------------------


class Reader:
    """Reads one page over its own connection, which is opened again after a failure."""

    def __init__(self, place: PageAddress, context: Any) -> None:
        self._place, self._context = place, context
        self._connection: HTTPConnection | None = None
        self._iterations = series.Iterations()
        self._paths = list(zip(place.paths, place.shown, strict=True))
        self._written: dict[tuple[str, str], float] = {}
        self._latest: dict[tuple[str, str], float] = {}

    @property
    def url(self) -> str:
        return self._paths[0][1]

    def find(self) -> bool:
        """Whether any of the paths has a page. Its values become the first read."""
        for path in self._paths:
            with suppress(OSError, HTTPException, ValueError):
                self._latest = self._fetch(path[0])
                self._paths = [path]
                return True
            self._close()
        return False

    def read(self) -> bool:
        """Read the page again. Returns False if that failed."""
        self._latest = {}
        try:
            self._latest = self._fetch(self._paths[0][0])
        except (OSError, HTTPException, ValueError):
            self._close()
            return False
        return True

    def news(self, t_s: float, took_s: float, *, every: bool) -> list[MetricSample]:
        """The samples that the latest read changed, plus the read's duration and `up`, which is always the last sample.

        With `every`, changed series that `series.passing` normally leaves out are included.
        """
        wanted = {key: value for key, value in self._latest.items() if every or not series.passing(key[0])}
        changed = {key: value for key, value in wanted.items() if self._written.get(key) != value}
        self._written |= changed
        told = changed | {(series.TOOK, ""): round(took_s, 6), (series.UP, ""): float(bool(self._latest))}
        one = partial(MetricSample, t_s=t_s, target=self._place.target, page=self.url)
        return [one(name=name, labels=labels, value=value) for (name, labels), value in told.items()]

    def _fetch(self, path: str) -> dict[tuple[str, str], float]:
        place = self._place
        if self._connection is None:
            kind = partial(HTTPSConnection, context=self._context) if place.tls else HTTPConnection
            self._connection = kind(place.host, place.port, timeout=TIMEOUT_S)
        self._connection.request("GET", path, headers={"Accept": "text/plain, application/json", **place.headers})
        response: HTTPResponse = self._connection.getresponse()
        data = response.read(MOST_BYTES + 1)
        if response.status != 200 or len(data) > MOST_BYTES:
            self._close()
            raise ValueError(f"status {response.status}, {len(data):,} bytes")
        if data.lstrip()[:1] == b"[" and place.drains:
            return self._iterations.samples(data)
        return series.samples(data.decode("utf-8", "replace"))

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def follow(folder: Path, source: RawIOBase, output: IO[bytes]) -> None:
    """The main function of the scraper process.

    Find the pages and print their URLs as one JSON line to `output`; read the start time from `source`; read all pages
    until `source` ends; then read them once more.
    """
    job = msgspec.json.decode(source.readline(), type=ScrapeJob)
    context = None
    if any(place.tls for place in job.places):
        from loadgen_sdk.transport.wire import Tls

        context = Tls(verify=job.verify, ca=job.ca, cert=job.cert, key=job.key).context()
    readers = [Reader(place, context) for place in job.places]
    with ThreadPoolExecutor(max(len(readers), 1)) as pool:
        began = monotonic_ns()
        readers = [reader for reader, has_page in zip(readers, pool.map(Reader.find, readers), strict=True) if has_page]
        took_s = (monotonic_ns() - began) / 1e9
        with suppress(BrokenPipeError):
            output.write(msgspec.json.encode([reader.url for reader in readers]) + b"\n")
            output.flush()
        line = source.readline()
        if not readers or not line:
            return
        start_ns = int(line)
        with open(folder / series.FILE, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:

            def write_samples(began: int, took_s: float, *, every: bool) -> None:
                t_s = round((began - start_ns) / 1e9, 4)
                samples = [sample for reader in readers for sample in reader.news(t_s, took_s, every=every)]
                file.write(b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples))
                file.flush()

            write_samples(began, took_s, every=True)
            ended, due_s = False, max(start_ns / 1e9, monotonic())
            while not ended:
                ended = bool(select.select([source], [], [], max(due_s - monotonic(), 0))[0])
                if ended:
                    sleep(SETTLE_S)
                began, cpu_before = monotonic_ns(), process_time()
                list(pool.map(Reader.read, readers))
                write_samples(began, (monotonic_ns() - began) / 1e9, every=ended)
                slower_s = EVERY_S + (began - start_ns) / 1e9 / SLOWER
                wait_s = max(EVERY_S, (process_time() - cpu_before) / CPU_SHARE, slower_s)
                due_s = max(due_s + wait_s, monotonic())


class Scraper:
    """The scraper process as the command that starts the run sees it. No process if there is nothing to read."""

    def __init__(self, folder: Path, asked: PagesAsked, probes: Sequence[ProbeResult]) -> None:
        self._off = "off" in asked.pages
        self._process: subprocess.Popen[bytes] | None = None
        addresses = places(asked, probes)
        if not addresses:
            return
        with suppress(OSError):  # if no process can be started, no page is read
            self._process = subprocess.Popen(
                child_process.command("loadgen.server_metrics.scraper", str(folder)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is handled by the run, not by the scraper
            )
        tls = asked.tls
        job = ScrapeJob(places=addresses, verify=tls.verify, ca=tls.ca, cert=tls.cert, key=tls.key)
        self._send(msgspec.json.encode(job) + b"\n")

    def pages(self) -> tuple[str, ...] | None:
        """The URLs of the pages found; empty if there are none, or if none was found within FOUND_S. None: `off`."""
        if self._process is None:
            return None if self._off else ()
        assert self._process.stdout is not None
        line = b""
        if select.select([self._process.stdout], [], [], FOUND_S)[0]:
            line = self._process.stdout.readline()
        shown = tuple(msgspec.json.decode(line, type=list[str])) if line else ()
        if not shown:
            self.close()
        return shown

    def begin(self, start_ns: int) -> None:
        """The load begins at this instant of the monotonic clock, which all processes of a machine share."""
        self._send(b"%d\n" % start_ns)

    def close(self) -> None:
        """Let the process read once more and end. Waits for it for a limited time, then kills it."""
        if self._process is None:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(SETTLE_S + 2 * TIMEOUT_S + 1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _send(self, line: bytes) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()


if __name__ == "__main__":
    os.nice(5)
    with open(0, "rb", buffering=0, closefd=False) as source:  # unbuffered: select does not see what a buffer holds
        follow(Path(sys.argv[1]), source, sys.stdout.buffer)
