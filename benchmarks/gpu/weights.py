"""Create a model of random weights in the shape of a Llama, without any download.

    python benchmarks/gpu/weights.py OUT --shape tiny|7b|70b [--form hf|gguf|config] [--context N]

`hf`: a folder with bfloat16 weights (safetensors) for transformers, vLLM, SGLang and TensorRT-LLM.
`config`: the same without weights, for engines that make their own at random (`--load-format
dummy`). `gguf`: a file for llama.cpp with 4-bit weights (Q4_0); `tiny` has 16 bits. The tokenizer
is a byte-level BPE trained on Python's own library. Such a model costs what a real one of its shape
costs, and its responses mean nothing: they end at the length limit. `tiny` takes some seconds. The
script prints the number of parameters and the files.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import sysconfig
import tempfile
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
BOS_TOKEN_ID = SPECIAL_TOKENS.index("<s>")
EOS_TOKEN_ID = SPECIAL_TOKENS.index("</s>")
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "chat_template": CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
}
# A larger vocabulary needs more text: one source file of Python's library for so many tokens.
TOKENS_PER_TRAINING_FILE = 32

# The matrices repeat so many random values. The number is prime, so no two rows are equal.
DISTINCT_VALUES = 4_000_037
# Standard deviations. The output matrix chooses the next token: if its weights were as narrow as
# the others, greedy decoding would repeat a single token.
WEIGHT_STD = 0.02
OUTPUT_WEIGHT_STD = 0.3
RMS_NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a Llama model."""

    hidden_size: int
    intermediate_size: int  # of the feed-forward layers
    layers: int
    attention_heads: int
    kv_heads: int
    vocabulary_size: int
    context_tokens: int

    @property
    def head_size(self) -> int:
        """The dimensions of one attention head."""
        return self.hidden_size // self.attention_heads


SHAPES = {
    "tiny": ModelShape(256, 512, 2, 4, 4, 4096, 32768),
    "7b": ModelShape(4096, 11008, 32, 32, 32, 32000, 4096),
    "70b": ModelShape(8192, 28672, 80, 64, 8, 32000, 4096),
}


class Tensor(NamedTuple):
    """A weight matrix, or the weight vector of a normalization, which consists of ones.

    Attributes:
        hf_name: The name in the Hugging Face format, without the suffix ".weight".
        gguf_name: The name in a GGUF file, without the suffix ".weight".
        dimensions: (rows, columns) of a matrix, (size,) of a vector.
        std: The standard deviation of the values of a matrix.
    """

    hf_name: str
    gguf_name: str
    dimensions: tuple[int, ...]
    std: float = WEIGHT_STD

    @property
    def is_vector(self) -> bool:
        """Whether the tensor has one dimension."""
        return len(self.dimensions) == 1

    @property
    def value_count(self) -> int:
        """The number of values, which is the product of the dimensions."""
        return math.prod(self.dimensions)


def list_tensors(shape: ModelShape) -> list[Tensor]:
    """Return all tensors of a Llama model, in the order in which they are stored."""
    embedding_dimensions = (shape.vocabulary_size, shape.hidden_size)
    tensors = [Tensor("model.embed_tokens", "token_embd", embedding_dimensions)]
    for layer in range(shape.layers):
        tensors += list_layer_tensors(shape, layer)
    tensors.append(Tensor("model.norm", "output_norm", (shape.hidden_size,)))
    tensors.append(Tensor("lm_head", "output", embedding_dimensions, OUTPUT_WEIGHT_STD))
    return tensors


