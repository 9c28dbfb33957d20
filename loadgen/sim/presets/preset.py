"""Presets: simulated machines as data, read from `presets/*.yaml` or from a file of the user.

A preset file states each constant with its unit in the name and its source beside it. The formulas
here convert the constants into the costs of the simulation engine. They count the numbers in the
matrices of a transformer, and the floating-point operations (FLOPs) of multiplying with them: one
multiplication and one addition, so two per number.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, Strict

from loadgen.core import units
from loadgen.core.errors import CombinedError, LoadgenError, UserError, did_you_mean
from loadgen.core.workload.diagnostics import Loc, locate, sort_errors, validate_document
from loadgen.core.workload.fields import Share
from loadgen.core.workload.file_models import FileContext, Part
from loadgen.core.workload.workload_files import read_yaml_text
from loadgen.core.workload.yaml_marks import Map, overlay, read_yaml
from loadgen.sim.engine.replica import Costs, ServerLimits
from loadgen.sim.engine.system import ReplicaChange, SimulatedSystem
from loadgen.sim.simulated_answers import AnswerDefects

FOLDER = Path(__file__).parent
GIB = 1 << 30
HEAD_BYTES_PER_NUMBER = 2.0  # the output head and the embedding are kept in 16 bits
FLOPS_PER_WEIGHT = 2.0  # a multiplication and an addition
BYTES_PER_NS_OF_1_TB_PER_S = 1e3  # 1 TB/s = 1e12 bytes / 1e9 ns
FLOPS_PER_NS_OF_1_TFLOPS = 1e3
NS_PER_MS = 1e6
BITS = {"nvfp4": 4.5, "fp8": 8.0, "fp16": 16.0, "bf16": 16.0, "int8": 8.0, "int4": 4.5}
"""Bits per number, including shared scales: NVFP4 has one 8-bit scale per 16 numbers of 4 bits."""

Routing = Literal["round_robin", "weighted"]
Count = Annotated[int, Strict(), Field(ge=1, le=10**9)]
WholeNumber = Annotated[int, Strict()]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
# The bounds keep the costs of an iteration above zero and finite.
Positive = Annotated[float, Strict(), Field(ge=1e-9, le=1e12, allow_inf_nan=False)]


def _check_time(text: str) -> str:
    units.seconds(text)
    return text


Time = Annotated[str, AfterValidator(_check_time)]
"""A time from the start of the run, as it is written: `20s`."""


class SourcedNumber(Part):
    """A number and its source. The unit is in the name of its key."""

    value: Positive
    source: str

    @classmethod
    def convert_to_fields(cls, data: Any) -> Any:
        """Accept a bare number, with which a user replaces a constant."""
        if isinstance(data, int | float) and not isinstance(data, bool):
            return {"value": data, "source": "set by the user"}
        return data


class Model(Part):
    """A dense decoder with grouped-query attention and a gated MLP, such as Llama 3.

    The fields are those of its `config.json`: `hidden` is the length of the vector of a token
    between the layers, `heads` and `kv_heads` are the numbers of query heads and of key (or value)
    heads of a layer, and `intermediate` is the length of the vector inside its MLP.
    """

    name: str
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    intermediate: Count
    vocab: WholeNumber
    weights: Literal["nvfp4", "fp8", "fp16", "bf16", "int8", "int4"]
    kv_cache: Literal["nvfp4", "fp8", "fp16", "bf16"] = "fp8"

    @property
    def head_size(self) -> int:
        """Numbers in the key (or value) of one head."""
        return self.hidden // self.heads

    @property
    def block_parameters(self) -> int:
        """Number of weights of all transformer layers, each of which is used for every token.

        Grouped-query attention has four matrices: query and output have the width of all query
        heads, key and value that of all key-value heads. The gated MLP has three matrices: gate, up
        and down.
        """
        query_width = self.heads * self.head_size
        kv_width = self.kv_heads * self.head_size
        attention_weights = self.hidden * (2 * query_width + 2 * kv_width)
        mlp_weights = 3 * self.hidden * self.intermediate
        return self.layers * (attention_weights + mlp_weights)

    @property
    def head_parameters(self) -> int:
        """Number of weights of the output head, and also of the embedding."""
        return self.hidden * self.vocab

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights that an iteration reads, once for the whole batch.

        The layers have the precision `weights`, the output head has 16 bits.
        """
        block_bytes = self.block_parameters * BITS[self.weights] / 8
        return block_bytes + HEAD_BYTES_PER_NUMBER * self.head_parameters

    @property
    def memory_bytes(self) -> float:
        """Bytes of weights in memory.

        They include the embedding, of which an iteration reads only the row of each token.
        """
        return self.weight_bytes + HEAD_BYTES_PER_NUMBER * self.head_parameters

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of the keys and values of one token in all layers."""
        keys_and_values = 2 * self.layers * self.kv_heads * self.head_size
        return keys_and_values * BITS[self.kv_cache] / 8

    @property
    def token_flops(self) -> float:
        """FLOPs of computing one token, without its attention to others: two per weight.

        The output head is counted for every token, though only sampled tokens pass through it. This
        is 0.4 % of a 70B model.
        """
        return FLOPS_PER_WEIGHT * (self.block_parameters + self.head_parameters)

    @property
    def attended_flops(self) -> float:
        """FLOPs of one token attending to one other token.

        For each number of each query head of each layer, these are 2 for query times key, and 2 for
        the value times the weight that follows from it.
        """
        return 4.0 * self.layers * self.heads * self.head_size


class Hardware(Part):
    """One GPU: its data sheet, and the share of it that is effective."""

    memory_gib: SourcedNumber
    bandwidth_tb_s: SourcedNumber  # memory bandwidth, from the data sheet
    bandwidth_share: SourcedNumber  # effective share of the bandwidth
    peak_tflops: SourcedNumber  # dense, in the precision of the weights, from the data sheet
    # Effective share of the peak, fitted. Includes communication and everything else that scales
    # with tokens.
    compute_share: SourcedNumber
    overhead_ms: SourcedNumber  # per iteration; fitted, one value per GPU generation
    power_w: SourcedNumber  # TDP
    # Per GPU, what a site reserves for it: with its share of hosts, network and cooling.
    provisioned_kw: SourcedNumber | None = None


class PresetServer(Part):
    """The server's configuration, in TensorRT-LLM's terms."""

    max_batch_size: Count
    max_num_tokens: WholeNumber
    max_seq_len: Annotated[int, Strict(), Field(ge=2)]
    tokens_per_block: Count = 32
    kv_cache_share: Number = 0.95  # of the memory that weights and reserve leave free
    reserve_gib: Number = 6.0  # per GPU: activations, graphs, runtime
    scheduler: Literal["max_utilization", "guaranteed_no_evict"] = "max_utilization"
    chunked_prefill: Annotated[bool, Strict()] = True
    block_reuse: Annotated[bool, Strict()] = True
    stream_interval: Count = 1
    # over HTTP: mean time between the events of one iteration, sent one by one
    emit_us: Annotated[float, Strict(), Field(ge=0)] = 0.0
    source: str = ""


class PresetAnswers(Part):
    """How the responses to questions with known answers are wrong, in virtual time."""

    wrong: Share = 0.0  # share of the responses that are corrupted
    above_in_flight: Annotated[int, Strict(), Field(ge=0)] = 0  # only above so many in flight
    changed_words: Share = 0.0  # share of words that the model chooses differently
    seed: Annotated[int, Strict(), Field(ge=0)] = 0

    @property
    def defects(self) -> AnswerDefects:
        """The same as plain data."""
        return AnswerDefects(
            wrong_share=float(self.wrong),
            above_in_flight=self.above_in_flight,
            changed_words_share=float(self.changed_words),
            seed=self.seed,
        )


class Preset(Part):
    """A simulated system: identical machines (VMs) with the same number of replicas each."""

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
    # mean prompt length of the runs used for the fit; assumed, not published
    assumed_input_tokens: SourcedNumber
    fitted_on: str
    # per replica; below it no published number constrains the model
    valid_from_sequences: SourcedNumber
    vm_speeds: tuple[Positive, ...] = ()  # of each VM, relative to their mean; empty: all 1
    routing: Routing = "round_robin"
    # how many replicas serve from these times on: `{20s: 3, 60s: 4}`
    replicas_at: dict[Time, Count] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    # without it, all responses to questions with known answers are right
    answers: PresetAnswers | None = None

    @property
    def identity(self) -> str:
        """A hash of everything that decides what the system does and how fast it is."""
        unused_fields: dict[str, bool | set[str]] = {"hardware": {"provisioned_kw"}}
        if self.answers is None:
            unused_fields["answers"] = True
        return hashlib.sha256(self.model_dump_json(exclude=unused_fields).encode()).hexdigest()

    @property
    def precision(self) -> str:
        """The precision of weights and KV cache, as the simulated server reports it."""
        return f"{self.model.weights}, KV cache {self.model.kv_cache}"

    @property
    def gpus(self) -> int:
        """The number of GPUs of all machines."""
        return self.vms * self.gpus_per_vm

    @property
    def provisioned_kw(self) -> float | None:
        """The power that a site reserves for all machines, or None if no figure is published."""
        per_gpu_kw = self.hardware.provisioned_kw
        return None if per_gpu_kw is None else per_gpu_kw.value * self.gpus

    @property
    def replicas(self) -> int:
        """The number of replicas on all machines."""
        return self.gpus // self.gpus_per_replica

    @property
    def description(self) -> str:
        """A description for the notes of a run: the system, and the data that it was fitted on."""
        changes = "".join(f", {count} from {time} on" for time, count in self.replicas_at.items())
        replicas = f"{self.replicas} replicas{changes}, routing {self.routing}"
        return f"{self.title}; fitted on {self.fitted_on}; {replicas}"

    @property
    def speeds(self) -> tuple[float, ...]:
        """The relative speed of each replica, VM after VM."""
        replicas_per_vm = self.gpus_per_vm // self.gpus_per_replica
        vm_speeds = self.vm_speeds or (1.0,) * self.vms
        return tuple(speed for speed in vm_speeds for _ in range(replicas_per_vm))

    @property
    def changes(self) -> tuple[ReplicaChange, ...]:
        """The changes of the number of replicas, in order of time."""
        changes = [
            ReplicaChange(units.duration_ns(time, default_unit="s"), count)
            for time, count in self.replicas_at.items()
        ]
        return tuple(sorted(changes, key=lambda change: (change.at_ns, change.serving_count)))

    @property
    def system(self) -> SimulatedSystem:
        """The replicas of all machines and how requests are routed to them."""
        return SimulatedSystem(
            costs=self.costs,
            limits=self.limits,
            speeds=self.speeds,
            routing=self.routing,
            tokens_per_event=self.server.stream_interval,
            changes=self.changes,
        )

    @property
    def costs(self) -> Costs:
        """The costs of an iteration of one replica, by the roofline model.

        Each cost is a number of bytes or operations (of the model) divided by an effective rate (of
        the hardware). With tensor parallelism, the GPUs of a replica share the work of every
        matrix, so their rates are added. Only a fraction of the rates in the data sheet is
        effective (`bandwidth_share` and `compute_share`).
        """
        hardware = self.hardware  # each of its constants has a `value` and a source
        model = self.model
        gpus = self.gpus_per_replica
        effective_tb_per_s = hardware.bandwidth_tb_s.value * hardware.bandwidth_share.value
        effective_tflops = hardware.peak_tflops.value * hardware.compute_share.value
        bytes_per_ns = effective_tb_per_s * BYTES_PER_NS_OF_1_TB_PER_S * gpus
        flops_per_ns = effective_tflops * FLOPS_PER_NS_OF_1_TFLOPS * gpus

        return Costs(
            overhead_ns=hardware.overhead_ms.value * NS_PER_MS,
            weights_ns=model.weight_bytes / bytes_per_ns,
            kv_token_ns=model.kv_token_bytes / bytes_per_ns,
            token_ns=model.token_flops / flops_per_ns,
            # For one token that attends to one other token.
            attended_ns=model.attended_flops / flops_per_ns,
        )

    def response_ns(self, concurrency: int, input_tokens: float, output_tokens: float) -> float:
        """Return an estimate in ns of how long a response takes.

        A replica generates several responses (sequences) at the same time, in iterations. Each
        iteration gives every sequence one token, so a response needs one iteration per output
        token. Iterations also compute the prompts of new sequences, which delays all others. All
        sequences have about the same length. So while one is generated, each of the others ends
        once and is replaced by a new one. For example, with 8 sequences, a response is delayed by 8
        prompts: its own, and those of 7 new sequences.

        Args:
            concurrency: The number of requests in flight, over all replicas.
            input_tokens: The mean length of a prompt.
            output_tokens: The mean length of an output.
        """
        requests_per_replica = max(1.0, concurrency / self.replicas)
        sequences = min(requests_per_replica, self.server.max_batch_size)

        # Averaged over its output, a sequence has its prompt and half of the output in the cache.
        mean_cached_tokens = input_tokens + output_tokens / 2
        iteration_ns = self._decoding_iteration_ns(sequences, mean_cached_tokens)
        output_ns = output_tokens * iteration_ns
        prompts_ns = sequences * self._prompt_ns(input_tokens)

        return output_ns + prompts_ns

    def _decoding_iteration_ns(self, sequences: float, mean_cached_tokens: float) -> float:
        """Return the duration of an iteration without prompts in ns, by the roofline model.

        Args:
            sequences: The number of sequences that get a token each.
            mean_cached_tokens: How many tokens of a sequence are in the cache. All are read.
        """
        costs = self.costs
        memory_ns = costs.weights_ns + costs.kv_token_ns * sequences * mean_cached_tokens
        compute_ns = sequences * (costs.token_ns + costs.attended_ns * mean_cached_tokens)
        return costs.overhead_ns + max(memory_ns, compute_ns)

    def _prompt_ns(self, input_tokens: float) -> float:
        """Return how long the computation of one prompt takes, in ns.

        Averaged over the prompt, a token attends to half of the prompt.
        """
        costs = self.costs
        mean_attended_tokens = input_tokens / 2
        return input_tokens * (costs.token_ns + costs.attended_ns * mean_attended_tokens)

    @property
    def limits(self) -> ServerLimits:
        """The limits of one replica: batch size, tokens, and blocks of its key-value cache.

        The weights and a reserve take a part of the memory of its GPUs. The cache gets the fraction
        `kv_cache_share` of the rest.
        """
        server = self.server
        usable_gib_per_gpu = self.hardware.memory_gib.value - server.reserve_gib
        usable_bytes = usable_gib_per_gpu * self.gpus_per_replica * GIB
        cache_bytes = (usable_bytes - self.model.memory_bytes) * server.kv_cache_share
        block_bytes = self.model.kv_token_bytes * server.tokens_per_block

        return ServerLimits(
            max_batch_size=server.max_batch_size,
            max_num_tokens=server.max_num_tokens,
            kv_blocks=max(0, int(cache_bytes / block_bytes)),
            tokens_per_block=server.tokens_per_block,
            max_seq_len=server.max_seq_len,
            chunked_prefill=server.chunked_prefill,
            reserves_output_blocks=server.scheduler == "guaranteed_no_evict",
            block_reuse=server.block_reuse,
        )


def names() -> list[str]:
    """Return the names of the packaged presets, sorted."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def load_preset(name: str, where: str = "--preset ") -> Preset:
    """Return a packaged preset by its name, or a preset of the user by the path of its file.

    Args:
        name: The name or path. A path contains a slash or ends in .yaml or .yml.
        where: What precedes the name in an error about the file as a whole, such as a flag.

    Raises:
        UserError: The preset does not exist or cannot be read.
        CombinedError: There are errors in the file. All of them are reported.
    """
    return _load(name, f"{where}{name}", extended_by=()).preset


