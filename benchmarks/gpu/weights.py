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


class Tensor(NamedTuple):
    """A tensor, with its names in both formats and its dimensions."""

    hf: str
    gguf: str
    rows: int
    columns: int  # 0: a vector of ones
    spread: float = WEIGHT_SPREAD


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
    return sum(tensor.rows * (tensor.columns or 1) for tensor in list_tensors(shape))


def train_tokenizer(folder: Path, vocabulary: int) -> dict[str, Any]:
    """Train a tokenizer into the folder and return tokenizer.json."""
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
    files = sorted([*library.glob("*.py"), *library.glob("*/*.py")])[: vocabulary // 32]
    bpe.train_from_iterator((file.read_text("utf-8", errors="ignore") for file in files), trainer)
    bpe.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    trained: dict[str, Any] = json.loads((folder / "tokenizer.json").read_bytes())
    return trained


def model_config(shape: Shape) -> dict[str, Any]:
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
    """Write `count` values of an array, cyclically, from a start index."""
    while count > 0:
        piece = values[position : position + count]
        piece.tofile(file)
        count, position = count - len(piece), 0


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the upper 16 bits of float32 values."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def write_hf(folder: Path, shape: Shape, seed: int) -> None:
    """Write model.safetensors with bfloat16 weights."""
    random = np.random.default_rng(seed)
    normal = random.standard_normal(VALUE_PERIOD, np.float32)
    values_by_spread = {
        spread: _to_bfloat16(normal * np.float32(spread))
        for spread in (WEIGHT_SPREAD, OUTPUT_WEIGHT_SPREAD)
    }
    ones = _to_bfloat16(np.ones(shape.hidden, np.float32))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in list_tensors(shape):
        size = 2 * tensor.rows * (tensor.columns or 1)
        dimensions = [tensor.rows, tensor.columns] if tensor.columns else [tensor.rows]
        header[f"{tensor.hf}.weight"] = {
            "dtype": "BF16",
            "shape": dimensions,
            "data_offsets": [offset, offset + size],
        }
        offset += size
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header_bytes)) + header_bytes)
        for tensor in list_tensors(shape):
            if tensor.columns:
                start = int(random.integers(VALUE_PERIOD))
                _write_cyclic(
                    file, values_by_spread[tensor.spread], tensor.rows * tensor.columns, start
                )
            else:
                ones.tofile(file)


_STRING, _UINT32, _INT32, _FLOAT32, _BOOL = 8, 4, 5, 6, 7  # GGUF's types of values


def _encode_text(text: str) -> bytes:
    """Encode a string of GGUF."""
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _encode_value(value_type: int, value: Any) -> bytes:
    """Encode a value of GGUF with its type."""
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, value_type, len(value)) + b"".join(
            _encode_value(value_type, item)[4:] for item in value
        )
    packed = (
        _encode_text(value)
        if value_type == _STRING
        else struct.pack(
            {_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "<?"}[value_type], value
        )
    )
    return struct.pack("<I", value_type) + packed


def _gguf_metadata(
    shape: Shape, tokenizer: dict[str, Any], four_bits: bool
) -> list[tuple[str, int, Any]]:
    """Return the metadata of the file as (key, type, value)."""
    vocabulary = sorted(tokenizer["model"]["vocab"].items(), key=lambda pair: pair[1])
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]
    ]
    names = [token for token, _ in vocabulary] + [
        f"<unused{i}>" for i in range(shape.vocabulary - len(vocabulary))
    ]
    token_types = [
        3 if name in SPECIAL else 5 if name.startswith("<unused") else 1 for name in names
    ]
    return [
        ("general.architecture", _STRING, "llama"),
        ("general.name", _STRING, "random"),
        ("general.alignment", _UINT32, 32),
        ("general.file_type", _UINT32, 2 if four_bits else 1),
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
        ("tokenizer.ggml.tokens", _STRING, names),
        ("tokenizer.ggml.token_type", _INT32, token_types),
        ("tokenizer.ggml.merges", _STRING, merges),
        ("tokenizer.ggml.bos_token_id", _UINT32, 1),
        ("tokenizer.ggml.eos_token_id", _UINT32, 2),
        ("tokenizer.ggml.add_bos_token", _BOOL, False),
        ("tokenizer.chat_template", _STRING, TEMPLATE),
    ]


def write_gguf(
    path: Path, shape: Shape, tokenizer: dict[str, Any], seed: int, four_bits: bool
) -> None:
    """Write a GGUF file (version 3): matrices in Q4_0 or in 16 bits, norms in 32."""
    random = np.random.default_rng(seed)
    metadata = _gguf_metadata(shape, tokenizer, four_bits)
    matrix_type, block, block_bytes = (2, 32, 18) if four_bits else (1, 1, 2)
    values_by_spread: dict[float, NDArray[Any]] = {}
    for spread in (WEIGHT_SPREAD, OUTPUT_WEIGHT_SPREAD):
        if four_bits:  # a scale and 32 numbers from -8 to 7
            blocks = random.integers(0, 256, (VALUE_PERIOD // 32, 18), np.uint8)
            blocks[:, :2] = np.frombuffer(np.float16(spread / 4.6).tobytes(), np.uint8)
            values_by_spread[spread] = blocks
        else:
            values_by_spread[spread] = (
                random.standard_normal(VALUE_PERIOD, np.float32) * spread
            ).astype(np.float16)
    infos, offset = b"", 0
    all_tensors = list(list_tensors(shape))
    for tensor in all_tensors:
        dimensions = (tensor.columns, tensor.rows) if tensor.columns else (tensor.rows,)
        tensor_type = matrix_type if tensor.columns else 0
        infos += _encode_text(f"{tensor.gguf}.weight") + struct.pack(
            f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, tensor_type, offset
        )
        size = (
            tensor.rows * tensor.columns // block * block_bytes
            if tensor.columns
            else 4 * tensor.rows
        )
        offset += size + -size % 32
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(all_tensors), len(metadata)))
        for name, tensor_type, value in metadata:
            file.write(_encode_text(name) + _encode_value(tensor_type, value))
        file.write(infos)
        file.write(bytes(-file.tell() % 32))
        for tensor in all_tensors:
            if tensor.columns:
                values = values_by_spread[tensor.spread]
                _write_cyclic(
                    file,
                    values,
                    tensor.rows * tensor.columns // block,
                    int(random.integers(len(values))),
                )
            else:
                np.ones(tensor.rows, np.float32).tofile(file)
            file.write(bytes(-file.tell() % 32))


def write_model(
    folder: Path, shape: Shape, forms: frozenset[str], seed: int = 0, four_bits: bool = False
) -> None:
    """Write the folder of a model: tokenizer and config always, weights as `forms` says.

    A tokenizer that exists already is kept, because training one of 32,000 words takes a minute.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_path = folder / "tokenizer.json"
    tokenizer = (
        json.loads(tokenizer_path.read_bytes())
        if tokenizer_path.exists()
        else train_tokenizer(folder, shape.vocabulary)
    )
    (folder / "config.json").write_text(json.dumps(model_config(shape), indent=2))
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": 2})
    )
    if "hf" in forms:
        write_hf(folder, shape, seed)
    if "gguf" in forms:
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
        parser.error("OUT: where to?")
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