def list_layer_tensors(shape: ModelShape, layer: int) -> list[Tensor]:
    """Return the tensors of one transformer layer: attention, feed-forward and normalizations."""
    hf = f"model.layers.{layer}"
    gguf = f"blk.{layer}"
    hidden = shape.hidden_size
    intermediate = shape.intermediate_size
    kv_size = shape.kv_heads * shape.head_size

    return [
        Tensor(f"{hf}.input_layernorm", f"{gguf}.attn_norm", (hidden,)),
        Tensor(f"{hf}.self_attn.q_proj", f"{gguf}.attn_q", (hidden, hidden)),
        Tensor(f"{hf}.self_attn.k_proj", f"{gguf}.attn_k", (kv_size, hidden)),
        Tensor(f"{hf}.self_attn.v_proj", f"{gguf}.attn_v", (kv_size, hidden)),
        Tensor(f"{hf}.self_attn.o_proj", f"{gguf}.attn_output", (hidden, hidden)),
        Tensor(f"{hf}.post_attention_layernorm", f"{gguf}.ffn_norm", (hidden,)),
        Tensor(f"{hf}.mlp.gate_proj", f"{gguf}.ffn_gate", (intermediate, hidden)),
        Tensor(f"{hf}.mlp.up_proj", f"{gguf}.ffn_up", (intermediate, hidden)),
        Tensor(f"{hf}.mlp.down_proj", f"{gguf}.ffn_down", (hidden, intermediate)),
    ]


def count_parameters(shape: ModelShape) -> int:
    """Return the number of weights of a model, those of the normalizations included."""
    return sum(tensor.value_count for tensor in list_tensors(shape))


# -- tokenizer and configuration -------------------------------------------------------------------


def write_tokenizer(model_dir: Path, vocabulary_size: int) -> None:
    """Train a byte-level BPE tokenizer and write tokenizer.json and tokenizer_config.json.

    It is trained on the source files of Python's standard library, which every machine has.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    source_files = list_library_files(vocabulary_size // TOKENS_PER_TRAINING_FILE)
    texts = (file.read_text("utf-8", errors="ignore") for file in source_files)
    tokenizer.train_from_iterator(texts, trainer)

    tokenizer.save(str(model_dir / "tokenizer.json"))
    (model_dir / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))


def list_library_files(count: int) -> list[Path]:
    """Return the first `count` source files of Python's standard library in alphabetical order."""
    library_dir = Path(sysconfig.get_path("stdlib"))
    source_files = [*library_dir.glob("*.py"), *library_dir.glob("*/*.py")]
    return sorted(source_files)[:count]


def build_model_config(shape: ModelShape) -> dict[str, object]:
    """Return the content of config.json, from which Hugging Face transformers builds the model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.attention_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocabulary_size,
        "max_position_embeddings": shape.context_tokens,
        "rms_norm_eps": RMS_NORM_EPSILON,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


# -- safetensors: weights in the Hugging Face format -----------------------------------------------


def write_safetensors(path: Path, shape: ModelShape, seed: int) -> None:
    """Write a safetensors file with random bfloat16 weights.

    The file is the length of its header, the header as JSON, and the data of all tensors. Drawing
    every value would take minutes for a large model. So all matrices repeat the same
    DISTINCT_VALUES random values, each matrix from a random position on.
    """
    random = np.random.default_rng(seed)
    normal = random.standard_normal(DISTINCT_VALUES, np.float32)
    values_by_std = {
        std: _to_bfloat16(normal * np.float32(std)) for std in (WEIGHT_STD, OUTPUT_WEIGHT_STD)
    }
    norm_weights = _to_bfloat16(np.ones(shape.hidden_size, np.float32))
    header = encode_safetensors_header(list_tensors(shape))

    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in list_tensors(shape):
            if tensor.is_vector:
                norm_weights.tofile(file)
            else:
                start_index = int(random.integers(DISTINCT_VALUES))
                values = values_by_std[tensor.std]
                _write_cyclically(file, values, tensor.value_count, start_index)


def encode_safetensors_header(tensors: list[Tensor]) -> bytes:
    """Return the JSON header of a safetensors file, padded with spaces to a multiple of 8 bytes.

    It has the type, the dimensions and the byte range of each tensor. The byte ranges are counted
    from the end of the header.
    """
    bytes_per_value = 2  # of a bfloat16
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        end = begin + bytes_per_value * tensor.value_count
        header[f"{tensor.hf_name}.weight"] = {
            "dtype": "BF16",
            "shape": tensor.dimensions,
            "data_offsets": [begin, end],
        }
        begin = end

    encoded = json.dumps(header).encode()
    return encoded + b" " * bytes_to_next_multiple(len(encoded), multiple_of=8)


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Convert float32 values to bfloat16, which is their upper 16 bits.

    NumPy has no type bfloat16, so the bits are returned as unsigned integers.
    """
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _write_cyclically(
    file: BinaryIO, values: NDArray[Any], value_count: int, start_index: int
) -> None:
    """Write `value_count` items of an array, which is repeated as often as needed.

    The first item is that at `start_index`. The last item of the array is followed by its first.
    """
    remaining = value_count
    position = start_index
    while remaining > 0:
        piece = values[position : position + remaining]
        piece.tofile(file)
        remaining -= len(piece)
        position = 0


