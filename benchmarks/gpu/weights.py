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
import struct
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

SPECIAL = ("<unk>", "<s>", "</s>")
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
VALUE_PERIOD = 4_000_037  # values; a prime, so that no two rows of a matrix are alike
WEIGHT_SPREAD, OUTPUT_WEIGHT_SPREAD = (
    0.02,
    0.3,
)  # of weights; wide where the words are chosen, else greedy answers repeat one


class Shape(NamedTuple):
    """The dimensions of a Llama."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int


SHAPES = {
    "tiny": Shape(256, 512, 2, 4, 4, 4096, 32768),
    "7b": Shape(4096, 11008, 32, 32, 32, 32000, 4096),
    "70b": Shape(8192, 28672, 80, 64, 8, 32000, 4096),
}


def encode_safetensors_header(shape: Shape) -> bytes:
    """Return the header: type, dimensions and place of each tensor, padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in list_tensors(shape):
        end = offset + 2 * tensor.value_count  # bfloat16 has two bytes
        header[f"{tensor.hf}.weight"] = {
            "dtype": "BF16",
            "shape": [tensor.rows] if tensor.is_vector else [tensor.rows, tensor.columns],
            "data_offsets": [offset, end],
        }
        offset = end

    encoded = json.dumps(header).encode()
    return encoded + b" " * padding_to(8, len(encoded))


class Tensor(NamedTuple):
    """A tensor, with its names in both formats and its dimensions.

    `columns` is 0 for a vector, which is all ones. `spread` is the standard deviation of a matrix.
    """

    hf: str
    gguf: str
    rows: int
    columns: int
    spread: float = WEIGHT_SPREAD

    @property
    def is_vector(self) -> bool:
        """Return whether it is a vector of ones."""
        return self.columns == 0

    @property
    def value_count(self) -> int:
        """Return the number of values."""
        return self.rows if self.is_vector else self.rows * self.columns


def list_tensors(shape: Shape) -> Iterator[Tensor]:
    """Yield all tensors of the model."""
    size, kv = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
    yield Tensor("model.embed_tokens", "token_embd", shape.vocabulary, size)

    for number in range(shape.layers):
        hf, gguf = f"model.layers.{number}", f"blk.{number}"
        yield Tensor(f"{hf}.input_layernorm", f"{gguf}.attn_norm", size, 0)
        yield Tensor(f"{hf}.self_attn.q_proj", f"{gguf}.attn_q", size, size)
        yield Tensor(f"{hf}.self_attn.k_proj", f"{gguf}.attn_k", kv, size)
        yield Tensor(f"{hf}.self_attn.v_proj", f"{gguf}.attn_v", kv, size)
        yield Tensor(f"{hf}.self_attn.o_proj", f"{gguf}.attn_output", size, size)
        yield Tensor(f"{hf}.post_attention_layernorm", f"{gguf}.ffn_norm", size, 0)
        yield Tensor(f"{hf}.mlp.gate_proj", f"{gguf}.ffn_gate", shape.inner, size)
        yield Tensor(f"{hf}.mlp.up_proj", f"{gguf}.ffn_up", shape.inner, size)
        yield Tensor(f"{hf}.mlp.down_proj", f"{gguf}.ffn_down", size, shape.inner)

    yield Tensor("model.norm", "output_norm", size, 0)
    yield Tensor("lm_head", "output", shape.vocabulary, size, OUTPUT_WEIGHT_SPREAD)


def count_parameters(shape: Shape) -> int:
    """Return the number of parameters."""
    return sum(tensor.value_count for tensor in list_tensors(shape))


TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "chat_template": TEMPLATE,
    "clean_up_tokenization_spaces": False,
}


WORDS_PER_FILE = 32  # of the vocabulary: a larger one is trained on more files