class _LoadedPreset(NamedTuple):
    """A preset and its document, completed by the document of the preset that it extends."""

    document: Map
    preset: Preset


def _load(name: str, where: str, extended_by: tuple[str, ...]) -> _LoadedPreset:
    """Read and check a preset, together with the presets that it extends.

    A user's file without a name is named after its file, and not after the preset that it extends.

    Args:
        name: The name of a packaged preset, or the path of a user's file.
        where: The place that an error about the file as a whole names, such as an option.
        extended_by: The names of the presets that extend it, directly or not, to find cycles.

    Raises:
        UserError: The preset does not exist, cannot be read, or extends itself.
        CombinedError: There are errors in the file.
    """
    if name in extended_by:
        raise UserError("cycle", "the preset extends itself", where)

    is_user_file = name.endswith((".yaml", ".yml")) or "/" in name
    path = Path(name) if is_user_file else _path_of_packaged(name, where)
    file_document, syntax_errors = _read_document(path)
    is_named_after_file = is_user_file and "name" not in file_document

    if "extends" in file_document:
        complete_document = _complete_document(
            file_document, path, extended_by=(*extended_by, name)
        )
    else:
        complete_document = file_document

    if is_named_after_file:
        complete_document["name"] = path.stem

    preset = _validate_preset(file_document, complete_document, path, syntax_errors)
    return _LoadedPreset(complete_document, preset)