def bytes_to_next_multiple(size: int, multiple_of: int) -> int:
    """Return how many bytes of padding `size` lacks: 3 for a size of 13 and a multiple of 8."""
    return -size % multiple_of


# -- GGUF: weights for llama.cpp -------------------------------------------------------------------

# The numbers of the GGUF format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
GGUF_MAGIC = b"GGUF"
GGUF_VERSION = 3
GGUF_ALIGNMENT_BYTES = 32  # the data of each tensor starts at a multiple of it


class GgufValueType(IntEnum):
    """The types of metadata values in a GGUF file."""

    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9


class GgufTokenType(IntEnum):
    """The types of the tokens of a vocabulary in a GGUF file."""

    NORMAL = 1
    CONTROL = 3
    UNUSED = 5


class GgufTensorType(IntEnum):
    """The types of tensor data in a GGUF file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2


STRUCT_FORMATS = {
    GgufValueType.UINT32: "<I",
    GgufValueType.INT32: "<i",
    GgufValueType.FLOAT32: "<f",
    GgufValueType.BOOL: "<?",
}


class MatrixFormat(NamedTuple):
    """How the matrices of a GGUF file are stored: in blocks of values that are packed together.

    Attributes:
        file_type: The number that the metadata of a file with such matrices has.
        tensor_type: The type of each matrix.
        values_per_block: The values that one block has.
        bytes_per_block: The size of one block.
    """

    file_type: int
    tensor_type: GgufTensorType
    values_per_block: int
    bytes_per_block: int

    def count_blocks(self, value_count: int) -> int:
        """Return how many blocks a matrix with so many values has."""
        return value_count // self.values_per_block


F16_MATRICES = MatrixFormat(1, GgufTensorType.F16, values_per_block=1, bytes_per_block=2)
# A block of Q4_0 is a scale of two bytes and 32 integers of four bits.
Q4_0_MATRICES = MatrixFormat(2, GgufTensorType.Q4_0, values_per_block=32, bytes_per_block=18)
# The standard deviation of the integers from -8 to 7, if each has the same probability
FOUR_BIT_INTEGER_STD = 4.6


class MetadataEntry(NamedTuple):
    """One entry in the metadata of a GGUF file.

    Attributes:
        key: The name of the entry, for example "llama.block_count".
        value_type: The type of the value, or of its items if the value is a list.
        value: A string, a number, a boolean, or a list of them.
    """

    key: str
    value_type: GgufValueType
    value: Any

    def encode(self) -> bytes:
        """Return the entry as a GGUF file stores it: the key, the type and the value.

        A list is stored as the type ARRAY, the type of its items, their number, and the items.
        """
        encoded_key = _encode_string(self.key)
        if not isinstance(self.value, list):
            encoded_type = struct.pack("<I", self.value_type)
            return encoded_key + encoded_type + _encode_value(self.value_type, self.value)

        array_header = struct.pack("<IIQ", GgufValueType.ARRAY, self.value_type, len(self.value))
        items = [_encode_value(self.value_type, item) for item in self.value]
        return encoded_key + array_header + b"".join(items)


def _encode_value(value_type: GgufValueType, value: Any) -> bytes:
    """Return the bytes of a single metadata value in a GGUF file, without its type."""
    if value_type == GgufValueType.STRING:
        return _encode_string(value)
    return struct.pack(STRUCT_FORMATS[value_type], value)


def _encode_string(text: str) -> bytes:
    """Return a string as a GGUF file stores it: its length in bytes, then its UTF-8 bytes."""
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def write_gguf(
    path: Path,
    shape: ModelShape,
    tokenizer: dict[str, Any],
    matrix_format: MatrixFormat,
    seed: int,
) -> None:
    """Write a model with random weights as a GGUF file, the format of llama.cpp.

    The file has a header, the metadata, a description of each tensor and the data of all tensors.

    Args:
        path: The file to write.
        shape: The dimensions of the model.
        tokenizer: The content of tokenizer.json.
        matrix_format: How the matrices are stored.
        seed: The seed of the random weights.
    """
    tensors = list_tensors(shape)
    metadata = [
        *build_model_metadata(shape, matrix_format),
        *build_tokenizer_metadata(tokenizer, shape.vocabulary_size),
    ]
    with path.open("wb") as file:
        file.write(GGUF_MAGIC)
        file.write(struct.pack("<IQQ", GGUF_VERSION, len(tensors), len(metadata)))
        for entry in metadata:
            file.write(entry.encode())
        file.write(encode_tensor_descriptions(tensors, matrix_format))
        _write_padding(file)
        write_tensor_data(file, tensors, matrix_format, seed)


def build_model_metadata(shape: ModelShape, matrix_format: MatrixFormat) -> list[MetadataEntry]:
    """Return the entries of a GGUF file that describe the file and the dimensions of the model."""
    uint32 = GgufValueType.UINT32
    float32 = GgufValueType.FLOAT32
    string = GgufValueType.STRING
    return [
        MetadataEntry("general.architecture", string, "llama"),
        MetadataEntry("general.name", string, "random"),
        MetadataEntry("general.alignment", uint32, GGUF_ALIGNMENT_BYTES),
        MetadataEntry("general.file_type", uint32, matrix_format.file_type),
        MetadataEntry("llama.context_length", uint32, shape.context_tokens),
        MetadataEntry("llama.embedding_length", uint32, shape.hidden_size),
        MetadataEntry("llama.block_count", uint32, shape.layers),
        MetadataEntry("llama.feed_forward_length", uint32, shape.intermediate_size),
        MetadataEntry("llama.attention.head_count", uint32, shape.attention_heads),
        MetadataEntry("llama.attention.head_count_kv", uint32, shape.kv_heads),
        MetadataEntry("llama.attention.layer_norm_rms_epsilon", float32, RMS_NORM_EPSILON),
        MetadataEntry("llama.rope.dimension_count", uint32, shape.head_size),
        MetadataEntry("llama.vocab_size", uint32, shape.vocabulary_size),
    ]


def build_tokenizer_metadata(
    tokenizer: dict[str, Any], vocabulary_size: int
) -> list[MetadataEntry]:
    """Return the entries of a GGUF file that describe the tokenizer.

    `tokenizer` is the content of tokenizer.json.
    """
    tokens = list_vocabulary(tokenizer, vocabulary_size)
    token_types = [classify_token(token) for token in tokens]
    # Depending on the version of the package `tokenizers`, a merge is "a b" or ["a", "b"].
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in tokenizer["model"]["merges"]
    ]
    return [
        MetadataEntry("tokenizer.ggml.model", GgufValueType.STRING, "gpt2"),
        MetadataEntry("tokenizer.ggml.pre", GgufValueType.STRING, "gpt-2"),
        MetadataEntry("tokenizer.ggml.tokens", GgufValueType.STRING, tokens),
        MetadataEntry("tokenizer.ggml.token_type", GgufValueType.INT32, token_types),
        MetadataEntry("tokenizer.ggml.merges", GgufValueType.STRING, merges),
        MetadataEntry("tokenizer.ggml.bos_token_id", GgufValueType.UINT32, BOS_TOKEN_ID),
        MetadataEntry("tokenizer.ggml.eos_token_id", GgufValueType.UINT32, EOS_TOKEN_ID),
        MetadataEntry("tokenizer.ggml.add_bos_token", GgufValueType.BOOL, False),
        MetadataEntry("tokenizer.chat_template", GgufValueType.STRING, CHAT_TEMPLATE),
    ]


def list_vocabulary(tokenizer: dict[str, Any], vocabulary_size: int) -> list[str]:
    """Return the tokens in the order of their IDs.

    If training found fewer tokens than the vocabulary has, tokens such as "<unused7>" follow. The
    number of tokens must be that of the rows of the embedding matrix.
    """
    ids_by_token: dict[str, int] = tokenizer["model"]["vocab"]
    trained_tokens = sorted(ids_by_token, key=lambda token: ids_by_token[token])
    missing_count = vocabulary_size - len(trained_tokens)
    unused_tokens = [f"<unused{number}>" for number in range(missing_count)]
    return trained_tokens + unused_tokens


def classify_token(token: str) -> GgufTokenType:
    """Return the type that a token has in a GGUF file."""
    if token in SPECIAL_TOKENS:
        return GgufTokenType.CONTROL
    if token.startswith("<unused"):
        return GgufTokenType.UNUSED
    return GgufTokenType.NORMAL


def encode_tensor_descriptions(tensors: list[Tensor], matrix_format: MatrixFormat) -> bytes:
    """Return the part of a GGUF file that describes its tensors.

    Each has its name, the number of dimensions, the dimensions (columns before rows), the type and
    the byte offset of its data from the beginning of all data.
    """
    encoded = b""
    offset = 0
    for tensor in tensors:
        tensor_type = GgufTensorType.F32 if tensor.is_vector else matrix_format.tensor_type
        dimension_count = len(tensor.dimensions)
        encoded += _encode_string(f"{tensor.gguf_name}.weight")
        encoded += struct.pack("<I", dimension_count)
        encoded += struct.pack(f"<{dimension_count}Q", *reversed(tensor.dimensions))
        encoded += struct.pack("<IQ", tensor_type, offset)

        size = count_data_bytes(tensor, matrix_format)
        offset += size + bytes_to_next_multiple(size, GGUF_ALIGNMENT_BYTES)

    return encoded


def count_data_bytes(tensor: Tensor, matrix_format: MatrixFormat) -> int:
    """Return the size of a tensor's data in a GGUF file, in which vectors are float32."""
    if tensor.is_vector:
        return 4 * tensor.value_count
    return matrix_format.count_blocks(tensor.value_count) * matrix_format.bytes_per_block


