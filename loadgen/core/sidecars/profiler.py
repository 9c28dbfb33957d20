"""Starts and stops the profilers of the servers around a part of the load, for `--profile`.

IO, in a process of its own. vLLM, SGLang and TensorRT-LLM all have POST /start_profile and
/stop_profile. The process ends when its standard input does, and first stops the profilers that it
has started, also if the run is interrupted or killed.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import msgspec
from loadgen_sdk.transport.tls import Tls
from loadgen_sdk.wire_formats.server_profiles import SERVER_PROFILES

from loadgen.core import child_process, units
from loadgen.core.errors import TargetError, UserError
from loadgen.core.metrics import reasons
from loadgen.core.sidecars.page_addresses import MetricsPageOptions, target_headers
from loadgen.core.sidecars.page_connection import PageConnection
from loadgen.core.sidecars.scraper import MAX_PAGE_BYTES

if TYPE_CHECKING:
    from loadgen_sdk.probe.probe import ProbeResult

    from loadgen.core.results.manifest import ReasonCode, StagePlan

STEADY = "steady"
"""The name of the measured stages in `--profile`."""

REQUEST_TIMEOUT_S = 10.0
"""Longest wait for the response to a start, and to the test whether a server has a profiler."""

STOP_TIMEOUT_S = 180.0
"""Longest wait for the response to a stop. The server first writes its trace."""

STOP_ATTEMPTS = 2


class ProfiledServer(msgspec.Struct, frozen=True, kw_only=True):
    """One server whose profiler is used.

    Attributes:
        host: The host name or address.
        port: The port.
        tls: Whether to connect with TLS.
        start_path: The path that starts the profiler.
        stop_path: The path that stops the profiler.
        url: The URL for messages, without secrets.
        headers: The headers of each request.
    """

    host: str
    port: int
    tls: bool
    start_path: str
    stop_path: str
    url: str
    headers: dict[str, str] = {}


class ProfileJob(msgspec.Struct, frozen=True, kw_only=True):
    """The first line on the standard input of the process. The second line is a ProfileSpan."""

    servers: tuple[ProfiledServer, ...]
    tls: Tls


class ProfileSpan(msgspec.Struct, frozen=True, kw_only=True):
    """When the profilers run, in s of the monotonic clock.

    An `end_s` of None means until the load is over.
    """

    begin_s: float
    end_s: float | None = None


class ProfileOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the process did. Servers are given as URLs.

    Attributes:
        missing: The servers that have no profiler.
        started_s: When the profilers were started, in s of the monotonic clock. None: never.
        stopped_s: When the profilers were stopped. None: never.
        failed: The servers that did not start their profiler.
        still_running: The servers whose profiler could not be stopped.
    """

    missing: tuple[str, ...] = ()
    started_s: float | None = None
    stopped_s: float | None = None
    failed: tuple[str, ...] = ()
    still_running: tuple[str, ...] = ()


class ProfilerOptions(msgspec.Struct, frozen=True):
    """The value of `--profile STAGE[:TIME]`.

    Attributes:
        stage: The name of a stage, or STEADY for the measured stages.
        max_duration_ns: The longest time that the profilers run, or None.
    """

    stage: str
    max_duration_ns: int | None = None


def parse_profile_option(text: str) -> ProfilerOptions:
    """Return the options in the value of `--profile`. Raises units.InvalidValueError."""
    stage, colon, duration = text.partition(":")
    if not stage:
        raise units.InvalidValueError(
            "invalid_value",
            "names no stage",
            "write steady or the name of a stage, optionally with a maximum time: steady:10s",
        )

    return ProfilerOptions(stage, units.duration_ns(duration) if colon else None)


class RunSpan(NamedTuple):
    """A time of the run, in ns from its start. An `end_ns` of None means the end of the load."""

    begin_ns: int
    end_ns: int | None


