"""Tokenizers: they count tokens and list words that are exactly one token each. Only this module uses their libraries.

There are two kinds: the packaged cl100k vocabulary (read from this package, never from a network) and the
`tokenizer.json` of a model. cl100k is loaded when the first text must be counted, because building prompts from the
packaged words needs no counting. This module draws no random numbers and knows no requests.
"""

from __future__ import annotations

import functools
import hashlib
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec import Struct
from msgspec.structs import replace

from loadgen.core.errors import UserError, of_reading

if TYPE_CHECKING:
    import numpy as np

PACKAGED, FILE = "cl100k", "tokenizer.json"
DATA = Path(__file__).parent.parent.parent / "data"
# Of the unpacked files; see data/pack.py.
RANKS_SHA256 = "6bfd43f7b31b50b645b3228413547e662af1ae4801e9b192b9791680a71d650c"
WORDS_SHA256 = "cc6f6eeef36f99dd1f2c2c665936e7fefb5ad9189cbd8013d47a043ede6ba5df"

# Both equal those of tiktoken_ext.openai_public.cl100k_base; a test compares them.
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
SPECIAL = {
    "<|endoftext|>": 100257,
    "<|fim_prefix|>": 100258,
    "<|fim_middle|>": 100259,
    "<|fim_suffix|>": 100260,
    "<|endofprompt|>": 100276,
}

Encode = Callable[[str], list[int]]


