"""Event handlers that every run has, for example for its manifest, profilers and metrics pages.

The method `handle_event` of each class is called with every event of a run and acts on those that
it needs. If it returns a manifest for `ManifestCreated` or `LoadEnded`, this replaces the manifest
of the run.
"""

from __future__ import annotations

import asyncio
import datetime
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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

    def handle_event(self, event: events.RunEvent) -> None:
        """Write the manifest when the run is planned, and again when its workers are placed.

        Workers are placed on nodes only in a run on a cluster. The manifest then lists these nodes.
        """
        match event:
            case events.RunPlanned():
                self._planned = event
                write_manifest(event.plan.job.folder, event.manifest)
            case events.WorkersPlaced() if self._planned is not None:
                manifest = msgspec.structs.replace(self._planned.manifest, cluster=event.cluster)
                write_manifest(self._planned.plan.job.folder, manifest)
            case events.LoadStarted():
                # `finish_run` needs the load to know how it ended.
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

    def handle_event(self, event: events.RunEvent) -> RunManifest | None:
        """Start the scraper when the targets have been probed, and close it after the load.

        In between, the scraper is sent the start of the load. For `ManifestCreated`, the manifest
        is returned with the pages that the scraper has found. Other events return None.
        """
        if isinstance(event, events.TargetsProbed):
            self._scraper = self._start_scraper(event.folder, event.settings, event.probe_results)

        if self._scraper is None:  # The targets have not been probed yet.
            return None

        match event:
            case events.ManifestCreated():
                return self._add_pages(event.manifest, self._scraper)
            case events.LoadStarted():
                self._scraper.start_load(event.start_ns)
            case events.LoadEnded():
                self._scraper.close()

        return None

    def _start_scraper(
        self, folder: Path, settings: Settings, probe_results: Sequence[ProbeResult]
    ) -> Scraper:
        """Start the scraper, and note which servers do not report the timing that is requested."""
        if settings.server_timing:
            self._servers_without_timing = [
                result.server for result in probe_results if not result.reports_server_timing
            ]
        return Scraper(folder, settings.pages, probe_results)

    def _add_pages(self, manifest: RunManifest, scraper: Scraper) -> RunManifest:
        """Return the manifest with the URLs of the pages that are read.

        The user may want the server's timing of each request. Servers report it in their responses,
        or on a page (`pages.accounts`). If no server has such a page, and some do not report the
        timing in their responses, the manifest also gets a note about one of these servers.
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

    def handle_event(self, event: events.RunEvent) -> RunManifest | None:
        """Start the process when the targets have been probed, and end it after the load.

        After a load that has not failed, the manifest is returned with notes on what was profiled.
        All other events return None. Without `--profile`, nothing happens.

        Raises:
            UserError: The load has no stage of the name in `--profile`.
        """
        if isinstance(event, events.TargetsProbed) and event.settings.profile is not None:
            self._options = event.settings.profile
            self._profiler = Profiler(event.settings.pages, event.probe_results)

        if self._options is None or self._profiler is None:
            return None

        match event:
            case events.ManifestCreated():
                # The stages are known from here on, so an unknown one is reported before the load.
                self._stages = event.manifest.stages
                check_stage_exists(self._options, self._stages)
            case events.LoadStarted():
                self._profiler.begin(event.start_ns, self._stages, self._options)
            case events.LoadEnded():
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

    def handle_event(self, event: events.RunEvent) -> None:
        """Check the stop rules of the workload regularly from the start of the load to its end.

        A task does this. It is cancelled at the end, because it would otherwise wait for the time
        of its next check.
        """
        match event:
            case events.RunPlanned():
                self._plan = event.plan
            case events.LoadStarted() if self._plan is not None:
                self._start_rule_check(self._plan, event)
            case events.LoadEnded() if self._rule_check is not None:
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

    def handle_event(self, event: events.RunEvent) -> None:
        """Empty the caches when the run is planned, just before the load.

        The targets are known earlier, when they have been probed. But the caches must stay as they
        are if a check of the plan then ends the run with an error.

        Raises:
            LoadgenError: A cache could not be emptied.
        """
        match event:
            case events.TargetsProbed() if event.settings.reset_cache:
                self._settings = event.settings
                # Servers of embeddings and scores have no prefix cache.
                self._probe_results = [
                    result
                    for result in event.probe_results
                    if result.target.api not in NON_GENERATIVE_APIS
                ]
            case events.RunPlanned() if self._settings is not None:
                # No event loop runs in this thread before the load.
                asyncio.run(cache_reset.reset_caches(self._settings, self._probe_results))


def resolve_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the IP addresses of host names, for example `{"localhost": ["::1", "127.0.0.1"]}`.

    The list is empty for a name without an address, or if there is no result within LOOKUP_S.
    """
    addresses_by_name: dict[str, list[str]] = {name: [] for name in names}

    def store_addresses(name: str) -> None:
        addresses_by_name[name] = _resolve_name(name)

    # One thread for each name, because `getaddrinfo` has no timeout. Daemon threads, because the
    # process could otherwise not exit while one of them still waits.
    threads = [
        Thread(target=store_addresses, args=(name,), daemon=True) for name in addresses_by_name
    ]
    for thread in threads:
        thread.start()

    deadline_s = monotonic() + LOOKUP_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - monotonic()))

    # A copy, since a thread that still waits may store its result later.
    return dict(addresses_by_name)


def _resolve_name(name: str) -> list[str]:
    """Return the distinct IP addresses of a host name, or an empty list if it has none."""
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    # The last element of each tuple is the socket address, which begins with the IP address.
    ip_addresses = [str(info[-1][0]) for info in infos]
    return list(dict.fromkeys(ip_addresses))


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

    def handle_event(self, event: events.RunEvent) -> RunManifest | None:
        """Resolve the host names of the targets before the load, and again after it.

        After a load that has not failed, the manifest is returned with notes on names whose
        addresses have changed. Other events return None.
        """
        match event:
            case events.TargetsProbed():
                # A target that is an IP address needed no DNS lookup.
                host_names = {
                    result.target.host
                    for result in event.probe_results
                    if result.dns_ms is not None
                }
                self._addresses_before = self._resolve(host_names)
            case events.LoadStarted():
                self._start_ns = event.start_ns
            case events.LoadEnded() if event.manifest is not None:
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

    def handle_event(self, event: events.RunEvent) -> RunManifest | None:
        """Write the start of the load to the manifest on disk, and later to the final manifest.

        The first is for a run that is killed before its end. The second is returned when a load
        has ended that has not failed. All other events return None. A run without shards is left
        as it is.
        """
        if isinstance(event, events.RunPlanned):
            is_shard = event.plan.job.settings.shard is not None
            self._planned_run = event if is_shard else None

        if self._planned_run is None:
            return None

        match event:
            case events.LoadStarted():
                self._write_start(self._planned_run, event.start_ns)
            case events.LoadEnded() if event.manifest is not None:
                return self._with_start(event.manifest)

        return None

    def _write_start(self, planned_run: events.RunPlanned, start_ns: int) -> None:
        """Compute the delay of the load, and write it and its start to the manifest on disk."""
        job = planned_run.plan.job
        assert job.settings.shard is not None
        self._delay_ns = shard.start_delay_ns(job.settings.shard, start_ns)
        write_manifest(job.folder, self._with_start(planned_run.manifest))

    def _with_start(self, manifest: RunManifest) -> RunManifest:
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
