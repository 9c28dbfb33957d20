"""Presets: simulated machines as data, read from `presets/*.yaml` or from a file of the user's own, and checked.

Every constant stands in a file with its unit in its name and its source beside it; here are only the formulas that turn
them into the engine's costs. Reading files is the only IO.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from loadgen.errors import UserError
from loadgen.sim.engine.replica import Costs, ServerLimits

FOLDER = Path(__file__).parent
GIB = 1 << 30
BITS = {"nvfp4": 4.5, "fp8": 8.0, "fp16": 16.0, "bf16": 16.0, "int8": 8.0, "int4": 4.5}
"""Bits per number, shared scales included: NVFP4 has an 8-bit scale per 16 numbers of 4 bits."""

Routing = Literal["round_robin", "weighted"]
ROUTINGS: tuple[Routing, ...] = ("round_robin", "weighted")


class SourcedNumber(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number and where it is from. The unit is in the name of its key."""

    value: float
    source: str


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A dense decoder with grouped-query attention and a gated MLP, as in its `config.json`."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    weights: Literal["nvfp4", "fp8", "fp16", "bf16", "int8", "int4"]
    kv_cache: Literal["nvfp4", "fp8", "fp16", "bf16"] = "fp8"

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def block_parameters(self) -> int:
        """Weights that a token is multiplied with in the layers."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def weight_bytes(self) -> float:
        """Read once per iteration: layers in their own precision, the output head in 16 bits."""
        return self.block_parameters * BITS[self.weights] / 8 + 2.0 * self.hidden * self.vocab

    @property
    def memory_bytes(self) -> float:
        """Weights in memory: the embedding too, of which an iteration reads next to nothing."""
        return self.weight_bytes + 2.0 * self.hidden * self.vocab

    @property
    def kv_token_bytes(self) -> float:
        """Key and value of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * BITS[self.kv_cache] / 8

    @property
    def token_flops(self) -> float:
        """Two per weight. The output head counts, though only tokens that are sampled from pass it: 0.4 % of 70B."""
        return 2.0 * (self.block_parameters + self.hidden * self.vocab)

    @property
    def attended_flops(self) -> float:
        """Of one token attending to one token: query times key and weight times value, 2 each."""
        return 4.0 * self.layers * self.heads * self.head_size


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU, and what of its data sheet arrives."""

    memory_gib: SourcedNumber
    bandwidth_tb_s: SourcedNumber  # of its memory, data sheet
    bandwidth_share: SourcedNumber  # of it that arrives
    peak_tflops: SourcedNumber  # dense, in the precision of the weights, data sheet
    compute_share: (
        SourcedNumber  # of it that arrives, communication and all else that scales with tokens included: fitted
    )
    overhead_ms: SourcedNumber  # per iteration: fitted, one per GPU generation
    power_w: SourcedNumber  # TDP


class PresetServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Its configuration, in TensorRT-LLM's words."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    tokens_per_block: int = 32
    kv_cache_share: float = 0.95  # free_gpu_memory_fraction: of what weights and reserve leave
    reserve_gib: float = 6.0  # per GPU: activations, graphs, runtime
    scheduler: Literal["max_utilization", "guaranteed_no_evict"] = "max_utilization"
    chunked_prefill: bool = True
    block_reuse: bool = True
    stream_interval: int = 1
    emit_us: float = 0.0  # behind HTTP: between the events of one iteration, which leave one after the other
    source: str = ""


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A simulated system: some equal machines (VMs) of some replicas each."""

    name: str
    title: str
    generation: str  # of the GPU: whose overhead it is
    gpu: str
    vms: int
    gpus_per_vm: int
    gpus_per_replica: int  # tensor parallel
    model: Model
    hardware: Hardware
    server: PresetServer
    assumed_input_tokens: SourcedNumber  # mean prompt of the runs it was fitted on: they do not publish it
    fitted_on: str
    valid_from_sequences: SourcedNumber  # per replica: below, nothing published binds the model
    vm_speeds: tuple[float, ...] = ()  # of each VM, relative to their mean; empty: all 1
    routing: Routing = "round_robin"
    notes: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        return self.vms * self.gpus_per_vm

    @property
    def replicas(self) -> int:
        return self.gpus // self.gpus_per_replica

    @property
    def words(self) -> str:
        """What it is and what it rests on, for a run's notes."""
        return f"{self.title}; fitted on {self.fitted_on}; {self.replicas} replicas, routing {self.routing}"

    @property
    def speeds(self) -> tuple[float, ...]:
        """Of each replica, VM after VM."""
        each = self.gpus_per_vm // self.gpus_per_replica
        return tuple(speed for speed in (self.vm_speeds or (1.0,) * self.vms) for _ in range(each))

    @property
    def costs(self) -> Costs:
        """Of an iteration of one replica, whose GPUs share bytes and FLOPs."""
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

    @property
    def limits(self) -> ServerLimits:
        server = self.server
        per_gpu = self.hardware.memory_gib.value - server.reserve_gib
        free = (per_gpu * self.gpus_per_replica * GIB - self.model.memory_bytes) * server.kv_cache_share
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
    """The presets that come with the package."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def load_preset(name: str, where: str = "--preset ") -> Preset:
    """A packaged preset by name, or the user's own by the path of its file. Raises UserError."""
    return _check(_read(name, f"{where}{name}", ()), f"{where}{name}")


