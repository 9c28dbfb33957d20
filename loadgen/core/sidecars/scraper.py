"""Read the servers' metrics pages during a run, about once a second, in a process of its own.

The workers do not know about this process, which has its own connections. Its first read is before
the load and its last read after it. A page that fails is counted and requested again a second
later; it never ends a run. Keys arrive on standard input and are written nowhere.
"""

from __future__ import annotations

import itertools
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
from loadgen.core.server_metrics.request_accounts import TimingBreakdown
from loadgen.core.server_metrics.series import MetricSample, PageValues, SeriesKey
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
"""A lower priority than the load has."""


class ScrapeJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job of the scraper process, which is the first line on its standard input, as JSON."""

    addresses: tuple[PageAddress, ...]
    verify: bool = True
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    reads_nvidia_smi: bool = False
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
        """Create a reader, which connects at the first read.

        Args:
            address: The address of the page. If a kind of server has its page at one of several
                paths, the address has all of them, until `find_page` has found the right one.
            context: The TLS context for a page with HTTPS.
        """
        self.address = address
        self.breakdowns: list[TimingBreakdown] = []
        """Timing breakdowns that were read and are not written yet."""
        self._path = address.paths[0]
        self._url = address.urls[0]
        self._is_connected = False
        self._connection = PageConnection(
            address.host, address.port, context if address.tls else None, TIMEOUT_S
        )
        self._iterations = series.IterationParser()
        self._latest: PageValues = {}
        """What the latest read returned; empty if it failed."""
        self._written: PageValues = {}
        """The value of each series in the last sample of it that was written."""

    @property
    def url(self) -> str:
        """Return the URL of the page, or of the first candidate before the page is found."""
        return self._url

    def find_page(self) -> bool:
        """Look for the page at each of its possible paths, and return True if there is one.

        The successful read counts as the first read of the page. Timing breakdowns that it
        contains are dropped, because they are those of requests before the run.
        """
        for path, url in zip(self.address.paths, self.address.urls, strict=True):
            self._path = path
            self._url = url
            if self.read():
                self.breakdowns.clear()
                return True
        return False

    def read(self) -> bool:
        """Read the page into `_latest`. Return False if it cannot be read or parsed.

        A server may have closed the connection while it was idle. Then a read fails that would
        succeed with a new connection, so it is repeated once.
        """
        was_connected = self._is_connected
        error = self._try_read()
        if was_connected and isinstance(error, ConnectionError):
            error = self._try_read()
        return error is None

    def _try_read(self) -> Exception | None:
        """Read the page into `_latest`, and return the error if that failed."""
        self._latest = {}
        try:
            self._latest = self._parse(self._fetch(self._path))
        except (OSError, *PARSE_ERRORS) as error:
            self._connection.close()
            self._is_connected = False
            return error
        self._is_connected = True
        return None

    def new_samples(
        self, t_s: float, duration_s: float, *, includes_rare: bool
    ) -> list[MetricSample]:
        """Return a sample for each series that the latest read changed.

        Two samples about the read follow: its duration, and `up`, which is always the last one.

        Args:
            t_s: The time of the read, from the start of the run.
            duration_s: How long it took.
            includes_rare: Whether to include series that are written only at the first and the last
                read (see `series.is_written_rarely`).
        """
        changed_values = {}
        for key, value in self._latest.items():
            is_included = includes_rare or not series.is_written_rarely(key.name)
            if is_included and self._written.get(key) != value:
                changed_values[key] = value
        self._written |= changed_values
        values_of_read = _values_of_read(duration_s, succeeded=bool(self._latest))
        return _make_samples(changed_values | values_of_read, t_s, self.address.target, self.url)

    def _parse(self, data: bytes) -> PageValues:
        """Return the values on a page, whose format depends on the kind of the page.

        A page of timing breakdowns has no values. Its breakdowns are added to `breakdowns`, and one
        value is returned, which shows that the read succeeded.

        Raises one of PARSE_ERRORS for a malformed page.
        """
        address = self.address
        if address.kind == "accounts":
            self.breakdowns += request_accounts.parse_breakdowns(data, address.target or 0)
            return {SeriesKey("accounts", ""): 1.0}
        first_character = data.lstrip()[:1]
        if address.kind == "energy" and first_character == b"{":
            return energy.parse_energy_metrics(data)
        if address.is_emptied_by_read and first_character == b"[":
            return self._iterations.parse(data)
        values = series.parse_page(data.decode("utf-8", "replace"))
        if address.names:
            values = {
                SeriesKey(address.names.get(key.name, key.name), key.labels): value
                for key, value in values.items()
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
    breakdowns: tuple[TimingBreakdown, ...] = ()

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._incomplete_line = b""
        self._latest: PageValues = {}
        self._printed_s = 0.0

    def find_page(self) -> bool:
        """Start nvidia-smi. Return False if it cannot be started or prints nothing."""
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
        """Take what was printed since the last read. Return False if it printed nothing lately.

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

    def new_samples(
        self,
        t_s: float,
        duration_s: float,
        *,
        includes_rare: bool,  # noqa: ARG002 - There are no rare series here.
    ) -> list[MetricSample]:
        """Return a sample for each value of the latest read. Most of these few values change."""
        values_of_read = _values_of_read(duration_s, succeeded=bool(self._latest))
        return _make_samples(self._latest | values_of_read, t_s, None, self.url)

    def close(self) -> None:
        """End nvidia-smi."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


_Reader: TypeAlias = PageReader | SmiReader


def _values_of_read(duration_s: float, *, succeeded: bool) -> PageValues:
    """Return the duration of a read, and whether it succeeded, which has to be the last value."""
    return {
        SeriesKey(series.SCRAPE_DURATION, ""): round(duration_s, 6),
        SeriesKey(series.UP, ""): float(succeeded),
    }


def _make_samples(
    values: PageValues, t_s: float, target: int | None, url: str
) -> list[MetricSample]:
    """Return a sample for each value of a page. See `MetricSample` for the arguments."""
    return [
        MetricSample(
            t_s=t_s, target=target, page=url, name=key.name, labels=key.labels, value=value
        )
        for key, value in values.items()
    ]


def scrape(folder: Path, source: RawIOBase, output: IO[bytes]) -> None:
    """Run the scraper process until the load has ended.

    The process that started this one sends the job and later the start time, as lines, and closes
    the pipe at the end of the load. It receives the URLs of the pages that were found.

    Args:
        folder: The folder of the run, in which the samples are written.
        source: The pipe from the other process.
        output: The pipe to it.
    """
    job = msgspec.json.decode(source.readline(), type=ScrapeJob)
    context = None
    if any(address.tls for address in job.addresses):
        from loadgen_sdk.transport.tls import Tls  # Only needed with TLS.

        context = Tls(verify=job.verify, ca=job.ca, cert=job.cert, key=job.key).context()
    readers: list[_Reader] = [PageReader(address, context) for address in job.addresses]
    if job.reads_nvidia_smi:
        readers.append(SmiReader())
    try:
        with ThreadPoolExecutor(max(len(readers), 1)) as pool:
            _find_and_read_pages(readers, pool, folder, source, output)
    finally:
        for reader in readers:
            if isinstance(reader, SmiReader):
                reader.close()


def _find_and_read_pages(
    candidates: Sequence[_Reader],
    pool: ThreadPoolExecutor,
    folder: Path,
    source: RawIOBase,
    output: IO[bytes],
) -> None:
    """Find the pages, wait for the start of the load, and read the pages until the load ends.

    Candidates without a page are not read again. `scrape` explains the other arguments.
    """
    find_start_ns = monotonic_ns()
    has_page = list(pool.map(lambda reader: reader.find_page(), candidates))
    readers = list(itertools.compress(candidates, has_page))
    find_duration_s = (monotonic_ns() - find_start_ns) / 1e9
    with suppress(BrokenPipeError):
        output.write(msgspec.json.encode(_found_pages(readers)) + b"\n")
        output.flush()
    start_line = source.readline()
    if not readers or not start_line:
        return
    start_ns = int(start_line)
    with ExitStack() as files:
        writer = _SampleWriter(readers, folder, start_ns, files)
        writer.write(find_start_ns, find_duration_s, includes_rare=True)
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
        """Open the files that the readers need.

        Args:
            readers: The readers whose results are written.
            folder: The folder of the run.
            start_ns: The start of the run on the monotonic clock.
            files: Closes the files.
        """
        self.start_ns = start_ns
        self._readers = readers
        self._page_readers = [reader for reader in readers if reader.address.kind != "accounts"]
        self._samples_file: IO[bytes] | None = None
        self._breakdowns_file: IO[bytes] | None = None
        if self._page_readers:
            self._samples_file = files.enter_context(_open_file(folder / series.FILE))
        if len(self._page_readers) < len(readers):
            breakdowns_path = folder / request_accounts.FILE
            self._breakdowns_file = files.enter_context(_open_file(breakdowns_path))

    def write(self, read_start_ns: int, duration_s: float, *, includes_rare: bool) -> None:
        """Write the values that the latest reads changed, and the timing breakdowns of requests.

        Args:
            read_start_ns: When the reads started, on the monotonic clock.
            duration_s: How long they took.
            includes_rare: See `PageReader.new_samples`.
        """
        t_s = round((read_start_ns - self.start_ns) / 1e9, 4)
        if self._samples_file is not None:
            samples: list[MetricSample] = []
            for reader in self._page_readers:
                samples += reader.new_samples(t_s, duration_s, includes_rare=includes_rare)
            _write_lines(self._samples_file, samples)
        if self._breakdowns_file is not None:
            for reader in self._readers:
                if isinstance(reader, PageReader):
                    _write_lines(self._breakdowns_file, reader.breakdowns)
                    reader.breakdowns.clear()


def _read_until_end(
    readers: Sequence[_Reader], pool: ThreadPoolExecutor, source: RawIOBase, writer: _SampleWriter
) -> None:
    """Read all pages about once a second until `source` ends, and once more after that.

    The pages are read at the same time, in threads. A page that is still being read after
    MAX_DELAY_S delays the others no longer, and is not requested again before it has ended.
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
        duration_s = (monotonic_ns() - read_start_ns) / 1e9
        writer.write(read_start_ns, duration_s, includes_rare=has_ended)

        interval_s = _read_interval_s(
            elapsed_s=(read_start_ns - writer.start_ns) / 1e9,
            cpu_s=process_time() - cpu_before_s,
        )
        next_read_s = max(next_read_s + interval_s, monotonic())


