"""What one process needs for its share of a plan, and what it reports: clients with open connections, bodies, the spool
of its rows, and a memory that does not hold the load up.

IO, before and after the load. `driver.py` sends while the clock runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.transport.own_flows import OwnFlows
from loadgen_sdk.transport.pool import Pool
from loadgen_sdk.transport.target import header_secrets
from loadgen_sdk.transport.wire import Wire, raise_file_limit
from msgspec import Struct, field

from loadgen.core import child_process
from loadgen.core.errors import TargetError
from loadgen.core.execution import step_targets
from loadgen.core.execution.bodies import Bodies
from loadgen.core.execution.body_prefetch import BodyPrefetch, linked, preparer
from loadgen.core.execution.head_lines import head_lines
from loadgen.core.execution.plan import Job, Plan, Tuning
from loadgen.core.execution.probing import client_options
from loadgen.core.execution.shard import CONNECTION_S, sleep_until_before_start
from loadgen.core.results.manifest import Cluster
from loadgen.core.results.spool import Spool
from loadgen.core.schedule.timetable import Schedule
from loadgen.core.workload import Closed

AHEAD = 2_000  # bodies kept ready for a load without end, where no process builds them
SPARE_OPEN = (
    32  # connections opened before an open-loop run, besides those that its first second needs
)
MOST_SPARE = 1_000  # most connections opened before an open-loop run
BUILD_CPU_S = (
    20.0  # longest time to build bodies in advance; after it, the load starts with a part of them
)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # what malloc.h calls them
LARGE_BLOCK, KEPT_BLOCK = 1 << 17, 1 << 23


class Share(Struct, frozen=True, kw_only=True):
    """What a worker reports when its share is done.

    `prompts_total`, `prompts_count`: its part of `prompts.Digest`. `bodies_total`: the same of the bodies.
    """

    prompts_total: int
    prompts_count: int
    bodies_total: int = 0
    late: int  # bodies that were built in the sending loop
    interrupted: bool
    stopped: bool = False  # because a target stopped answering
    down: dict[int, float] = field(
        default_factory=dict
    )  # target -> when it stopped answering, s from the start
    notes: tuple[str, ...] = ()  # warnings about the workers' machines, found during the run
    cluster: Cluster | None = None  # where the workers were
    hot_path: str = ""  # as in `manifest.Host`


class Equipment(Struct, frozen=True, kw_only=True):
    """What a driver works with.

    `clients`: one per target. `serving`: the targets of a step of the load. `head_lines`: header lines of a request.
    `numbers`: the requests of each stage, in order. `redact`: takes keys out of a text.
    """

    wire: Wire
    clients: Sequence[Any]
    serving: Callable[[int], Sequence[int]] | None = None
    head_lines: Callable[[int], bytes] | None = None
    bodies: Bodies
    numbers: Sequence[Iterator[int]]
    spool: Spool
    redact: Callable[[str], str] = str


@contextlib.asynccontextmanager
async def equipped(plan: Plan, part: Schedule, share: int) -> AsyncIterator[Equipment]:
    """While inside, all that is needed to send `part` is there. Raises TargetError if a target cannot be used."""
    job, requests = plan.job, plan.requests
    settings, workload = job.settings, job.workload
    raise_file_limit(0)
    try:
        wire = Wire(asyncio.get_running_loop())
    except TargetUnusable as error:
        raise TargetError(error.code, str(error), "", error.hint) from None
    clients = [_client(job, i, requests.history == "server", wire) for i in range(len(job.found))]
    beside = large(plan.timetable, settings.tuning) or (
        plan.timetable.slots is None and child_process.forks()
    )
    if beside:
        bodies: Bodies = BodyPrefetch(job, part, requests)
    else:
        bodies = Bodies(requests, preparer(job, requests), len(part.stages), linked=linked(job))
    spool = Spool(job.folder, share, settings.tuning.segment_rows)
    secrets = [
        *(endpoint.api_key for endpoint in settings.endpoints),
        *header_secrets(settings.headers),
    ]

    def redact(text: str) -> str:
        for probed in job.found:
            text = probed.target.redact(text, *secrets)
        return text

    return_blocks(KEPT_BLOCK)
    try:
        numbers: list[Iterator[int]] = []
        if isinstance(bodies, BodyPrefetch):
            await bodies.filled()
        else:
            numbers = [part.stage_numbers(span) for span in part.stages]
            for stage, span in enumerate(part.stages):
                bodies.build(
                    stage,
                    numbers[stage],
                    most=AHEAD if span.chains is None else None,
                    cpu_s=BUILD_CPU_S,
                )
        await sleep_until_before_start(settings.shard, lead_s=CONNECTION_S)
        for client in clients:
            await client.open(-(-opened_ahead(part) // len(clients)))
        senders = (
            [OwnFlows(client, spool.events) for client in clients]
            if settings.keep == "gaps"
            else clients
        )
        yield Equipment(
            wire=wire,
            clients=senders,
            serving=step_targets.serving(settings, requests),
            bodies=bodies,
            numbers=numbers,
            spool=spool,
            redact=redact,
            head_lines=head_lines(workload, requests, slos=settings.slo_headers),
        )
    except TargetUnusable as error:
        raise TargetError(
            error.code, str(error), job.found[0].target.redacted, error.hint
        ) from None
    finally:
        spool.close()
        bodies.close()
        for client in clients:
            client.close()
        wire.shut()


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """While inside, Python's cycle collector is off. Enter it before the start instant is chosen.

    A collection over all objects would block the sending loop for tens of ms, and a request creates no cycles. What is
    garbage now is collected after the load: to look for it costs as much as 300 requests.
    """
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def return_blocks(size: int) -> None:
    """From now on this process gives freed blocks of so many bytes and more back to the system at once.

    While bodies are built, and what was recorded is summed up, few go back (KEPT_BLOCK): the pages of a long prompt, or
    of a column, would all be given out again, and be cleared, for the next one. While requests are sent, those of
    LARGE_BLOCK do. glibc begins so, but puts ever larger blocks into its heap once such a block was freed. There each
    leaves a hole, which small ones break up: in 45 minutes with 1,000 streams the holes grew to as much as was in use
    (21 MB). Other C libraries have no such rule, and nothing is done.
    """
    memory = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        memory.mallopt(M_TRIM_THRESHOLD, size), memory.mallopt(M_MMAP_THRESHOLD, size)
        memory.malloc_trim(0)


def large(timetable: Schedule, tuning: Tuning) -> bool:
    """Whether a separate process builds bodies during the run: too many requests, too long, or too many lanes."""
    endless = [span for span in timetable.stages if span.chains is None]
    return (timetable.slots is not None and timetable.slots > tuning.most_ahead) or any(
        (span.length_ns or 0) > tuning.long_ns or span.lanes > AHEAD // 4 for span in endless
    )


def opened_ahead(part: Schedule) -> int:
    """Connections to open before the start: one per lane, or an estimate; never more than there are requests."""
    lanes = max((len(part.own_lanes(span)) for span in part.stages if span.lanes), default=0)
    rates = [
        rate
        for span in part.stages[:1]
        if (rate := span.offered_rps) is not None and math.isfinite(rate)
    ]
    guess = min(SPARE_OPEN + math.ceil(max(rates, default=0.0) / part.parts), MOST_SPARE)
    count = lanes * part.chains.side_by_side or guess
    return min(count, part.slots if part.slots is not None else count)


def _client(job: Job, index: int, keep_text: bool, wire: Wire) -> Any:
    probed = job.found[index]
    settings = job.settings.of(job.settings.endpoints[index])
    keep_text = keep_text or probed.usage is False
    options: dict[str, Any] = {
        **client_options(settings, probed),
        "timeout_ns": job.workload.timeout_ns,
        "stall_timeout_ns": job.workload.stall_timeout_ns,
        "keep_text": keep_text,
    }
    open_ahead = any(not isinstance(stage.arrival, Closed) for stage in job.workload.stages)
    return Pool(probed.target, wire=wire, ahead=open_ahead, sources=settings.sources, **options)
