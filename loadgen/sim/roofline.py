"""The load at which a simulated machine is full, by the roofline of its preset alone: nothing is simulated. Pure.

A search begins there. It is an estimate: no queue, no chance, every request the mean of a sample.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.core import seeds
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.prompts import PromptTarget
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.core.schedule.sessions import build_sessions
from loadgen.sim.request_lengths import sizes_of
from loadgen.sim.virtual_backend import preset_of

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.schedule.sessions import Session
    from loadgen.core.slo import Slo
    from loadgen.core.workload import Workload
    from loadgen.sim.engine.replica import Costs, ServerLimits

SAMPLE = 1_000  # requests
SCATTER = (
    2_654_435_761  # consecutive numbers times this look drawn: turns meet the replicas by chance
)
HALVINGS = 20  # of an interval that holds what is looked for


class Work(NamedTuple):
    """What the requests of a chain ask of the machine together: how many they are, tokens to compute of prompts and to
    generate, other tokens that those of prompts attend to, and those in the cache that are read for those generated.
    """

    requests: float
    computed: float
    generated: float
    attended: float
    read: float


def filling_rate(workload: Workload, settings: Settings) -> float | None:
    """The rate at which single requests, conversations or tasks fill the machine, as it has to be to keep TPOT, and
    tasks in their time, within the SLO. None where no request can be served.
    """
    preset = preset_of(settings)
    sample = _sample(workload, settings)
    work = _mean(sample)
    if work is None:
        return None
    limits_ns: list[float] = [
        term.limit_ns for slo in _slos(workload) for term in slo.terms if term.metric == "tpot"
    ]
    task = workload.slo.task if workload.slo is not None else None
    if task is not None and task.within_ns is not None:
        limits_ns.append(_pace_ns(workload, sample, task.within_ns, task.share, preset.costs))
    rate = _filled(work, preset.costs, preset.limits, min(limits_ns, default=math.inf))
    return rate * sum(preset.speeds) if rate else None


def _slos(workload: Workload) -> Iterator[Slo]:
    """The SLO of a workload, and those of its classes."""
    classes = getattr(workload.requests, "classes", {})
    yield from (
        slo for slo in (workload.slo, *(one.slo for one in classes.values())) if slo is not None
    )


def _filled(work: Work, costs: Costs, limits: ServerLimits, iteration_ns: float) -> float:
    """Sessions per second of one replica that goes at most so slowly."""
    x = limits.max_num_tokens / (work.computed + work.generated)
    if work.generated:
        x = min(x, limits.max_batch_size / work.generated)
        x = min(x, limits.kv_blocks * limits.tokens_per_block / max(work.read, 1.0))
    if _iteration_ns(x, work, costs) > iteration_ns:
        low = 0.0
        for _ in range(HALVINGS):
            middle = (low + x) / 2
            low, x = (
                (low, middle) if _iteration_ns(middle, work, costs) > iteration_ns else (middle, x)
            )
        x = low
    return x * 1e9 / _iteration_ns(x, work, costs)


def _iteration_ns(x: float, work: Work, costs: Costs) -> float:
    """The mean time of an iteration in which `x` of a chain is done. Prompts come by chance: an iteration with some
    takes overhead + max(weights + kv_token * read, what is computed of prompts and of answers), another one as long as
    its answers alone.
    """
    read_ns = costs.weights_ns + x * costs.kv_token_ns * work.read
    answers_ns = x * (costs.token_ns * work.generated + costs.attended_ns * work.read)
    prompts_ns = x * (costs.token_ns * work.computed + costs.attended_ns * work.attended)
    share = -math.expm1(-x * work.requests)  # of the iterations with prompts
    with_some_ns = max(share * read_ns, share * answers_ns + prompts_ns)
    return costs.overhead_ns + (1 - share) * max(read_ns, answers_ns) + with_some_ns


def _pace_ns(
    workload: Workload,
    sample: dict[int, dict[int, Work]],
    within_ns: int,
    share: float,
    costs: Costs,
) -> float:
    """The longest time of an iteration in which this share of the tasks ends in time."""
    chains = build_sessions(workload.requests, workload.seed or 0)
    tasks = [(chains.get(number), [*works.values()]) for number, works in sample.items()]
    tasks = [
        (chain, works)
        for chain, works in tasks
        if not chain.is_single_request and len(works) == chain.turn_count
    ]
    low, high = 0.0, float(within_ns)
    for _ in range(HALVINGS if tasks else 0):
        middle = (low + high) / 2
        kept = np.mean([_duration_ns(*task, middle, costs) <= within_ns for task in tasks])
        low, high = (middle, high) if kept >= share else (low, middle)
    return high


def _duration_ns(chain: Session, works: list[Work], iteration_ns: float, costs: Costs) -> float:
    """How long a task takes, one token of each of its answers an iteration."""
    starts_ns = [0.0] * len(works)
    for place, work in enumerate(works):
        own_ns = costs.token_ns * work.computed + (work.generated + 1) * iteration_ns
        ends_ns = starts_ns[place] + chain.pauses_ns[place] + own_ns
        for other in chain.successors[place]:
            starts_ns[other] = max(starts_ns[other], ends_ns)
    return ends_ns


def _mean(sample: dict[int, dict[int, Work]]) -> Work | None:
    """The mean work of a chain."""
    totals = [np.sum([*works.values()], axis=0) for works in sample.values()]
    return Work(*np.mean(totals, axis=0).tolist()) if totals else None


def _sample(workload: Workload, settings: Settings) -> dict[int, dict[int, Work]]:
    """The work of each request, by its number, of some chains, by theirs. As many requests before only fill the
    caches.
    """
    preset, seed = preset_of(settings), workload.seed or 0
    requests = build_prompts(
        workload,
        seed,
        seeds.salt_number(""),
        load_tokenizer(settings.tokenizer),
        PromptTarget(api=settings.api),
    )
    limits = preset.limits
    sizes = sizes_of(
        workload.requests, requests, limits.tokens_per_block if limits.block_reuse else 0, settings
    )
    kept: dict[int, set[Hashable]] = defaultdict(set)  # by replica: blocks in its cache
    sample: dict[int, dict[int, Work]] = defaultdict(dict)
    for place, number in enumerate(requests.numbers(SAMPLE)):
        input_tokens, output_tokens, blocks = sizes(number)
        computed = input_tokens
        if output_tokens:
            cache = kept[(place * SCATTER >> 16) % preset.replicas]
            cached = next(
                (at for at, block in enumerate(blocks) if block not in cache), len(blocks)
            )
            cache.update(blocks)
            computed = max(1, input_tokens - cached * limits.tokens_per_block)
            output_tokens = max(0, min(output_tokens, limits.max_seq_len - input_tokens))
        if place >= SAMPLE // 2:
            read = output_tokens * (input_tokens + output_tokens / 2)
            attended = computed * (input_tokens - computed / 2)
            sample[number // requests.turns][number] = Work(
                1, computed, output_tokens, attended, read
            )
    return sample
