"""A model of random weights in the shape of a Llama, made here: nothing is downloaded.

    python benchmarks/gpu/weights.py OUT --shape tiny|7b|70b [--form hf|gguf|config] [--context N] [--smoke]

`hf`: a folder with bfloat16 weights (safetensors) for transformers, vLLM, SGLang and TensorRT-LLM; `config`: the same
without weights, for engines that make their own at random (`--load-format dummy`); `gguf`: a file for llama.cpp with
4-bit weights (Q4_0), of `tiny` with 16 bits. The tokenizer is a byte-level BPE trained on Python's own library. Such a
model costs what a real one of its shape costs, and its answers mean nothing: they end where the limit ends them.
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
PERIOD = 4_000_037  # values; a prime, so that no two rows of a matrix are alike
SPREAD, OUTPUT_SPREAD = (
    0.02,
    0.3,
)  # of weights; wide where the words are chosen, else greedy answers repeat one


class Shape(NamedTuple):
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
    hf: str
    gguf: str
    rows: int
    columns: int  # 0: a vector of ones
    spread: float = SPREAD


def tensors(shape: Shape) -> Iterator[Tensor]:
    """All tensors of the model, under both names."""
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
    yield Tensor("lm_head", "output", shape.vocabulary, size, OUTPUT_SPREAD)


def parameters(shape: Shape) -> int:
    return sum(tensor.rows * (tensor.columns or 1) for tensor in tensors(shape))


def tokenizer(folder: Path, vocabulary: int) -> dict[str, Any]:
    """Train a tokenizer into the folder; returns tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted([*library.glob("*.py"), *library.glob("*/*.py")])[: vocabulary // 32]
    made.train_from_iterator((file.read_text("utf-8", errors="ignore") for file in files), trainer)
    made.save(str(folder / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    read: dict[str, Any] = json.loads((folder / "tokenizer.json").read_bytes())
    return read


def config(shape: Shape) -> dict[str, Any]:
    """config.json of transformers."""
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


def _cycle(file: BinaryIO, values: NDArray[Any], count: int, start: int) -> None:
    """Write `count` values, again and again from the array, beginning at one of them."""
    while count > 0:
        piece = values[start : start + count]
        piece.tofile(file)
        count, start = count - len(piece), 0


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def write_hf(folder: Path, shape: Shape, seed: int) -> None:
    """model.safetensors: bfloat16."""
    random = np.random.default_rng(seed)
    normal = random.standard_normal(PERIOD, np.float32)
    drawn = {spread: _bfloat16(normal * np.float32(spread)) for spread in (SPREAD, OUTPUT_SPREAD)}
    ones = _bfloat16(np.ones(shape.hidden, np.float32))
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors(shape):
        size = 2 * tensor.rows * (tensor.columns or 1)
        dims = [tensor.rows, tensor.columns] if tensor.columns else [tensor.rows]
        head[f"{tensor.hf}.weight"] = {
            "dtype": "BF16",
            "shape": dims,
            "data_offsets": [at, at + size],
        }
        at += size
    packed = json.dumps(head).encode()
    packed += b" " * (-len(packed) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(packed)) + packed)
        for tensor in tensors(shape):
            if tensor.columns:
                start = int(random.integers(PERIOD))
                _cycle(file, drawn[tensor.spread], tensor.rows * tensor.columns, start)
            else:
                ones.tofile(file)


_TEXT, _WHOLE, _SIGNED, _REAL, _YES = 8, 4, 5, 6, 7  # GGUF's types of values


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(kind: int, value: Any) -> bytes:
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(
            _value(kind, one)[4:] for one in value
        )
    packed = (
        _text(value)
        if kind == _TEXT
        else struct.pack({_WHOLE: "<I", _SIGNED: "<i", _REAL: "<f", _YES: "<?"}[kind], value)
    )
    return struct.pack("<I", kind) + packed


def _gguf_head(shape: Shape, words: dict[str, Any], four_bits: bool) -> list[tuple[str, int, Any]]:
    vocabulary = sorted(words["model"]["vocab"].items(), key=lambda pair: pair[1])
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in words["model"]["merges"]
    ]
    names = [token for token, _ in vocabulary] + [
        f"<unused{i}>" for i in range(shape.vocabulary - len(vocabulary))
    ]
    kinds = [3 if name in SPECIAL else 5 if name.startswith("<unused") else 1 for name in names]
    return [
        ("general.architecture", _TEXT, "llama"),
        ("general.name", _TEXT, "random"),
        ("general.alignment", _WHOLE, 32),
        ("general.file_type", _WHOLE, 2 if four_bits else 1),
        ("llama.context_length", _WHOLE, shape.context),
        ("llama.embedding_length", _WHOLE, shape.hidden),
        ("llama.block_count", _WHOLE, shape.layers),
        ("llama.feed_forward_length", _WHOLE, shape.inner),
        ("llama.attention.head_count", _WHOLE, shape.heads),
        ("llama.attention.head_count_kv", _WHOLE, shape.kv_heads),
        ("llama.attention.layer_norm_rms_epsilon", _REAL, 1e-5),
        ("llama.rope.dimension_count", _WHOLE, shape.hidden // shape.heads),
        ("llama.vocab_size", _WHOLE, shape.vocabulary),
        ("tokenizer.ggml.model", _TEXT, "gpt2"),
        ("tokenizer.ggml.pre", _TEXT, "gpt-2"),
        ("tokenizer.ggml.tokens", _TEXT, names),
        ("tokenizer.ggml.token_type", _SIGNED, kinds),
        ("tokenizer.ggml.merges", _TEXT, merges),
        ("tokenizer.ggml.bos_token_id", _WHOLE, 1),
        ("tokenizer.ggml.eos_token_id", _WHOLE, 2),
        ("tokenizer.ggml.add_bos_token", _YES, False),
        ("tokenizer.chat_template", _TEXT, TEMPLATE),
    ]


def write_gguf(path: Path, shape: Shape, words: dict[str, Any], seed: int, four_bits: bool) -> None:
    """A GGUF file (version 3): matrices in Q4_0 or in 16 bits, norms in 32."""
    random = np.random.default_rng(seed)
    head = _gguf_head(shape, words, four_bits)
    matrix_type, block, block_bytes = (2, 32, 18) if four_bits else (1, 1, 2)
    drawn: dict[float, NDArray[Any]] = {}
    for spread in (SPREAD, OUTPUT_SPREAD):
        if four_bits:  # a scale and 32 numbers from -8 to 7
            blocks = random.integers(0, 256, (PERIOD // 32, 18), np.uint8)
            blocks[:, :2] = np.frombuffer(np.float16(spread / 4.6).tobytes(), np.uint8)
            drawn[spread] = blocks
        else:
            drawn[spread] = (random.standard_normal(PERIOD, np.float32) * spread).astype(np.float16)
    infos, at = b"", 0
    all_tensors = list(tensors(shape))
    for tensor in all_tensors:
        dims = (tensor.columns, tensor.rows) if tensor.columns else (tensor.rows,)
        kind = matrix_type if tensor.columns else 0
        infos += _text(f"{tensor.gguf}.weight") + struct.pack(
            f"<I{len(dims)}QIQ", len(dims), *dims, kind, at
        )
        size = (
            tensor.rows * tensor.columns // block * block_bytes
            if tensor.columns
            else 4 * tensor.rows
        )
        at += size + -size % 32
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(all_tensors), len(head)))
        for name, kind, value in head:
            file.write(_text(name) + _value(kind, value))
        file.write(infos)
        file.write(bytes(-file.tell() % 32))
        for tensor in all_tensors:
            if tensor.columns:
                values = drawn[tensor.spread]
                _cycle(
                    file,
                    values,
                    tensor.rows * tensor.columns // block,
                    int(random.integers(len(values))),
                )
            else:
                np.ones(tensor.rows, np.float32).tofile(file)
            file.write(bytes(-file.tell() % 32))


def make(
    folder: Path, shape: Shape, forms: frozenset[str], seed: int = 0, four_bits: bool = False
) -> None:
    """The folder of a model: tokenizer and config always, weights (`hf`) and model.gguf (`gguf`) as asked.

    A tokenizer that is there already, brought along, is kept: training one of 32,000 words takes a minute.
    """
    folder.mkdir(parents=True, exist_ok=True)
    there = folder / "tokenizer.json"
    words = (
        json.loads(there.read_bytes()) if there.exists() else tokenizer(folder, shape.vocabulary)
    )
    (folder / "config.json").write_text(json.dumps(config(shape), indent=2))
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": 2})
    )
    if "hf" in forms:
        write_hf(folder, shape, seed)
    if "gguf" in forms:
        write_gguf(folder / "model.gguf", shape, words, seed, four_bits)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--form", action="append", choices=("hf", "gguf", "config"))
    parser.add_argument("--context", type=int, help="tokens; of the shape without it")
    parser.add_argument("--smoke", action="store_true", help="a tiny one into a scratch folder")
    given = parser.parse_args()
    if given.out is None and not given.smoke:
        parser.error("OUT: where to?")
    shape = SHAPES[given.shape]
    shape = shape._replace(context=given.context or shape.context)
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.out or Path(scratch)
        forms = frozenset(given.form or ("hf", "gguf"))
        make(folder, shape, forms, four_bits=given.shape != "tiny")
        files = ", ".join(
            f"{file.name} {file.stat().st_size:,} bytes" for file in sorted(folder.iterdir())
        )
    print(f"{given.shape}: {parameters(shape):,} parameters; {files}")


if __name__ == "__main__":
    main()
