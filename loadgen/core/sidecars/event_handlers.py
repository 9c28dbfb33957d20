"""Event handlers that every run has, for example for its manifest, profilers and metrics pages.

Each handler is called with every event of a run and acts on those that it needs. If a handler
returns a manifest for `ManifestCreated` or `LoadEnded`, it replaces the manifest of the run.
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
from loadgen.core.results.manifest import RunManifest, StagePlan, encode_manifest
from loadgen.core.sidecars import cache_reset
from loadgen.core.sidecars.profiler import Profiler, ProfilerOptions, profile_span
from loadgen.core.sidecars.scraper import Scraper

LOOKUP_S = 5.0
"""Longest wait for the addresses of a host name, s."""


class ManifestFile:
    """Writes `run.json` during the run, so that a run that is killed has its workers and stages.

    Attributes:
        load: The running load, or None before the load has started.
    """

    def __init__(self) -> None:
        self.load: events.RunningLoad | None = None
        self._planned: events.RunPlanned | None = None

    def __call__(self, event: events.RunEvent) -> None:
        """Write the manifest when the run is planned and when its workers are placed."""
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
    def removed_without_load(self, folder: Path) -> Iterator[None]:
        """Remove the manifest if an error or Ctrl-C ends the block before the load has started."""
        try:
            yield
        except (LoadgenError, CombinedError, KeyboardInterrupt):
            if self.load is None:
                (folder / "run.json").unlink(missing_ok=True)
            raise


class Pages:
    """Runs the process that reads the metrics pages of the servers and of the hardware."""

    def __init__(self) -> None:
        self._scraper: Scraper | None = None
        # Servers whose responses lack the timing breakdown that the settings request.
        self._servers_without_timing: list[str] = []

    def __call__(self, event: events.RunEvent) -> RunManifest | None:
        """Start the process, pass it the start of the load, and end it after the load."""
        match event:
            case events.TargetsProbed(folder, settings, probes):
                self._scraper = Scraper(folder, settings.pages, probes)
                if settings.server_timing:
                    self._servers_without_timing = [
                        probe.server for probe in probes if not probe.reports_server_timing
                    ]
            case events.ManifestCreated(manifest) if self._scraper is not None:
                return self._with_pages(manifest, self._scraper)
            case events.LoadStarted(start_ns) if self._scraper is not None:
                self._scraper.start_load(start_ns)
            case events.LoadEnded() if self._scraper is not None:
                self._scraper.close()
        return None

    def _with_pages(self, manifest: RunManifest, scraper: Scraper) -> RunManifest:
        """Return the manifest with the pages that are read, and a note if timings are missing."""
        pages = scraper.find_pages()
        manifest = msgspec.structs.replace(
            manifest, server_pages=scraper.metrics_urls(), energy_pages=pages.energy
        )
        missing_timing = None
        if self._servers_without_timing and not pages.accounts:
            missing_timing = {"server": self._servers_without_timing[0]}
        note = reasons.make_note("server_timing_missing", missing_timing)
        return run_manifest.add_notes(manifest, note)


class Profiling:
    """Runs the process that starts and stops the profilers of the servers, for `--profile`."""

    def __init__(self) -> None:
        self._options: ProfilerOptions | None = None
        self._profiler: Profiler | None = None
        self._stages: tuple[StagePlan, ...] = ()

    def __call__(self, event: events.RunEvent) -> RunManifest | None:
        """Start the process, pass it the times of the profilers, and end it after the load."""
        match event:
            case events.TargetsProbed(_, settings, probes) if settings.profile is not None:
                self._options = settings.profile
                self._profiler = Profiler(settings.pages, probes)
            case events.ManifestCreated(manifest) if self._options is not None:
                self._stages = manifest.stages
                # Called before the load for its error, if the load does not have the stage.
                profile_span(self._options, self._stages)
            case events.LoadStarted(start_ns) if self._options is not None:
                assert self._profiler is not None
                self._profiler.begin(start_ns, self._stages, self._options)
            case events.LoadEnded(manifest) if self._profiler is not None:
                notes = self._profiler.notes()
                return None if manifest is None else run_manifest.add_notes(manifest, notes)
        return None


class StopWatch:
    """Ends the load when a stop rule of the workload (`stop_when`) applies."""

    def __init__(self) -> None:
        self._planned: events.RunPlanned | None = None
        self._watching: asyncio.Task[None] | None = None

    def __call__(self, event: events.RunEvent) -> None:
        """Watch the stop rules of the workload while the load runs."""
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
    """Empties the prefix caches of the servers, for `reset_cache`, once the run is planned.

    At that time no check can refuse the run any more.
    """

    def __init__(self) -> None:
        self._settings: Settings | None = None
        self._probes: list[ProbeResult] = []

    def __call__(self, event: events.RunEvent) -> None:
        """Empty the caches when the run is planned."""
        match event:
            case events.TargetsProbed(_, settings, probes) if settings.reset_cache:
                self._settings = settings
                self._probes = [
                    probe for probe in probes if probe.target.api not in NON_GENERATIVE_APIS
                ]
            case events.RunPlanned() if self._settings is not None:
                asyncio.run(cache_reset.reset_caches(self._settings, self._probes))


def resolve_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the addresses of host names.

    The list is empty for a name without an address, or if there is no result within LOOKUP_S.
    """
    addresses: dict[str, list[str]] = {name: [] for name in names}

    def resolve(name: str) -> None:
        with suppress(OSError, UnicodeError):
            infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            addresses[name] = list(dict.fromkeys(str(address[0]) for *_, address in infos))

    # Threads, because getaddrinfo has no timeout. Daemons, because one may never return.
    threads = [Thread(target=resolve, args=(name,), daemon=True) for name in addresses]
    for thread in threads:
        thread.start()
    deadline_s = monotonic() + LOOKUP_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - monotonic()))
    return dict(addresses)


