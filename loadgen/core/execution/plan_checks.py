"""Check a plan against its options and this machine before the first request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from loadgen.core import child_process, format, slo
from loadgen.core.errors import CombinedError, LoadgenError, UserError
from loadgen.core.execution import resource_limits
from loadgen.core.execution.plan import Plan, Settings, share_of_limit
from loadgen.core.execution.resource_limits import ConnectionDemand
from loadgen.core.schedule.schedule import Schedule
from loadgen.core.workload import Mix, Task, Workload, requests_by_class
from loadgen.core.workload.answers_objective import answers_objective_errors
from loadgen.core.workload.request_classes import list_question_classes
from loadgen.figures import needs as response_parts_needed_for

# More workers per core only use memory (60 to 100 MB each) and compete for the core.
_MAX_WORKERS_PER_CORE = 8


class _RequestLimit(NamedTuple):
    """A limit of how many requests are in a state, such as "in flight", at the same time."""

    state: str
    requests: int | None
    flag: str


def check_plan(plan: Plan, *, is_local: bool) -> None:
    """Raise CombinedError with everything that is wrong with a plan.

    Args:
        plan: The plan.
        is_local: Whether the workers run on this machine, so that its limits apply.
    """
    worker_count_errors: Iterable[LoadgenError] = ()
    connection_errors: Iterable[LoadgenError] = ()
    if is_local:
        worker_count_errors = _worker_count_errors(plan.job.settings.workers)
        connection_errors = _connection_errors(plan)

    # The user sees the errors in this order.
    errors: list[LoadgenError] = [
        *resource_limits.unusable_source_errors(plan.job.settings.sources),
        *workload_errors(plan.job.workload, plan.job.settings),
        *_oversized_request_errors(plan),
        *worker_count_errors,
        *_limit_share_errors(plan),
        *_empty_shard_errors(plan),
        *connection_errors,
    ]
    if errors:
        raise CombinedError(errors)


def _oversized_request_errors(plan: Plan) -> Iterator[UserError]:
    """Yield an error if too many requests do not fit the context of the targets."""
    if plan.oversized_requests is None:
        return
    job = plan.job
    error = plan.oversized_requests.to_error(job.workload, job.settings.display_name)
    if error is not None:
        yield error


def _worker_count_errors(workers: int) -> Iterator[UserError]:
    """Yield an error if this machine has too few cores for this number of worker processes."""
    cpus = child_process.count_cpus()
    if workers > _MAX_WORKERS_PER_CORE * cpus:
        processes = format.counted(workers, "worker process", "worker processes")
        yield UserError(
            "resource_limit",
            message=f"{processes} on {format.counted(cpus, 'core')}",
            where=f"--workers {workers}",
            hint="use --workers auto, at most one per core",
        )


def _limit_share_errors(plan: Plan) -> Iterator[UserError]:
    """Yield an error for each limit that is too small to be divided among all workers.

    Workers do not communicate, so each keeps to its own share of a limit, which must be at least 1.
    A limit of requests in flight applies to open loops only.
    """
    workload = plan.job.workload
    schedule = plan.schedule
    workers = plan.job.settings.workers * schedule.shard_count

    limits = [_RequestLimit("in prefill", workload.max_in_prefill, "--set max_in_prefill")]
    if any(not stage.is_closed_loop for stage in schedule.stages):
        limits.append(_RequestLimit("in flight", workload.max_in_flight, "--max-in-flight"))

    for limit in limits:
        if limit.requests is not None and limit.requests < workers:
            requests = format.counted(limit.requests, "request")
            yield UserError(
                "out_of_range",
                message=(
                    f"{requests} {limit.state} cannot be spread over "
                    f"{format.counted(workers, 'worker')}"
                ),
                where=limit.flag,
                hint=f"use at most {limit.requests} workers over all shards",
            )


def _empty_shard_errors(plan: Plan) -> Iterator[UserError]:
    """Yield an error if this shard of a run has a measured stage without a request.

    A run can be divided into shards, which are sent from several machines. The last shards are
    empty if there are more shards than requests or virtual users.
    """
    shard = plan.job.settings.shard
    if shard is not None and not _all_measured_stages_send(plan.schedule):
        yield UserError(
            "out_of_range",
            message="this part of the run has no requests to send",
            where=f"--shard {shard.index}/{shard.count}",
            hint="use fewer shards: at most one per request, and one per virtual user",
        )


def _all_measured_stages_send(schedule: Schedule) -> bool:
    """Return True if every measured stage of a shard has at least one request in this shard.

    A stage that only a duration limits has no known number of requests. It sends some if it has
    virtual users in this shard.
    """
    for stage in schedule.stages:
        if not stage.measured:
            continue

        request_count = schedule.slot_count_of(stage)
        if request_count is None:
            sends_requests = len(schedule.virtual_users_of(stage)) > 0
        else:
            sends_requests = request_count > 0

        if not sends_requests:
            return False
    return True


def _connection_errors(plan: Plan) -> Iterator[UserError]:
    """Yield the errors of a run that needs more connections than this machine allows."""
    job = plan.job
    max_in_flight = share_of_limit(job.workload.max_in_flight, plan.schedule)
    demand = ConnectionDemand(
        total=resource_limits.count_connections(plan.schedule, max_in_flight),
        workers=job.settings.workers,
        addresses=[result.target.address for result in job.probe_results],
        source_addresses=len(job.settings.sources),
        is_simulated=job.simulated,
    )
    yield from resource_limits.limit_errors(demand, resource_limits.read_machine_limits())


def workload_errors(workload: Workload, settings: Settings) -> Iterator[UserError]:
    """Yield an error for everything that a workload needs and these settings exclude.

    No target has to be probed for this, so it can be checked before anything is started.

    Without streaming, and with APIs that return numbers instead of text, a response arrives at
    once, so nothing can depend on the time of its tokens.
    """
    yield from _task_errors(workload, settings)
    yield from _prefill_limit_errors(workload, settings)
    yield from answers_objective_errors(workload)
    yield from _distributed_questions_errors(workload, settings)

    if settings.returns_numbers:
        yield from _stop_rule_errors(workload, settings)

    if settings.slo_headers and not _has_slo_for_headers(workload):
        yield UserError(
            "missing_key",
            message="there is no TTFT or TPOT objective to send to a gateway",
            where="--set slo_headers",
            hint="for example --slo ttft:500ms:p95 --slo tpot:50ms:p95",
        )


def _distributed_questions_errors(workload: Workload, settings: Settings) -> Iterator[UserError]:
    """Yield an error if several machines would send questions with known answers.

    The responses stay on the machines that sent the questions, so nothing could check them.
    """
    is_distributed = settings.ray is not None or settings.shard is not None
    if is_distributed and list_question_classes(workload.requests):
        yield UserError(
            "unsupported",
            message="responses to questions stay on the machines that sent the questions",
            where="--check-answers",
            hint="send the load from this machine, without --ray and --shard",
        )


def _task_errors(workload: Workload, settings: Settings) -> Iterator[UserError]:
    """Yield an error for each property of tasks that the settings do not support.

    Tool calls need an API that has them. Requests that users abandon after some output need
    streamed responses.
    """
    tasks = [
        requests
        for requests in requests_by_class(workload.requests).values()
        if isinstance(requests, Task)
    ]
    calls_tools = any(task.known_tools for task in tasks)
    if calls_tools and settings.api not in ("chat", "messages"):
        yield UserError(
            "unsupported",
            message="tool calls need the chat API",
            where=f"--api {settings.api}",
            hint="--api chat",
        )

    has_abandoned_requests = any(task.abandoned for task in tasks)
    if has_abandoned_requests and not settings.stream:
        yield UserError(
            "unsupported",
            message="abandoned requests need a streamed response",
            where="--no-stream",
            hint="remove it, or remove `abandoned` from the workload",
        )


def _prefill_limit_errors(workload: Workload, settings: Settings) -> Iterator[UserError]:
    """Yield an error if requests in prefill are limited, but responses do not show when it ends.

    A streamed response shows the end of prefill by its first token. Embeddings and scores are the
    result of prefill alone, so the end of the response is that of prefill.
    """
    returns_embeddings_or_scores = settings.returns_numbers
    shows_end_of_prefill = settings.stream or returns_embeddings_or_scores
    if workload.max_in_prefill is not None and not shows_end_of_prefill:
        yield UserError(
            "unsupported",
            message="max_in_prefill needs streamed responses, which show the end of prefill",
            where="--no-stream",
            hint="stream responses, or remove max_in_prefill",
        )


def _stop_rule_errors(workload: Workload, settings: Settings) -> Iterator[UserError]:
    """Yield an error for each `--stop-when` rule about tokens, for responses without tokens.

    A rule ends the load when a metric exceeds a limit, such as `e2e:p50:5s`. It can never apply if
    its metric needs tokens. The rule about errors counts failed requests and needs none.
    """
    for rule in workload.stop_when:
        if rule.metric == "errors":
            continue

        needs_tokens = response_parts_needed_for(rule.metric) != ""
        if needs_tokens:
            yield UserError(
                "unsupported",
                message=f"responses of {settings.api} have no tokens, so this rule never applies",
                where=f"--stop-when {rule.metric}",
                hint="errors:20%, or e2e:p50:5s",
            )


def _has_slo_for_headers(workload: Workload) -> bool:
    """Return True if the workload or one of its classes has an SLO that a header can carry.

    Only limits of TTFT and TPOT have a header; see `slo.HEADER_PREFIXES`.
    """
    slos = [workload.slo]
    if isinstance(workload.requests, Mix):
        slos += [request_class.slo for request_class in workload.requests.classes.values()]
    return any(slo.sent_headers(class_slo) for class_slo in slos)
