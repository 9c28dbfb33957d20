"""Read the servers' metrics pages during a run, about once a second, in a process of its own.

The workers do not know about this process, which has its own connections. Its first read is before
the load and its last read after it. A page that fails is counted and requested again a second
later; it never ends a run. Keys arrive on standard input and are written nowhere.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from functools import partial
from io import RawIOBase
from pathlib import Path
from time import monotonic, monotonic_ns, process_time, sleep
from typing import IO, TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from loadgen.core import child_process
from loadgen.core.server_metrics import energy, request_accounts, series
from loadgen.core.server_metrics.request_accounts import RequestAccount
from loadgen.core.server_metrics.series import MetricSample
from loadgen.core.sidecars.page_addresses import (
    PAGE_KINDS,
    MetricsPageOptions,
    PageAddress,
    find_page_addresses,
    reads_smi,
)
from loadgen.core.sidecars.page_connection import PageConnection

if TYPE_CHECKING:
    import ssl

    from loadgen_sdk.probe.probe import ProbeResult

INTERVAL_S = 1.0
MAX_CPU_SHARE = 0.05
"""Of one core. If reading and parsing needs more, pages are read less often."""
SECONDS_PER_SLOWDOWN = 3600
"""The interval grows by 1 s each hour, so that a run of days does not write gigabytes."""
TIMEOUT_S = 2.0
"""For a whole page, because a server may send a byte now and then."""
MAX_DELAY_S = 2 * TIMEOUT_S
"""How long one page can delay the reads of the others."""
DISCOVERY_TIMEOUT_S = 4.0
"""How long a run waits for the first reads while it prepares."""
SETTLE_S = 0.1
"""The time between the end of the load and the last read. Counters are updated with a delay."""
MAX_PAGE_BYTES = 16 << 20
"""A longer page is an error."""
PARSE_ERRORS = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)
"""What parsers raise on malformed pages, which must not end the process."""
NICENESS = 5

_Values: TypeAlias = dict[tuple[str, str], float]
"""The values of series by name and labels."""


class ScrapeJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job of the scraper process, which is the first line on its standard input, as JSON."""

    addresses: tuple[PageAddress, ...]
    verify: bool = True
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    smi: bool = False
    """Whether nvidia-smi of this machine is read too."""


class FoundPages(NamedTuple):
    """The URLs of the pages that the scraper process has found, by PAGE_KINDS."""

    metrics: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    energy: tuple[str, ...] = ()


# -- the process ----------------------------------------------------------------------------------


