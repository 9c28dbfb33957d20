"""Reads the servers' metrics pages during a run, about once a second. IO, in a process of its own.

The workers do not know about it. It has its own connections. Its first read is before the load and its last read after
it. A page that fails is counted and requested again a second later; it never ends a run. Keys arrive on standard input
and are written nowhere.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from functools import partial
from io import RawIOBase
from pathlib import Path
from time import monotonic, monotonic_ns, process_time, sleep
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, get_args
from urllib.parse import unquote, urlsplit

import msgspec
from loadgen_sdk.transport.http1 import merge_headers

from loadgen.core import child_process
from loadgen.core.errors import UserError
from loadgen.core.server_metrics import energy, request_accounts, series
from loadgen.core.server_metrics.request_accounts import RequestAccount
from loadgen.core.server_metrics.series import MetricSample
from loadgen.core.sidecars.page_connection import PageConnection

if TYPE_CHECKING:
    from loadgen_sdk.probe.probe import ProbeResult
    from loadgen_sdk.transport.tls import Tls

EVERY_S = 1.0
CPU_SHARE = (
    0.05  # of one core, for reading and parsing; to keep it, many long pages are read less often
)
SLOWER = 3600  # every 2 s after an hour, every 11 s after ten hours: a run of days must not write gigabytes
TIMEOUT_S = 2.0  # for a whole page: a server may send a byte now and then
LONGEST_S = 2 * TIMEOUT_S  # that a page can hold up the reads of the others
FOUND_S = 4.0  # how long a run, while it prepares, waits for the first reads
SETTLE_S = 0.1  # between the last response and the last read: counters are updated with a delay
MOST_BYTES = 16 << 20  # of one page; a longer page is an error
WORDS = ("auto", "off", "drain")
ENERGY_WORDS = ("auto", "off", "nvidia-smi")
# What a page may make of its parser: a library that raises something else on a strange page must not end the process.
NO_PAGE = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)

Kind = Literal["metrics", "accounts", "energy"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""What is read from a page: all of its series; accounts of requests (request_accounts.py); power (energy.py)."""


class PageAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where one metrics page may be: of `paths`, the first that answers with a page is used."""

    target: int | None
    host: str
    port: int
    tls: bool
    paths: tuple[str, ...]
    shown: tuple[str, ...]  # the URLs of `paths`, without secrets
    headers: dict[str, str] = {}
    drains: bool = (
        False  # also read JSON statistics that each read empties; only if the user asks for it
    )
    kind: Kind = "metrics"
    names: dict[str, str] = {}  # under which its series of these names are stored


class ScrapeJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job of the scraper process: the first line on its standard input, as JSON."""

    places: tuple[PageAddress, ...]
    verify: bool = True
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    smi: bool = False  # also read nvidia-smi of this machine


class FoundPages(NamedTuple):
    """What the scraper process answers: the URLs of the pages that it has found, by Kind."""

    metrics: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    energy: tuple[str, ...] = ()


class MetricsPageOptions(msgspec.Struct, frozen=True):
    """Which pages a run reads: `pages` as given to `--server-metrics`, `energy` to `--energy`, and a key (or None) per
    target. `accounts`: of requests too, where a server keeps them on a page.
    """

    pages: tuple[str, ...]
    keys: tuple[str | None, ...]
    headers: tuple[tuple[str, str], ...]
    tls: Tls
    energy: tuple[str, ...] = ("auto",)
    accounts: bool = False


def places(asked: MetricsPageOptions, probes: Sequence[ProbeResult]) -> tuple[PageAddress, ...]:
    """The pages to read, without duplicates.

    The key of a target is sent only to pages on the target's own host and port.
    """
    return (
        *_metrics_places(asked, probes),
        *_energy_places(asked, probes),
        *_accounts_places(asked, probes),
    )


