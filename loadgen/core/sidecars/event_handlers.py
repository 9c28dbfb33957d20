"""What `execute` itself has going along with a run: each hears the events of the run and acts on those that it needs.

Of a hearer that is told `ManifestCreated` or `LoadEnded`, the manifest that it gives back is that
of the run from then on.
"""

from __future__ import annotations

import asyncio
import datetime
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from time import monotonic, monotonic_ns

import msgspec
from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.wire_formats.server_profiles import NON_GENERATIVE_APIS

from loadgen.core.errors import CombinedError, LoadgenError
from loadgen.core.execution import events, run_manifest, shard
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.stop_watch import stop_when_broken
from loadgen.core.metrics import reasons
from loadgen.core.results import store
from loadgen.core.results.manifest import RunManifest, encode_manifest
from loadgen.core.sidecars import cache_reset
from loadgen.core.sidecars.profiler import Profiler, ProfilerOptions, span
from loadgen.core.sidecars.scraper import Scraper

LOOKUP_S = 5.0  # longest wait for what a name means


class ManifestFile:
    """`run.json` while the run goes: a run that is killed has its workers and its steps. `load`: once it goes."""

    def __init__(self) -> None:
        self.load: events.RunningLoad | None = None
        self._planned: events.RunPlanned | None = None

    def __call__(self, event: events.RunEvent) -> None:
        match event:
            case events.RunPlanned(plan, manifest):
                self._planned = event
                write_manifest(plan.job.folder, manifest)
            case events.WorkersPlaced(cluster) if self._planned is not None:
                plan, manifest = self._planned
                write_manifest(plan.job.folder, msgspec.structs.replace(manifest, cluster=cluster))
            case events.LoadStarted(_, load):
                self.load = load

    @contextmanager
    def of_a_load(self, folder: Path) -> Iterator[None]:
        """A Fault or a Ctrl-C inside before the load starts removes the manifest: nothing was measured."""
        try:
            yield
        except (LoadgenError, CombinedError, KeyboardInterrupt):
            if self.load is None:
                (folder / "run.json").unlink(missing_ok=True)
            raise


class Pages:
    """The process that reads pages of the servers and of the hardware."""

    def __init__(self) -> None:
        self._scraper: Scraper | None = None
        self._silent: list[
            str
        ] = []  # servers of whose requests accounts are asked, and whose answers have none

    def __call__(self, event: events.RunEvent) -> RunManifest | None:
        match event:
            case events.TargetsProbed(folder, settings, found):
                self._scraper = Scraper(folder, settings.pages, found)
                self._silent = [
                    one.server
                    for one in found
                    if settings.server_timing and not one.reports_server_timing
                ]
            case events.ManifestCreated(manifest) if self._scraper is not None:
                pages = self._scraper.find_pages()
                manifest = msgspec.structs.replace(
                    manifest, server_pages=self._scraper.metrics_urls(), energy_pages=pages.energy
                )
                lacking = (
                    {"server": self._silent[0]} if self._silent and not pages.accounts else None
                )
                return run_manifest.add_notes(
                    manifest, reasons.make_note("server_timing_missing", lacking)
                )
            case events.LoadStarted(start_ns) if self._scraper is not None:
                self._scraper.start_load(start_ns)
            case events.LoadEnded() if self._scraper is not None:
                self._scraper.close()
        return None


class Profiling:
    """The process that starts and stops the profilers of the servers, where the settings ask for it."""

    def __init__(self) -> None:
        self._asked: ProfilerOptions | None = None
        self._profiler: Profiler | None = None
        self._manifest: RunManifest | None = None

    def __call__(self, event: events.RunEvent) -> RunManifest | None:
        match event:
            case events.TargetsProbed(_, settings, found) if settings.profile is not None:
                self._asked, self._profiler = settings.profile, Profiler(settings.pages, found)
            case events.ManifestCreated(manifest) if self._asked is not None:
                self._manifest = manifest
                span(self._asked, manifest.stages)  # refuses a stage that there is not
            case events.LoadStarted(start_ns) if self._asked and self._profiler and self._manifest:
                self._profiler.begin(start_ns, self._manifest.stages, self._asked)
            case events.LoadEnded(manifest) if self._profiler is not None:
                notes = self._profiler.notes()
                return None if manifest is None else run_manifest.add_notes(manifest, notes)
        return None


