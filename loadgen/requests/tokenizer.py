"""The one room that knows tokenizers: it counts tokens, and knows the words that are exactly one token each.

Two kinds: the packaged cl100k vocabulary (read from this package, never from a network) and a model's own
`tokenizer.json`. Neither is loaded before the first text has to be counted, because building prompts from the packaged
words needs no counting. Nothing here draws random numbers or knows requests.
"""

from __future__ import annotations

import functools
import hashlib
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loadgen.errors import UserError

PACKAGED = "cl100k"
DATA = Path(__file__).parent.parent / "data"
RANKS_SHA256 = (
    "6bfd43f7b31b50b645b3228413547e662af1ae4801e9b192b9791680a71d650c"  # of the unpacked file; see data/pack.py
)
WORDS_SHA256 = "cc6f6eeef36f99dd1f2c2c665936e7fefb5ad9189cbd8013d47a043ede6ba5df"

# Both as in tiktoken_ext.openai_public.cl100k_base; a test holds them against it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """Counts tokens, and offers the words to build texts of a wanted length from.

    `words` are one token each inside a text, written with their leading space; `starts` are one token each at the
    beginning of a text (written without space), and after a space as well. With `additive` a start followed by n - 1
    words is n tokens by construction; otherwise such a text has to be counted.
    """

    tag: Literal["estimate", "tokenizer"]  # whose counts these are (metrics.md)
    name: str
    sha256: str  # of the vocabulary: part of what makes two runs comparable
    starts: Sequence[str]
    words: Sequence[str]
    additive: bool
    loaded: Callable[[], Encode]

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens neither added nor recognised. The first call may load the vocabulary."""
        return self.loaded()(text)

    def count(self, text: str) -> int:
        return len(self.encode(text)) if text else 0


def load_tokenizer(spec: str | None = None) -> Tokenizer:
    """Return the packaged tokenizer (None, "" or "cl100k"), or that of a `tokenizer.json`: the file, or its folder.

    Raises UserError when there is no such file, it is not a tokenizer, or the packaged data is damaged.
    """
    return local(Path(spec)) if spec and spec != PACKAGED else packaged()


@functools.cache
def packaged() -> Tokenizer:
    """cl100k: its counts equal Llama-3's within 0.1 % and Qwen3's within 2 % on English and code."""
    words = _unpacked("cl100k.words.gz", WORDS_SHA256).decode("ascii").split("\n")
    return Tokenizer(
        tag="estimate",
        name=PACKAGED,
        sha256=RANKS_SHA256,
        starts=words[:4096],  # data/pack.py puts those first that are one token without their space too
        words=[" " + word for word in words],
        additive=True,
        loaded=_cl100k,
    )


@functools.cache
def _cl100k() -> Encode:
    """Build the encoding from the packaged ranks (about 0.15 s); `tiktoken.get_encoding` would go to the network."""
    import tiktoken

    packed = _unpacked("cl100k.ranks.gz", RANKS_SHA256)
    ranks: dict[bytes, int] = {}
    at = 0
    while at < len(packed):
        end = at + 1 + packed[at]
        ranks[packed[at + 1 : end]] = len(ranks)
        at = end
    return tiktoken.Encoding(PACKAGED, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=SPECIAL).encode_ordinary


def _unpacked(name: str, sha256: str) -> bytes:
    path = DATA / name
    hint = "the installation is damaged: install loadgen again"
    try:
        content = zlib.decompress(path.read_bytes(), wbits=31)
    except (OSError, zlib.error) as error:
        raise UserError(f"the packaged vocabulary cannot be read: {error}", str(path), hint) from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError("the packaged vocabulary is not the one that belongs to this version", str(path), hint)
    return content


def local(path: Path) -> Tokenizer:
    """Read a `tokenizer.json` (or the folder that holds one) and find its one-token words."""
    file = path / "tokenizer.json" if path.is_dir() else path
    hint = 'name a tokenizer.json, the folder that holds it, or "cl100k"; nothing is downloaded'
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"no tokenizer there: {error.strerror}", str(file), hint) from None
    import tokenizers

    try:
        model = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception for whatever it cannot read
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"not a tokenizer.json: {text}", str(file), hint) from None
    model.no_truncation()
    model.no_padding()

    def encode(text: str) -> list[int]:
        ids: list[int] = model.encode(text, add_special_tokens=False).ids
        return ids

    def lengths(texts: list[str]) -> list[int]:
        return [len(one.ids) for one in model.encode_batch(texts, add_special_tokens=False)]

    starts, words = _one_token_words(_candidates(model.get_vocab()), lengths)
    if not words or not starts:
        raise UserError("this tokenizer has no word of two letters or more that is one token", str(file), hint)
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
    """Plain words that may be one token: of the vocabulary itself (at most 16,384, lowest ids first)."""
    word = re.compile(
        r"[Ġ▁ ]?([a-z]{2,})(?:</w>)?"
    )  # the marks of byte-level, SentencePiece and older BPE vocabularies
    found = (word.fullmatch(token) for token in sorted(vocabulary, key=vocabulary.__getitem__))
    return list(dict.fromkeys(match[1] for match in found if match))[:16_384]


def _one_token_words(candidates: list[str], lengths: Callable[[list[str]], list[int]]) -> tuple[list[str], list[str]]:
    """Keep what is one token in a joined text: first the words (twice after an anchor), then the starts before one."""
    if not candidates:
        return [], []
    alone = lengths(candidates)
    anchor = candidates[alone.index(min(alone))]
    base = min(alone)
    inner = lengths([f"{anchor} {word} {word}" for word in candidates])
    words = [word for word, n in zip(candidates, inner, strict=True) if n == base + 2]
    if not words:
        return [], []
    opened = lengths([f"{word} {words[0]}" for word in words])
    starts = [word for word, n in zip(words, opened, strict=True) if n == 2]
    return starts, [" " + word for word in words]
