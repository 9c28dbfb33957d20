"""Presets: simulated machines as data, read from `presets/*.yaml` or from the user's own file, and checked.

A preset file states each constant with its unit in the name and its source beside it. This module has only the formulas
that convert them into the engine's costs. Reading files is the only IO.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from loadgen.core.errors import Code, UserError, meant, of_reading
from loadgen.sim.engine.latency_model import duration_ns
from loadgen.sim.engine.replica import Costs, ServerLimits

FOLDER = Path(__file__).parent
GIB = 1 << 30
BITS = {"nvfp4": 4.5, "fp8": 8.0, "fp16": 16.0, "bf16": 16.0, "int8": 8.0, "int4": 4.5}
"""Bits per number, including shared scales: NVFP4 has one 8-bit scale per 16 numbers of 4 bits."""

Routing = Literal["round_robin", "weighted"]
Count = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
Positive = Annotated[
    float, msgspec.Meta(ge=1e-9, le=1e12)
]  # so that no cost of an iteration is 0 or infinite
AtLeastZero = Annotated[float, msgspec.Meta(ge=0)]


class SourcedNumber(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number and its source. The unit is in the name of its key."""

    value: Positive
    source: str


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A dense decoder with grouped-query attention and a gated MLP; fields as in its `config.json`."""

    name: str
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    intermediate: Count
    vocab: int
    weights: Literal["nvfp4", "fp8", "fp16", "bf16", "int8", "int4"]
    kv_cache: Literal["nvfp4", "fp8", "fp16", "bf16"] = "fp8"

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def block_parameters(self) -> int:
        """Number of weights that each token is multiplied with in the layers."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def weight_bytes(self) -> float:
        """Bytes read per iteration: the layers in their own precision, the output head in 16 bits."""
        return self.block_parameters * BITS[self.weights] / 8 + 2.0 * self.hidden * self.vocab

    @property
    def memory_bytes(self) -> float:
        """Bytes of weights in memory. Includes the embedding, of which an iteration reads almost nothing."""
        return self.weight_bytes + 2.0 * self.hidden * self.vocab

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of the keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * BITS[self.kv_cache] / 8

    @property
    def token_flops(self) -> float:
        """FLOPs per token: two per weight.

        The output head is counted for every token, though only sampled tokens pass through it: 0.4 % of a 70B model.
        """
        return 2.0 * (self.block_parameters + self.hidden * self.vocab)

    @property
    def attended_flops(self) -> float:
        """FLOPs of one token attending to one other: 2 for query times key and 2 for weight times value."""
        return 4.0 * self.layers * self.heads * self.head_size


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU: its data sheet, and the share of it that is effective."""

    memory_gib: SourcedNumber
    bandwidth_tb_s: SourcedNumber  # memory bandwidth, from the data sheet
    bandwidth_share: SourcedNumber  # effective share of the bandwidth
    peak_tflops: SourcedNumber  # dense, in the precision of the weights, from the data sheet
    # Effective share of the peak, fitted. Includes communication and everything else that scales with tokens.
    compute_share: SourcedNumber
    overhead_ms: SourcedNumber  # per iteration; fitted, one value per GPU generation
    power_w: SourcedNumber  # TDP


class PresetServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server's configuration, in TensorRT-LLM's terms."""

    max_batch_size: Count
    max_num_tokens: int
    max_seq_len: Annotated[int, msgspec.Meta(ge=2)]
    tokens_per_block: Count = 32
    kv_cache_share: float = (
        0.95  # free_gpu_memory_fraction: share of the memory that weights and reserve leave free
    )
    reserve_gib: float = 6.0  # per GPU: activations, graphs, runtime
    scheduler: Literal["max_utilization", "guaranteed_no_evict"] = "max_utilization"
    chunked_prefill: bool = True
    block_reuse: bool = True
    stream_interval: Count = 1
    emit_us: AtLeastZero = (
        0.0  # over HTTP: mean time between the events of one iteration, sent one by one
    )
    source: str = ""


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A simulated system: a number of identical machines (VMs) with the same number of replicas each."""

    name: str
    title: str
    generation: str  # of the GPU; the overhead is fitted per generation
    gpu: str
    vms: Count
    gpus_per_vm: Count
    gpus_per_replica: Count  # tensor parallel
    model: Model
    hardware: Hardware
    server: PresetServer
    assumed_input_tokens: (
        SourcedNumber  # mean prompt length of the runs used for the fit; assumed, not published
    )
    fitted_on: str
    valid_from_sequences: (
        SourcedNumber  # per replica; below it no published number constrains the model
    )
    vm_speeds: tuple[Positive, ...] = ()  # of each VM, relative to their mean; empty: all 1
    routing: Routing = "round_robin"
    replicas_at: dict[
        str, Count
    ] = {}  # how many replicas serve from these times on: `{20s: 3, 60s: 4}`
    notes: tuple[str, ...] = ()

    @property
    def precision(self) -> str:
        """Of weights and KV cache, as the simulated server says it."""
        return f"{self.model.weights}, KV cache {self.model.kv_cache}"

    @property
    def gpus(self) -> int:
        return self.vms * self.gpus_per_vm

    @property
    def replicas(self) -> int:
        return self.gpus // self.gpus_per_replica

    @property
    def words(self) -> str:
        """A description for a run's notes: the system, and the data that it was fitted on."""
        changes = "".join(f", {count} from {at} on" for at, count in self.replicas_at.items())
        return f"{self.title}; fitted on {self.fitted_on}; {self.replicas} replicas{changes}, routing {self.routing}"

    @property
    def speeds(self) -> tuple[float, ...]:
        """The relative speed of each replica, VM after VM."""
        each = self.gpus_per_vm // self.gpus_per_replica
        return tuple(speed for speed in (self.vm_speeds or (1.0,) * self.vms) for _ in range(each))

    @property
    def changes(self) -> tuple[tuple[int, int], ...]:
        """When, in ns, the number of replicas changes, and to what, in order. Raises UserError."""
        return tuple(
            sorted(
                (duration_ns(at, "replicas_at"), count) for at, count in self.replicas_at.items()
            )
        )

    @property
    def costs(self) -> Costs:
        """The costs of an iteration of one replica, whose GPUs share bytes and FLOPs equally."""
        hardware, model, gpus = self.hardware, self.model, self.gpus_per_replica
        bytes_per_ns = hardware.bandwidth_tb_s.value * hardware.bandwidth_share.value * 1e3 * gpus
        flops_per_ns = hardware.peak_tflops.value * hardware.compute_share.value * 1e3 * gpus
        return Costs(
            overhead_ns=hardware.overhead_ms.value * 1e6,
            weights_ns=model.weight_bytes / bytes_per_ns,
            kv_token_ns=model.kv_token_bytes / bytes_per_ns,
            token_ns=model.token_flops / flops_per_ns,
            attended_ns=model.attended_flops / flops_per_ns,
        )

    def answer_ns(self, lanes: int, input_tokens: float, output_tokens: float) -> float:
        """About how long an answer takes while `lanes` requests are in flight, in ns: the decoding of its tokens, and
        the prompts of all sequences of its replica, each computed once in that time.
        """
        costs = self.costs
        sequences = min(max(1.0, lanes / self.replicas), self.server.max_batch_size)
        held_tokens = sequences * (input_tokens + output_tokens / 2)
        memory_ns = costs.weights_ns + costs.kv_token_ns * held_tokens
        compute_ns = sequences * (
            costs.token_ns + costs.attended_ns * (input_tokens + output_tokens / 2)
        )
        iteration_ns = costs.overhead_ns + max(memory_ns, compute_ns)
        prompt_ns = input_tokens * (costs.token_ns + costs.attended_ns * input_tokens / 2)
        return output_tokens * iteration_ns + sequences * prompt_ns

    @property
    def limits(self) -> ServerLimits:
        server = self.server
        per_gpu = self.hardware.memory_gib.value - server.reserve_gib
        free = (
            per_gpu * self.gpus_per_replica * GIB - self.model.memory_bytes
        ) * server.kv_cache_share
        return ServerLimits(
            max_batch_size=server.max_batch_size,
            max_num_tokens=server.max_num_tokens,
            kv_blocks=max(0, int(free / (self.model.kv_token_bytes * server.tokens_per_block))),
            tokens_per_block=server.tokens_per_block,
            max_seq_len=server.max_seq_len,
            chunked_prefill=server.chunked_prefill,
            guaranteed=server.scheduler == "guaranteed_no_evict",
            block_reuse=server.block_reuse,
        )