def profile_span(options: ProfilerOptions, stages: Sequence[StagePlan]) -> RunSpan:
    """Return when the profilers start and stop.

    They run from the start of the first profiled stage to the end of the last one, but at most for
    `options.max_duration_ns`. A stage that ends with its last response has no planned end. The
    profilers then run until the end of the load, unless their time is limited.

    Raises UserError if the load does not have the stage.
    """
    profiled_stages = _select_profiled_stages(options, stages)
    begin_ns = profiled_stages[0].start_ns
    end_ns = profiled_stages[-1].end_ns
    if options.max_duration_ns is None:
        return RunSpan(begin_ns, end_ns)

    latest_end_ns = begin_ns + options.max_duration_ns
    if end_ns is None:
        return RunSpan(begin_ns, latest_end_ns)

    return RunSpan(begin_ns, min(end_ns, latest_end_ns))


def check_stage_exists(options: ProfilerOptions, stages: Sequence[StagePlan]) -> None:
    """Raise UserError if the load does not have the stage whose time is to be profiled."""
    _select_profiled_stages(options, stages)


def _select_profiled_stages(
    options: ProfilerOptions, stages: Sequence[StagePlan]
) -> list[StagePlan]:
    """Return the stages to profile, at least one: the measured ones, or those of a name.

    Raises UserError if the load has no such stage.
    """
    if options.stage == STEADY:
        profiled_stages = [stage for stage in stages if stage.measured]
    else:
        profiled_stages = [stage for stage in stages if stage.name == options.stage]

    if profiled_stages:
        return profiled_stages

    known_names = [STEADY, *dict.fromkeys(stage.name for stage in stages if stage.name)]
    raise UserError(
        "unknown_name",
        message=f"the load has no stage {options.stage!r}",
        where=f"--profile {options.stage}",
        hint=f"known: {', '.join(known_names)}",
    )


