"""Event handlers that every run has, for example for its manifest, profilers and metrics pages.

Each handler is called with every event of a run and acts on those that it needs. If a handler
returns a manifest for `ManifestCreated` or `LoadEnded`, it replaces the manifest of the run.
"""

from __future__ import annotations

import asyncio
import datetime
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from time import monotonic, monotonic_ns

import msgspec
from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.wire_formats.server_profiles import NON_GENERATIVE_APIS

from loadgen.core.errors import CombinedError, LoadgenError
from loadgen.core.execution import events, run_manifest, shard
from loadgen.core.execution.plan import Plan, Settings
from loadgen.core.execution.stop_watch import stop_when_broken
from loadgen.core.metrics import reasons
from loadgen.core.results import store
from loadgen.core.results.manifest import RunManifest, StagePlan, encode_manifest
from loadgen.core.sidecars import cache_reset
from loadgen.core.sidecars.profiler import Profiler, ProfilerOptions, check_stage_exists
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
        """Handle an event of the run.

        The manifest is written when the run is planned, and again with the nodes of the cluster
        when the workers of a run on a cluster are placed. The load is kept, because its end decides
        the state in the final manifest.
        """
        if isinstance(event, events.RunPlanned):
            self._planned = event
            write_manifest(event.plan.job.folder, event.manifest)
        elif isinstance(event, events.WorkersPlaced) and self._planned is not None:
            manifest = msgspec.structs.replace(self._planned.manifest, cluster=event.cluster)
            write_manifest(self._planned.plan.job.folder, manifest)
        elif isinstance(event, events.LoadStarted):
            self.load = event.load

    @contextmanager
    def removed_without_load(self, folder: Path) -> Iterator[None]:
        """Remove the manifest if an error or Ctrl-C ends the block before the load has started."""
        try:
            yield
        except (LoadgenError, CombinedError, KeyboardInterrupt):
            if self.load is None:
                (folder / "run.json").unlink(missing_ok=True)
            raise


class MetricsPages:
    """Runs the scraper, the process that reads the metrics pages of servers and hardware."""

    def __init__(self) -> None:
        """Begin without a process."""
        self._scraper: Scraper | None = None
        # Servers whose responses lack the timing breakdown that the settings request.
        self._servers_without_timing: list[str] = []

    def __call__(self, event: events.RunEvent) -> RunManifest | None:
        """Handle an event of the run.

        The scraper is started when the targets have been probed, reads from the start of the load
        to its end, and is then closed. When the manifest is created, the pages that the scraper has
        found are added to it, and this manifest is returned. Other events return None.
        """
        if isinstance(event, events.TargetsProbed):
            self._start_scraper(event.folder, event.settings, event.probe_results)
        if self._scraper is None:
            return None
        if isinstance(event, events.ManifestCreated):
            return self._add_pages(event.manifest, self._scraper)
        if isinstance(event, events.LoadStarted):
            self._scraper.start_load(event.start_ns)
        elif isinstance(event, events.LoadEnded):
            self._scraper.close()
        return None

    def _start_scraper(
        self, folder: Path, settings: Settings, probe_results: Sequence[ProbeResult]
    ) -> None:
        """Start the scraper, and note which servers do not report the timing that is requested."""
        self._scraper = Scraper(folder, settings.pages, probe_results)
        if settings.server_timing:
            self._servers_without_timing = [
                result.server for result in probe_results if not result.reports_server_timing
            ]

    def _add_pages(self, manifest: RunManifest, scraper: Scraper) -> RunManifest:
        """Return the manifest with the URLs of the pages that are read.

        The user may request that servers report the timing of each request, which they do in their
        responses or on a page of their own (`pages.accounts`). If some servers do not report it in
        their responses, and no server has such a page, a note about the first of them is added.
        """
        pages = scraper.find_pages()
        manifest_with_pages = msgspec.structs.replace(
            manifest, server_pages=scraper.metrics_urls(), energy_pages=pages.energy
        )
        has_timing_pages = len(pages.accounts) > 0
        if has_timing_pages or not self._servers_without_timing:
            return manifest_with_pages
        values = {"server": self._servers_without_timing[0]}
        note = reasons.make_note("server_timing_missing", values)
        return run_manifest.add_notes(manifest_with_pages, note)


