"""Estimates the load at which a simulated machine is full, by the roofline of its preset.

A search starts at this load. Nothing is simulated: there is no queue, and every request is the mean
of a sample. The roofline model (Williams, Waterman and Patterson 2009) says that an iteration takes
as long as its memory traffic or its computation, whichever is longer; `engine.replica.Costs` has
its terms. A session is a single request, a conversation or a task.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.core import seeds
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.prompts import PromptTarget
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.schedule.sessions import build_sessions
from loadgen.sim.request_lengths import RequestSize, create_request_sizer
from loadgen.sim.virtual_backend import preset_of

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.schedule.sessions import Session
    from loadgen.core.slo import Slo
    from loadgen.core.workload import Workload
    from loadgen.sim.engine.replica import Costs, ServerLimits
    from loadgen.sim.presets.preset import Preset

SAMPLED_REQUESTS = 1_000  # the first half of them only fills the caches
BISECTION_STEPS = 20  # narrow an interval to a millionth of its width
# Multiples of this number look random in their upper bits (Knuth's multiplicative hash), so that
# consecutive turns of a conversation meet the replicas by chance.
HASH_MULTIPLIER = 2_654_435_761
HASH_SHIFT = 16


class Work(NamedTuple):
    """The load that requests put on a machine, as the sum over one or several requests."""

    requests: float
    computed_tokens: float  # of prompts, without those found in the cache
    generated_tokens: float
    attended_tokens: float  # sum over the computed tokens of the tokens that each attends to
    read_tokens: float  # sum over the generated tokens of the cached tokens that each reads


SessionWork = dict[int, Work]
"""The work of each sampled request of a session, by its number."""


def estimate_saturation_rate(workload: Workload, settings: Settings) -> float | None:
    """Return the rate per second at which single requests, conversations or tasks fill the machine.

    The machine has to be fast enough to keep the limits of the SLO for TPOT and for the duration of
    tasks. Return None if no request can be served.
    """
    preset = preset_of(settings)
    sample = _sample_work(workload, settings)
    mean_work = _mean_session_work(sample)
    if mean_work is None:
        return None
    iteration_limits_ns: list[float] = [
        term.limit_ns for slo in _all_slos(workload) for term in slo.terms if term.metric == "tpot"
    ]
    task = workload.slo.task if workload.slo is not None else None
    if task is not None and task.within_ns is not None:
        timed_tasks = _timed_tasks(workload, sample, preset.costs)
        iteration_limits_ns.append(_slowest_iteration_ns(timed_tasks, task.within_ns, task.share))
    max_iteration_ns = min(iteration_limits_ns, default=math.inf)
    rate_per_s = _replica_rate(mean_work, preset.costs, preset.limits, max_iteration_ns)
    return rate_per_s * sum(preset.speeds) if rate_per_s else None


def _all_slos(workload: Workload) -> Iterator[Slo]:
    """Yield the SLO of a workload, and those of its classes."""
    classes = getattr(workload.requests, "classes", {})
    for slo in (workload.slo, *(request_class.slo for request_class in classes.values())):
        if slo is not None:
            yield slo


def _replica_rate(work: Work, costs: Costs, limits: ServerLimits, max_iteration_ns: float) -> float:
    """Return the sessions per second that fill one replica.

    `work` is that of a mean session. The number of sessions whose work is done per iteration (a
    fraction, because a session takes many iterations) is limited by four things:

    - the tokens that an iteration may compute
    - the size of a batch: each sequence in it generates one token per iteration
    - the cache: a generated token reads all tokens of its sequence, which have to be in the cache
    - the time that an iteration may take
    """
    sessions = limits.max_num_tokens / (work.computed_tokens + work.generated_tokens)
    if work.generated_tokens:
        cache_tokens = limits.kv_blocks * limits.tokens_per_block
        sessions = min(
            sessions,
            limits.max_batch_size / work.generated_tokens,
            cache_tokens / max(work.read_tokens, 1.0),  # 1.0 avoids a division by 0
        )
    if _iteration_ns(sessions, work, costs) > max_iteration_ns:
        sessions = _sessions_within(max_iteration_ns, sessions, work, costs)
    return sessions * 1e9 / _iteration_ns(sessions, work, costs)


def _sessions_within(
    max_iteration_ns: float, max_sessions: float, work: Work, costs: Costs
) -> float:
    """Return the most sessions per iteration with which an iteration takes at most so long.

    The duration grows with the sessions, so the number is found by bisection.
    """
    low = 0.0
    high = max_sessions
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        if _iteration_ns(middle, work, costs) > max_iteration_ns:
            high = middle
        else:
            low = middle
    return low


def _iteration_ns(sessions: float, work: Work, costs: Costs) -> float:
    """Return the mean duration of an iteration that does the work of this many sessions.

    The number is a fraction, because a session takes many iterations. Prompts arrive at random, so
    their number in an iteration has a Poisson distribution: a share of 1 - exp(-mean) of the
    iterations has at least one. In these, the prompts are computed together with the outputs. By
    the roofline model, an iteration of either kind takes as long as its memory traffic or its
    computation, whichever is longer.
    """
    memory_ns = costs.weights_ns + sessions * costs.kv_token_ns * work.read_tokens
    output_ns = sessions * (
        costs.token_ns * work.generated_tokens + costs.attended_ns * work.read_tokens
    )
    prompt_ns = sessions * (
        costs.token_ns * work.computed_tokens + costs.attended_ns * work.attended_tokens
    )
    prompts_per_iteration = sessions * work.requests
    share_with_prompts = -math.expm1(-prompts_per_iteration)
    # Both kinds count with their share of the iterations. All prompts are computed in iterations
    # of this kind, so the time for prompts, a mean over all iterations, is not multiplied by it.
    with_prompts_ns = max(
        share_with_prompts * memory_ns, share_with_prompts * output_ns + prompt_ns
    )
    without_prompts_ns = (1 - share_with_prompts) * max(memory_ns, output_ns)
    return costs.overhead_ns + without_prompts_ns + with_prompts_ns


class _TimedTask:
    """A sampled task: the graph of its requests, and the work of each of them."""

    def __init__(self, session: Session, works: Sequence[Work], costs: Costs) -> None:
        self._session = session
        self._works = works
        self._costs = costs

    def duration_ns(self, iteration_ns: float) -> float:
        """Return how long the task takes if every iteration takes so long.

        Each of its requests gets one token per iteration, and starts when the last of the requests
        that it depends on has ended and its pause is over. Requests come after those that they
        depend on.
        """
        starts_ns = [0.0] * len(self._works)
        end_ns = 0.0
        for turn, work in enumerate(self._works):
            prefill_ns = self._costs.token_ns * work.computed_tokens
            # One iteration more than tokens: a request first waits for the end of the current one.
            decode_ns = (work.generated_tokens + 1) * iteration_ns
            end_ns = starts_ns[turn] + self._session.pauses_ns[turn] + prefill_ns + decode_ns
            for successor in self._session.successors[turn]:
                starts_ns[successor] = max(starts_ns[successor], end_ns)
        return end_ns


def _timed_tasks(
    workload: Workload, sample: dict[int, SessionWork], costs: Costs
) -> list[_TimedTask]:
    """Return the sampled tasks, without those of which a request is missing in the sample.

    The duration of a task follows from all of its requests. Single requests are no tasks.
    """
    sessions = build_sessions(workload.requests, workload.seed or 0)
    tasks = []
    for number, works in sample.items():
        session = sessions.get(number)
        if not session.is_single_request and len(works) == session.turn_count:
            tasks.append(_TimedTask(session, [*works.values()], costs))
    return tasks


def _slowest_iteration_ns(tasks: Sequence[_TimedTask], within_ns: int, share: float) -> float:
    """Return the longest time of an iteration with which this share of the tasks ends in time.

    The longer iterations take, the fewer tasks end within `within_ns`, so the time is found by
    bisection. It is at most `within_ns`, which is also returned if there are no tasks.
    """
    low = 0.0
    high = float(within_ns)
    if not tasks:
        return high
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        in_time = np.mean([task.duration_ns(middle) <= within_ns for task in tasks])
        if in_time >= share:
            low = middle
        else:
            high = middle
    return high


def _mean_session_work(sample: dict[int, SessionWork]) -> Work | None:
    """Return the mean work of a session, or None if there is no session."""
    if not sample:
        return None
    totals = [np.sum([*works.values()], axis=0) for works in sample.values()]
    return Work(*np.mean(totals, axis=0).tolist())


def _sample_work(workload: Workload, settings: Settings) -> dict[int, SessionWork]:
    """Return the work of the requests of some sessions, by the number of the session.

    Each request finds in the cache of its replica what the requests before it have left there. The
    first half of the sample only fills these caches, as the start of a run does, and is left out.
    """
    preset = preset_of(settings)
    prompts = build_prompts(
        workload,
        workload.seed or 0,
        seeds.salt_number(""),
        load_tokenizer(settings.tokenizer),
        PromptTarget(api=settings.api),
    )
    limits = preset.limits
    tokens_per_block = limits.tokens_per_block if limits.block_reuse else 0
    request_size = create_request_sizer(
        workload.requests, prompts, tokens_per_block, requests_values=settings.values
    )
    caches: dict[int, set[Hashable]] = defaultdict(set)  # blocks by replica
    sample: dict[int, SessionWork] = defaultdict(dict)
    for index, number in enumerate(prompts.request_ids(SAMPLED_REQUESTS)):
        replica = (index * HASH_MULTIPLIER >> HASH_SHIFT) % preset.replicas
        work = _work_of_request(request_size(number), caches[replica], preset)
        if index >= SAMPLED_REQUESTS // 2:
            sample[number // prompts.turns][number] = work
    return sample


def _work_of_request(size: RequestSize, cache: set[Hashable], preset: Preset) -> Work:
    """Return the work of one request, and add its blocks to the cache of its replica.

    An output that would exceed the longest sequence is shortened, as in the engine.
    """
    limits = preset.limits
    if not size.output_tokens:
        # A request for values (embeddings, rerank) shares no blocks and is computed as a whole.
        return _work_of_lengths(size.input_tokens, size.input_tokens, output_tokens=0)
    cached_tokens = _count_cached_blocks(size.blocks, cache) * limits.tokens_per_block
    cache.update(size.blocks)
    # At least the last token of a prompt is computed, because the first output follows from it.
    computed_tokens = max(1, size.input_tokens - cached_tokens)
    output_tokens = max(0, min(size.output_tokens, limits.max_seq_len - size.input_tokens))
    return _work_of_lengths(size.input_tokens, computed_tokens, output_tokens)


def _work_of_lengths(input_tokens: int, computed_tokens: int, output_tokens: int) -> Work:
    """Return the work of a request with these lengths.

    In a transformer with causal attention, a token attends to all tokens up to its own, whose keys
    and values are read from the cache. `engine.replica` counts the same tokens one by one; here
    the sums are taken by their means.
    """
    # The computed tokens are the last ones of the prompt, from `input - computed` to `input`.
    mean_position_of_computed = input_tokens - computed_tokens / 2
    # The generated tokens follow the prompt, from `input` to `input + output`.
    mean_position_of_generated = input_tokens + output_tokens / 2
    return Work(
        requests=1,
        computed_tokens=computed_tokens,
        generated_tokens=output_tokens,
        attended_tokens=computed_tokens * mean_position_of_computed,
        read_tokens=output_tokens * mean_position_of_generated,
    )


def _count_cached_blocks(blocks: Sequence[Hashable], cache: set[Hashable]) -> int:
    """Return how many blocks at the beginning of a prompt are in the cache."""
    for index, block in enumerate(blocks):
        if block not in cache:
            return index
    return len(blocks)