class Profiler:
    """The process that starts and stops the profilers, as seen by the command that runs a load."""

    def __init__(self, pages: MetricsPageOptions, probes: Sequence[ProbeResult]) -> None:
        """Start the process, and wait until it has checked that all servers have a profiler.

        Args:
            pages: The options with API keys, headers and TLS for requests to the servers.
            probes: What the probe found out about each target.

        Raises:
            UserError: A kind of server has no profiler.
            TargetError: A server was started without its profiler.
        """
        _check_has_profiler(probes)
        self._outcome = ProfileOutcome()
        self._start_ns = 0
        self._process = subprocess.Popen(
            child_process.command("loadgen.core.sidecars.profiler"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The run handles Ctrl-C and then closes the standard input of the process.
            start_new_session=True,
        )
        self._send(ProfileJob(servers=_profiled_servers(pages, probes), tls=pages.tls))

        servers_without_profiler = self._receive_outcome().missing
        if servers_without_profiler:
            self.close()
            raise _missing_profiler_error(servers_without_profiler, probes)

    def begin(self, start_ns: int, stages: Sequence[StagePlan], options: ProfilerOptions) -> None:
        """Pass the times of the profilers to the process when the load has started.

        Args:
            start_ns: The start of the run on the monotonic clock.
            stages: The stages of the run.
            options: The options of the profilers.
        """
        self._start_ns = start_ns
        span = profile_span(options, stages)
        begin_s = (start_ns + span.begin_ns) / 1e9
        end_s = None if span.end_ns is None else (start_ns + span.end_ns) / 1e9
        self._send(ProfileSpan(begin_s=begin_s, end_s=end_s))

    def close(self) -> None:
        """Stop the profilers that still run, and wait until the servers have confirmed it.

        The end of its standard input makes the process stop them. Its last line then says what was
        profiled. A second call has no effect.
        """
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return

        with suppress(BrokenPipeError):
            self._process.stdin.close()

        self._outcome = self._receive_outcome()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def stop_and_create_notes(self) -> dict[str, ReasonCode]:
        """Stop the profilers, and return notes about what was profiled and what went wrong.

        The codes of the notes are "profiled" with the time from the start of the run,
        "profile_failed" for servers that did not start their profiler, and "profile_left" for
        servers whose profiler could not be stopped and still runs.
        """
        self.close()
        outcome = self._outcome

        notes: dict[str, ReasonCode] = {}
        if outcome.started_s is not None and outcome.stopped_s is not None and not outcome.failed:
            run_start_s = self._start_ns / 1e9
            values = {
                "from_s": outcome.started_s - run_start_s,
                "to_s": outcome.stopped_s - run_start_s,
            }
            notes |= reasons.make_note("profiled", values)

        if outcome.failed:
            notes |= reasons.make_note("profile_failed", {"servers": ", ".join(outcome.failed)})

        if outcome.still_running:
            servers = ", ".join(outcome.still_running)
            notes |= reasons.make_note("profile_left", {"servers": servers})

        return notes

    def _send(self, message: msgspec.Struct) -> None:
        """Write a line to the process, unless it has ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()

    def _receive_outcome(self) -> ProfileOutcome:
        """Return the next outcome from the process, or an empty one if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return msgspec.json.decode(line, type=ProfileOutcome) if line else ProfileOutcome()


def _missing_profiler_error(
    server_urls: Sequence[str], probes: Sequence[ProbeResult]
) -> TargetError:
    """Return the error for servers that were started without their profiler.

    The hint is how to start the kind of server of the first target with it.
    """
    server_profile = probes[0].server_profile
    hint = f"{server_profile.title}: {server_profile.profiler_requirement}"
    message = "the server has no /start_profile"
    return TargetError("unsupported", message, ", ".join(server_urls), hint)


def _check_has_profiler(probes: Sequence[ProbeResult]) -> None:
    """Raise UserError for a kind of server that has no profiler."""
    for probe in probes:
        if not probe.server_profile.profiler_requirement:
            known = ", ".join(
                profile.title
                for profile in SERVER_PROFILES.values()
                if profile.profiler_requirement
            )
            raise UserError(
                "unsupported",
                f"{probe.server_profile.title} has no profiler that HTTP requests can start",
                "--profile",
                f"known: {known}",
            )


def _profiled_servers(
    pages: MetricsPageOptions, probes: Sequence[ProbeResult]
) -> tuple[ProfiledServer, ...]:
    """Return the servers of the targets, each of them once.

    Several targets can be the same server, for example with different API keys. They then have the
    same host, port and path to start the profiler, which may be started only once.
    """
    servers: dict[tuple[str, int, str], ProfiledServer] = {}
    for target_index, probe in enumerate(probes):
        target = probe.target
        start_path = target.server_path("/start_profile")
        server_key = (target.host, target.port, start_path)
        if server_key in servers:
            continue

        servers[server_key] = ProfiledServer(
            host=target.host,
            port=target.port,
            tls=target.tls,
            url=target.redacted,
            start_path=start_path,
            stop_path=target.server_path("/stop_profile"),
            headers=target_headers(pages, target_index, probe),
        )

    return tuple(servers.values())


# -- the process -----------------------------------------------------------------------------------


class _ServerProfilers:
    """Sends requests to the profilers of the servers."""

    def __init__(self, job: ProfileJob) -> None:
        self.servers = job.servers
        uses_tls = any(server.tls for server in job.servers)
        self._tls_context = job.tls.context() if uses_tls else None

    def is_missing(self, server: ProfiledServer) -> bool:
        """Return whether a server has no profiler, or does not respond.

        An OPTIONS request has no effect, and an existing path responds to it with anything but 404.
        """
        status = self._request(server, "OPTIONS", server.start_path, REQUEST_TIMEOUT_S)
        return status in (0, 404)

    def start(self, server: ProfiledServer) -> bool:
        """Start the profiler of a server. Return whether that succeeded."""
        status = self._request(server, "POST", server.start_path, REQUEST_TIMEOUT_S)
        return 200 <= status < 300

    def stop(self, server: ProfiledServer) -> bool:
        """Stop the profiler of a server. Return whether that succeeded at some attempt."""
        for _ in range(STOP_ATTEMPTS):
            status = self._request(server, "POST", server.stop_path, STOP_TIMEOUT_S)
            if 200 <= status < 300:
                return True
        return False

    def _request(self, server: ProfiledServer, method: str, path: str, timeout_s: float) -> int:
        """Return the status of the response to a request, or 0 if there is none."""
        context = self._tls_context if server.tls else None
        connection = PageConnection(server.host, server.port, context, timeout_s)
        try:
            return connection.request(method, path, server.headers, MAX_PAGE_BYTES)[0]
        except (OSError, ValueError):
            return 0
        finally:
            connection.close()


def run_profiler_process(source: BinaryIO, output: BinaryIO) -> None:
    """Run the process that starts and stops the profilers of the servers during a load.

    It exchanges JSON lines with the command that runs the load. It reads the job, and writes which
    servers have no profiler. If there are none, it reads when the profilers should run. At the end
    it writes what was done.

    Args:
        source: The pipe from the command. When it ends, the profilers are stopped early.
        output: The pipe to the command.
    """
    profilers = _ServerProfilers(msgspec.json.decode(source.readline(), type=ProfileJob))
    missing = [server.url for server in profilers.servers if profilers.is_missing(server)]
    _report(output, ProfileOutcome(missing=tuple(missing)))

    if missing:
        outcome = ProfileOutcome()  # The command reports an error, and there is no load.
    else:
        outcome = _profile_when_load_starts(profilers, source)

    _report(output, outcome)


def _profile_when_load_starts(profilers: _ServerProfilers, source: BinaryIO) -> ProfileOutcome:
    """Wait for the start of the load, run the profilers, and return what was done.

    When the load starts, the command sends the time in which the profilers should run. If the pipe
    ends without it, the run has ended before its load, and nothing is done.
    """
    span_line = source.readline()
    has_load_started = span_line != b""
    if not has_load_started:
        return ProfileOutcome()
    span = msgspec.json.decode(span_line, type=ProfileSpan)
    return _profile(profilers, span, source)


def _profile(profilers: _ServerProfilers, span: ProfileSpan, source: BinaryIO) -> ProfileOutcome:
    """Run the profilers of the servers during a time of the load, and return what was done.

    Args:
        profilers: The profilers.
        span: When they start and stop.
        source: The pipe from the command, which ends with the load. The profilers then stop early,
            or are not started at all.
    """
    has_load_ended = _wait_until(source, span.begin_s)
    if has_load_ended:
        return ProfileOutcome()

    started_s = monotonic()
    failed: list[ProfiledServer] = []

    running: list[ProfiledServer] = []
    for server in profilers.servers:
        if profilers.start(server):
            running.append(server)
        else:
            failed.append(server)

    _wait_until(source, span.end_s)
    stopped_s = monotonic()
    not_stopped = [server for server in running if not profilers.stop(server)]

    return ProfileOutcome(
        started_s=started_s,
        stopped_s=stopped_s,
        failed=tuple(server.url for server in failed),
        still_running=tuple(server.url for server in not_stopped),
    )


def _wait_until(source: BinaryIO, time_s: float | None) -> bool:
    """Wait until a time of the monotonic clock, or until `source` ends. Return True if it ended.

    Without a time, wait until `source` ends.
    """
    timeout_s = None if time_s is None else max(time_s - monotonic(), 0)
    return bool(select.select([source], [], [], timeout_s)[0])


def _report(output: BinaryIO, outcome: ProfileOutcome) -> None:
    """Write an outcome as a line, unless nobody reads it any more."""
    with suppress(BrokenPipeError):
        output.write(msgspec.json.encode(outcome) + b"\n")
        output.flush()


if __name__ == "__main__":
    os.nice(5)
    # Unbuffered, so that `select` sees a line that was not read yet.
    with open(0, "rb", buffering=0, closefd=False) as source:
        run_profiler_process(source, sys.stdout.buffer)