def train_tokenizer(folder: Path, vocabulary: int) -> dict[str, object]:
    """Train a byte-level BPE tokenizer, write its files and return the content of tokenizer.json.

    The text is the source of Python's standard library, because every machine has it.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_path("stdlib"))
    source_files = sorted([*library.glob("*.py"), *library.glob("*/*.py")])
    training_files = source_files[: vocabulary // WORDS_PER_FILE]
    texts = (file.read_text("utf-8", errors="ignore") for file in training_files)
    bpe.train_from_iterator(texts, trainer)
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    trained: dict[str, Any] = json.loads((folder / "tokenizer.json").read_bytes())

    return trained


def model_config(shape: Shape) -> dict[str, object]:
    """Return config.json of transformers."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def _write_cyclic(file: BinaryIO, values: NDArray[Any], count: int, position: int) -> None:
    """Write `count` values of an array, from a start index on and from its begin after its end."""
    while count > 0:
        piece = values[position : position + count]
        piece.tofile(file)
        count -= len(piece)
        position = 0


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the upper 16 bits of float32 values."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def padding_to(multiple: int, size: int) -> int:
    """Return how many bytes are missing to the next multiple: 3 for size 13 and multiple 8."""
    return -size % multiple


def write_hf(folder: Path, shape: Shape, seed: int) -> None:
    """Write model.safetensors with random bfloat16 weights.

    A safetensors file is the length of its header, the header as JSON, and the data of all tensors.
    To be fast, the matrices repeat VALUE_PERIOD random values cyclically, each from a random
    position on. Norms are ones.
    """
    random = np.random.default_rng(seed)
    normal = random.standard_normal(VALUE_PERIOD, np.float32)
    values_by_spread = {
        spread: _to_bfloat16(normal * np.float32(spread))
        for spread in (WEIGHT_SPREAD, OUTPUT_WEIGHT_SPREAD)
    }
    ones = _to_bfloat16(np.ones(shape.hidden, np.float32))

    header = encode_safetensors_header(shape)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in list_tensors(shape):
            if tensor.is_vector:
                ones.tofile(file)
            else:
                start = int(random.integers(VALUE_PERIOD))
                values = values_by_spread[tensor.spread]
                _write_cyclic(file, values, tensor.value_count, start)


def _encode_text(text: str) -> bytes:
    """Encode a string of GGUF."""
    return struct.pack("<Q", len(text.encode())) + text.encode()


# Numbers of the GGUF format (version 3): https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9  # types of metadata values


_PACK_FORMATS = {_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "<?"}


_NORMAL_TOKEN, _CONTROL_TOKEN, _UNUSED_TOKEN = 1, 3, 5  # types of tokens


_MOSTLY_F16, _MOSTLY_Q4_0 = 1, 2  # types of files


_F32, _F16, _Q4_0 = 0, 1, 2  # types of tensors


_ALIGNMENT = 32  # bytes, of the data of each tensor


_Q4_0_VALUES, _Q4_0_BYTES = 32, 18  # a block: a scale of two bytes and 32 numbers of four bits


def _encode_value(value_type: int, value: object) -> bytes:
    """Encode a metadata value of GGUF: its type, then the value.

    A list is an array: the type of its items, their number, and the items without their types.
    """
    if isinstance(value, list):
        header = struct.pack("<IIQ", _ARRAY, value_type, len(value))
        return header + b"".join(_encode_bare_value(value_type, item) for item in value)
    return struct.pack("<I", value_type) + _encode_bare_value(value_type, value)


def _encode_bare_value(value_type: int, value: Any) -> bytes:
    """Encode a value of GGUF without its type."""
    if value_type == _STRING:
        return _encode_text(value)
    return struct.pack(_PACK_FORMATS[value_type], value)


def _list_gguf_tokens(tokenizer: dict[str, Any], vocabulary: int) -> list[str]:
    """Return the tokens in the order of their ids, filled up to the size of the vocabulary."""
    ids_by_token: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(ids_by_token, key=lambda token: ids_by_token[token])
    fillers = [f"<unused{i}>" for i in range(vocabulary - len(tokens))]
    return tokens + fillers


def _gguf_token_type(token: str) -> int:
    """Return the type of a token."""
    if token in SPECIAL:
        return _CONTROL_TOKEN
    if token.startswith("<unused"):
        return _UNUSED_TOKEN
    return _NORMAL_TOKEN