class PageReader:
    """Reads one page over its own connection, which is opened again after a failure."""

    def __init__(self, address: PageAddress, context: ssl.SSLContext | None) -> None:
        self.address = address
        self.accounts: list[RequestAccount] = []
        """Timing breakdowns that were read and are not written yet."""
        self._is_connected = False
        self._connection = PageConnection(
            address.host, address.port, context if address.tls else None, TIMEOUT_S
        )
        self._iterations = series.Iterations()
        self._paths = list(zip(address.paths, address.urls, strict=True))
        self._written: _Values = {}
        self._latest: _Values = {}

    @property
    def url(self) -> str:
        """Return the URL of the page, or of the first candidate before the page is found."""
        return self._paths[0][1]

    def find(self) -> bool:
        """Return True if one of the paths has a page.

        Its values become the first read. Timing breakdowns of earlier requests are dropped.
        """
        for path in self._paths:
            self._paths = [path]
            if self.read():
                self.accounts.clear()
                return True
        return False

    def read(self) -> bool:
        """Read the page again. Returns False if that failed, whatever the page is.

        The server may have closed a connection that was idle while the run prepared. In this case
        the read is repeated once.
        """
        was_connected = self._is_connected
        self._is_connected = True
        self._latest = {}
        try:
            self._latest = self._parse(self._fetch(self._paths[0][0]))
        except (OSError, *PARSE_ERRORS) as error:
            self._connection.close()
            self._is_connected = False
            return was_connected and isinstance(error, ConnectionError) and self.read()
        return True

    def new_samples(self, t_s: float, took_s: float, *, every: bool) -> list[MetricSample]:
        """Return the samples that the latest read changed, and the duration of the read.

        `up` is always the last sample. With `every`, series that are only written at the first and
        the last read are included (see `series.is_written_rarely`).
        """
        values = {
            key: value
            for key, value in self._latest.items()
            if every or not series.is_written_rarely(key[0])
        }
        changed = {key: value for key, value in values.items() if self._written.get(key) != value}
        self._written |= changed
        facts = _facts_about_read(took_s, succeeded=bool(self._latest))
        return _make_samples(changed | facts, t_s, self.address.target, self.url)

    def _parse(self, data: bytes) -> _Values:
        """Return the values on a page."""
        address = self.address
        if address.kind == "accounts":
            self.accounts += request_accounts.accounts(data, address.target or 0)
            return {("accounts", ""): 1.0}
        if address.kind == "energy" and data.lstrip()[:1] == b"{":
            return energy.parse_energy_metrics(data)
        if data.lstrip()[:1] == b"[" and address.drains:
            return self._iterations.samples(data)
        parsed = series.samples(data.decode("utf-8", "replace"))
        values = {
            (address.names.get(name, name), labels): value
            for (name, labels), value in parsed.items()
        }
        return energy.select_hardware_values(values) if address.kind == "energy" else values

    def _fetch(self, path: str) -> bytes:
        """Return the body of a page. Raises ValueError for a status other than 200."""
        headers = {"Accept": "text/plain, application/json", **self.address.headers}
        status, body = self._connection.request("GET", path, headers, MAX_PAGE_BYTES)
        if status != 200:
            raise ValueError(f"status {status}")
        return body