def _read_interval_s(elapsed_s: float, cpu_s: float) -> float:
    """Return the time between two reads.

    It is INTERVAL_S at the start of a run and grows slowly, and is longer if reads cost so much CPU
    time that they would take more than MAX_CPU_SHARE of a core.

    Args:
        elapsed_s: The time since the start of the run, which is negative before it.
        cpu_s: The CPU time of the last read of all pages.
    """
    slow_interval_s = INTERVAL_S + elapsed_s / SECONDS_PER_SLOWDOWN
    return max(INTERVAL_S, slow_interval_s, cpu_s / MAX_CPU_SHARE)


def _open_file(path: Path) -> IO[bytes]:
    """Open a file for appending that only its owner may read."""
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))


def _write_lines(file: IO[bytes], lines: Sequence[MetricSample | TimingBreakdown]) -> None:
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
        """Start the process and send it its job. If it cannot be started, no page is read.

        Args:
            folder: The folder of the run.
            options: Which pages the user wants to read.
            probes: What the probe found out about each target.
        """
        self._is_off = "off" in options.pages
        self._found_pages: FoundPages | None = None
        self._process: subprocess.Popen[bytes] | child_process.ForkedProcess | None = None
        addresses = find_page_addresses(options, probes)
        needs_nvidia_smi = reads_smi(options, probes)
        if not addresses and not needs_nvidia_smi:
            return
        with suppress(OSError):
            self._process = child_process.start_sidecar(
                "loadgen.core.sidecars.scraper", str(folder), work=partial(main, str(folder))
            )
        tls = options.tls
        job = ScrapeJob(
            addresses=addresses,
            verify=tls.verify,
            ca=tls.ca,
            cert=tls.cert,
            key=tls.key,
            reads_nvidia_smi=needs_nvidia_smi,
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
        """Wait for the line with the pages that the process has found."""
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