def _read(name: str, where: str, seen: tuple[str, ...]) -> dict[str, Any]:
    """The file as a mapping, with what it extends under it."""
    import yaml

    own = name.endswith((".yaml", ".yml")) or "/" in name
    path = Path(name) if own else FOLDER / f"{name}.yaml"
    if name in seen:
        raise UserError("a preset that extends itself", where, "")
    if not own and name not in names():
        near = difflib.get_close_matches(name, names(), 1)
        known = f"known: {', '.join(names())}; or the path of a YAML file"
        raise UserError(f'unknown preset "{name}"', where, f'did you mean "{near[0]}"? {known}' if near else known)
    try:
        value = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise UserError(f"cannot read it: {error.strerror}", str(path)) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"not YAML: {' '.join(str(error).split())}", str(path)) from None
    if not isinstance(value, dict):
        raise UserError("not a preset: it must be a mapping", str(path), "see docs/simulation.md")
    extends = value.pop("extends", None)
    if own:
        value.setdefault("name", path.stem)
    if extends is None:
        return value
    if not isinstance(extends, str):
        raise UserError("extends must be the name of a preset", str(path), f"known: {', '.join(names())}")
    below = _read(extends, f"{path} (extends)", (*seen, name))
    changed = [
        f"{part}.{key}" for part in ("model", "hardware") if isinstance(value.get(part), dict) for key in value[part]
    ]
    if own and changed and "fitted_on" not in value:
        value["fitted_on"] = (
            f"nothing: {', '.join(changed)} are the user's own over {extends}, which was fitted on"
            f" {below.get('fitted_on')}"
        )
    return _over(below, value)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, mappings key by key; a bare number takes the place of a constant."""
    merged = dict(below)
    for key, value in above.items():
        under = below.get(key)
        if isinstance(under, dict) and isinstance(value, dict):
            merged[key] = _over(under, value)
        elif isinstance(under, dict) and "source" in under and isinstance(value, int | float):
            merged[key] = {"value": value, "source": "given by the user"}
        else:
            merged[key] = value
    return merged


_KNOWN: dict[str, type[msgspec.Struct]] = {
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
        what, _, at = text.partition(" - at ")
        at = at.strip("`") or "$"
        kind = _KNOWN.get(at, SourcedNumber)
        place = f"{where} ({at.removeprefix('$.')})" if at != "$" else where
        hint = f"known: {', '.join(kind.__struct_fields__)}" if "field" in what else _choices(at)
        raise UserError(what[:1].lower() + what[1:], place, hint) from None
    except RecursionError:
        raise UserError("nested too deep", where) from None
    faults = list(_faults(preset))
    if faults:
        raise UserError("; ".join(faults), where, "see docs/simulation.md")
    return preset


def _choices(at: str) -> str:
    """The values that a place in a preset takes, where these are words."""
    above, _, name = at.rpartition(".")
    kind = _KNOWN.get(above)
    words = get_args(get_type_hints(kind).get(name)) if kind else ()
    return f"known: {', '.join(words)}" if words and all(isinstance(word, str) for word in words) else ""


def _faults(preset: Preset) -> list[str]:
    """What a machine cannot be."""
    model, server, hardware = preset.model, preset.server, preset.hardware
    found = []
    counts = {f"model.{n}": getattr(model, n) for n in ("layers", "hidden", "heads", "kv_heads", "intermediate")}
    counts |= {n: getattr(preset, n) for n in ("vms", "gpus_per_vm", "gpus_per_replica")}
    counts |= {f"server.{n}": getattr(server, n) for n in ("max_batch_size", "tokens_per_block", "stream_interval")}
    counts |= {f"hardware.{n}": getattr(hardware, n).value for n in hardware.__struct_fields__}
    counts["server.emit_us + 1"] = server.emit_us + 1
    counts["vm_speeds"] = min(preset.vm_speeds, default=1.0)
    counts["assumed_input_tokens"] = preset.assumed_input_tokens.value
    found += [f"{name} must be above 0" for name, value in counts.items() if not value > 0]
    if found:
        return found
    if model.hidden % model.heads or model.heads % model.kv_heads:
        found.append("model.heads must divide model.hidden, and model.kv_heads the heads")
    if preset.gpus_per_vm % preset.gpus_per_replica:
        found.append("gpus_per_replica must divide gpus_per_vm")
    if preset.vm_speeds and len(preset.vm_speeds) != preset.vms:
        found.append(f"vm_speeds has {len(preset.vm_speeds)} speeds for {preset.vms} VMs")
    if server.max_num_tokens < server.max_batch_size:
        found.append("server.max_num_tokens must be at least server.max_batch_size")
    if server.max_seq_len < 2:
        found.append("server.max_seq_len must be at least 2")
    limits = preset.limits
    if limits.kv_blocks * limits.tokens_per_block < server.max_seq_len:
        held = limits.kv_blocks * limits.tokens_per_block
        found.append(f"beside the weights there is room for {held:,} tokens, less than server.max_seq_len")
    return found