class Profiling:
    """Runs the process that starts and stops the profilers of the servers, for `--profile`."""

    def __init__(self) -> None:
        """Begin without a process."""
        self._options: ProfilerOptions | None = None
        self._profiler: Profiler | None = None
        self._stages: tuple[StagePlan, ...] = ()

    def __call__(self, event: events.RunEvent) -> RunManifest | None:
        """Handle an event of the run. Without `--profile`, nothing happens.

        The process is started when the targets have been probed, gets the times of the profilers
        when the load starts, and is ended after the load. After a load that has not failed, the
        manifest with notes on what was profiled is returned. All other events return None.

        Raises:
            UserError: The load has no stage of the name in `--profile`.
        """
        if isinstance(event, events.TargetsProbed) and event.settings.profile is not None:
            self._options = event.settings.profile
            self._profiler = Profiler(event.settings.pages, event.probe_results)
        if self._options is None or self._profiler is None:  # Without `--profile`.
            return None
        if isinstance(event, events.ManifestCreated):
            # The stages are known from here on, so an unknown one is reported before the load.
            self._stages = event.manifest.stages
            check_stage_exists(self._options, self._stages)
        elif isinstance(event, events.LoadStarted):
            self._profiler.begin(event.start_ns, self._stages, self._options)
        elif isinstance(event, events.LoadEnded):
            notes = self._profiler.stop_and_create_notes()
            if event.manifest is not None:
                return run_manifest.add_notes(event.manifest, notes)
        return None


class StopWatch:
    """Ends the load when a stop rule of the workload (`stop_when`) applies."""

    def __init__(self) -> None:
        """Begin without a plan."""
        self._plan: Plan | None = None
        self._rule_check: asyncio.Task[None] | None = None

    def __call__(self, event: events.RunEvent) -> None:
        """Handle an event of the run.

        If the workload has stop rules, a task that checks them regularly is started with the load.
        It is cancelled when the load has ended, because it would otherwise wait for the next check.
        """
        if isinstance(event, events.RunPlanned):
            self._plan = event.plan
        elif isinstance(event, events.LoadStarted) and self._plan is not None:
            self._start_rule_check(self._plan, event)
        elif isinstance(event, events.LoadEnded) and self._rule_check is not None:
            self._rule_check.cancel()

    def _start_rule_check(self, plan: Plan, load_started: events.LoadStarted) -> None:
        """Start the task that ends the load if a rule of the workload applies, if it has any."""
        rules = plan.job.workload.stop_when
        if rules:
            check = stop_when_broken(rules, plan.job.folder, load_started, plan.schedule.horizon_ns)
            self._rule_check = asyncio.get_running_loop().create_task(check)


class CacheReset:
    """Empties the prefix caches of the servers before the load, if the settings request it."""

    def __init__(self) -> None:
        """Begin without targets."""
        self._settings: Settings | None = None
        self._probe_results: list[ProbeResult] = []

    def __call__(self, event: events.RunEvent) -> None:
        """Handle an event of the run.

        The targets are known when they have been probed (`TargetsProbed`). Further checks follow,
        and a run that they refuse should leave the servers as they are. So the caches are emptied
        only when all checks have passed (`RunPlanned`). Servers of embeddings and scores have no
        such cache.

        Raises:
            LoadgenError: A cache could not be emptied.
        """
        if isinstance(event, events.TargetsProbed) and event.settings.reset_cache:
            self._settings = event.settings
            self._probe_results = [
                result
                for result in event.probe_results
                if result.target.api not in NON_GENERATIVE_APIS
            ]
        elif isinstance(event, events.RunPlanned) and self._settings is not None:
            # No event loop runs in this thread before the load.
            asyncio.run(cache_reset.reset_caches(self._settings, self._probe_results))


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