def names() -> list[str]:
    """The names of the presets in the package, sorted."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def load_preset(name: str, where: str = "--preset ") -> Preset:
    """A preset of the package by name, or the user's own by the path of its file.

    Raises UserError if it cannot be read or is not valid. `where` is the text before the name in that error.
    """
    return _check(_read(name, f"{where}{name}", ()), f"{where}{name}")


def _read(name: str, where: str, seen: tuple[str, ...]) -> dict[str, Any]:
    """The file as a mapping, merged over the preset that it extends. `seen` are the names that led here."""
    from loadgen.core.workload.yaml_marks import plain_yaml

    is_user_file = name.endswith((".yaml", ".yml")) or "/" in name
    path = Path(name) if is_user_file else FOLDER / f"{name}.yaml"
    if name in seen:
        raise UserError("cycle", "a preset that extends itself", where, "")
    if not is_user_file and name not in names():
        raise UserError(
            "unknown_name",
            f'unknown preset "{name}"',
            where,
            f"{meant(name, names())}; or the path of a YAML file",
        )
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise UserError(of_reading(error), f"cannot read it: {error.strerror}", str(path)) from None
    except UnicodeDecodeError as error:
        raise UserError("invalid_syntax", f"not YAML: {error}", str(path)) from None
    value = plain_yaml(text, str(path))
    if not isinstance(value, dict):
        raise UserError(
            "wrong_type", "not a preset: it must be a mapping", str(path), "see docs/simulation.md"
        )
    extends = value.pop("extends", None)
    if is_user_file:
        value.setdefault("name", path.stem)
    if extends is None:
        return value
    if not isinstance(extends, str):
        raise UserError(
            "wrong_type",
            "extends must be the name of a preset",
            str(path),
            f"known: {', '.join(names())}",
        )
    base = _read(extends, f"{path} (extends)", (*seen, name))
    parts = {
        part: value[part] for part in ("model", "hardware") if isinstance(value.get(part), dict)
    }
    changed = ", ".join(f"{part}.{key}" for part, keys in parts.items() for key in keys)
    if is_user_file and changed and "fitted_on" not in value:
        fitted_on = f"{extends}, which was fitted on {base.get('fitted_on')}"
        value["fitted_on"] = f"nothing: {changed} are the user's own over {fitted_on}"
    return _merge(base, value)


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` merged over `below`, mappings key by key. A bare number replaces a sourced number's value."""
    merged = dict(below)
    for key, value in above.items():
        replaced = below.get(key)
        if isinstance(replaced, dict) and isinstance(value, dict):
            merged[key] = _merge(replaced, value)
        elif isinstance(replaced, dict) and "source" in replaced and isinstance(value, int | float):
            merged[key] = {"value": value, "source": "given by the user"}
        else:
            merged[key] = value
    return merged


