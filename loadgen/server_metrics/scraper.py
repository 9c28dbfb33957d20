"""Reads the servers' own metrics pages while a run goes, about once a second. IO, in a process of its own: the workers
know nothing of it.

It has its own connections, its first read is before the load and its last one after it. A page that fails is counted,
and asked again a second later; it never ends a run. Keys come in on standard input and are written nowhere.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from io import RawIOBase
from pathlib import Path
from time import monotonic, monotonic_ns, process_time, sleep
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from loadgen.errors import UserError
from loadgen.server_metrics import series
from loadgen.server_metrics.series import MetricSample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen_sdk.probe.probe import ProbeResult
    from loadgen_sdk.transport.wire import Tls

EVERY_S = 1.0
CPU_SHARE = 0.05  # of one core, that reading and parsing may take: many long pages are read less often
SLOWER = 3600  # after an hour every 2 s, after ten every 11 s: a run of days leaves no gigabytes
TIMEOUT_S = 2.0
FOUND_S = 4.0  # how long a run waits for the first reads, while it prepares
SETTLE_S = 0.1  # from the last answer to the last read, for counters that follow
MOST_BYTES = 16 << 20
WORDS = ("auto", "off", "drain")


class PageAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where one page may be: the first path that answers with one is it."""

    target: int | None
    host: str
    port: int
    tls: bool
    paths: tuple[str, ...]
    shown: tuple[str, ...]  # the URLs of the paths, without secrets
    headers: dict[str, str] = {}
    drains: bool = False  # JSON that each read empties is read too: only where somebody asked for it


class ScrapeJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is told on its standard input, in one line."""

    places: tuple[PageAddress, ...]
    verify: bool = True
    ca: str | None = None
    cert: str | None = None
    key: str | None = None


class PagesAsked(NamedTuple):
    """Which pages a run reads, and with what: `pages` as `--server-metrics` has them, a key (or None) per target."""

    pages: tuple[str, ...]
    keys: tuple[str | None, ...]
    headers: tuple[tuple[str, str], ...]
    tls: Tls


def places(asked: PagesAsked, found: Sequence[ProbeResult]) -> tuple[PageAddress, ...]:
    """The pages that are asked for. The key of a target goes to pages on its own host and port, nowhere else."""
    if "off" in asked.pages:
        return ()
    urls = [one for one in asked.pages if one not in WORDS]
    if urls:
        return tuple(_named(url, i if len(urls) == len(found) else None, asked, found) for i, url in enumerate(urls))
    made: list[PageAddress] = []
    for i, one in enumerate(found):
        paths = series.AUTO.get(one.server, ())
        if "drain" in asked.pages and one.server == "trtllm":
            paths = ("/metrics",)
        if paths:
            target = one.target
            root = f"{'https' if target.tls else 'http'}://{target.address}{target.root}"
            shown = tuple(root + path for path in paths)
            if any(place.shown == shown for place in made):
                continue  # the same server under another key: its page is read once
            made.append(
                PageAddress(
                    target=i, host=target.host, port=target.port, tls=target.tls, headers=_headers(asked, i, one),
                    paths=tuple(target.beside(path) for path in paths), shown=shown,
                    drains="drain" in asked.pages,
                )
            )  # fmt: skip
    return tuple(made)


def check(asked: Sequence[str]) -> UserError | None:
    """What is wrong with `--server-metrics`, if anything is. A URL is not repeated: it may have a key in it."""
    words = [one for one in asked if one in WORDS]
    if words and len(asked) > 1:
        return UserError(f"{words[0]!r} stands alone", "--server-metrics", "auto, off, drain, or URLs of pages")
    for url in asked:
        if url not in words:
            try:
                parts = urlsplit(url)
                good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            except ValueError:
                good = False
            if not good:
                hint = "auto, off, drain, or the URL of a page: http://host:8000/metrics"
                return UserError("no URL of a metrics page", "--server-metrics", hint)
    return None


def _named(url: str, target: int | None, asked: PagesAsked, found: Sequence[ProbeResult]) -> PageAddress:
    import base64
    from urllib.parse import unquote

    parts = urlsplit(url)
    host, tls = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    own = next((i for i, one in enumerate(found) if (one.target.host, one.target.port) == (host, port)), None)
    headers = _headers(asked, own, found[own]) if own is not None else {}
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers = {**headers, "Authorization": f"Basic {base64.b64encode(pair).decode()}"}
    path = parts.path or "/metrics"
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return PageAddress(
        target=own if target is None else target,
        host=host,
        port=port,
        tls=tls,
        paths=(f"{path}?{parts.query}" if parts.query else path,),
        shown=(f"{parts.scheme}://{authority}{path}",),
        headers=headers,
        drains=True,
    )


def _headers(asked: PagesAsked, target: int, found: ProbeResult) -> dict[str, str]:
    key = asked.keys[target]
    made = {"Authorization": f"Bearer {key}"} if key else {}
    if found.target.basic:
        made["Authorization"] = found.target.basic
    return {**made, **dict(asked.headers)}


# -- the process ---------------------------------------------------------------------------------------------------


class Reader:
    """One page, over a connection of its own that is opened again when it fails."""

    def __init__(self, place: PageAddress, context: Any) -> None:
        self._place, self._context = place, context
        self._connection: HTTPConnection | None = None
        self._iterations = series.Iterations()
        self._paths = list(zip(place.paths, place.shown, strict=True))
        self._last: dict[tuple[str, str], float] = {}
        self._latest: dict[tuple[str, str], float] = {}

    @property
    def url(self) -> str:
        return self._paths[0][1]

    def find(self) -> bool:
        """Whether there is a page; what it said is the first read."""
        for path in self._paths:
            with suppress(OSError, HTTPException, ValueError):
                self._latest = self._ask(path[0])
                self._paths = [path]
                return True
            self._close()
        return False

    def read(self) -> bool:
        """Ask the page again. False: it failed."""
        self._latest = {}
        try:
            self._latest = self._ask(self._paths[0][0])
        except (OSError, HTTPException, ValueError):
            self._close()
            return False
        return True

    def news(self, t_s: float, took_s: float, *, every: bool) -> list[MetricSample]:
        """What the latest read changed, all of it when `every`; `up` is the last line of each read."""
        changed = {
            key: value
            for key, value in self._latest.items()
            if (every or not series.passing(key[0])) and self._last.get(key) != value
        }
        self._last |= changed
        own = {(series.TOOK, ""): round(took_s, 6), (series.UP, ""): float(bool(self._latest))}
        return [
            MetricSample(t_s=t_s, target=self._place.target, page=self.url, name=name, labels=labels, value=value)
            for (name, labels), value in (*changed.items(), *own.items())
        ]

    def _ask(self, path: str) -> dict[tuple[str, str], float]:
        place = self._place
        if self._connection is None:
            if place.tls:
                self._connection = HTTPSConnection(place.host, place.port, timeout=TIMEOUT_S, context=self._context)
            else:
                self._connection = HTTPConnection(place.host, place.port, timeout=TIMEOUT_S)
        self._connection.request("GET", path, headers={"Accept": "text/plain, application/json", **place.headers})
        answer: HTTPResponse = self._connection.getresponse()
        data = answer.read(MOST_BYTES + 1)
        if answer.status != 200 or len(data) > MOST_BYTES:
            self._close()
            raise ValueError(f"status {answer.status}, {len(data):,} bytes")
        if data.lstrip()[:1] == b"[" and place.drains:
            return self._iterations.samples(data)
        return series.samples(data.decode("utf-8", "replace"))

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def follow(folder: Path, source: RawIOBase, said: IO[bytes]) -> None:
    """The life of the process: find the pages and name them, wait for the start instant, read until standard input
    ends, read once more."""
    job = msgspec.json.decode(source.readline(), type=ScrapeJob)
    context = None
    if any(place.tls for place in job.places):
        from loadgen_sdk.transport.wire import Tls

        context = Tls(verify=job.verify, ca=job.ca, cert=job.cert, key=job.key).context()
    readers = [Reader(place, context) for place in job.places]
    with ThreadPoolExecutor(max(len(readers), 1)) as pool:
        began = monotonic_ns()
        readers = [one for one, is_there in zip(readers, pool.map(Reader.find, readers), strict=True) if is_there]
        took_s = (monotonic_ns() - began) / 1e9
        with suppress(BrokenPipeError):
            said.write(msgspec.json.encode([one.url for one in readers]) + b"\n")
            said.flush()
        line = source.readline()
        if not readers or not line:
            return
        start_ns = int(line)
        with (folder / series.FILE).open("ab") as file:

            def note(began: int, took_s: float, *, every: bool) -> None:
                t_s = round((began - start_ns) / 1e9, 4)
                news = [sample for one in readers for sample in one.news(t_s, took_s, every=every)]
                file.write(b"".join(msgspec.json.encode(sample) + b"\n" for sample in news))
                file.flush()

            note(began, took_s, every=True)
            over, due = False, max(start_ns / 1e9, monotonic())
            while not over:
                over = bool(select.select([source], [], [], max(due - monotonic(), 0))[0])
                if over:
                    sleep(SETTLE_S)
                began, busy = monotonic_ns(), process_time()
                list(pool.map(Reader.read, readers))
                note(began, (monotonic_ns() - began) / 1e9, every=over)
                wait_s = max(EVERY_S, (process_time() - busy) / CPU_SHARE, EVERY_S + (began - start_ns) / 1e9 / SLOWER)
                due = max(due + wait_s, monotonic())


class Scraper:
    """The process that reads the pages of a run, from the command that started the run; none where nothing is read."""

    def __init__(self, folder: Path, asked: PagesAsked, found: Sequence[ProbeResult]) -> None:
        self._off = "off" in asked.pages
        self._process: subprocess.Popen[bytes] | None = None
        pages = places(asked, found)
        if not pages:
            return
        with suppress(OSError):  # no room for another process: no page is read
            self._process = subprocess.Popen(
                [sys.executable, "-m", "loadgen.server_metrics.scraper", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the run's affair
            )
        tls = asked.tls
        job = ScrapeJob(places=pages, verify=tls.verify, ca=tls.ca, cert=tls.cert, key=tls.key)
        self._tell(msgspec.json.encode(job) + b"\n")

    def pages(self) -> tuple[str, ...] | None:
        """The pages that there are; none of servers that take longer than FOUND_S to show one. None: not looked for."""
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
        """The load begins at this instant of the monotonic clock, which is one for all processes of a machine."""
        self._tell(b"%d\n" % start_ns)

    def close(self) -> None:
        """Read once more, and end. Waits for it, not for long."""
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

    def _tell(self, line: bytes) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()


if __name__ == "__main__":
    os.nice(5)
    with open(0, "rb", buffering=0, closefd=False) as source:  # select sees what a buffer would hide
        follow(Path(sys.argv[1]), source, sys.stdout.buffer)