class Names:
    """Adds a note if the host name of a target resolves to other addresses after the load.

    The load went on to the addresses from before. They are not resolved again during the load,
    because the loop that sends requests does nothing else.
    """

    def __init__(
        self, resolve: Callable[[Iterable[str]], dict[str, list[str]]] = resolve_names
    ) -> None:
        self._resolve = resolve
        self._start_ns = 0
        self._addresses_before: dict[str, list[str]] = {}

    def __call__(self, event: events.RunEvent) -> RunManifest | None:
        """Resolve the host names before and after the load."""
        match event:
            case events.TargetsProbed(_, _, probes):
                names = {probe.target.host for probe in probes if probe.dns_ms is not None}
                self._addresses_before = self._resolve(names)
            case events.LoadStarted(start_ns):
                self._start_ns = start_ns
            case events.LoadEnded(manifest) if manifest is not None:
                return self._with_notes(manifest)
        return None

    def _with_notes(self, manifest: RunManifest) -> RunManifest:
        """Return the manifest with a note for each name that resolves to other addresses now."""
        for name, after in self._resolve(self._addresses_before).items():
            before = self._addresses_before[name]
            at_s = (monotonic_ns() - self._start_ns) / 1e9
            # One common address is enough, since a resolver may return some of many in turns.
            if before and set(before).isdisjoint(after):
                values = {"name": name, "before": before, "after": after, "at_s": at_s}
                note = reasons.make_note("name_moved", values)
                manifest = run_manifest.add_notes(manifest, note)
        return manifest


class ShardStart:
    """Records in the manifest of a shard when its load started, also if it is killed later."""

    def __init__(self) -> None:
        self._planned: events.RunPlanned | None = None
        self._delay_ns = 0

    def __call__(self, event: events.RunEvent) -> RunManifest | None:
        """Record the start of the load in the manifest, when it starts and at its end."""
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
        """Return the manifest with the time at which the load started."""
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