def write_tensor_data(
    file: BinaryIO, tensors: list[Tensor], matrix_format: MatrixFormat, seed: int
) -> None:
    """Write the data of all tensors of a GGUF file, each padded to the alignment of the format.

    To be fast, the matrices repeat the same random blocks, each starting at a random block. The
    weights of normalizations are ones.
    """
    random = np.random.default_rng(seed)
    blocks_by_std = {
        std: draw_matrix_blocks(random, std, matrix_format)
        for std in (WEIGHT_STD, OUTPUT_WEIGHT_STD)
    }
    for tensor in tensors:
        if tensor.is_vector:
            np.ones(tensor.value_count, np.float32).tofile(file)
        else:
            blocks = blocks_by_std[tensor.std]
            block_count = matrix_format.count_blocks(tensor.value_count)
            start_index = int(random.integers(len(blocks)))
            _write_cyclically(file, blocks, block_count, start_index)
        _write_padding(file)


def draw_matrix_blocks(
    random: np.random.Generator, std: float, matrix_format: MatrixFormat
) -> NDArray[Any]:
    """Return DISTINCT_VALUES random values in blocks of a matrix format.

    The values have the standard deviation `std`. A block of the format F16 is a single value.
    """
    if matrix_format == Q4_0_MATRICES:
        return draw_q4_0_blocks(random, std)
    values = random.standard_normal(DISTINCT_VALUES, np.float32) * std
    return values.astype(np.float16)


