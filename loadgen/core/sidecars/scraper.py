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
from contextlib import ExitStack, closing, suppress
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
    should_read_smi,
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
    """The job of the scraper process, which is the first line on its standard input, as JSON.

    Attributes:
        addresses: Where pages may be.
        verify: Whether certificates of servers are verified.
        ca: A file of certificate authorities, or None for those of the system.
        cert: The file of a client certificate, or None.
        key: The file of its key, or None.
        reads_nvidia_smi: Whether nvidia-smi of this machine is read too.
    """

    addresses: tuple[PageAddress, ...]
    verify: bool = True
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    reads_nvidia_smi: bool = False


class FoundPages(NamedTuple):
    """The URLs of the pages that the scraper process has found, by PAGE_KINDS."""

    metrics: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    energy: tuple[str, ...] = ()


# -- the process ----------------------------------------------------------------------------------


class PageReader:
    """Reads one page over its own connection, which is opened again after a failure."""

    def __init__(self, address: PageAddress, tls_context: ssl.SSLContext | None) -> None:
        """Create a reader, which connects at the first read.

        Args:
            address: The address of the page, with all paths at which this kind of server may have
                it. `find_page` tries them and then leaves only the right one.
            tls_context: The TLS context for a page with HTTPS.
        """
        self.address = address

        # Timing breakdowns that were read and are not written yet.
        self.breakdowns: list[TimingBreakdown] = []
        self._path = address.paths[0]
        self._url = address.urls[0]
        self._is_connected = False
        self._connection = PageConnection(
            address.host, address.port, tls_context if address.tls else None, TIMEOUT_S
        )
        self._iteration_parser = series.IterationParser()

        # The values of the latest read; empty if it failed.
        self._latest_values: PageValues = {}

        # The value of each series in its last sample that was written.
        self._written_values: PageValues = {}

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
        """Read the page and keep its values. Return False if it cannot be read or parsed.

        A server may have closed the connection while it was idle. Then a read fails that would
        succeed with a new connection, so it is repeated once.
        """
        was_connected = self._is_connected
        error = self._try_read()
        if was_connected and isinstance(error, ConnectionError):
            error = self._try_read()
        return error is None

    def _try_read(self) -> Exception | None:
        """Read the page into `_latest_values`, and return the error if that failed."""
        self._latest_values = {}
        try:
            self._latest_values = self._parse(self._fetch(self._path))
        except (OSError, *PARSE_ERRORS) as error:
            self._connection.close()
            self._is_connected = False
            return error

        self._is_connected = True
        return None

    def take_new_samples(
        self, t_s: float, duration_s: float, *, includes_rare: bool
    ) -> list[MetricSample]:
        """Return the samples that the caller has to write after a read of the page.

        To keep the file small, there is a sample only for each series whose value differs from the
        one that was written last. Two samples about the read itself follow: its duration, and `up`
        with the value 1, or 0 for a read that failed. `up` is always the last one.

        Args:
            t_s: The time of the read, from the start of the run.
            duration_s: How long it took.
            includes_rare: Whether to include series that are written only at the first and the last
                read (see `series.is_written_rarely`).
        """
        changed_values = {}
        for key, value in self._latest_values.items():
            is_included = includes_rare or not series.is_written_rarely(key.name)
            has_changed = self._written_values.get(key) != value
            if is_included and has_changed:
                changed_values[key] = value

        self._written_values.update(changed_values)
        has_succeeded = len(self._latest_values) > 0
        values_of_read = _values_of_read(duration_s, succeeded=has_succeeded)

        return _make_samples(changed_values | values_of_read, t_s, self.address.target, self.url)

    def _parse(self, data: bytes) -> PageValues:
        """Return the values on a page, whose format depends on the kind of the page.

        A page of timing breakdowns has no values: its breakdowns are added to `breakdowns`.

        Raises one of PARSE_ERRORS for a malformed page.
        """
        if self.address.kind == "accounts":
            return self._parse_breakdowns(data)
        if self.address.kind == "energy":
            return self._parse_energy(data)

        # TensorRT-LLM has a JSON list of statistics, which each read empties.
        is_json_list = data.lstrip().startswith(b"[")
        if self.address.is_emptied_by_read and is_json_list:
            return self._iteration_parser.parse(data)

        return self._parse_prometheus(data)

    def _parse_breakdowns(self, data: bytes) -> PageValues:
        """Add the timing breakdowns on a page to `breakdowns`.

        An empty result would count as a failed read, so one value is returned, which is not
        written.
        """
        target = 0 if self.address.target is None else self.address.target
        self.breakdowns += request_accounts.parse_breakdowns(data, target)
        return {SeriesKey("accounts", ""): 1.0}

    def _parse_energy(self, data: bytes) -> PageValues:
        """Return the values about hardware on a page: JSON of trtllm-serve or Prometheus text."""
        is_json_object = data.lstrip().startswith(b"{")
        if is_json_object:
            return energy.parse_energy_metrics(data)
        return energy.select_hardware_values(self._parse_prometheus(data))

    def _parse_prometheus(self, data: bytes) -> PageValues:
        """Return the values on a page of Prometheus text, by the names under which they are stored.

        Most series are stored under the name that they have on the page. A server that a plug-in
        added may have other names for the same quantities. `address.names` then has the name by
        which loadgen stores such a series, for example `loadgen:running` for `acme_running`.
        """
        values = series.parse_page(data.decode("utf-8", "replace"))
        stored_name_by_page_name = self.address.names
        if not stored_name_by_page_name:
            return values

        stored_values = {}
        for key, value in values.items():
            stored_name = stored_name_by_page_name.get(key.name, key.name)
            stored_values[SeriesKey(stored_name, key.labels)] = value

        return stored_values

    def _fetch(self, path: str) -> bytes:
        """Return the body of a page. Raises ValueError for a status other than 200."""
        headers = {"Accept": "text/plain, application/json", **self.address.headers}
        status, body = self._connection.request("GET", path, headers, MAX_PAGE_BYTES)
        if status != 200:
            raise ValueError(f"status {status}")
        return body