class SmiReader:
    """Reads what a running `nvidia-smi` prints, which is one line per GPU and second.

    That costs less than starting nvidia-smi for each read.
    """

    address = PageAddress(target=None, host="", port=0, tls=False, paths=(), urls=(), kind="energy")
    url = energy.SMI
    accounts: tuple[RequestAccount, ...] = ()

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._incomplete_line = b""
        self._latest: _Values = {}
        self._printed_s = 0.0

    def find(self) -> bool:
        """Start nvidia-smi. Returns False if it cannot be started or prints nothing."""
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
        """Take what was printed since the last read. Returns False if it printed nothing lately.

        nvidia-smi prints by its own clock, so a single read without a line is no failure.
        """
        assert self._process is not None and self._process.stdout is not None
        printed = self._incomplete_line + (self._process.stdout.read() or b"")
        *lines, self._incomplete_line = printed[-MAX_PAGE_BYTES:].split(b"\n")
        values = energy.parse_nvidia_smi(b"\n".join(lines).decode("utf-8", "replace"))
        if values:
            self._latest |= values
            self._printed_s = monotonic()
        elif monotonic() > self._printed_s + energy.LONGEST_GAP_S:
            self._latest = {}
        return bool(self._latest)

    def new_samples(self, t_s: float, took_s: float, *, every: bool) -> list[MetricSample]:  # noqa: ARG002 - most of its few series change
        """Return all values of the latest read."""
        facts = _facts_about_read(took_s, succeeded=bool(self._latest))
        return _make_samples(self._latest | facts, t_s, None, self.url)

    def close(self) -> None:
        """End nvidia-smi."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


_Reader: TypeAlias = PageReader | SmiReader


def _facts_about_read(took_s: float, *, succeeded: bool) -> _Values:
    """Return the duration of a read, and whether it succeeded, which has to be the last value."""
    return {(series.TOOK, ""): round(took_s, 6), (series.UP, ""): float(succeeded)}


def _make_samples(values: _Values, t_s: float, target: int | None, url: str) -> list[MetricSample]:
    return [
        MetricSample(t_s=t_s, target=target, page=url, name=name, labels=labels, value=value)
        for (name, labels), value in values.items()
    ]


def scrape(folder: Path, source: RawIOBase, output: IO[bytes]) -> None:
    """Run the scraper process.

    It finds the pages and prints them as one JSON line to `output`, reads the start time from
    `source`, reads all pages until `source` ends, and then reads them once more.
    """
    job = msgspec.json.decode(source.readline(), type=ScrapeJob)
    context = None
    if any(address.tls for address in job.addresses):
        from loadgen_sdk.transport.tls import Tls  # Only needed with TLS.

        context = Tls(verify=job.verify, ca=job.ca, cert=job.cert, key=job.key).context()
    readers: list[_Reader] = [PageReader(address, context) for address in job.addresses]
    if job.smi:
        readers.append(SmiReader())
    try:
        with ThreadPoolExecutor(max(len(readers), 1)) as pool:
            _scrape(readers, pool, folder, source, output)
    finally:
        for reader in readers:
            if isinstance(reader, SmiReader):
                reader.close()


def _scrape(
    candidates: Sequence[_Reader],
    pool: ThreadPoolExecutor,
    folder: Path,
    source: RawIOBase,
    output: IO[bytes],
) -> None:
    """Find the pages, wait for the start of the load, and read the pages until the load ends."""
    find_start_ns = monotonic_ns()
    has_page = list(pool.map(lambda reader: reader.find(), candidates))
    readers = [reader for reader, found in zip(candidates, has_page, strict=True) if found]
    find_took_s = (monotonic_ns() - find_start_ns) / 1e9
    with suppress(BrokenPipeError):
        output.write(msgspec.json.encode(_found_pages(readers)) + b"\n")
        output.flush()
    start_line = source.readline()
    if not readers or not start_line:
        return
    start_ns = int(start_line)
    with ExitStack() as files:
        writer = _SampleWriter(readers, folder, start_ns, files)
        writer.write(find_start_ns, find_took_s, every=True)
        _read_until_end(readers, pool, source, writer)


def _found_pages(readers: Sequence[_Reader]) -> FoundPages:
    """Return the URLs of the pages of the readers."""
    urls_by_kind = (
        tuple(reader.url for reader in readers if reader.address.kind == kind)
        for kind in PAGE_KINDS
    )
    return FoundPages(*urls_by_kind)


class _SampleWriter:
    """Writes the results of reads to the files of a run."""

    def __init__(
        self, readers: Sequence[_Reader], folder: Path, start_ns: int, files: ExitStack
    ) -> None:
        """Open the files that the readers need. `files` closes them."""
        self.start_ns = start_ns
        self._readers = readers
        self._page_readers = [reader for reader in readers if reader.address.kind != "accounts"]
        self._samples_file: IO[bytes] | None = None
        self._accounts_file: IO[bytes] | None = None
        if self._page_readers:
            self._samples_file = files.enter_context(_open_file(folder / series.FILE))
        if len(self._page_readers) < len(readers):
            self._accounts_file = files.enter_context(_open_file(folder / request_accounts.FILE))

    def write(self, read_start_ns: int, took_s: float, *, every: bool) -> None:
        """Write what the latest reads changed. See `PageReader.new_samples` for `every`."""
        t_s = round((read_start_ns - self.start_ns) / 1e9, 4)
        if self._samples_file is not None:
            samples: list[MetricSample] = []
            for reader in self._page_readers:
                samples += reader.new_samples(t_s, took_s, every=every)
            _write_lines(self._samples_file, samples)
        if self._accounts_file is not None:
            accounts = [account for reader in self._readers for account in reader.accounts]
            _write_lines(self._accounts_file, accounts)
            for reader in self._readers:
                if isinstance(reader, PageReader):
                    reader.accounts.clear()


def _read_until_end(
    readers: Sequence[_Reader], pool: ThreadPoolExecutor, source: RawIOBase, writer: _SampleWriter
) -> None:
    """Read all pages about once a second until `source` ends, and once more after that.

    A page that is still being read is not requested again, because it may take forever.
    """
    has_ended = False
    next_read_s = max(writer.start_ns / 1e9, monotonic())
    reads: dict[int, Future[bool]] = {}
    while not has_ended:
        wait_s = max(next_read_s - monotonic(), 0)
        has_ended = bool(select.select([source], [], [], wait_s)[0])
        if has_ended:
            sleep(SETTLE_S)
        read_start_ns = monotonic_ns()
        cpu_before_s = process_time()
        for index, reader in enumerate(readers):
            if index not in reads or reads[index].done():
                reads[index] = pool.submit(reader.read)
        wait(reads.values(), MAX_DELAY_S)
        writer.write(read_start_ns, (monotonic_ns() - read_start_ns) / 1e9, every=has_ended)
        elapsed_s = (read_start_ns - writer.start_ns) / 1e9
        interval_s = max(
            INTERVAL_S + elapsed_s / SECONDS_PER_SLOWDOWN,
            (process_time() - cpu_before_s) / MAX_CPU_SHARE,
            INTERVAL_S,
        )
        next_read_s = max(next_read_s + interval_s, monotonic())


def _open_file(path: Path) -> IO[bytes]:
    """Open a file for appending that only its owner may read."""
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))


def _write_lines(file: IO[bytes], lines: Sequence[MetricSample | RequestAccount]) -> None:
    """Write values as JSON lines."""
    file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    file.flush()


# -- the command that starts the run --------------------------------------------------------------


class Scraper:
    """The scraper process, as the command that starts the run sees it.

    There is no process if there is nothing to read.
    """

    def __init__(
        self, folder: Path, options: MetricsPageOptions, probes: Sequence[ProbeResult]
    ) -> None:
        """Start the process and send it its job. If it cannot be started, no page is read."""
        self._is_off = "off" in options.pages
        self._found_pages: FoundPages | None = None
        self._process: subprocess.Popen[bytes] | child_process.ForkedProcess | None = None
        addresses = find_page_addresses(options, probes)
        needs_smi = reads_smi(options, probes)
        if not addresses and not needs_smi:
            return
        with suppress(OSError):
            self._process = child_process.start_sidecar(
                "loadgen.core.sidecars.scraper", str(folder), copy=partial(main, str(folder))
            )
        tls = options.tls
        job = ScrapeJob(
            addresses=addresses,
            verify=tls.verify,
            ca=tls.ca,
            cert=tls.cert,
            key=tls.key,
            smi=needs_smi,
        )
        self._send(msgspec.json.encode(job) + b"\n")

    def metrics_urls(self) -> tuple[str, ...] | None:
        """Return the URLs of the metrics pages, or None if none are looked for (`off`)."""
        return None if self._is_off else self.find_pages().metrics

    def find_pages(self) -> FoundPages:
        """Return the URLs of all pages. There are none if that takes over DISCOVERY_TIMEOUT_S."""
        if self._found_pages is None:
            self._found_pages = self._receive_found_pages()
            if not any(self._found_pages):
                self.close()
        return self._found_pages

    def _receive_found_pages(self) -> FoundPages:
        if self._process is None:
            return FoundPages()
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], DISCOVERY_TIMEOUT_S)[0]:
            return FoundPages()
        line = self._process.stdout.readline()
        return msgspec.json.decode(line, type=FoundPages) if line else FoundPages()

    def start_load(self, start_ns: int) -> None:
        """Tell the process when the load starts.

        The time is on the monotonic clock, which all processes of a machine share.
        """
        self._send(b"%d\n" % start_ns)

    def close(self) -> None:
        """Let the process read once more and end. If that takes too long, it is killed."""
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
        """Send a line to the process, if there is one."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()


def main(folder: str) -> None:
    """Run the scraper process on standard input and output.

    Standard input is not buffered, because select does not see what a buffer holds.
    """
    os.nice(NICENESS)
    with (
        open(0, "rb", buffering=0, closefd=False) as source,
        open(1, "wb", closefd=False) as output,
    ):
        scrape(Path(folder), source, output)


if __name__ == "__main__":
    main(sys.argv[1])