_STRUCT_AT: dict[str, type[msgspec.Struct]] = {
    "$": Preset,
    "$.model": Model,
    "$.hardware": Hardware,
    "$.server": PresetServer,
}


def _check(value: dict[str, Any], where: str) -> Preset:
    try:
        preset = msgspec.convert(value, Preset)
    except msgspec.ValidationError as error:
        text = str(error)
        message, _, path = text.partition(" - at ")
        path = path.strip("`") or "$"
        kind = _STRUCT_AT.get(path, SourcedNumber)
        place = f"{where} ({path.removeprefix('$.')})" if path != "$" else where
        hint = (
            f"known: {', '.join(kind.__struct_fields__)}" if "field" in message else _choices(path)
        )
        code: Code = "invalid_value"
        if "field" in message:  # the only two of its messages with that word
            code = "missing_key" if "missing" in message else "unknown_key"
        raise UserError(code, message[:1].lower() + message[1:], place, hint) from None
    except RecursionError:
        raise UserError("too_large", "nested too deep", where) from None
    if faults := _find_faults(preset):
        raise UserError("conflict", "; ".join(faults), where, "see docs/simulation.md")
    return preset


def _choices(path: str) -> str:
    """A hint with the allowed values of a place in a preset if they are words, else an empty string."""
    parent, _, name = path.rpartition(".")
    kind = _STRUCT_AT.get(parent)
    words = get_args(get_type_hints(kind).get(name)) if kind else ()
    return (
        f"known: {', '.join(words)}"
        if words and all(isinstance(word, str) for word in words)
        else ""
    )


def _find_faults(preset: Preset) -> list[str]:
    """Descriptions of what is impossible in a preset; empty if it is valid."""
    model, server = preset.model, preset.server
    faults = []
    if model.hidden % model.heads or model.heads % model.kv_heads:
        faults.append("model.heads must divide model.hidden, and model.kv_heads the heads")
    if preset.gpus_per_vm % preset.gpus_per_replica:
        faults.append("gpus_per_replica must divide gpus_per_vm")
    if preset.vm_speeds and len(preset.vm_speeds) != preset.vms:
        faults.append(f"vm_speeds has {len(preset.vm_speeds)} speeds for {preset.vms} VMs")
    if server.max_num_tokens < server.max_batch_size:
        faults.append("server.max_num_tokens must be at least server.max_batch_size")
    if any(count > preset.replicas for _, count in preset.changes):
        faults.append(f"replicas_at has more than the {preset.replicas} replicas of these machines")
    if faults:
        return faults
    limits = preset.limits
    if limits.kv_blocks * limits.tokens_per_block < server.max_seq_len:
        capacity_tokens = limits.kv_blocks * limits.tokens_per_block
        faults.append(
            f"beside the weights there is room for {capacity_tokens:,} tokens, less than server.max_seq_len"
        )
    return faults