def _validate_preset(
    file_document: Map, document: Map, path: Path, syntax_errors: list[LoadgenError]
) -> Preset:
    """Return the preset in a document.

    Args:
        file_document: The content of the file itself, which knows the lines for errors.
        document: The content of the file, completed by the values of the preset that it extends.
        path: The path of the file.
        syntax_errors: The errors that were found when the file was read.

    Raises:
        CombinedError: There are errors in the syntax, in single values, or combinations of values
            that are impossible. All of them are reported.
    """
    context = FileContext(file=str(path), directory=path.parent, errors=syntax_errors)
    preset = validate_document(Preset, document, context)  # adds its errors to the context
    if preset is not None:
        context.errors.extend(_find_conflicts(preset, file_document, context.file))
    if preset is None or context.errors:
        raise CombinedError(sort_errors(context.errors))
    return preset


def _path_of_packaged(name: str, where: str) -> Path:
    """Return the file of a packaged preset. Raises UserError if there is no such preset."""
    if name not in names():
        hint = f"{did_you_mean(name, names())}; or give the path of a YAML file"
        raise UserError("unknown_name", f'unknown preset "{name}"', where, hint)
    return FOLDER / f"{name}.yaml"


def _read_document(path: Path) -> tuple[Map, list[LoadgenError]]:
    """Return the document in a file, and the errors in its syntax. Raises UserError."""
    hint = "see docs/evidence/simulation.md"
    text = read_yaml_text(path, str(path), "preset", lambda: hint, hint)
    return read_yaml(text, str(path), os.environ, kind="preset", example="extends: gb300-vm")


