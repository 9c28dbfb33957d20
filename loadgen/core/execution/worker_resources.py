"""Prepare what a worker needs to send its share of a plan, and define what it reports afterwards.

Before the load, `open_resources` opens connections, builds request bodies and creates the record
log. `driver.py` uses them while the load runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.transport.host_resources import raise_file_limit
from loadgen_sdk.transport.pool import Pool
from loadgen_sdk.transport.reactor import Reactor
from loadgen_sdk.transport.request_timelines import RequestTimelines
from loadgen_sdk.transport.target import header_secrets
from msgspec import Struct, field

from loadgen.core import child_process
from loadgen.core.errors import TargetError
from loadgen.core.execution import step_targets
from loadgen.core.execution.bodies import Bodies, body_encoder, links_responses
from loadgen.core.execution.body_prefetch import BodyPrefetch
from loadgen.core.execution.plan import Job, Plan, Tuning
from loadgen.core.execution.probing import client_options
from loadgen.core.execution.process_memory import LARGEST_KEPT_BLOCK, release_blocks_above
from loadgen.core.execution.request_headers import request_header_lines
from loadgen.core.execution.shard import CONNECTION_S, sleep_until_before_start
from loadgen.core.results.manifest import Cluster
from loadgen.core.results.spool import Spool
from loadgen.core.schedule.schedule import Schedule
from loadgen.core.workload import Closed

BODIES_AHEAD = 2_000
"""Bodies kept ready for a load without a number of requests, if no separate process builds them."""

_SPARE_CONNECTIONS = 32  # opened before an open loop, besides those that its first second needs
_MAX_SPARE_CONNECTIONS = 1_000
_MAX_BUILD_CPU_S = 20.0  # After this time the load starts with a part of the bodies.


class WorkerResult(Struct, frozen=True, kw_only=True):
    """What a worker reports when it has sent its share of a plan."""

    # Its part of the digests of all prompts (see `prompts.Digest`) and of all bodies.
    prompts_total: int
    prompts_count: int
    bodies_total: int = 0
    late: int  # bodies that had to be built in the sending loop
    interrupted: bool
    stopped: bool = False  # because a target stopped responding
    # For each target that stopped responding: when it did, in s from the start.
    down: dict[int, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # warnings about the workers' machines
    cluster: Cluster | None = None  # where the workers ran
    hot_path: str = ""  # as in `manifest.Host`


class WorkerResources(Struct, frozen=True, kw_only=True):
    """What a driver needs to send its share of a plan."""

    reactor: Reactor
    clients: Sequence[Any]  # one per target
    targets_by_slot: Callable[[int], Sequence[int]] | None = (
        None  # the targets that serve a step of the load
    )
    header_lines: Callable[[int], bytes] | None = None  # additional header lines of a request
    bodies: Bodies
    numbers: Sequence[Iterator[int]]  # for each stage, the numbers of its requests in order
    spool: Spool
    redact: Callable[[str], str] = str  # removes API keys from a text


@contextlib.asynccontextmanager
async def open_resources(plan: Plan, part: Schedule, worker: int) -> AsyncIterator[WorkerResources]:
    """Open what worker number `worker` needs to send `part`, and close it afterwards.

    Raises TargetError if a target cannot be used.
    """
    job = plan.job
    settings = job.settings
    raise_file_limit(0)
    try:
        reactor = Reactor(asyncio.get_running_loop())
    except TargetUnusable as error:
        raise TargetError(error.code, str(error), "", error.hint) from None
    keep_text = plan.requests.history == "server"
    pools = [
        _create_pool(job, target, keep_text, reactor) for target in range(len(job.probe_results))
    ]
    bodies = _create_bodies(plan, part)
    spool = Spool(job.folder, worker, settings.tuning.segment_rows)
    release_blocks_above(LARGEST_KEPT_BLOCK)
    try:
        numbers = await _build_first_bodies(bodies, part)
        await sleep_until_before_start(settings.shard, lead_s=CONNECTION_S)
        connections_per_target = math.ceil(connections_to_open(part) / len(pools))
        for pool in pools:
            await pool.open(connections_per_target)
        clients: Sequence[Any] = pools
        if settings.keep == "gaps":
            clients = [RequestTimelines(pool, spool.events) for pool in pools]
        yield WorkerResources(
            reactor=reactor,
            clients=clients,
            targets_by_slot=step_targets.targets_by_request(settings, plan.requests),
            bodies=bodies,
            numbers=numbers,
            spool=spool,
            redact=_create_redactor(job),
            header_lines=request_header_lines(
                job.workload, plan.requests, sends_slos=settings.slo_headers
            ),
        )
    except TargetUnusable as error:
        target = job.probe_results[0].target.redacted
        raise TargetError(error.code, str(error), target, error.hint) from None
    finally:
        spool.close()
        bodies.close()
        for pool in pools:
            pool.close()
        reactor.shut_down()


def _create_bodies(plan: Plan, part: Schedule) -> Bodies:
    """Return the builder of request bodies, in a separate process if the load is large."""
    job = plan.job
    is_endless = plan.schedule.slot_count is None
    if needs_builder_process(plan.schedule, job.settings.tuning) or (
        is_endless and child_process.forks()
    ):
        return BodyPrefetch(job, part, plan.requests)
    return Bodies(
        plan.requests,
        body_encoder(job, plan.requests),
        len(part.stages),
        links_responses=links_responses(job),
    )


async def _build_first_bodies(bodies: Bodies, part: Schedule) -> list[Iterator[int]]:
    """Build as many bodies as possible before the load starts.

    Return the numbers of the requests whose bodies are still to be built, for each stage. The list
    is empty if a separate process builds them.
    """
    if isinstance(bodies, BodyPrefetch):
        await bodies.receive_first_bodies()
        return []
    numbers_by_stage = [part.slot_ids_of(stage) for stage in part.stages]
    for stage, numbers in zip(part.stages, numbers_by_stage, strict=True):
        bodies.build(
            stage.index,
            numbers,
            max_bodies=BODIES_AHEAD if stage.session_count is None else None,
            max_cpu_s=_MAX_BUILD_CPU_S,
        )
    return numbers_by_stage


def _create_redactor(job: Job) -> Callable[[str], str]:
    """Return a function that removes all API keys of a job from a text."""
    api_keys = [endpoint.api_key for endpoint in job.settings.endpoints]
    secrets = [*api_keys, *header_secrets(job.settings.headers)]

    def redact(text: str) -> str:
        for probed in job.probe_results:
            text = probed.target.redact(text, *secrets)
        return text

    return redact


def needs_builder_process(schedule: Schedule, tuning: Tuning) -> bool:
    """Return True if a separate process should build bodies during the run.

    That is the case if there are too many requests, or if a load without a number of requests is
    too long or has too many virtual users.
    """
    if schedule.slot_count is not None and schedule.slot_count > tuning.most_ahead:
        return True
    return any(
        (stage.length_ns or 0) > tuning.long_ns or stage.concurrency > BODIES_AHEAD // 4
        for stage in schedule.stages
        if stage.session_count is None
    )


def connections_to_open(part: Schedule) -> int:
    """Return how many connections to open before the start.

    One per virtual user, or an estimate for an open loop, and never more than there are requests.
    """
    users = max(
        (len(part.virtual_users_of(stage)) for stage in part.stages if stage.is_closed_loop),
        default=0,
    )
    if users:
        count = users * part.sessions.max_parallel_turns
    else:
        rate = part.stages[0].offered_rps or 0.0
        first_second = math.ceil(rate / part.shard_count) if math.isfinite(rate) else 0
        count = min(_SPARE_CONNECTIONS + first_second, _MAX_SPARE_CONNECTIONS)
    return count if part.slot_count is None else min(count, part.slot_count)


def _create_pool(job: Job, target: int, keep_text: bool, reactor: Reactor) -> Pool:
    """Return the connection pool for a target."""
    probed = job.probe_results[target]
    settings = job.settings.for_endpoint(job.settings.endpoints[target])
    has_open_loop = any(not isinstance(stage.arrival, Closed) for stage in job.workload.stages)
    options: dict[str, Any] = {
        **client_options(settings, probed),
        "timeout_ns": job.workload.timeout_ns,
        "stall_timeout_ns": job.workload.stall_timeout_ns,
        # Without usage from the server, output tokens are counted from the text.
        "keep_text": keep_text or probed.reports_usage is False,
    }
    return Pool(
        probed.target, reactor=reactor, ahead=has_open_loop, sources=settings.sources, **options
    )
