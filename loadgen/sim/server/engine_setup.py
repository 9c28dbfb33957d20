"""Create the engine of a simulated server from its options."""

from __future__ import annotations

import importlib
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
from loadgen.sim.server.request_parser import RequestRules

if TYPE_CHECKING:
    from loadgen.sim.engine.system import SimulatedSystem
    from loadgen.sim.presets.preset import Preset

FLOOD_EVENTS_PER_WRITE = 50  # with the option `flood`
NS_PER_US = 1e3


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
    are drawn from distributions.

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

    return _create_latency_model(options, rules)


def _create_latency_model(options: Options, rules: RequestRules) -> EngineSetup:
    """Create an engine whose latencies are drawn. Raises UserError.

    The engine emits as many tokens at a time as an event has. With the option `flood`, an event has
    one token, and the engine emits the tokens of many events at a time, which are sent in one
    write, to load a client as much as possible.
    """
    if options.flood:
        tokens_per_event = 1
        tokens_per_emission = FLOOD_EVENTS_PER_WRITE
    else:
        tokens_per_event = options.stream_interval
        tokens_per_emission = options.stream_interval

    latency_options = LatencyOptions(
        ttft=parse_distribution(options.ttft, "--ttft"),
        itl=parse_distribution(options.itl, "--itl"),
        per_input_token_ns=parse_duration_ns(options.per_input_token, "--per-input-token"),
        tokens_per_emission=tokens_per_emission,
        lockstep=options.lockstep,
        slots=options.slots,
        flood=options.flood,
        seed=options.seed,
    )

    return EngineSetup(
        engine=LatencyModel(latency_options),
        fleet=None,
        rules=rules,
        tokens_per_event=tokens_per_event,
    )


def _create_fleet(options: Options, rules: RequestRules) -> EngineSetup:
    """Create the engine that simulates a machine: the replicas of a preset.

    Raises UserError or CombinedError if the preset or the number of processes is not valid.
    """
    from loadgen.sim.presets.preset import load_preset

    preset = load_preset(options.preset)

    # A server sends the tokens of an iteration one after the other. This is the time between two.
    emission_spacing_us = preset.server.emit_us
    fleet = Fleet(
        _select_replicas_of_process(options, preset),
        emission_spacing_ns=round(emission_spacing_us * NS_PER_US),
    )
    rules = _apply_preset(rules, options, preset)

    has_prefix_cache = rules.tokens_per_block > 0
    if has_prefix_cache:
        # Blocks are hashed with numpy. The import takes long, so it is done before any request.
        importlib.import_module("numpy")

    return EngineSetup(
        engine=fleet,
        fleet=fleet,  # again, for callers that need a physical engine
        rules=rules,
        tokens_per_event=preset.server.stream_interval,
        weight_precision=preset.model.weights,
        kv_cache_precision=preset.model.kv_cache,
    )


def _select_replicas_of_process(options: Options, preset: Preset) -> SimulatedSystem:
    """Return the system of a preset with only the replicas that this process simulates.

    If the server has several processes, the replicas are divided among them: of 3 processes, the
    one with the index 1 has replicas 1, 4, 7 and so on.

    Raises UserError if the number of processes is not valid.
    """
    process_count = options.cores
    _check_process_count(process_count, options.process_index, preset)
    speeds = preset.speeds[options.process_index :: process_count]
    return msgspec.structs.replace(preset.system, speeds=speeds)


def _apply_preset(rules: RequestRules, options: Options, preset: Preset) -> RequestRules:
    """Return the rules for requests to a preset: its limits, and its model by default.

    A model name that the user has specified is used instead of that of the preset. The option
    `model` always has a value, so only a name other than its default counts as specified.
    """
    limits = preset.limits
    default_model = Options().model
    has_specified_model = options.model != default_model

    return msgspec.structs.replace(
        rules,
        model=options.model if has_specified_model else preset.model.name,
        max_seq_len=limits.max_seq_len,
        # 0 means that there is no such limit, and that there is no cache.
        max_num_tokens=0 if limits.chunked_prefill else limits.max_num_tokens,
        tokens_per_block=limits.tokens_per_block if limits.block_reuse else 0,
    )


def _check_process_count(process_count: int, process_index: int, preset: Preset) -> None:
    """Raise UserError if a server cannot divide the replicas of a preset among its processes.

    Each process needs a replica. If the number of replicas changes during the run
    (`replicas_at`), one process has to simulate all of them.
    """
    hint = "use at most one process per replica, and a single process with replicas_at"
    if preset.changes and process_count > 1:
        problem = f"{process_count} processes are configured, but replicas_at works with only one"
        raise UserError("out_of_range", problem, "--cores", hint)

    has_replica = process_index < preset.replicas
    if not has_replica:
        problem = (
            f"{process_count} processes are configured, but there are only "
            f"{preset.replicas} replicas"
        )
        raise UserError("out_of_range", problem, "--cores", hint)
