"""The load at which a simulated machine is full, by the roofline of its preset alone: nothing is simulated. Pure.

A search begins there. It is an estimate: no queue, no chance, every request the mean of a sample.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from loadgen.core import seeds
from loadgen.core.requests.build import build
from loadgen.core.requests.tokenizer import load_tokenizer
from loadgen.sim.request_lengths import sizes_of
from loadgen.sim.virtual_backend import preset_of

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.slo import Slo
    from loadgen.core.workload import Workload
    from loadgen.sim.engine.replica import Costs, ServerLimits

SAMPLE = 1_000  # requests
SCATTER = 2_654_435_761  # consecutive numbers times this look drawn: turns meet the replicas by chance


class Work(NamedTuple):
    """What the requests of a chain ask of the machine together: tokens to compute and to generate, other tokens that
    those attend to, tokens in the cache that are read for those generated."""

    computed: float
    generated: float
    attended: float
    read: float


def filling_rate(workload: Workload, settings: Settings) -> float | None:
    """The rate at which single requests, conversations or tasks fill the machine, as it has to be to keep TPOT within
    the SLO. None where no request can be served."""
    preset = preset_of(settings)
    work = _work(workload, settings)
    if work is None:
        return None
    limit_ns = min(
        (term.limit_ns for slo in _slos(workload) for term in slo.terms if term.metric == "tpot"), default=None
    )
    rate = _filled(work, preset.costs, preset.limits, limit_ns)
    return rate * sum(preset.speeds) if rate else None


def _slos(workload: Workload) -> Iterator[Slo]:
    """The SLO of a workload, and those of its classes."""
    classes = getattr(workload.requests, "classes", {})
    yield from (slo for slo in (workload.slo, *(one.slo for one in classes.values())) if slo is not None)


def _filled(work: Work, costs: Costs, limits: ServerLimits, iteration_ns: int | None) -> float:
    """Chains per second of one replica. An iteration that `x` chains share alike takes
    overhead + max(weights + kv_token * read * x, (token * (computed + generated) + attended * attended) * x)."""
    compute_ns = costs.token_ns * (work.computed + work.generated) + costs.attended_ns * work.attended
    read_ns = costs.kv_token_ns * work.read
    x = limits.max_num_tokens / (work.computed + work.generated)
    if work.generated:
        x = min(x, limits.max_batch_size / work.generated)
        x = min(x, limits.kv_blocks * limits.tokens_per_block / max(work.read, 1.0))
    if iteration_ns is not None:
        left_ns = iteration_ns - costs.overhead_ns
        x = min(x, left_ns / compute_ns, (left_ns - costs.weights_ns) / max(read_ns, 1e-9))
    if x <= 0:
        return 0.0
    return x * 1e9 / (costs.overhead_ns + max(costs.weights_ns + read_ns * x, compute_ns * x))


def _work(workload: Workload, settings: Settings) -> Work | None:
    """The mean work of a chain, by a sample of requests, of which the first half only fills the caches."""
    preset, seed = preset_of(settings), workload.seed or 0
    requests = build(workload, seed, seeds.salt_number(""), load_tokenizer(settings.tokenizer), api=settings.api)
    limits = preset.limits
    sizes = sizes_of(workload.requests, requests, limits.tokens_per_block if limits.block_reuse else 0, settings)
    kept: dict[int, set[Hashable]] = defaultdict(set)  # by replica: blocks in its cache
    seen: set[int] = set()  # chains of the second half
    total = [0.0] * len(Work._fields)
    for place, number in enumerate(requests.numbers(SAMPLE)):
        input_tokens, output_tokens, blocks = sizes(number)
        computed = input_tokens
        if output_tokens:
            cache = kept[(place * SCATTER >> 16) % preset.replicas]
            cached = next((at for at, block in enumerate(blocks) if block not in cache), len(blocks))
            cache.update(blocks)
            computed = max(1, input_tokens - cached * limits.tokens_per_block)
            output_tokens = max(0, min(output_tokens, limits.max_seq_len - input_tokens))
        if place >= SAMPLE // 2:
            seen.add(number // requests.turns)
            read = output_tokens * (input_tokens + output_tokens / 2)
            work = Work(computed, output_tokens, computed * (input_tokens - computed / 2) + read, read)
            total = [sum(pair) for pair in zip(total, work, strict=True)]
    return Work(*(value / len(seen) for value in total)) if seen else None