def reads_smi(asked: MetricsPageOptions, probes: Sequence[ProbeResult]) -> bool:
    """Whether nvidia-smi of this machine is read: where it is asked for, or is there and some target is here too."""
    if "nvidia-smi" in asked.energy:
        return True
    here = any(_is_here(probe.target.host) for probe in probes)
    return "auto" in asked.energy and here and shutil.which("nvidia-smi") is not None


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _metrics_places(
    asked: MetricsPageOptions, probes: Sequence[ProbeResult]
) -> tuple[PageAddress, ...]:
    if "off" in asked.pages:
        return ()
    urls = [page for page in asked.pages if page not in WORDS]
    if urls:
        each = len(urls) == len(probes)
        return tuple(
            _address_of_url(url, i if each else None, asked, probes) for i, url in enumerate(urls)
        )
    drains = "drain" in asked.pages

    def paths(probe: ProbeResult) -> tuple[str, ...]:
        return (
            (probe.server_profile.consumed_metrics_path,)
            if drains and probe.server_profile.consumed_metrics_path
            else probe.server_profile.metrics_paths
        )

    return _beside(asked, probes, paths, "metrics", drains=drains)


def _energy_places(
    asked: MetricsPageOptions, probes: Sequence[ProbeResult]
) -> tuple[PageAddress, ...]:
    urls = [
        _address_of_url(url, None, asked, probes) for url in asked.energy if url not in ENERGY_WORDS
    ]
    own = _beside(
        asked,
        probes,
        lambda probe: tuple(filter(None, (probe.server_profile.energy_path,))),
        "energy",
    )
    pages = [msgspec.structs.replace(place, kind="energy", drains=False) for place in urls]
    return (*pages, *(own if "auto" in asked.energy else ()))


def _accounts_places(
    asked: MetricsPageOptions, probes: Sequence[ProbeResult]
) -> tuple[PageAddress, ...]:
    """Each read of these pages empties them. They are read of a server whose answers have no account."""

    def paths(probe: ProbeResult) -> tuple[str, ...]:
        return (
            (probe.server_profile.timing_records_path,)
            if probe.server_profile.timing_records_path and not probe.reports_server_timing
            else ()
        )

    return _beside(asked, probes, paths, "accounts") if asked.accounts else ()


def _beside(
    asked: MetricsPageOptions,
    probes: Sequence[ProbeResult],
    paths_of: Callable[[ProbeResult], tuple[str, ...]],
    kind: Kind,
    *,
    drains: bool = False,
) -> tuple[PageAddress, ...]:
    """Pages that the targets themselves serve; each server's once, though it is a target under several keys."""
    addresses: list[PageAddress] = []
    for i, probe in enumerate(probes):
        target, paths = probe.target, paths_of(probe)
        root = f"{'https' if target.tls else 'http'}://{target.address}{target.root}"
        shown = tuple(root + path for path in paths)
        if paths and not any(place.shown == shown for place in addresses):
            addresses.append(
                PageAddress(
                    target=i,
                    host=target.host,
                    port=target.port,
                    tls=target.tls,
                    drains=drains,
                    kind=kind,
                    paths=tuple(target.server_path(path) for path in paths),
                    shown=shown,
                    headers=target_headers(asked, i, probe),
                    names=series.names_for(probe.server_profile.metrics)
                    if kind == "metrics"
                    else {},
                )
            )
    return tuple(addresses)


def check(
    asked: Sequence[str],
    flag: str = "--server-metrics",
    known: tuple[str, ...] = WORDS,
    alone: tuple[str, ...] = WORDS,
) -> UserError | None:
    """The fault in the values of a flag that takes pages, or None. The message never repeats a URL: it may contain a
    key. `known`: the words that it takes, of which those of `alone` exclude all else.
    """
    words = [value for value in asked if value in known]
    hint = f"{', '.join(known)}, or URLs of pages"
    if (lonely := [word for word in words if word in alone]) and len(asked) > 1:
        return UserError("conflict", f"{lonely[0]!r} stands alone", flag, hint)
    for url in asked:
        if url not in words:
            try:
                parts = urlsplit(url)
                valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            except ValueError:
                valid = False
            if not valid:
                return UserError(
                    "invalid_url",
                    "no URL of a metrics page",
                    flag,
                    f"{hint}: http://host:8000/metrics",
                )
    return None