def _gguf_metadata(
    shape: Shape, tokenizer: dict[str, Any], four_bits: bool
) -> list[tuple[str, int, Any]]:
    """Return the metadata of the file as (key, type, value).

    `tokenizer` is the content of tokenizer.json.
    """
    tokens = _list_gguf_tokens(tokenizer, shape.vocabulary)

    # Depending on the version of the package, a merge is "a b" or ["a", "b"].
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in tokenizer["model"]["merges"]
    ]
    return [
        ("general.architecture", _STRING, "llama"),
        ("general.name", _STRING, "random"),
        ("general.alignment", _UINT32, _ALIGNMENT),
        ("general.file_type", _UINT32, _MOSTLY_Q4_0 if four_bits else _MOSTLY_F16),
        ("llama.context_length", _UINT32, shape.context),
        ("llama.embedding_length", _UINT32, shape.hidden),
        ("llama.block_count", _UINT32, shape.layers),
        ("llama.feed_forward_length", _UINT32, shape.inner),
        ("llama.attention.head_count", _UINT32, shape.heads),
        ("llama.attention.head_count_kv", _UINT32, shape.kv_heads),
        ("llama.attention.layer_norm_rms_epsilon", _FLOAT32, 1e-5),
        ("llama.rope.dimension_count", _UINT32, shape.hidden // shape.heads),
        ("llama.vocab_size", _UINT32, shape.vocabulary),
        ("tokenizer.ggml.model", _STRING, "gpt2"),
        ("tokenizer.ggml.pre", _STRING, "gpt-2"),
        ("tokenizer.ggml.tokens", _STRING, tokens),
        ("tokenizer.ggml.token_type", _INT32, [_gguf_token_type(token) for token in tokens]),
        ("tokenizer.ggml.merges", _STRING, merges),
        ("tokenizer.ggml.bos_token_id", _UINT32, 1),
        ("tokenizer.ggml.eos_token_id", _UINT32, 2),
        ("tokenizer.ggml.add_bos_token", _BOOL, False),
        ("tokenizer.chat_template", _STRING, TEMPLATE),
    ]


class MatrixFormat(NamedTuple):
    """How the matrices of a GGUF file are stored: in blocks of values that are packed together."""

    tensor_type: int
    values_per_block: int
    bytes_per_block: int


MATRICES_Q4_0 = MatrixFormat(_Q4_0, _Q4_0_VALUES, _Q4_0_BYTES)


MATRICES_F16 = MatrixFormat(_F16, values_per_block=1, bytes_per_block=2)


# Numbers of four bits from -8 to 7, all with the same probability, have this standard deviation.
Q4_0_SPREAD = 4.6


def _random_blocks(
    random: np.random.Generator, spread: float, matrix_format: MatrixFormat
) -> NDArray[Any]:
    """Return random blocks of matrix values with this standard deviation."""
    if matrix_format == MATRICES_F16:
        values = random.standard_normal(VALUE_PERIOD, np.float32) * spread
        return values.astype(np.float16)

    block_count = VALUE_PERIOD // _Q4_0_VALUES
    blocks = random.integers(0, 256, (block_count, _Q4_0_BYTES), np.uint8)
    scale = np.float16(spread / Q4_0_SPREAD)
    blocks[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)

    return blocks


def _encode_tensor_infos(tensors: list[Tensor], matrix_format: MatrixFormat) -> bytes:
    """Return name, dimensions, type and offset of each tensor, as the header of GGUF has them.

    The offset is from the begin of the data; the fastest dimension is the first one.
    """
    infos = b""
    offset = 0
    for tensor in tensors:
        if tensor.is_vector:
            dimensions: tuple[int, ...] = (tensor.rows,)
            tensor_type = _F32
            size = 4 * tensor.rows
        else:
            dimensions = (tensor.columns, tensor.rows)
            tensor_type = matrix_format.tensor_type
            block_count = tensor.value_count // matrix_format.values_per_block
            size = block_count * matrix_format.bytes_per_block

        infos += _encode_text(f"{tensor.gguf}.weight")
        infos += struct.pack("<I", len(dimensions))
        infos += struct.pack(f"<{len(dimensions)}Q", *dimensions)
        infos += struct.pack("<IQ", tensor_type, offset)
        offset += size + padding_to(_ALIGNMENT, size)

    return infos


def _align(file: BinaryIO) -> None:
    """Write zeros up to the next multiple of the alignment."""
    file.write(bytes(padding_to(_ALIGNMENT, file.tell())))


def write_gguf(
    path: Path, shape: Shape, tokenizer: dict[str, Any], seed: int, four_bits: bool
) -> None:
    """Write a GGUF file (version 3) with random weights.

    Matrices have 4 bits (Q4_0) or 16, and norms are ones of 32 bits. As in `write_hf`, the matrices
    repeat a number of random blocks cyclically. `tokenizer` is the content of tokenizer.json.
    """
    random = np.random.default_rng(seed)
    matrix_format = MATRICES_Q4_0 if four_bits else MATRICES_F16
    blocks_by_spread = {
        spread: _random_blocks(random, spread, matrix_format)
        for spread in (WEIGHT_SPREAD, OUTPUT_WEIGHT_SPREAD)
    }
    metadata = _gguf_metadata(shape, tokenizer, four_bits)

    tensors = list(list_tensors(shape))
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for key, value_type, value in metadata:
            file.write(_encode_text(key) + _encode_value(value_type, value))

        file.write(_encode_tensor_infos(tensors, matrix_format))
        _align(file)

        for tensor in tensors:
            if tensor.is_vector:
                np.ones(tensor.rows, np.float32).tofile(file)
            else:
                blocks = blocks_by_spread[tensor.spread]
                block_count = tensor.value_count // matrix_format.values_per_block
                _write_cyclic(file, blocks, block_count, int(random.integers(len(blocks))))
            _align(file)


def write_model(
    folder: Path,
    shape: Shape,
    weight_formats: frozenset[str],
    seed: int = 0,
    four_bits: bool = False,
) -> None:
    """Write the folder of a model: its tokenizer, its configuration, and random weights.

    A tokenizer that exists already is kept, because training one of 32,000 words takes a minute.

    Args:
        folder: Where the files go.
        shape: The dimensions of the model.
        weight_formats: The formats of weights to write, "hf" and "gguf". Others write none.
        seed: Draws the weights.
        four_bits: The matrices of the GGUF file have 4 bits instead of 16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_path = folder / "tokenizer.json"
    if tokenizer_path.exists():
        tokenizer = json.loads(tokenizer_path.read_bytes())
    else:
        tokenizer = train_tokenizer(folder, shape.vocabulary)

    (folder / "config.json").write_text(json.dumps(model_config(shape), indent=2))
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": 2})
    )

    if "hf" in weight_formats:
        write_hf(folder, shape, seed)

    if "gguf" in weight_formats:
        write_gguf(folder / "model.gguf", shape, tokenizer, seed, four_bits)


def main() -> None:
    """Write a model and print its size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--form", action="append", choices=("hf", "gguf", "config"))
    parser.add_argument("--context", type=int, help="tokens; of the shape without it")
    parser.add_argument("--smoke", action="store_true", help="a tiny one into a scratch folder")

    args = parser.parse_args()
    if args.out is None and not args.smoke:
        parser.error("OUT is missing: the folder of the model")

    shape = SHAPES[args.shape]
    shape = shape._replace(context=args.context or shape.context)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.out or Path(scratch)
        forms = frozenset(args.form or ("hf", "gguf"))
        write_model(folder, shape, forms, four_bits=args.shape != "tiny")
        files = ", ".join(
            f"{file.name} {file.stat().st_size:,} bytes" for file in sorted(folder.iterdir())
        )

    print(f"{args.shape}: {count_parameters(shape):,} parameters; {files}")


if __name__ == "__main__":
    main()
