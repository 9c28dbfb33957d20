"""Estimate the load at which a simulated machine is full, by the roofline of its preset.

A search starts at this load. Nothing is simulated: there is no queue, and every request is the mean
of a sample. The roofline model (Williams, Waterman and Patterson 2009) says that an iteration takes
as long as its memory traffic or its computation, whichever is longer; `engine.replica.Costs` has
its terms. A session is a single request, a conversation or a task.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.core import seeds
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.prompts import Prompts, PromptTarget
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.schedule.sessions import build_sessions
from loadgen.sim.request_lengths import RequestSize, RequestSizer, create_request_sizer
from loadgen.sim.virtual_backend import load_target_preset

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.schedule.sessions import Session
    from loadgen.core.slo import Slo
    from loadgen.core.workload import Workload
    from loadgen.sim.engine.replica import Costs, ServerLimits

SAMPLED_REQUESTS = 1_000  # the first half of them only fills the caches
BISECTION_STEPS = 20  # narrow an interval to a millionth of its width
NS_PER_S = 1e9
HASH_MULTIPLIER = 2_654_435_761  # 2^32 divided by the golden ratio: Knuth's multiplicative hash
HASH_SHIFT = 16  # only the upper bits of the product look random


class Work(NamedTuple):
    """The load that requests put on a machine, as the sum over one or several requests.

    Attributes:
        requests: The number of requests.
        computed_tokens: Tokens of prompts, without those found in the cache.
        generated_tokens: Output tokens.
        attended_tokens: Sum over the computed tokens of the tokens that each attends to.
        read_tokens: Sum over the generated tokens of the cached tokens that each reads.
    """

    requests: float
    computed_tokens: float
    generated_tokens: float
    attended_tokens: float
    read_tokens: float


SessionWork = dict[int, Work]
"""The work of each sampled request of a session, by its number."""


def estimate_saturation_rate(workload: Workload, settings: Settings) -> float | None:
    """Return the rate in sessions per second that fills the simulated system.

    A session is a single request, a conversation or a task. The rate is the highest one at which
    the system still meets the limits of the SLO for TPOT and for the duration of tasks. A search
    begins at this rate. Return None if no request can be served.
    """
    preset = load_target_preset(settings)
    sample = _sample_work(workload, settings)
    mean_work = _average_session_work(sample)
    if mean_work is None:
        return None

    max_iteration_ns = _find_slo_iteration_limit_ns(workload, sample, preset.costs)
    replica_rate_per_s = _saturation_rate_of_replica(
        mean_work, preset.costs, preset.limits, max_iteration_ns
    )
    is_servable = replica_rate_per_s > 0  # not if the SLO is violated without any load
    if not is_servable:
        return None

    # The rate is that of a replica with speed 1, and other replicas serve in proportion.
    return replica_rate_per_s * sum(preset.speeds)


def _find_slo_iteration_limit_ns(
    workload: Workload, sample: dict[int, SessionWork], costs: Costs
) -> float:
    """Return how long an iteration may take at most so that the SLO of a workload is met, in ns.

    The SLO can limit an iteration in two ways:

    - By a limit for TPOT, the time per output token: a request gets one token per iteration, so no
      iteration may take longer than this limit.
    - By a limit for the duration of tasks, which consist of several requests. The longest iteration
      with which enough tasks end in time is the limit.

    The result is infinite if neither is limited.

    Args:
        workload: The workload with its SLO.
        sample: The work of sampled requests, by session. Tasks are taken from it.
        costs: The costs of an iteration of a replica.
    """
    limits_ns: list[float] = list(_iterate_tpot_limits_ns(workload))
    task_slo = workload.slo.task if workload.slo is not None else None
    if task_slo is not None and task_slo.within_ns is not None:
        tasks = _select_complete_tasks(workload, sample, costs)
        task_limit_ns = _find_task_iteration_limit_ns(
            tasks, max_duration_ns=task_slo.within_ns, required_fraction=task_slo.share
        )
        limits_ns.append(task_limit_ns)

    return min(limits_ns, default=math.inf)


def _iterate_tpot_limits_ns(workload: Workload) -> Iterator[int]:
    """Yield all limits in ns that a workload and its classes have for the time per output token."""
    for slo in _all_slos(workload):
        for term in slo.terms:
            if term.metric == "tpot":
                yield term.limit_ns


def _all_slos(workload: Workload) -> Iterator[Slo]:
    """Yield the SLO of a workload, and those of its classes."""
    classes = getattr(workload.requests, "classes", {})
    for slo in (workload.slo, *(request_class.slo for request_class in classes.values())):
        if slo is not None:
            yield slo


def _saturation_rate_of_replica(
    mean_work: Work, costs: Costs, limits: ServerLimits, max_iteration_ns: float
) -> float:
    """Return the highest rate, in sessions per second, that one replica can serve permanently.

    At this rate, the work that arrives during an iteration is the work that the iteration does. A
    session takes many iterations, so this is the work of a fraction of a session. The rate is the
    fraction divided by the duration of the iteration. For example, 0.05 sessions per iteration of
    20 ms are 2.5 sessions per second.

    Args:
        mean_work: The mean work of a session.
        costs: The costs of an iteration of the replica.
        limits: The limits of the replica.
        max_iteration_ns: The time that an iteration may take.
    """
    sessions_per_iteration = _max_sessions_for_limits(mean_work, limits)
    iteration_ns = _iteration_ns(sessions_per_iteration, mean_work, costs)

    # An iteration that does so much work may take too long. Then it has to do less.
    if iteration_ns > max_iteration_ns:
        sessions_per_iteration = _max_sessions_for_duration(
            max_iteration_ns, sessions_per_iteration, mean_work, costs
        )
        iteration_ns = _iteration_ns(sessions_per_iteration, mean_work, costs)

    return sessions_per_iteration * NS_PER_S / iteration_ns


def _max_sessions_for_limits(mean_work: Work, limits: ServerLimits) -> float:
    """Return the work that an iteration can do at most, in sessions, by the limits of a replica.

    A session is one or several requests. It takes many iterations, so the result is usually a
    fraction: 0.05 means that an iteration does a twentieth of the work of a session. Each limit of
    an iteration, divided by what a whole session needs, gives such a fraction:

    - An iteration computes at most `max_num_tokens` tokens. A session needs those of its prompts
      and outputs.
    - An iteration generates one token per sequence of the batch, which has at most `max_batch_size`
      sequences.
    - An iteration reads the key-value cache once at most: each generated token reads all tokens of
      its sequence there.
    """
    computed_tokens_per_session = mean_work.computed_tokens + mean_work.generated_tokens
    sessions_by_compute = limits.max_num_tokens / computed_tokens_per_session
    has_output = mean_work.generated_tokens > 0
    if not has_output:
        return sessions_by_compute

    sessions_by_batch = limits.max_batch_size / mean_work.generated_tokens
    cache_tokens = limits.kv_blocks * limits.tokens_per_block
    read_tokens_per_session = max(mean_work.read_tokens, 1.0)  # at least 1, for the division
    sessions_by_cache = cache_tokens / read_tokens_per_session

    return min(sessions_by_compute, sessions_by_batch, sessions_by_cache)


def _max_sessions_for_duration(
    max_iteration_ns: float, max_sessions: float, mean_work: Work, costs: Costs
) -> float:
    """Return how many sessions a replica can serve per iteration without a too long iteration.

    The result is usually a fraction: an iteration does a small part of the work of a session. An
    iteration with more work takes longer, so the result is found by bisection.

    Args:
        max_iteration_ns: The time that an iteration may take.
        max_sessions: An upper bound of the result. With it, an iteration takes too long.
        mean_work: The mean work of a session.
        costs: The costs of an iteration of the replica.
    """
    low = 0.0
    high = max_sessions
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        if _iteration_ns(middle, mean_work, costs) > max_iteration_ns:
            high = middle
        else:
            low = middle

    return low


class _MeanTimes(NamedTuple):
    """The mean times that an iteration needs for its work, in ns.

    Attributes:
        memory_ns: For reading the weights of the model and the key-value cache.
        output_ns: For computing output tokens.
        prompt_ns: For computing prompts. Iterations without a prompt are included in this mean.
    """

    memory_ns: float
    output_ns: float
    prompt_ns: float


def _mean_times(sessions_per_iteration: float, mean_work: Work, costs: Costs) -> _MeanTimes:
    """Return the mean times that an iteration needs for memory, outputs and prompts.

    Computing a token costs `token_ns`, and `attended_ns` for each token that it attends to. An
    output token attends to all tokens before it, whose keys and values are read from the cache
    (`read_tokens`). The tokens of prompts that are not in the cache (`computed_tokens`) attend to
    `attended_tokens`.

    Args:
        sessions_per_iteration: The work of an iteration in sessions, usually a fraction.
        mean_work: The mean work of a session. A session is one or several requests.
        costs: The costs of an iteration, by the roofline model.
    """
    kv_cache_ns = sessions_per_iteration * costs.kv_token_ns * mean_work.read_tokens

    output_ns_per_session = (
        costs.token_ns * mean_work.generated_tokens + costs.attended_ns * mean_work.read_tokens
    )
    prompt_ns_per_session = (
        costs.token_ns * mean_work.computed_tokens + costs.attended_ns * mean_work.attended_tokens
    )
    return _MeanTimes(
        memory_ns=costs.weights_ns + kv_cache_ns,
        output_ns=sessions_per_iteration * output_ns_per_session,
        prompt_ns=sessions_per_iteration * prompt_ns_per_session,
    )


def _iteration_ns(sessions_per_iteration: float, mean_work: Work, costs: Costs) -> float:
    """Return the mean duration of an iteration in ns, by the roofline model.

    An iteration takes as long as its memory traffic or its computation, whichever is longer. With
    the probability p, it computes prompts and outputs, otherwise only outputs:

    - Without prompts it takes max(memory_ns, output_ns).
    - With prompts it takes max(memory_ns, output_ns + prompt_ns / p). All prompts are computed in
      these iterations, so each of them needs more time for prompts than the mean `prompt_ns`.

    The result is the mean of both durations, weighted by 1 - p and p. The second one, multiplied by
    p, is max(p * memory_ns, p * output_ns + prompt_ns). It is computed in this form, because p may
    be 0.

    Args:
        sessions_per_iteration: The work of an iteration in sessions, usually a fraction.
        mean_work: The mean work of a session. A session is one or several requests.
        costs: The costs of an iteration.
    """
    times = _mean_times(sessions_per_iteration, mean_work, costs)
    p = _probability_of_arrival(sessions_per_iteration * mean_work.requests)

    weighted_without_prompts_ns = (1 - p) * max(times.memory_ns, times.output_ns)
    weighted_with_prompts_ns = max(p * times.memory_ns, p * times.output_ns + times.prompt_ns)
    return costs.overhead_ns + weighted_without_prompts_ns + weighted_with_prompts_ns


def _probability_of_arrival(mean_arrivals: float) -> float:
    """Return the probability that at least one prompt arrives during an iteration.

    Prompts arrive at random, so their number has a Poisson distribution. It is 0 with the
    probability exp(-mean), and at least 1 with the probability 1 - exp(-mean). `math.expm1(x)` is
    exp(x) - 1, and exact for an x near 0, too.
    """
    return -math.expm1(-mean_arrivals)


class _TimedTask:
    """A sampled task: the graph of its requests, and the work of each of them."""

    def __init__(self, session: Session, work_of_turn: Sequence[Work], costs: Costs) -> None:
        self._session = session
        self._work_of_turn = work_of_turn
        self._costs = costs

    def estimate_duration_ns(self, iteration_ns: float) -> float:
        """Return how long the task takes if every iteration takes `iteration_ns`.

        A request (a turn) starts when all requests that it depends on have ended and its pause is
        over. It then gets one token per iteration. Turns are numbered so that each one comes after
        those that it depends on, and the last turn ends the task.
        """
        starts_ns = [0.0] * len(self._work_of_turn)
        end_ns = 0.0
        for turn, work in enumerate(self._work_of_turn):
            prefill_ns = self._costs.token_ns * work.computed_tokens
            # A request first waits for the end of the current iteration.
            iterations = 1 + work.generated_tokens
            pause_ns = self._session.pauses_ns[turn]
            end_ns = starts_ns[turn] + pause_ns + prefill_ns + iterations * iteration_ns
            for successor in self._session.successors[turn]:
                starts_ns[successor] = max(starts_ns[successor], end_ns)

        return end_ns


def _select_complete_tasks(
    workload: Workload, sample: dict[int, SessionWork], costs: Costs
) -> list[_TimedTask]:
    """Return the tasks in the sample, without those at its ends that are only partly sampled.

    A task is a session of several requests, and its duration follows from all of them. The first
    and the last task of the sample may have requests outside, so that it cannot be calculated.
    """
    sessions = build_sessions(workload.requests, workload.seed or 0)
    tasks = []
    for session_number, session_work in sample.items():
        session = sessions.get(session_number)  # builds the session from its number
        is_complete = len(session_work) == session.turn_count
        if is_complete and not session.is_single_request:
            work_of_turn = list(session_work.values())
            tasks.append(_TimedTask(session, work_of_turn, costs))

    return tasks


def _find_task_iteration_limit_ns(
    tasks: Sequence[_TimedTask], max_duration_ns: int, required_fraction: float
) -> float:
    """Return how long an iteration may take at most, in ns, so that enough tasks end in time.

    The longer iterations take, the fewer tasks end in time, so the limit is found by bisection. An
    iteration is never longer than a task, so the limit is between 0 and `max_duration_ns`.

    Args:
        tasks: The sampled tasks. Without any, the result is `max_duration_ns`.
        max_duration_ns: How long a task may take by the SLO.
        required_fraction: The fraction of the tasks that has to end in time by the SLO.
    """
    if not tasks:
        return float(max_duration_ns)

    low = 0.0
    high = float(max_duration_ns)
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        are_in_time = [task.estimate_duration_ns(middle) <= max_duration_ns for task in tasks]
        if np.mean(are_in_time) >= required_fraction:
            low = middle
        else:
            high = middle

    return high


def _average_session_work(sample: dict[int, SessionWork]) -> Work | None:
    """Return the mean work of a session, or None if there is no session."""
    if not sample:
        return None
    session_totals = [np.sum([*work.values()], axis=0) for work in sample.values()]
    return Work(*np.mean(session_totals, axis=0).tolist())


def _sample_work(workload: Workload, settings: Settings) -> dict[int, SessionWork]:
    """Return the work of each sampled request, by its session and its id.

    The work of a request depends on how much of its prompt is in the prefix cache of its replica,
    where earlier requests have left their blocks. At the start of a run the caches are empty. So
    the first half of the sample is a warm-up, which only fills the caches and has no entry in the
    result. For example, {7: {14: work, 15: work}} has two requests of session 7.
    """
    preset = load_target_preset(settings)
    prompts = _build_sample_prompts(workload, settings)
    request_sizer = _create_sample_sizer(workload, settings, prompts, preset.limits)
    cached_blocks_of_replica: list[set[Hashable]] = [set() for _ in range(preset.replicas)]
    work_by_session: dict[int, SessionWork] = defaultdict(dict)

    warm_up_requests = SAMPLED_REQUESTS // 2
    for index, request_id in enumerate(prompts.request_ids(SAMPLED_REQUESTS)):
        size = request_sizer(request_id)
        replica_index = _choose_sample_replica(index, preset.replicas)
        cached_blocks = cached_blocks_of_replica[replica_index]

        is_warm_up = index < warm_up_requests
        if not is_warm_up:
            # The ids of the requests of a session follow each other, one per turn.
            session_number = request_id // prompts.turns
            session_work = work_by_session[session_number]
            session_work[request_id] = _estimate_work(size, cached_blocks, preset.limits)

        cached_blocks.update(size.blocks)

    return work_by_session


def _create_sample_sizer(
    workload: Workload, settings: Settings, prompts: Prompts, limits: ServerLimits
) -> RequestSizer:
    """Return a function that returns the lengths of a request and the blocks of its prompt."""
    return create_request_sizer(
        workload.requests,
        prompts,
        tokens_per_block=limits.tokens_per_block if limits.block_reuse else 0,
        is_non_generative=settings.returns_numbers,
    )


def _build_sample_prompts(workload: Workload, settings: Settings) -> Prompts:
    """Return the requests of a workload. Only lengths matter, so any salt of the texts will do."""
    return build_prompts(
        workload,
        seed=workload.seed or 0,
        salt=seeds.salt_number(""),
        tokenizer=load_tokenizer(settings.tokenizer),
        target=PromptTarget(api=settings.api),
    )


def _choose_sample_replica(index: int, replica_count: int) -> int:
    """Return the replica of a request in the sample: as if at random, but always the same one.

    The consecutive turns of a conversation are spread over the replicas in this way. Knuth's
    multiplicative hash is used: the upper bits of the product look random.
    """
    product = index * HASH_MULTIPLIER
    upper_bits = product >> HASH_SHIFT
    return upper_bits % replica_count


def _estimate_work(size: RequestSize, cached_blocks: Set[Hashable], limits: ServerLimits) -> Work:
    """Return the work of a request whose replica has these blocks in its cache.

    An output that would exceed the longest sequence is shortened, as in the engine.
    """
    is_non_generative = not size.output_tokens
    if is_non_generative:
        # A request for embeddings or ranks shares no blocks and is computed as a whole.
        return _work_of_lengths(size.input_tokens, size.input_tokens, output_tokens=0)

    cached_tokens = _count_cached_blocks(size.blocks, cached_blocks) * limits.tokens_per_block

    # At least the last token of a prompt is computed, because the first output follows from it.
    computed_tokens = max(1, size.input_tokens - cached_tokens)
    output_tokens = max(0, min(size.output_tokens, limits.max_seq_len - size.input_tokens))
    return _work_of_lengths(size.input_tokens, computed_tokens, output_tokens)


def _work_of_lengths(input_tokens: int, computed_tokens: int, output_tokens: int) -> Work:
    """Return the work of a request with these lengths.

    With causal attention, a token attends to all tokens before it: the token at position 100
    attends to 100 tokens. For consecutive tokens, the sum of these numbers is the number of tokens
    times their mean position. For example, the tokens at positions 100 to 120 attend to about
    20 * 110 = 2,200 tokens. An output token reads the tokens that it attends to from the key-value
    cache.

    Args:
        input_tokens: The length of the prompt.
        computed_tokens: The tokens of the prompt that were not found in the cache. They are the
            last ones of the prompt.
        output_tokens: The length of the output.
    """
    first_computed_position = input_tokens - computed_tokens
    mean_position_of_computed = first_computed_position + computed_tokens / 2
    mean_position_of_generated = input_tokens + output_tokens / 2

    return Work(
        requests=1,
        computed_tokens=computed_tokens,
        generated_tokens=output_tokens,
        attended_tokens=computed_tokens * mean_position_of_computed,
        read_tokens=output_tokens * mean_position_of_generated,
    )


def _count_cached_blocks(blocks: Sequence[Hashable], cached_blocks: Set[Hashable]) -> int:
    """Return how many blocks at the beginning of a prompt are in the cache."""
    for index, block in enumerate(blocks):
        if block not in cached_blocks:
            return index
    return len(blocks)