def _address_of_url(
    url: str, target: int | None, asked: MetricsPageOptions, probes: Sequence[ProbeResult]
) -> PageAddress:
    parts = urlsplit(url)
    host, tls = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    addresses = [(probe.target.host, probe.target.port) for probe in probes]
    own_target = addresses.index((host, port)) if (host, port) in addresses else None
    headers = (
        target_headers(asked, own_target, probes[own_target]) if own_target is not None else {}
    )
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


def target_headers(asked: MetricsPageOptions, target: int, probe: ProbeResult) -> dict[str, str]:
    """The headers of a question to a target itself: its key, and those of the user."""
    key = asked.keys[target]
    value = probe.target.basic or (f"Bearer {key}" if key else "")
    return dict(merge_headers([("Authorization", value)] if value else [], asked.headers))


# -- the process ---------------------------------------------------------------------------------------------------


class Reader:
    """Reads one page over its own connection, which is opened again after a failure."""

    def __init__(self, place: PageAddress, context: Any) -> None:
        self.place, self._has_asked = place, False
        self._connection = PageConnection(
            place.host, place.port, context if place.tls else None, TIMEOUT_S
        )
        self._iterations = series.Iterations()
        self._paths = list(zip(place.paths, place.shown, strict=True))
        self._written: dict[tuple[str, str], float] = {}
        self._latest: dict[tuple[str, str], float] = {}
        self.accounts: list[RequestAccount] = []  # read, and not yet written

    @property
    def url(self) -> str:
        return self._paths[0][1]

    def find(self) -> bool:
        """Whether any of the paths has a page. Its values become the first read; accounts of the past are dropped."""
        for path in self._paths:
            self._paths = [path]
            if self.read():
                self.accounts.clear()
                return True
        return False

    def read(self) -> bool:
        """Read the page again. Returns False if that failed, whatever the page is.

        A server may have closed a connection that was idle while the run prepared: then there is a second try.
        """
        self._latest, reused, self._has_asked = {}, self._has_asked, True
        try:
            self._latest = self._values(self._fetch(self._paths[0][0]))
        except (OSError, *NO_PAGE) as error:
            self._connection.close()
            self._has_asked = False
            return reused and isinstance(error, ConnectionError) and self.read()
        return True

    def news(self, t_s: float, took_s: float, *, every: bool) -> list[MetricSample]:
        """The samples that the latest read changed, plus the read's duration and `up`, which is always the last sample.

        With `every`, changed series that `series.passing` normally leaves out are included.
        """
        wanted = {
            key: value for key, value in self._latest.items() if every or not series.passing(key[0])
        }
        changed = {key: value for key, value in wanted.items() if self._written.get(key) != value}
        self._written |= changed
        told = changed | {
            (series.TOOK, ""): round(took_s, 6),
            (series.UP, ""): float(bool(self._latest)),
        }
        one = partial(MetricSample, t_s=t_s, target=self.place.target, page=self.url)
        return [
            one(name=name, labels=labels, value=value) for (name, labels), value in told.items()
        ]

    def _values(self, data: bytes) -> dict[tuple[str, str], float]:
        place = self.place
        if place.kind == "accounts":
            self.accounts += request_accounts.accounts(data, place.target or 0)
            return {("accounts", ""): 1.0}
        if place.kind == "energy" and data.lstrip()[:1] == b"{":
            return energy.of_energy_metrics(data)
        if data.lstrip()[:1] == b"[" and place.drains:
            return self._iterations.samples(data)
        read = series.samples(data.decode("utf-8", "replace"))
        values = {
            (place.names.get(name, name), labels): value for (name, labels), value in read.items()
        }
        return energy.known(values) if place.kind == "energy" else values

    def _fetch(self, path: str) -> bytes:
        headers = {"Accept": "text/plain, application/json", **self.place.headers}
        status, body = self._connection.request("GET", path, headers, MOST_BYTES)
        if status != 200:
            raise ValueError(f"status {status}")
        return body