class StopWatch:
    """Ends the load where a rule of the workload is broken."""

    def __init__(self) -> None:
        self._planned: events.RunPlanned | None = None
        self._watching: asyncio.Task[None] | None = None

    def __call__(self, event: events.RunEvent) -> None:
        match event:
            case events.RunPlanned(plan):
                self._planned = event if plan.job.workload.stop_when else None
            case events.LoadStarted() if self._planned is not None:
                plan = self._planned.plan
                rules = plan.job.workload.stop_when
                horizon_ns = plan.schedule.horizon_ns
                watching = stop_when_broken(rules, plan.job.folder, event, horizon_ns)
                self._watching = asyncio.get_running_loop().create_task(watching)
            case events.LoadEnded() if self._watching is not None:
                self._watching.cancel()


class CacheReset:
    """Empties the prefix caches of the servers, where the settings ask for it: when nobody has refused the run."""

    def __init__(self) -> None:
        self._settings: Settings | None = None
        self._found: list[ProbeResult] = []

    def __call__(self, event: events.RunEvent) -> None:
        match event:
            case events.TargetsProbed(_, settings, found) if settings.reset_cache:
                self._settings, self._found = (
                    settings,
                    [one for one in found if one.target.api not in NON_GENERATIVE_APIS],
                )
            case events.RunPlanned() if self._settings is not None:
                asyncio.run(cache_reset.empty(self._settings, self._found))


def addresses(names: Iterable[str]) -> dict[str, list[str]]:
    """What names mean; nothing for one that has no address, or no answer within LOOKUP_S."""
    found: dict[str, list[str]] = {name: [] for name in names}

    def look_up(name: str) -> None:
        with suppress(OSError, UnicodeError):
            infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            found[name] = list(dict.fromkeys(str(address[0]) for *_, address in infos))

    threads = [Thread(target=look_up, args=(name,), daemon=True) for name in found]
    last = monotonic() + LOOKUP_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, last - monotonic()))
    return dict(found)


class Names:
    """Says where the name of a target means other addresses after the load: it went on to those of before.

    In between nobody looks: the loop that sends does nothing else.
    """

    def __init__(
        self, look_up: Callable[[Iterable[str]], dict[str, list[str]]] = addresses
    ) -> None:
        self._look_up, self._start_ns = look_up, 0
        self._before: dict[str, list[str]] = {}

    def __call__(self, event: events.RunEvent) -> RunManifest | None:
        match event:
            case events.TargetsProbed(_, _, found):
                self._before = self._look_up(
                    {one.target.host for one in found if one.dns_ms is not None}
                )
            case events.LoadStarted(start_ns):
                self._start_ns = start_ns
            case events.LoadEnded(manifest) if manifest is not None:
                for name, after in self._look_up(self._before).items():
                    before, at_s = self._before[name], (monotonic_ns() - self._start_ns) / 1e9
                    if before and not {*before} & {
                        *after
                    }:  # a part of many may be what was told this time
                        moved = {"name": name, "before": before, "after": after, "at_s": at_s}
                        manifest = run_manifest.add_notes(
                            manifest, reasons.make_note("name_moved", moved)
                        )
                return manifest
        return None


class ShardStart:
    """Records in the manifest of a shard when its load started, also of a part that is killed later."""

    def __init__(self) -> None:
        self._planned: events.RunPlanned | None = None
        self._delay_ns = 0

    def __call__(self, event: events.RunEvent) -> RunManifest | None:
        match event:
            case events.RunPlanned(plan) if plan.job.settings.shard is not None:
                self._planned = event
            case events.LoadStarted(start_ns) if self._planned is not None:
                plan, manifest = self._planned
                assert plan.job.settings.shard is not None
                self._delay_ns = shard.start_delay_ns(plan.job.settings.shard, start_ns)
                write_manifest(plan.job.folder, self._with_delay(manifest))
            case events.LoadEnded(manifest) if manifest is not None and self._planned is not None:
                return self._with_delay(manifest)
        return None

    def _with_delay(self, manifest: RunManifest) -> RunManifest:
        assert manifest.shard is not None
        start = datetime.datetime.fromisoformat(manifest.shard.start_at)
        started = start + datetime.timedelta(microseconds=self._delay_ns / 1000)
        return msgspec.structs.replace(
            manifest,
            started=started.astimezone().isoformat(timespec="milliseconds"),
            shard=msgspec.structs.replace(
                manifest.shard, start_delay_ms=round(self._delay_ns / 1e6, 3)
            ),
        )


def write_manifest(folder: Path, manifest: RunManifest) -> None:
    """Write the manifest of a run."""
    store.replace(folder / "run.json", encode_manifest(manifest))
