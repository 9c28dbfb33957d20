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
from loadgen_sdk.transport.target import Target, header_secrets
from msgspec import Struct, field

from loadgen.core import child_process
from loadgen.core.errors import TargetError
from loadgen.core.execution import step_targets
from loadgen.core.execution.bodies import Bodies, body_encoder, links_responses
from loadgen.core.execution.body_prefetch import BodyPrefetch
from loadgen.core.execution.plan import Job, Plan, Tuning
from loadgen.core.execution.probing import client_options
from loadgen.core.execution.process_memory import LARGEST_KEPT_BLOCK, set_largest_kept_block
from loadgen.core.execution.request_headers import create_header_function
from loadgen.core.execution.shard import CONNECTION_S, sleep_until_before_start
from loadgen.core.requests.question_prompts import QuestionFinder, create_question_finder
from loadgen.core.results.manifest import Cluster
from loadgen.core.results.record_log import RecordLog
from loadgen.core.schedule.schedule import Schedule
from loadgen.core.workload import Closed

BODIES_AHEAD = 2_000
"""Bodies kept ready for a load without a number of requests, if no separate process builds them."""

_SPARE_CONNECTIONS = 32  # opened before an open loop, besides those that its first second needs
_MAX_SPARE_CONNECTIONS = 1_000
# In a load with more virtual users, idle times are too short for the worker to build bodies: fewer
# than four would be ready for each virtual user.
_MAX_USERS_OF_IDLE_BUILDER = BODIES_AHEAD // 4
_MAX_BUILD_CPU_S = 20.0  # After this time the load starts with a part of the bodies.