def draw_q4_0_blocks(random: np.random.Generator, std: float) -> NDArray[np.uint8]:
    """Return random blocks of the format Q4_0, each of which is a row of bytes.

    The first two bytes of a block are its scale, a float16. The others are pairs of integers of
    four bits. A value is the product of an integer and the scale. All blocks have random integers
    and the same scale, with which the values have the standard deviation `std`.
    """
    block_count = Q4_0_MATRICES.count_blocks(DISTINCT_VALUES)
    blocks = random.integers(0, 256, (block_count, Q4_0_MATRICES.bytes_per_block), np.uint8)
    scale = np.float16(std / FOUR_BIT_INTEGER_STD)
    blocks[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks


def _write_padding(file: BinaryIO) -> None:
    """Write zeros up to the next position at which the data of a tensor may start."""
    file.write(bytes(bytes_to_next_multiple(file.tell(), GGUF_ALIGNMENT_BYTES)))


# -- the model and the script ----------------------------------------------------------------------


def write_model(
    model_dir: Path,
    shape: ModelShape,
    weight_formats: frozenset[str],
    matrix_format: MatrixFormat,
    seed: int = 0,
) -> None:
    """Write the files of a model: its tokenizer, its configuration and random weights.

    An existing tokenizer is kept, because training one with 32,000 tokens takes a minute.

    Args:
        model_dir: The directory of the files. It is created if it does not exist.
        shape: The dimensions of the model.
        weight_formats: The formats in which weights are written, of "hf" and "gguf". No weights
            are written for another format, such as "config".
        matrix_format: How the GGUF file stores matrices.
        seed: The seed of the random weights.
    """
    model_dir.mkdir(parents=True, exist_ok=True)
    tokenizer_path = model_dir / "tokenizer.json"
    if not tokenizer_path.exists():
        write_tokenizer(model_dir, shape.vocabulary_size)

    config = build_model_config(shape)
    generation_config = {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": EOS_TOKEN_ID}
    (model_dir / "config.json").write_text(json.dumps(config, indent=2))
    (model_dir / "generation_config.json").write_text(json.dumps(generation_config))

    if "hf" in weight_formats:
        write_safetensors(model_dir / "model.safetensors", shape, seed)

    if "gguf" in weight_formats:
        tokenizer = json.loads(tokenizer_path.read_bytes())
        write_gguf(model_dir / "model.gguf", shape, tokenizer, matrix_format, seed)


def choose_matrix_format(shape_name: str) -> MatrixFormat:
    """Return how a GGUF file of this shape stores matrices: with 16 bits if it is tiny, else 4."""
    return F16_MATRICES if shape_name == "tiny" else Q4_0_MATRICES


def main() -> None:
    """Write a model and print its number of parameters and its files."""
    args = parse_command_line()
    shape = SHAPES[args.shape]
    if args.context:
        shape = replace(shape, context_tokens=args.context)

    with tempfile.TemporaryDirectory() as scratch:
        model_dir = args.out or Path(scratch)
        weight_formats = frozenset(args.form or ("hf", "gguf"))
        write_model(model_dir, shape, weight_formats, choose_matrix_format(args.shape))
        file_sizes = [
            f"{file.name} {file.stat().st_size:,} bytes" for file in sorted(model_dir.iterdir())
        ]

    print(f"{args.shape}: {count_parameters(shape):,} parameters; {', '.join(file_sizes)}")


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, help="the folder of the model")
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="dimensions of the model")
    parser.add_argument(
        "--form",
        action="append",
        choices=("hf", "gguf", "config"),
        help="format of the weights; repeatable; by default hf and gguf",
    )
    parser.add_argument(
        "--context", type=int, help="longest context in tokens, in place of that of the shape"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="write a tiny model into a temporary folder"
    )

    args = parser.parse_args()
    if args.out is None and not args.smoke:
        parser.error("OUT is missing: the folder of the model")
    return args


if __name__ == "__main__":
    main()