def _complete_document(document: Map, path: Path, extended_by: tuple[str, ...]) -> Map:
    """Return a document that extends a preset, completed by the values of that preset.

    Args:
        document: A document with the key `extends`, which names the preset (the base).
        path: The path of its file.
        extended_by: The names of this preset and of those that extend it. If the base is one of
            them, a preset extends itself, which is an error.
    """
    base_name = document["extends"]
    if not isinstance(base_name, str):
        place = locate(document, ("extends",)).place(str(path))
        hint = f"known: {', '.join(names())}"
        raise UserError("wrong_type", "extends must be the name of a preset", place, hint)

    base = _load(base_name, f"{path} (extends)", extended_by)
    changes = _copy_without(document, "extends")
    complete_document = overlay(base.document, changes)

    changed_constants = _list_constants(changes)
    if changed_constants and "fitted_on" not in changes:
        # The constants of a preset were chosen (fitted) to agree with the measurements that
        # `fitted_on` names. With other constants, the preset agrees with none.
        complete_document["fitted_on"] = _describe_lost_fit(
            changed_constants, base_name, base.preset.fitted_on
        )

    return complete_document


def _describe_lost_fit(changed_constants: list[str], base_name: str, base_fitted_on: str) -> str:
    """Return the field `fitted_on` of a preset with other constants than the one that it extends.

    Args:
        changed_constants: The constants of the model or the hardware that it changes.
        base_name: The name of the preset that it extends.
        base_fitted_on: The field `fitted_on` of that preset.
    """
    return (
        f"nothing: the user changed {', '.join(changed_constants)} of {base_name}, "
        f"which was fitted on {base_fitted_on}"
    )