class Tokenizer(Struct, frozen=True, kw_only=True):
    """Counts tokens, and lists words from which texts of a given length are built.

    Each of `words` begins with a space and is one token inside a text. Each of `starts` has no space and is one token
    at the beginning of a text and after a space. If `additive`, a start followed by n - 1 words always has n tokens;
    otherwise such a text must be counted.
    """

    tag: Literal["estimate", "tokenizer"]  # the source of the counts (metrics.md)
    name: str
    sha256: str  # of the vocabulary; two runs are comparable only if it is equal
    starts: Sequence[str]
    words: Sequence[str]
    additive: bool
    loaded: Callable[[], Encode]

    @property
    def file_sha256(self) -> str:
        """Of the tokenizer file that the user gave; "" for the packaged vocabulary."""
        return self.sha256 if self.tag == "tokenizer" else ""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; adds and recognises no special tokens. The first call may load the vocabulary."""
        return self.loaded()(text)

    def count(self, text: str) -> int:
        return len(self.encode(text)) if text else 0


def load_tokenizer(spec: str | None = None) -> Tokenizer:
    """Return the packaged tokenizer (None, "" or "cl100k"), or that of a `tokenizer.json`: the file, its folder, or
    ORG/NAME of Hugging Face, from the cache of this host or fetched; its name is then ORG/NAME@COMMIT.

    Raises UserError if the file does not exist or is not a tokenizer, or if the packaged data is damaged.
    """
    if not spec or spec == PACKAGED:
        return packaged_tokenizer()
    if Path(spec).exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", spec):
        return read_tokenizer_file(Path(spec))
    from loadgen.core.workload import hub  # brings all that reads workloads

    snapshot = hub.find_cached_snapshot(spec, "model")
    if snapshot is None or not (snapshot / FILE).is_file():
        snapshot = hub.download_snapshot(spec, "model", [FILE], f"--tokenizer {spec}")
    return replace(read_tokenizer_file(snapshot), name=f"{spec}@{snapshot.name}")


def random_text(tokenizer: Tokenizer, words: int, random: np.random.Generator) -> str:
    """Return a text of so many random words of a tokenizer."""
    start = tokenizer.starts[int(random.integers(len(tokenizer.starts)))]
    numbers = random.integers(len(tokenizer.words), size=words - 1)
    return start + "".join(tokenizer.words[int(number)] for number in numbers)


@functools.cache
def packaged_tokenizer(folder: Path = DATA) -> Tokenizer:
    """The packaged cl100k. On English and code its counts are within 0.1 % of Llama-3 and within 2 % of Qwen3."""
    text = read_packaged_data(folder / "cl100k.words.gz", WORDS_SHA256).decode("ascii")
    return Tokenizer(
        tag="estimate",
        name=PACKAGED,
        sha256=RANKS_SHA256,
        # data/pack.py puts the words first that are also one token without the space
        starts=text.split("\n", 4096)[:4096],
        words=(" " + text.replace("\n", "\n ")).split("\n"),
        additive=True,
        loaded=functools.partial(_cl100k, folder),
    )


@functools.cache
def _cl100k(folder: Path) -> Encode:
    """Build the encoding from the packaged ranks (about 0.15 s); `tiktoken.get_encoding` would use the network."""
    import tiktoken

    packed = read_packaged_data(folder / "cl100k.ranks.gz", RANKS_SHA256)
    ranks: dict[bytes, int] = {}
    offset = 0
    while offset < len(packed):
        end = offset + 1 + packed[offset]
        ranks[packed[offset + 1 : end]] = len(ranks)
        offset = end
    return tiktoken.Encoding(
        PACKAGED, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=SPECIAL
    ).encode_ordinary


def read_packaged_data(path: Path, sha256: str) -> bytes:
    hint = "the installation is damaged: install loadgen again"
    try:
        content = zlib.decompress(path.read_bytes(), wbits=31)
    except (OSError, zlib.error) as error:
        raise UserError(
            of_reading(error), f"the packaged vocabulary cannot be read: {error}", str(path), hint
        ) from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(
            "changed_file",
            "the packaged vocabulary is not the one that belongs to this version",
            str(path),
            hint,
        )
    return content


def read_tokenizer_file(path: Path) -> Tokenizer:
    """Read a `tokenizer.json` (or the folder that contains one) and find its one-token words. Raises UserError."""
    file = path / FILE if path.is_dir() else path
    hint = 'name a tokenizer.json, the folder that holds it, ORG/NAME of Hugging Face, or "cl100k"'
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(
            of_reading(error), f"no tokenizer there: {error.strerror}", str(file), hint
        ) from None
    import tokenizers

    try:
        model = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception for any unreadable input
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            "wrong_format", f"not a tokenizer.json: {message}", str(file), hint
        ) from None
    model.no_truncation()
    model.no_padding()

    def encode(message: str) -> list[int]:
        ids: list[int] = model.encode(message, add_special_tokens=False).ids
        return ids

    def lengths(texts: list[str]) -> list[int]:
        return [
            len(encode(text)) for text in texts
        ]  # a batch would start threads: no process could build bodies then

    starts, words = _one_token_words(_candidates(model.get_vocab()), lengths)
    if not words or not starts:
        raise UserError(
            "unsupported",
            "this tokenizer has no word of two letters or more that is one token",
            str(file),
            hint,
        )
    return Tokenizer(
        tag="tokenizer",
        name=file.name if path.is_file() else path.name,
        sha256=hashlib.sha256(content).hexdigest(),
        starts=starts,
        words=words,
        additive=False,
        loaded=lambda: encode,
    )


def _candidates(vocabulary: dict[str, int]) -> list[str]:
    """Words of the vocabulary that may be one token (at most 16,384, lowest ids first)."""
    # with the space marks of byte-level, SentencePiece and older BPE vocabularies
    pattern = re.compile(r"[Ġ▁ ]?([a-z]{2,})(?:</w>)?")
    matches = (pattern.fullmatch(token) for token in sorted(vocabulary, key=vocabulary.__getitem__))
    return list(dict.fromkeys(match[1] for match in matches if match))[:16_384]


def _one_token_words(
    candidates: list[str], lengths: Callable[[list[str]], list[int]]
) -> tuple[list[str], list[str]]:
    """Return (starts, words) of the candidates that are one token each inside a text.

    A word is tested twice after an anchor word, a start before a tested word.
    """
    if not candidates:
        return [], []
    single_lengths = lengths(candidates)
    anchor = candidates[single_lengths.index(min(single_lengths))]
    anchor_tokens = min(single_lengths)
    lengths_inside = lengths([f"{anchor} {word} {word}" for word in candidates])
    words = [
        word for word, n in zip(candidates, lengths_inside, strict=True) if n == anchor_tokens + 2
    ]
    if not words:
        return [], []
    lengths_as_start = lengths([f"{word} {words[0]}" for word in words])
    starts = [word for word, n in zip(words, lengths_as_start, strict=True) if n == 2]
    return starts, [" " + word for word in words]