class HostNameCheck:
    """Adds a note if the host name of a target resolves to other addresses after the load.

    The load went on to the addresses from before. They are not resolved again during the load,
    because the loop that sends requests does nothing else.
    """

    def __init__(
        self, resolve: Callable[[Iterable[str]], dict[str, list[str]]] = resolve_names
    ) -> None:
        """Begin without names. `resolve` returns the addresses of host names."""
        self._resolve = resolve
        self._start_ns = 0
        self._addresses_before: dict[str, list[str]] = {}

    def __call__(self, event: events.RunEvent) -> RunManifest | None:
        """Handle an event of the run.

        Names are resolved when the targets have been probed, and again after a successful load. The
        manifest is then returned with notes on names whose addresses have changed. Other events
        return None.
        """
        if isinstance(event, events.TargetsProbed):
            host_names = {
                result.target.host for result in event.probe_results if result.dns_ms is not None
            }
            self._addresses_before = self._resolve(host_names)
        elif isinstance(event, events.LoadStarted):
            self._start_ns = event.start_ns
        elif isinstance(event, events.LoadEnded) and event.manifest is not None:
            return self._add_change_notes(event.manifest)
        return None

    def _add_change_notes(self, manifest: RunManifest) -> RunManifest:
        """Return the manifest with a note for each name that resolves to other addresses now.

        A name counts as unchanged if one of its addresses is still the same, because a resolver may
        return a few addresses out of a larger set, other ones each time. It counts as changed if it
        has no address any more.
        """
        for name, addresses_after in self._resolve(self._addresses_before).items():
            addresses_before = self._addresses_before[name]
            at_s = (monotonic_ns() - self._start_ns) / 1e9
            has_moved = set(addresses_before).isdisjoint(addresses_after)
            if addresses_before and has_moved:
                values = {
                    "name": name,
                    "before": addresses_before,
                    "after": addresses_after,
                    "at_s": at_s,
                }
                note = reasons.make_note("name_moved", values)
                manifest = run_manifest.add_notes(manifest, note)
        return manifest


class ShardStart:
    """Records in the manifest of a shard when its load started, even if it is killed later.

    The shards of a run should start together. Each records by how much it was late.
    """

    def __init__(self) -> None:
        """Begin without a plan."""
        self._planned_run: events.RunPlanned | None = None
        self._delay_ns = 0  # by how much the load started later than planned

    def __call__(self, event: events.RunEvent) -> RunManifest | None:
        """Record in the manifest of a shard when its load started.

        A shard is the part of a distributed run that one machine sends. A run without shards is
        left as it is. When the load starts, the time is written into the manifest on disk, in case
        the run is killed later. When the load has ended, it is added to the final manifest, which
        is returned. All other events return None.
        """
        if isinstance(event, events.RunPlanned):
            self._planned_run = event
        if self._planned_run is None:
            return None
        job = self._planned_run.plan.job
        shard_of_run = job.settings.shard
        if shard_of_run is None:
            return None
        if isinstance(event, events.LoadStarted):
            self._delay_ns = shard.start_delay_ns(shard_of_run, event.start_ns)
            write_manifest(job.folder, self._record_start(self._planned_run.manifest))
        elif isinstance(event, events.LoadEnded) and event.manifest is not None:
            return self._record_start(event.manifest)
        return None

    def _record_start(self, manifest: RunManifest) -> RunManifest:
        """Return the manifest with the time at which the load started, and its delay."""
        assert manifest.shard is not None
        planned_start = datetime.datetime.fromisoformat(manifest.shard.start_at)
        actual_start = planned_start + datetime.timedelta(microseconds=self._delay_ns / 1e3)
        shard_part = msgspec.structs.replace(
            manifest.shard, start_delay_ms=round(self._delay_ns / 1e6, 3)
        )
        return msgspec.structs.replace(
            manifest,
            started=actual_start.astimezone().isoformat(timespec="milliseconds"),
            shard=shard_part,
        )


def write_manifest(folder: Path, manifest: RunManifest) -> None:
    """Write the manifest of a run."""
    store.replace(folder / "run.json", encode_manifest(manifest))