def _copy_without(document: Map, removed_key: str) -> Map:
    """Return a copy of a document without one of its keys. Other keys keep their positions."""
    copy = Map(document.at)
    copy.path = document.path
    for key, value in document.items():
        if key != removed_key:
            copy.add(key, value, document.keys_at[key], document.values_at[key])
    return copy


def _list_constants(document: Map) -> list[str]:
    """Return the constants of the model and the hardware that a document sets: `model.layers`."""
    keys = []
    for section in ("model", "hardware"):
        constants = document.get(section)
        if isinstance(constants, Map):
            keys += [f"{section}.{name}" for name in constants]
    return keys


def _find_conflicts(preset: Preset, document: Map, file: str) -> Iterator[LoadgenError]:
    """Yield an error for each combination of values that is impossible.

    The size of an attention head and the number of replicas per VM are computed by division, and
    must be integers. If one of them is not, only this error is reported, because the other checks
    use these numbers.
    """
    model = preset.model
    has_integer_heads = model.hidden % model.heads == 0 and model.heads % model.kv_heads == 0
    if not has_integer_heads:
        problem = "model.hidden must be a multiple of model.heads, and heads of model.kv_heads"
        yield _conflict(problem, ("model", "heads"), document, file)
        return

    has_integer_replicas = preset.gpus_per_vm % preset.gpus_per_replica == 0
    if not has_integer_replicas:
        problem = "gpus_per_vm must be a multiple of gpus_per_replica"
        yield _conflict(problem, ("gpus_per_replica",), document, file)
        return

    problems = [
        *_find_vm_problems(preset),
        *_find_batch_problems(preset),
        *_find_replica_count_problems(preset),
        *_find_cache_problems(preset),
    ]
    for located_problem in problems:
        yield _conflict(located_problem.problem, located_problem.location, document, file)