class WorkerResult(Struct, frozen=True, kw_only=True):
    """What a worker reports when it has sent its share of a plan.

    Attributes:
        prompts_total: The sum of the hashes of its prompts, from which the digest of all prompts is
            computed (see `prompts.Digest`).
        prompts_count: The number of prompts in this sum.
        bodies_total: The same sum for its request bodies.
        late_bodies: How many bodies had to be built in the sending loop.
        interrupted: Whether the user interrupted the load.
        stopped: Whether the load was stopped because a target stopped responding.
        down_since_s: For each target that stopped responding, when it did, from the start.
        notes: Warnings about the workers' machines.
        cluster: Where the workers ran, if they ran on a cluster.
        hot_path: The implementation that reads sockets: `compiled`, `python` or empty.
    """

    prompts_total: int
    prompts_count: int
    bodies_total: int = 0
    late_bodies: int
    interrupted: bool
    stopped: bool = False
    down_since_s: dict[int, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    cluster: Cluster | None = None
    hot_path: str = ""


class WorkerResources(Struct, frozen=True, kw_only=True):
    """What a driver needs to send its share of a plan.

    Attributes:
        reactor: The event loop's part that reads and writes sockets.
        clients: One per target, each a `driver.Sender`.
        targets_by_slot: Returns the targets that can serve a slot. None if every target can.
        header_lines: Returns additional header lines for a slot, or None if there are none.
        find_question: Returns the index of the question with a known answer that a slot sends, or
            None if it sends none. It is None itself if the load has no questions.
        bodies: The request bodies.
        unbuilt_slot_ids: For each stage, the ids of the slots whose bodies are still to be built,
            in ascending order. Empty if a separate process builds the bodies.
        record_log: The record log.
        redact: Removes API keys from a text, and makes it one line that is safe for a terminal.
        hide_keys: Removes API keys from a response that is checked, and keeps its line breaks.
    """

    reactor: Reactor
    clients: Sequence[Any]
    targets_by_slot: Callable[[int], Sequence[int]] | None = None
    header_lines: Callable[[int], bytes] | None = None
    find_question: QuestionFinder | None = None
    bodies: Bodies
    unbuilt_slot_ids: Sequence[Iterator[int]]
    record_log: RecordLog
    redact: Callable[[str], str] = str
    hide_keys: Callable[[str], str] = str


@contextlib.asynccontextmanager
async def open_resources(
    plan: Plan, worker_schedule: Schedule, worker: int
) -> AsyncIterator[WorkerResources]:
    """Open what a worker needs to send its share of a plan, and close it afterwards.

    These are connections, request bodies and the files of records. The connections are open, and
    the first bodies are built, when the context is entered, so that the load does not begin with a
    burst of work. A failure of a later step closes what was opened before it.

    Args:
        plan: The plan of the run.
        worker_schedule: The share of the schedule that this worker sends.
        worker: The number of the worker.

    Raises:
        TargetError: A target cannot be used.
    """
    job = plan.job
    first_target = job.probe_results[0].target.redacted
    _raise_file_limit_as_far_as_possible()

    with contextlib.ExitStack() as cleanup:
        reactor = _create_reactor()
        cleanup.callback(reactor.shut_down)

        pools = _create_pools(plan, reactor)
        for pool in pools:
            cleanup.callback(pool.close)

        bodies = _create_bodies(plan, worker_schedule)
        cleanup.callback(bodies.close)
        record_log = RecordLog(job.folder, worker, job.settings.tuning.segment_rows)
        cleanup.callback(record_log.close)

        unbuilt_slot_ids = await _build_first_bodies(bodies, worker_schedule)
        await sleep_until_before_start(job.settings.shard, lead_s=CONNECTION_S)

        resources = WorkerResources(
            reactor=reactor,
            clients=_create_clients(job, pools, record_log),
            targets_by_slot=step_targets.targets_by_request(job.settings, plan.requests),
            header_lines=create_header_function(
                job.workload, plan.requests, sends_slos=job.settings.slo_headers
            ),
            find_question=create_question_finder(plan.requests),
            bodies=bodies,
            unbuilt_slot_ids=unbuilt_slot_ids,
            record_log=record_log,
            redact=_create_redactor(job, Target.redact),
            hide_keys=_create_redactor(job, Target.hide_secrets),
        )
        with _target_errors(where=first_target):
            await _open_connections(pools, connections_to_open(worker_schedule))
            yield resources


def _raise_file_limit_as_far_as_possible() -> None:
    """Raise this process's limit of open files, because each connection is an open file.

    Whether the system allows enough of them was checked before the run, so this demands no number.
    """
    raise_file_limit(needed=0)


def _create_reactor() -> Reactor:
    """Return the part of the running event loop that reads and writes sockets.

    Raises TargetError if this machine cannot run it.
    """
    with _target_errors(where=""):
        return Reactor(asyncio.get_running_loop())


async def _open_connections(pools: Sequence[Pool], connections: int) -> None:
    """Open the connections with which the load begins, spread evenly over the targets.

    Raises TargetUnusable if a target cannot be reached.
    """
    connections_per_target = math.ceil(connections / len(pools))
    for pool in pools:
        await pool.open(connections_per_target)


@contextlib.contextmanager
def _target_errors(where: str) -> Iterator[None]:
    """Turn the SDK's error for an unusable target into one that the command line shows."""
    try:
        yield
    except TargetUnusable as error:
        raise TargetError(error.code, str(error), where, error.hint) from None


def _create_pools(plan: Plan, reactor: Reactor) -> list[Pool]:
    """Return a connection pool for each target of a plan.

    A pool has the open connections to one target. Text of responses is kept only where it is
    needed: if later turns of a conversation send it back, or if output tokens are counted from it
    because the server reports no token counts.
    """
    job = plan.job
    has_open_loop = any(not isinstance(stage.arrival, Closed) for stage in job.workload.stages)
    sends_replies_back = plan.requests.history == "server"

    pools = []
    for endpoint, probe_result in zip(job.settings.endpoints, job.probe_results, strict=True):
        settings = job.settings.for_endpoint(endpoint)

        # `reports_usage` is None if the probe could not find out.
        lacks_token_counts = probe_result.reports_usage is False
        pool = Pool(
            probe_result.target,
            reactor=reactor,
            # Requests of an open loop are sent at fixed times and cannot wait for a connection.
            open_ahead=has_open_loop,
            sources=settings.sources,
            timeout_ns=job.workload.timeout_ns,
            stall_timeout_ns=job.workload.stall_timeout_ns,
            keep_text=sends_replies_back or lacks_token_counts,
            # The model, API key, headers and TLS settings of this target.
            **client_options(settings, probe_result),
        )
        pools.append(pool)

    return pools


def _create_clients(job: Job, pools: Sequence[Pool], record_log: RecordLog) -> Sequence[Any]:
    """Return what sends the requests: the pools, with `keep: gaps` in a wrapper.

    The wrapper writes the time of each output event of each request to the record log. Otherwise
    only histograms of these times are stored.
    """
    if job.settings.keep == "gaps":
        return [RequestTimelines(pool, record_log.add_event_times) for pool in pools]
    return pools


def _create_bodies(plan: Plan, worker_schedule: Schedule) -> Bodies:
    """Return what provides request bodies: this process, or a separate one for a large load.

    A separate process builds bodies while the load runs. A load whose number of requests is not
    known also uses one, but only where the system can fork this process, which is cheap. Starting a
    new Python interpreter would cost such a load more than it saves.
    """
    job = plan.job
    is_large = needs_builder_process(plan.schedule, job.settings.tuning)
    has_unknown_length = plan.schedule.slot_count is None
    can_use_fork = has_unknown_length and child_process.can_fork()
    if is_large or can_use_fork:
        return BodyPrefetch(job, worker_schedule, plan.requests)

    return Bodies(
        plan.requests,
        body_encoder(job, plan.requests),
        stages=len(worker_schedule.stages),
        links_responses=links_responses(job),
    )


async def _build_first_bodies(bodies: Bodies, worker_schedule: Schedule) -> list[Iterator[int]]:
    """Build the bodies of the first requests, or of all if possible, before the load starts.

    If a separate process builds the bodies (`BodyPrefetch`), this only waits for the first ones.

    Returns:
        For each stage, an iterator over the slot ids (requests) whose bodies the worker still has
        to build while it sends. The list is empty if a separate process builds the bodies.
    """
    # Each long prompt needs a large block of memory for a short time. By default, the allocator
    # returns such a block to the system after each prompt and requests it again for the next one.
    set_largest_kept_block(LARGEST_KEPT_BLOCK)
    if isinstance(bodies, BodyPrefetch):
        await bodies.receive_first_bodies()
        return []

    unbuilt_slot_ids = []
    for stage in worker_schedule.stages:
        slot_ids = worker_schedule.slot_ids_of(stage)
        has_unknown_length = stage.session_count is None
        max_bodies = BODIES_AHEAD if has_unknown_length else None
        bodies.build(stage.index, slot_ids, max_bodies=max_bodies, max_cpu_s=_MAX_BUILD_CPU_S)
        # `build` has consumed the ids of the bodies that it has built, so the others are left.
        unbuilt_slot_ids.append(slot_ids)

    return unbuilt_slot_ids


def _create_redactor(job: Job, redact_for: Callable[..., str]) -> Callable[[str], str]:
    """Return a function that removes all API keys of a job from a text.

    Servers repeat keys in error messages, and records must not contain them.

    Args:
        job: The job.
        redact_for: Removes the secrets of a target, and others that follow the text, from a text.
    """
    api_keys = [endpoint.api_key for endpoint in job.settings.endpoints]
    secrets = [*api_keys, *header_secrets(job.settings.headers)]

    def redact(text: str) -> str:
        for probe_result in job.probe_results:
            text = redact_for(probe_result.target, text, *secrets)
        return text

    return redact


def needs_builder_process(schedule: Schedule, tuning: Tuning) -> bool:
    """Return True if a separate process should build bodies during the run.

    That is the case if the load has too many requests to build all bodies before it starts. In a
    stage that only a duration limits, the number of requests is unknown, and the worker builds
    bodies while it is idle. It cannot do so if the stage is long or has many virtual users.
    """
    has_too_many_requests = (
        schedule.slot_count is not None and schedule.slot_count > tuning.most_ahead
    )
    if has_too_many_requests:
        return True

    for stage in schedule.stages:
        has_known_length = stage.session_count is not None
        if has_known_length:
            continue
        is_long = stage.length_ns is not None and stage.length_ns > tuning.long_ns
        has_many_users = stage.concurrency > _MAX_USERS_OF_IDLE_BUILDER
        if is_long or has_many_users:
            return True

    return False


def connections_to_open(worker_schedule: Schedule) -> int:
    """Return how many connections to open before the start.

    A closed loop needs one per virtual user, or several if turns of a session run in parallel. For
    an open loop the number is an estimate: as many as there are arrivals in the first second, and
    some to spare. There are never more connections than requests.
    """
    virtual_users = max(
        (
            len(worker_schedule.virtual_users_of(stage))
            for stage in worker_schedule.stages
            if stage.is_closed_loop
        ),
        default=0,
    )
    if virtual_users:
        connections = virtual_users * worker_schedule.sessions.max_parallel_turns
    else:
        connections = _connections_of_open_loop(worker_schedule)

    if worker_schedule.slot_count is None:
        return connections

    return min(connections, worker_schedule.slot_count)


def _connections_of_open_loop(worker_schedule: Schedule) -> int:
    """Return how many connections an open loop gets before its start."""
    rate_per_s = worker_schedule.stages[0].offered_rps or 0.0
    first_second = 0
    # With an infinite rate all requests are sent at once. Then the spare connections must do.
    if math.isfinite(rate_per_s):
        first_second = math.ceil(rate_per_s / worker_schedule.shard_count)
    return min(_SPARE_CONNECTIONS + first_second, _MAX_SPARE_CONNECTIONS)
