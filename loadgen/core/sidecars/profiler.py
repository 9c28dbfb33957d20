"""Starts and stops the profiler of the servers around a part of the load: `--profile`. IO, in a process of its own.

vLLM, SGLang and TensorRT-LLM have the same two questions, POST /start_profile and /stop_profile.
The process ends when its standard input does, and stops what it has started before it goes: also
where the run is interrupted or killed.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

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
ASK_S = 10.0  # for an answer to whether it has one, and to a start
STOP_S = 180.0  # for an answer to a stop: the server writes its trace first


class ProfiledServer(msgspec.Struct, frozen=True, kw_only=True):
    """One server whose profiler is used."""

    host: str
    port: int
    tls: bool
    start: str
    stop: str
    shown: str  # its URL, without secrets
    headers: dict[str, str] = {}


class ProfileJob(msgspec.Struct, frozen=True, kw_only=True):
    """The first line on the standard input of the process. The second one is a ProfileSpan."""

    servers: tuple[ProfiledServer, ...]
    tls: Tls


class ProfileSpan(msgspec.Struct, frozen=True, kw_only=True):
    """When the profilers run: s of the monotonic clock. `end_s` None: until the load is over."""

    begin_s: float
    end_s: float | None = None


class ProfileOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the process did: when it started and stopped the profilers (None: never), and what went wrong."""

    missing: tuple[str, ...] = ()  # servers without these questions
    started_s: float | None = None
    stopped_s: float | None = None
    failed: tuple[str, ...] = ()  # servers that did not start theirs
    left: tuple[str, ...] = ()  # servers whose profiler may still run


class ProfilerOptions(msgspec.Struct, frozen=True):
    """`--profile STAGE[:TIME]`: a stage by its name, or the steady part, and at most so long."""

    stage: str
    longest_ns: int | None = None


def asked(text: str) -> ProfilerOptions:
    """What the flag says. Raises units.InvalidValueError."""
    stage, colon, length = text.partition(":")
    if not stage:
        raise units.InvalidValueError(
            "invalid_value",
            "names no stage",
            "steady, or the name of a stage, with a longest time: steady:10s",
        )
    return ProfilerOptions(stage, units.duration_ns(length) if colon else None)


def span(wanted: ProfilerOptions, stages: Sequence[StagePlan]) -> tuple[int, int | None]:
    """From when to when, in ns from the start of the run. Raises UserError for a stage that the load does not have."""
    chosen = [
        stage
        for stage in stages
        if (stage.measured if wanted.stage == STEADY else stage.name == wanted.stage)
    ]
    if not chosen:
        known = ", ".join([STEADY, *dict.fromkeys(stage.name for stage in stages if stage.name)])
        raise UserError(
            "unknown_name",
            f"the load has no stage {wanted.stage!r}",
            f"--profile {wanted.stage}",
            f"known: {known}",
        )
    begin, end = chosen[0].start_ns, chosen[-1].end_ns
    if wanted.longest_ns is not None:
        end = begin + wanted.longest_ns if end is None else min(end, begin + wanted.longest_ns)
    return begin, end


