"""Create the engine of a simulated server from its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from loadgen.core.errors import UserError
from loadgen.sim.engine.fleet import Fleet
from loadgen.sim.engine.latency_model import (
    LatencyModel,
    LatencyOptions,
    parse_distribution,
    parse_duration_ns,
)
from loadgen.sim.server.options import Options
from loadgen.sim.server.request_parser import RequestRules, hash_blocks

if TYPE_CHECKING:
    from loadgen.sim.presets.preset import Preset

FLOOD_EVENTS_PER_WRITE = 50  # with the option `flood`


@dataclass(frozen=True)
class EngineSetup:
    """The engine of a server, and what depends on the choice of it.

    Attributes:
        engine: Decides when tokens are emitted.
        fleet: The engine if it is a physical one, else None.
        rules: Which requests are accepted.
        tokens_per_event: Tokens of each output event after the first.
        weight_precision: The precision of the weights of a preset's model, "" without a preset.
        kv_cache_precision: The precision of its key-value cache, "" without a preset.
    """

    engine: LatencyModel | Fleet
    fleet: Fleet | None
    rules: RequestRules
    tokens_per_event: int
    weight_precision: str = ""
    kv_cache_precision: str = ""


def create_engine(options: Options) -> EngineSetup:
    """Create the engine that the options describe.

    With a preset, it is the physical model of a machine. Otherwise, it is a model whose latencies
    are drawn from distributions. The option `flood` packs many events of one token into each write,
    to load a client as much as possible.

    Raises UserError or CombinedError if the options or the preset are not valid.
    """
    rules = RequestRules(
        flavor=options.api_flavor,
        model=options.model,
        max_seq_len=options.max_seq_len,
        max_num_tokens=options.max_num_tokens,
        seed=options.seed,
        worse=options.worse,
    )
    if options.preset:
        return _create_fleet(options, rules)
    latency_options = LatencyOptions(
        ttft=parse_distribution(options.ttft, "--ttft"),
        itl=parse_distribution(options.itl, "--itl"),
        per_input_token_ns=parse_duration_ns(options.per_input_token, "--per-input-token"),
        tokens_per_emission=(FLOOD_EVENTS_PER_WRITE if options.flood else options.stream_interval),
        lockstep=options.lockstep,
        slots=options.slots,
        flood=options.flood,
        seed=options.seed,
    )
    tokens_per_event = 1 if options.flood else options.stream_interval
    return EngineSetup(
        engine=LatencyModel(latency_options),
        fleet=None,
        rules=rules,
        tokens_per_event=tokens_per_event,
    )


def _create_fleet(options: Options, rules: RequestRules) -> EngineSetup:
    """Create the replicas of a preset that this process simulates.

    A server with several processes (`options.cores`) divides the replicas among them: replica n
    belongs to process n modulo their number. The limits of the preset decide which requests are
    accepted. Raises UserError or CombinedError.
    """
    from loadgen.sim.presets.preset import load_preset

    preset = load_preset(options.preset)
    speeds = preset.speeds[options.core :: options.cores]
    _check_process_count(options, preset, has_replicas=bool(speeds))
    limits = preset.limits
    server = preset.server
    is_default_model = options.model == Options().model
    tokens_per_block = limits.tokens_per_block if limits.block_reuse else 0
    rules = msgspec.structs.replace(
        rules,
        model=preset.model.name if is_default_model else options.model,
        max_seq_len=limits.max_seq_len,
        max_num_tokens=0 if limits.chunked_prefill else limits.max_num_tokens,
        tokens_per_block=tokens_per_block,
    )
    # The first call imports numpy. It is made now, so that no request waits for the import.
    hash_blocks(b"", 0, tokens_per_block)
    system = msgspec.structs.replace(preset.system, speeds=speeds)
    fleet = Fleet(system, emission_spacing_ns=round(server.emit_us * 1e3))
    return EngineSetup(
        engine=fleet,
        fleet=fleet,
        rules=rules,
        tokens_per_event=server.stream_interval,
        weight_precision=preset.model.weights,
        kv_cache_precision=preset.model.kv_cache,
    )


def _check_process_count(options: Options, preset: Preset, *, has_replicas: bool) -> None:
    """Raise UserError if a server cannot divide the replicas of a preset among its processes.

    Each process needs a replica. If the number of replicas changes during the run
    (`replicas_at`), one process has to simulate all of them.
    """
    has_changes_in_several_processes = bool(preset.changes) and options.cores > 1
    if has_replicas and not has_changes_in_several_processes:
        return
    if preset.changes:
        problem = f"{options.cores} processes are configured, but replicas_at works with only one"
    else:
        problem = (
            f"{options.cores} processes are configured, but there are only "
            f"{preset.replicas} replicas"
        )
    hint = "use at most one process per replica, and a single process with replicas_at"
    raise UserError("out_of_range", problem, "--cores", hint)