class _LocatedProblem(NamedTuple):
    """A problem with the values of a preset, and the location of one of them in its document."""

    problem: str
    location: Loc


def _find_vm_problems(preset: Preset) -> Iterator[_LocatedProblem]:
    """Yield a problem if the speeds of the VMs are listed, but not one for each VM."""
    if preset.vm_speeds and len(preset.vm_speeds) != preset.vms:
        problem = f"has {len(preset.vm_speeds)} speeds for {preset.vms} VMs"
        yield _LocatedProblem(problem, ("vm_speeds",))


def _find_batch_problems(preset: Preset) -> Iterator[_LocatedProblem]:
    """Yield a problem if an iteration has no room for one token of each sequence of a batch."""
    server = preset.server
    if server.max_num_tokens < server.max_batch_size:
        problem = "server.max_num_tokens must be at least server.max_batch_size"
        yield _LocatedProblem(problem, ("server", "max_num_tokens"))


def _find_replica_count_problems(preset: Preset) -> Iterator[_LocatedProblem]:
    """Yield a problem for each time from which more replicas serve than the machines have."""
    for time, replica_count in preset.replicas_at.items():
        if replica_count > preset.replicas:
            problem = (
                f"{replica_count} replicas are configured, but these machines have only "
                f"{preset.replicas}"
            )
            yield _LocatedProblem(problem, ("replicas_at", time))


def _find_cache_problems(preset: Preset) -> Iterator[_LocatedProblem]:
    """Yield a problem if the key-value cache has no room for the longest sequence.

    Such a sequence would wait for ever, because a replica never has enough free memory for it.
    """
    limits = preset.limits
    cache_tokens = limits.kv_blocks * limits.tokens_per_block
    if cache_tokens < limits.max_seq_len:
        problem = (
            f"the KV cache has room for only {cache_tokens:,} tokens beside the "
            "weights, fewer than server.max_seq_len"
        )
        yield _LocatedProblem(problem, ("server", "max_seq_len"))


def _conflict(problem: str, location: Loc, document: Map, file: str) -> LoadgenError:
    """Return the error about a value at a location of the document, with its line in the file."""
    place = locate(document, location).place(file)
    return UserError("conflict", problem, place, "see docs/evidence/simulation.md")