class Profiler:
    """The process as the command that runs the load sees it. Raises a fault where a server has no profiler."""

    def __init__(self, pages: MetricsPageOptions, found: Sequence[ProbeResult]) -> None:
        for probe in found:
            if not probe.server_profile.profiler_requirement:
                title = probe.server_profile.title
                known = ", ".join(
                    row.title for row in SERVER_PROFILES.values() if row.profiler_requirement
                )
                raise UserError(
                    "unsupported",
                    f"{title} has no profiler to start over HTTP",
                    "--profile",
                    f"known: {known}",
                )
        self._outcome, self._start_ns = ProfileOutcome(), 0
        self._process = subprocess.Popen(
            child_process.command("loadgen.core.sidecars.profiler"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is handled by the run, which then closes its standard input
        )
        servers = dict[tuple[str, int, str], ProfiledServer]()
        for i, probe in enumerate(found):
            target = probe.target
            server = ProfiledServer(
                host=target.host,
                port=target.port,
                tls=target.tls,
                shown=target.redacted,
                start=target.server_path("/start_profile"),
                stop=target.server_path("/stop_profile"),
                headers=target_headers(pages, i, probe),
            )
            servers.setdefault((server.host, server.port, server.start), server)
        self._send(ProfileJob(servers=tuple(servers.values()), tls=pages.tls))
        missing = self._heard().missing
        if missing:
            self.close()
            server_profile = next(probe.server_profile for probe in found)
            hint = f"{server_profile.title}: {server_profile.profiler_requirement}"
            raise TargetError("unsupported", "it has no /start_profile", ", ".join(missing), hint)

    def begin(self, start_ns: int, stages: Sequence[StagePlan], wanted: ProfilerOptions) -> None:
        """The load begins at this instant of the monotonic clock."""
        self._start_ns = start_ns
        begin, end = span(wanted, stages)
        self._send(
            ProfileSpan(
                begin_s=(start_ns + begin) / 1e9,
                end_s=None if end is None else (start_ns + end) / 1e9,
            )
        )

    def close(self) -> None:
        """The load is over: stop what still runs. Waits until the servers have said that it stopped."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            self._outcome = self._heard()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def notes(self) -> dict[str, ReasonCode]:
        """`close`, and what came of it, in words and as codes."""
        self.close()
        done = self._outcome
        notes: dict[str, ReasonCode] = {}
        if done.started_s is not None and done.stopped_s is not None and not done.failed:
            began = self._start_ns / 1e9
            notes |= reasons.make_note(
                "profiled", {"from_s": done.started_s - began, "to_s": done.stopped_s - began}
            )
        for code, servers in (("profile_failed", done.failed), ("profile_left", done.left)):
            notes |= reasons.make_note(code, {"servers": ", ".join(servers)} if servers else None)
        return notes

    def _send(self, line: msgspec.Struct) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(msgspec.json.encode(line) + b"\n")
            self._process.stdin.flush()

    def _heard(self) -> ProfileOutcome:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return msgspec.json.decode(line, type=ProfileOutcome) if line else ProfileOutcome()


# -- the process
# -----------------------------------------------------------------------------------------------------


def _ask(server: ProfiledServer, context: Any, method: str, path: str, timeout_s: float) -> int:
    """The status of an answer; 0 for none."""
    connection = PageConnection(
        server.host, server.port, context if server.tls else None, timeout_s
    )
    try:
        return connection.request(method, path, server.headers, MAX_PAGE_BYTES)[0]
    except (OSError, ValueError):
        return 0
    finally:
        connection.close()


def follow(source: Any, output: Any) -> None:
    """The main function of the process: say which servers lack it, wait, start, wait, stop, say what came of it."""
    job = msgspec.json.decode(source.readline(), type=ProfileJob)
    context = job.tls.context() if any(server.tls for server in job.servers) else None

    def say(outcome: ProfileOutcome) -> None:
        with suppress(BrokenPipeError):
            output.write(msgspec.json.encode(outcome) + b"\n")
            output.flush()

    # OPTIONS carries out nothing: a path that is there answers with anything but 404
    missing = [
        s.shown for s in job.servers if _ask(s, context, "OPTIONS", s.start, ASK_S) in (0, 404)
    ]
    say(ProfileOutcome(missing=tuple(missing)))
    line = b"" if missing else source.readline()
    if not line:
        say(ProfileOutcome())
        return
    when = msgspec.json.decode(line, type=ProfileSpan)
    if select.select([source], [], [], max(when.begin_s - monotonic(), 0))[0]:
        say(ProfileOutcome())
        return
    started_s = monotonic()
    failed = [
        s for s in job.servers if _ask(s, context, "POST", s.start, ASK_S) not in range(200, 300)
    ]
    select.select(
        [source], [], [], None if when.end_s is None else max(when.end_s - monotonic(), 0)
    )
    stopped_s = monotonic()
    left = [s for s in job.servers if s not in failed and not _stopped(s, context)]
    say(
        ProfileOutcome(
            started_s=started_s,
            stopped_s=stopped_s,
            failed=tuple(server.shown for server in failed),
            left=tuple(server.shown for server in left),
        )
    )


def _stopped(server: ProfiledServer, context: Any) -> bool:
    return any(
        _ask(server, context, "POST", server.stop, STOP_S) in range(200, 300) for _ in range(2)
    )


if __name__ == "__main__":
    os.nice(5)
    with open(0, "rb", buffering=0, closefd=False) as source:
        follow(source, sys.stdout.buffer)