class SmiReader:
    """Reads what a running `nvidia-smi` prints, which is one line per GPU and second.

    That costs less than starting nvidia-smi for each read. It has the same methods as a
    `PageReader`.
    """

    address = PageAddress(target=None, host="", port=0, tls=False, paths=(), urls=(), kind="energy")
    url = energy.SMI
    breakdowns: tuple[TimingBreakdown, ...] = ()

    def __init__(self) -> None:
        """Create a reader without a process."""
        self._process: subprocess.Popen[bytes] | None = None
        self._incomplete_line = b""
        self._latest_values: PageValues = {}
        self._last_output_s = 0.0

    def find_page(self) -> bool:
        """Start nvidia-smi. Return True if it has printed values within TIMEOUT_S."""
        try:
            self._process = subprocess.Popen(
                energy.SMI_COMMAND,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError:  # It is not installed.
            return False

        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

        # Wait for the first output. If none has come by then, `read` returns False.
        select.select([self._process.stdout], [], [], TIMEOUT_S)
        return self.read()

    def read(self) -> bool:
        """Take what was printed since the last read. Return True if values are known.

        nvidia-smi prints by its own clock, so a read without new values keeps those of the last
        one. They are dropped after `energy.LONGEST_GAP_S`.
        """
        values = energy.parse_nvidia_smi(self._read_lines())
        if values:
            self._latest_values |= values
            self._last_output_s = monotonic()
        elif monotonic() > self._last_output_s + energy.LONGEST_GAP_S:
            self._latest_values = {}
        return bool(self._latest_values)

    def _read_lines(self) -> str:
        """Return the complete lines that nvidia-smi has printed since the last call.

        If there is very much output, only its last MAX_PAGE_BYTES are kept, because only the latest
        values matter. The first line is then incomplete, and the parser skips it.
        """
        assert self._process is not None and self._process.stdout is not None
        new_output = self._process.stdout.read() or b""
        unparsed_output = (self._incomplete_line + new_output)[-MAX_PAGE_BYTES:]
        *lines, self._incomplete_line = unparsed_output.split(b"\n")
        return b"\n".join(lines).decode("utf-8", "replace")

    def take_new_samples(
        self,
        t_s: float,
        duration_s: float,
        *,
        includes_rare: bool,  # noqa: ARG002 - part of the interface of readers
    ) -> list[MetricSample]:
        """Return the samples that the caller has to write after a read of nvidia-smi.

        All values are written, changed or not: they are few, and nearly all change from read to
        read. Two samples about the read itself follow: its duration, and whether it succeeded.

        Args:
            t_s: The time of the read, from the start of the run.
            duration_s: How long it took.
            includes_rare: Has no effect. A `PageReader` writes some series rarely if it is False.
        """
        has_succeeded = len(self._latest_values) > 0
        values_of_read = _values_of_read(duration_s, succeeded=has_succeeded)
        values = self._latest_values | values_of_read
        return _make_samples(values, t_s, target=None, url=self.url)

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
    """Run the scraper process, which reads metrics pages of servers until the load has ended.

    The process exchanges lines with the command that runs the load. It receives the job, sends the
    URLs of the pages that exist, and receives the start time of the load. The command closes the
    pipe at the end of the load.

    Args:
        folder: The folder of the run, in which the samples are written.
        source: The pipe from the command.
        output: The pipe to the command.
    """
    job = msgspec.json.decode(source.readline(), type=ScrapeJob)
    with ExitStack() as cleanup:
        candidates = _create_readers(job, cleanup)
        pool = cleanup.enter_context(ThreadPoolExecutor(max(len(candidates), 1)))

        # To find out whether a page exists, it is read. This is the first read of the run.
        first_read_start_ns = monotonic_ns()
        readers = _find_pages(candidates, pool)
        first_read_s = (monotonic_ns() - first_read_start_ns) / 1e9
        _send_found_pages(readers, output)

        start_ns = _receive_start_time(source)
        if start_ns is None or not readers:
            return

        writer = _SampleWriter(readers, folder, start_ns, cleanup)
        writer.write(first_read_start_ns, first_read_s, includes_rare=True)
        _read_until_end(readers, pool, source, writer)


def _create_readers(job: ScrapeJob, cleanup: ExitStack) -> list[_Reader]:
    """Return a reader for each page that may exist, and one for nvidia-smi if it is requested.

    `cleanup` ends nvidia-smi at the end of its context.
    """
    tls_context = _create_tls_context(job)
    readers: list[_Reader] = [PageReader(address, tls_context) for address in job.addresses]
    if job.reads_nvidia_smi:
        smi_reader = cleanup.enter_context(closing(SmiReader()))
        readers.append(smi_reader)
    return readers


def _send_found_pages(readers: Sequence[_Reader], output: IO[bytes]) -> None:
    """Send the URLs of the pages of the readers to the command that runs the load.

    It may have ended already, which closes the pipe. That is noticed at the next read from it.
    """
    with suppress(BrokenPipeError):
        output.write(msgspec.json.encode(_found_pages(readers)) + b"\n")
        output.flush()


def _receive_start_time(source: RawIOBase) -> int | None:
    """Wait for the start of the load, and return its time on the monotonic clock in ns.

    Return None if the pipe ends without it, because the run has ended before its load.
    """
    start_line = source.readline()
    return int(start_line) if start_line else None


def _create_tls_context(job: ScrapeJob) -> ssl.SSLContext | None:
    """Return the TLS context of a job, or None if no page is read with TLS."""
    if not any(address.tls for address in job.addresses):
        return None
    # Other jobs do not need this module.
    from loadgen_sdk.transport.tls import Tls

    return Tls(verify=job.verify, ca=job.ca, cert=job.cert, key=job.key).context()


def _find_pages(candidates: Sequence[_Reader], pool: ThreadPoolExecutor) -> list[_Reader]:
    """Return the readers whose page exists, all of which are tried at the same time."""
    has_page = pool.map(lambda reader: reader.find_page(), candidates)
    return [reader for reader, is_found in zip(candidates, has_page, strict=True) if is_found]


def _found_pages(readers: Sequence[_Reader]) -> FoundPages:
    """Return the URLs of the pages of the readers."""
    urls_by_kind = (
        tuple(reader.url for reader in readers if reader.address.kind == kind)
        for kind in PAGE_KINDS
    )
    return FoundPages(*urls_by_kind)


class _SampleWriter:
    """Writes the results of reads to the files of a run.

    Attributes:
        start_ns: The start of the run on the monotonic clock.
    """

    def __init__(
        self, readers: Sequence[_Reader], folder: Path, start_ns: int, files: ExitStack
    ) -> None:
        """Open the files that the readers need.

        There are two kinds of results, each with a file of its own. Most pages give samples: values
        of metrics at the time of a read. A page with timing breakdowns (kind "accounts") has no
        metrics, but reports how long the server worked on each request.

        Args:
            readers: The readers whose results are written.
            folder: The folder of the run.
            start_ns: The start of the run on the monotonic clock.
            files: The context that closes the opened files.
        """
        self.start_ns = start_ns
        self._sample_readers: list[_Reader] = []

        self._breakdown_readers: list[PageReader] = []
        for reader in readers:
            if isinstance(reader, PageReader) and reader.address.kind == "accounts":
                self._breakdown_readers.append(reader)
            else:
                self._sample_readers.append(reader)

        self._sample_file: IO[bytes] | None = None
        self._breakdown_file: IO[bytes] | None = None
        if self._sample_readers:
            self._sample_file = files.enter_context(_open_file(folder / series.FILE))

        if self._breakdown_readers:
            breakdown_path = folder / request_accounts.FILE
            self._breakdown_file = files.enter_context(_open_file(breakdown_path))

    def write(self, read_start_ns: int, duration_s: float, *, includes_rare: bool) -> None:
        """Write what the latest reads of all pages have brought.

        These are the values of metrics that have changed since they were last written, and timing
        breakdowns: how long a server says that it took for each request.

        Args:
            read_start_ns: When the reads started, on the monotonic clock.
            duration_s: How long they took.
            includes_rare: Whether to write also the series that change rarely. See
                `PageReader.take_new_samples`.
        """
        t_s = round((read_start_ns - self.start_ns) / 1e9, 4)
        if self._sample_file is not None:
            samples: list[MetricSample] = []
            for reader in self._sample_readers:
                samples += reader.take_new_samples(t_s, duration_s, includes_rare=includes_rare)
            _write_lines(self._sample_file, samples)

        if self._breakdown_file is not None:
            for breakdown_reader in self._breakdown_readers:
                _write_lines(self._breakdown_file, breakdown_reader.breakdowns)
                breakdown_reader.breakdowns.clear()


def _read_until_end(
    readers: Sequence[_Reader], pool: ThreadPoolExecutor, source: RawIOBase, writer: _SampleWriter
) -> None:
    """Read all pages about once a second until the load has ended, and once more after that.

    The command that runs the load closes the pipe `source` at its end. Servers then have SETTLE_S
    to update their counters before the last read. Reads become less frequent in a long run, and if
    they take much CPU time (see `_read_interval_s`). To save space, series that change rarely are
    written only after the first read, which the caller has done, and after the last one.

    Args:
        readers: The readers of the pages.
        pool: Has a thread for each reader.
        source: The pipe from the command, which ends with the load.
        writer: Writes what was read.
    """
    parallel_reads = _ParallelReads(readers, pool)
    next_read_s = max(writer.start_ns / 1e9, monotonic())
    while not _wait_for_end(source, until_s=next_read_s):
        interval_s = _read_and_write(parallel_reads, writer, is_last_read=False)
        next_read_s = max(next_read_s + interval_s, monotonic())
    sleep(SETTLE_S)
    _read_and_write(parallel_reads, writer, is_last_read=True)


def _read_and_write(
    parallel_reads: _ParallelReads, writer: _SampleWriter, *, is_last_read: bool
) -> float:
    """Read all pages once and write what has changed. Return the time to the next read, in s."""
    read_start_ns = monotonic_ns()
    cpu_before_s = process_time()
    parallel_reads.read_all()
    read_duration_s = (monotonic_ns() - read_start_ns) / 1e9
    writer.write(read_start_ns, read_duration_s, includes_rare=is_last_read)

    return _read_interval_s(
        elapsed_s=(read_start_ns - writer.start_ns) / 1e9,
        cpu_s=process_time() - cpu_before_s,
    )


def _wait_for_end(source: RawIOBase, until_s: float) -> bool:
    """Wait until a time of the monotonic clock, or until `source` ends. Return True if it ended."""
    readable, _, _ = select.select([source], [], [], max(until_s - monotonic(), 0))
    return bool(readable)


class _ParallelReads:
    """Reads several pages at the same time, each in a thread."""

    def __init__(self, readers: Sequence[_Reader], pool: ThreadPoolExecutor) -> None:
        """Begin without reads. The pool must have a thread for each reader."""
        self._readers = readers
        self._pool = pool
        self._reads: dict[int, Future[bool]] = {}  # the last read of each reader, by its index

    def read_all(self) -> None:
        """Read all pages, and wait at most MAX_DELAY_S for them.

        A page that takes longer goes on in the background. It is not read again before that read
        has ended.
        """
        for index, reader in enumerate(self._readers):
            if index not in self._reads or self._reads[index].done():
                self._reads[index] = self._pool.submit(reader.read)
        wait(self._reads.values(), MAX_DELAY_S)


def _read_interval_s(elapsed_s: float, cpu_s: float) -> float:
    """Return the time between two reads.

    It is INTERVAL_S at the start of a run, and one second longer after every SECONDS_PER_SLOWDOWN
    of the run, so that the files of long runs stay small. It is also so long that reads take at
    most MAX_CPU_SHARE of a CPU core.

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
        job = ScrapeJob(
            addresses=find_page_addresses(options, probes),
            verify=options.tls.verify,
            ca=options.tls.ca,
            cert=options.tls.cert,
            key=options.tls.key,
            reads_nvidia_smi=should_read_smi(options, probes),
        )
        has_work = bool(job.addresses) or job.reads_nvidia_smi
        if not has_work:
            return

        try:
            self._process = child_process.start_sidecar(
                "loadgen.core.sidecars.scraper", str(folder), work=partial(main, str(folder))
            )
        except OSError:
            return

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