class SmiReader:
    """Reads what a running `nvidia-smi` prints, a line per GPU and second: it costs less than starting it anew."""

    place = PageAddress(target=None, host="", port=0, tls=False, paths=(), shown=(), kind="energy")
    url = energy.SMI
    accounts: tuple[RequestAccount, ...] = ()

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._latest: dict[tuple[str, str], float] = {}
        self._printed_s = 0.0

    def find(self) -> bool:
        with suppress(OSError):
            self._process = subprocess.Popen(
                energy.SMI_COMMAND,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            assert self._process.stdout is not None
            os.set_blocking(self._process.stdout.fileno(), False)
            select.select([self._process.stdout], [], [], TIMEOUT_S)
            return self.read()
        return False

    def read(self) -> bool:
        """Take what was printed since the last read; False where nothing came for a while."""
        assert self._process is not None and self._process.stdout is not None
        *lines, self._rest = (self._rest + (self._process.stdout.read() or b""))[
            -MOST_BYTES:
        ].split(b"\n")
        if printed := energy.of_smi(b"\n".join(lines).decode("utf-8", "replace")):
            self._latest, self._printed_s = self._latest | printed, monotonic()
        elif monotonic() > self._printed_s + energy.LONGEST_GAP_S:  # it prints by its own clock
            self._latest = {}
        return bool(self._latest)

    def news(self, t_s: float, took_s: float, *, every: bool) -> list[MetricSample]:
        """All values of the latest read: of few series, most of which change."""
        told = self._latest | {
            (series.TOOK, ""): round(took_s, 6),
            (series.UP, ""): float(bool(self._latest)),
        }
        one = partial(MetricSample, t_s=t_s, target=None, page=self.url)
        return [
            one(name=name, labels=labels, value=value) for (name, labels), value in told.items()
        ]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def follow(folder: Path, source: RawIOBase, output: IO[bytes]) -> None:
    """The main function of the scraper process.

    Find the pages and print which as one JSON line to `output`; read the start time from `source`; read all pages
    until `source` ends; then read them once more.
    """
    job = msgspec.json.decode(source.readline(), type=ScrapeJob)
    context = None
    if any(place.tls for place in job.places):
        from loadgen_sdk.transport.tls import Tls

        context = Tls(verify=job.verify, ca=job.ca, cert=job.cert, key=job.key).context()
    readers: list[Reader | SmiReader] = [Reader(place, context) for place in job.places]
    readers += [SmiReader()] if job.smi else []
    try:
        _follow(readers, folder, source, output)
    finally:
        for reader in readers:
            if isinstance(reader, SmiReader):
                reader.close()


def _follow(
    readers: list[Reader | SmiReader], folder: Path, source: RawIOBase, output: IO[bytes]
) -> None:
    with ThreadPoolExecutor(max(len(readers), 1)) as pool:
        began = monotonic_ns()
        has_page = list(pool.map(lambda reader: reader.find(), readers))
        readers = [reader for reader, has in zip(readers, has_page, strict=True) if has]
        took_s = (monotonic_ns() - began) / 1e9
        found = FoundPages(
            *(
                tuple(reader.url for reader in readers if reader.place.kind == kind)
                for kind in KINDS
            )
        )
        with suppress(BrokenPipeError):
            output.write(msgspec.json.encode(found) + b"\n")
            output.flush()
        line = source.readline()
        if not readers or not line:
            return
        start_ns = int(line)
        pages = [reader for reader in readers if reader.place.kind != "accounts"]
        with ExitStack() as files:
            samples_file = (
                files.enter_context(open(folder / series.FILE, "ab", opener=_private))
                if pages
                else None
            )
            accounts_file = None
            if len(pages) < len(readers):
                accounts_file = files.enter_context(
                    open(folder / request_accounts.FILE, "ab", opener=_private)
                )

            def write(began: int, took_s: float, *, every: bool) -> None:
                t_s = round((began - start_ns) / 1e9, 4)
                if samples_file is not None:
                    _write(
                        samples_file,
                        [s for reader in pages for s in reader.news(t_s, took_s, every=every)],
                    )
                if accounts_file is not None:
                    _write(
                        accounts_file,
                        [account for reader in readers for account in reader.accounts],
                    )
                    for reader in readers:
                        if isinstance(reader, Reader):
                            reader.accounts.clear()

            write(began, took_s, every=True)
            ended, due_s = False, max(start_ns / 1e9, monotonic())
            reading: dict[
                int, Future[bool]
            ] = {}  # place in `readers` -> its read; a page may be slow for ever
            while not ended:
                ended = bool(select.select([source], [], [], max(due_s - monotonic(), 0))[0])
                if ended:
                    sleep(SETTLE_S)
                began, cpu_before = monotonic_ns(), process_time()
                idle = [i for i in range(len(readers)) if i not in reading or reading[i].done()]
                reading |= {i: pool.submit(readers[i].read) for i in idle}
                wait(reading.values(), LONGEST_S)
                write(began, (monotonic_ns() - began) / 1e9, every=ended)
                slower_s = EVERY_S + (began - start_ns) / 1e9 / SLOWER
                wait_s = max(EVERY_S, (process_time() - cpu_before) / CPU_SHARE, slower_s)
                due_s = max(due_s + wait_s, monotonic())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _write(file: IO[bytes], lines: Sequence[MetricSample | RequestAccount]) -> None:
    file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    file.flush()


class Scraper:
    """The scraper process as the command that starts the run sees it. No process if there is nothing to read."""

    def __init__(
        self, folder: Path, asked: MetricsPageOptions, probes: Sequence[ProbeResult]
    ) -> None:
        self._off = "off" in asked.pages
        self._found: FoundPages | None = None
        self._process: subprocess.Popen[bytes] | child_process.Forked | None = None
        addresses, smi = places(asked, probes), reads_smi(asked, probes)
        if not addresses and not smi:
            return
        with suppress(OSError):  # if no process can be started, no page is read
            self._process = child_process.beside(
                "loadgen.core.sidecars.scraper", str(folder), copy=partial(main, str(folder))
            )
        tls = asked.tls
        job = ScrapeJob(
            places=addresses, verify=tls.verify, ca=tls.ca, cert=tls.cert, key=tls.key, smi=smi
        )
        self._send(msgspec.json.encode(job) + b"\n")

    def pages(self) -> tuple[str, ...] | None:
        """The URLs of the metrics pages found. None: `off`."""
        return None if self._off else self.found().metrics

    def found(self) -> FoundPages:
        """The URLs of all pages found; none if that took longer than FOUND_S."""
        if self._found is None:
            self._found = FoundPages()
            if self._process is not None:
                assert self._process.stdout is not None
                line = b""
                if select.select([self._process.stdout], [], [], FOUND_S)[0]:
                    line = self._process.stdout.readline()
                self._found = msgspec.json.decode(line, type=FoundPages) if line else FoundPages()
                if not any(self._found):
                    self.close()
        return self._found

    def begin(self, start_ns: int) -> None:
        """The load begins at this instant of the monotonic clock, which all processes of a machine share."""
        self._send(b"%d\n" % start_ns)

    def close(self) -> None:
        """Let the process read once more and end. Waits for it for a limited time, then kills it."""
        if self._process is None:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(SETTLE_S + 2 * TIMEOUT_S + 1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._process = None

    def _send(self, line: bytes) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()


def main(folder: str) -> None:
    """The process that `beside` starts."""
    os.nice(5)
    # unbuffered: select does not see what a buffer holds
    with (
        open(0, "rb", buffering=0, closefd=False) as source,
        open(1, "wb", closefd=False) as output,
    ):
        follow(Path(folder), source, output)


if __name__ == "__main__":
    main(sys.argv[1])
