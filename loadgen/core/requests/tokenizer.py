"""Tokenizers count tokens and list words that are exactly one token each.

There are two kinds: the packaged cl100k vocabulary, which is read from this package and never from
a network, and the `tokenizer.json` of a model. Only this module uses the libraries of tokenizers.
"""

from __future__ import annotations

import functools
import hashlib
import io
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from loadgen.core.errors import UserError, of_reading

if TYPE_CHECKING:
    import numpy as np

PACKAGED_NAME = "cl100k"
TOKENIZER_FILE = "tokenizer.json"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # ORG/NAME

DATA = Path(__file__).parent.parent.parent / "data"
RANKS_FILE = "cl100k.ranks.gz"
WORDS_FILE = "cl100k.words.gz"
# The hashes of the unpacked files; see data/pack.py.
RANKS_SHA256 = "6bfd43f7b31b50b645b3228413547e662af1ae4801e9b192b9791680a71d650c"
WORDS_SHA256 = "cc6f6eeef36f99dd1f2c2c665936e7fefb5ad9189cbd8013d47a043ede6ba5df"
START_WORD_COUNT = 4096
"""So many words at the beginning of WORDS_FILE are one token without a space before them, too."""

MAX_WORDS = 16_384
"""Most words that are taken from the vocabulary of a model."""

# A word may have the mark for a space before it: "Ġ" in byte-level vocabularies, "▁" in those of
# SentencePiece. Older BPE vocabularies mark the end of a word with "</w>".
_WORD_TOKEN = re.compile(r"[Ġ▁ ]?(?P<word>[a-z]{2,})(?:</w>)?")

# PATTERN and SPECIAL equal those of tiktoken_ext.openai_public.cl100k_base; a test compares them.
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

TOKENIZER_HINT = (
    "use the path of a tokenizer.json, the folder that holds it, ORG/NAME of Hugging "
    'Face, or "cl100k"'
)

GZIP_WINDOW_BITS = 31  # zlib expects the header of gzip.

Encode = Callable[[str], list[int]]
"""A function that returns the token ids of a text."""


class Tokenizer(Struct, frozen=True, kw_only=True):
    """A tokenizer, and words from which texts of a given number of tokens can be built.

    Attributes:
        tag: How counts of this tokenizer are called in results: those of the packaged vocabulary
            are estimates.
        name: The name that reports show.
        sha256: The hash of the vocabulary. Two runs can be compared only if it is equal.
        start_words: Words without a space that are one token at the start of a text and after a
            space.
        inner_words: Words that begin with a space and are one token inside a text.
        is_additive: Whether a start word followed by n - 1 inner words always has n tokens.
            Otherwise such a text must be counted.
        load_encode: Returns the function that encodes a text. Its first call may take a while.
    """

    tag: Literal["estimate", "tokenizer"]
    name: str
    sha256: str
    start_words: Sequence[str]
    inner_words: Sequence[str]
    is_additive: bool
    load_encode: Callable[[], Encode]

    @property
    def file_sha256(self) -> str:
        """The hash of the tokenizer file of the user, or "" for the packaged vocabulary."""
        return self.sha256 if self.tag == "tokenizer" else ""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without adding or recognizing special tokens."""
        return self.load_encode()(text)

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self.encode(text)) if text else 0


def load_tokenizer(spec: str | None = None) -> Tokenizer:
    """Return the packaged tokenizer or the tokenizer of a model.

    Args:
        spec: A `tokenizer.json`, the folder that contains it, or ORG/NAME of Hugging Face, which is
            read from the cache of this host or downloaded. None, "" and "cl100k" mean the packaged
            tokenizer.

    Raises:
        UserError: The file does not exist or is no tokenizer, or the packaged data is damaged.
    """
    if not spec or spec == PACKAGED_NAME:
        return packaged_tokenizer()
    if Path(spec).exists() or not HUB_NAME.fullmatch(spec):
        return read_tokenizer_file(Path(spec))

    # Imports all modules that read workloads, which workers do not need.
    from loadgen.core.workload import hub

    snapshot = hub.find_cached_snapshot(spec, "model")
    if snapshot is None or not (snapshot / TOKENIZER_FILE).is_file():
        snapshot = hub.download_snapshot(spec, "model", [TOKENIZER_FILE], f"--tokenizer {spec}")

    return replace(read_tokenizer_file(snapshot), name=f"{spec}@{snapshot.name}")


def random_text(tokenizer: Tokenizer, word_count: int, random: np.random.Generator) -> str:
    """Return a text of `word_count` random words of a tokenizer, at least one."""
    start_index = int(random.integers(len(tokenizer.start_words)))
    inner_indexes = random.integers(len(tokenizer.inner_words), size=word_count - 1)
    inner_words = [tokenizer.inner_words[int(index)] for index in inner_indexes]
    return tokenizer.start_words[start_index] + "".join(inner_words)


# -- the packaged vocabulary ----------------------------------------------------------------------


@functools.cache
def packaged_tokenizer(folder: Path = DATA) -> Tokenizer:
    """Return the packaged cl100k tokenizer, an estimate for models whose tokenizer is not known.

    Its counts of English and code are within 0.1 % of those of Llama 3 and within 2 % of Qwen 3.

    Args:
        folder: The folder with the vocabulary, and with the words that prompts are generated from.
    """
    content = read_packaged_data(folder / WORDS_FILE, WORDS_SHA256).decode("ascii")
    packaged_words = content.split("\n")
    return Tokenizer(
        tag="estimate",  # Results call its counts estimates.
        name=PACKAGED_NAME,
        sha256=RANKS_SHA256,  # The vocabulary identifies the tokenizer, not the list of words.
        # Every word is one token after a space. Only the first words are one token without it.
        start_words=packaged_words[:START_WORD_COUNT],
        inner_words=[" " + word for word in packaged_words],
        # cl100k splits texts at spaces, so it never merges two of these words.
        is_additive=True,
        # The vocabulary is only read to encode a text. Building prompts from words needs no counts.
        load_encode=functools.partial(_load_packaged_encode, folder),
    )


@functools.cache
def _load_packaged_encode(folder: Path) -> Encode:
    """Return the function that encodes a text with the packaged cl100k vocabulary.

    Building it takes about 0.15 s. The public way to get this encoding, `tiktoken.get_encoding`,
    would download the vocabulary.
    """
    import tiktoken

    packed_tokens = read_packaged_data(folder / RANKS_FILE, RANKS_SHA256)
    # The id (rank) of a token is its position in the file.
    ranks = {token: rank for rank, token in enumerate(_unpack_tokens(packed_tokens))}
    encoding = tiktoken.Encoding(
        PACKAGED_NAME, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=SPECIAL
    )
    return encoding.encode_ordinary


def _unpack_tokens(packed_tokens: bytes) -> Iterator[bytes]:
    """Yield the tokens of a packed vocabulary, where each has its length before it in one byte."""
    stream = io.BytesIO(packed_tokens)
    while length_byte := stream.read(1):
        yield stream.read(length_byte[0])


def read_packaged_data(path: Path, sha256: str) -> bytes:
    """Return the content of a gzip file that this package contains, such as its vocabulary.

    Raises UserError if the file cannot be read, or if its content does not have the hash `sha256`,
    which means that it belongs to another version of the package.
    """
    hint = "reinstall loadgen, because its installation is damaged"
    try:
        content = zlib.decompress(path.read_bytes(), wbits=GZIP_WINDOW_BITS)
    except (OSError, zlib.error) as error:
        problem = f"the packaged vocabulary cannot be read: {error}"
        error_code = of_reading(error)
        raise UserError(error_code, problem, str(path), hint) from None

    if hashlib.sha256(content).hexdigest() != sha256:
        problem = "the packaged vocabulary does not belong to this version of loadgen"
        raise UserError("changed_file", problem, str(path), hint)

    return content


# -- the tokenizer of a model ---------------------------------------------------------------------


def read_tokenizer_file(path: Path) -> Tokenizer:
    """Read the tokenizer of a model from a `tokenizer.json`, or the folder that contains one.

    Raises UserError if there is no tokenizer, or if it has no words that are one token each.
    Prompts are generated from such words.
    """
    file = path / TOKENIZER_FILE if path.is_dir() else path
    content = _read_file(file)
    model = _parse_model(content, file)

    def encode(text: str) -> list[int]:
        ids: list[int] = model.encode(text, add_special_tokens=False).ids
        return ids

    one_token_words = _find_one_token_words(_candidate_words(model.get_vocab()), encode)
    if not one_token_words.inner_words or not one_token_words.start_words:
        problem = (
            "this tokenizer has no single-token word of two or more letters, "
            "so no prompts can be generated with it"
        )
        raise UserError("unsupported", problem, str(file), TOKENIZER_HINT)

    return Tokenizer(
        tag="tokenizer",
        name=file.name if path.is_file() else path.name,
        sha256=hashlib.sha256(content).hexdigest(),
        start_words=one_token_words.start_words,
        inner_words=one_token_words.inner_words,
        is_additive=False,  # It may merge words with their neighbours.
        load_encode=lambda: encode,  # The model is loaded already.
    )


def _read_file(file: Path) -> bytes:
    """Return the bytes of a tokenizer file. Raises UserError if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        problem = f"there is no tokenizer here: {error.strerror}"
        raise UserError(of_reading(error), problem, str(file), TOKENIZER_HINT) from None


def _parse_model(content: bytes, file: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a file. Raises UserError if it is no tokenizer."""
    import tokenizers

    try:
        model = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # The library raises a bare Exception for any unreadable input.
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        problem = f"not a valid tokenizer.json: {message}"
        raise UserError("wrong_format", problem, str(file), TOKENIZER_HINT) from None

    model.no_truncation()
    model.no_padding()
    return model


def _candidate_words(vocabulary: dict[str, int]) -> list[str]:
    """Return words of a vocabulary that may be one token, those with the lowest ids first.

    In most vocabularies, low ids are frequent words. `vocabulary` has the id of each token.
    """
    tokens_by_id = sorted(vocabulary, key=vocabulary.__getitem__)
    matches = (_WORD_TOKEN.fullmatch(token) for token in tokens_by_id)
    vocabulary_words = [match["word"] for match in matches if match]
    distinct_words = list(dict.fromkeys(vocabulary_words))  # Unlike a set, this keeps their order.
    return distinct_words[:MAX_WORDS]


class _OneTokenWords(NamedTuple):
    """Words that are one token at the start of a text, and words that are one token inside it."""

    start_words: list[str]
    inner_words: list[str]


def _find_one_token_words(candidates: list[str], encode: Encode) -> _OneTokenWords:
    """Return which words are one token inside a text, and which of those also at its start.

    Prompts are built from such words, because a text of them has a known number of tokens.
    """

    def count_tokens(text: str) -> int:
        # The batch method of the library would start threads. This process could then not be
        # forked for building bodies, so texts are encoded one by one.
        return len(encode(text))

    inner_words = _select_inner_words(candidates, count_tokens)
    start_words = _select_start_words(inner_words, count_tokens)
    return _OneTokenWords(start_words, [f" {word}" for word in inner_words])


def _select_inner_words(candidates: list[str], count_tokens: Callable[[str], int]) -> list[str]:
    """Return the candidates that are one token inside a text, whatever word is before them.

    The token count of a word alone does not show this, because a tokenizer may merge a word with
    the text around it. So each candidate is counted twice in a row after another word, the anchor:
    if "time" is one token, and "time house house" is three, "house" is such a word.
    """
    if not candidates:
        return []

    # The candidate with the fewest tokens is the least likely to merge with other words.
    anchor = min(candidates, key=count_tokens)
    expected_tokens = count_tokens(anchor) + 2
    return [
        word for word in candidates if count_tokens(f"{anchor} {word} {word}") == expected_tokens
    ]


def _select_start_words(inner_words: list[str], count_tokens: Callable[[str], int]) -> list[str]:
    """Return the words that are one token at the start of a text, where no space is before them.

    A word is tested together with a word after it, because a tokenizer may add something to a word
    that stands alone. The second word is one token, as all `inner_words` are inside a text. So if
    "house water" is two tokens, "house" is the other one.
    """
    if not inner_words:
        return []
    second_word = inner_words[0]
    return [word for word in inner_words if count_tokens(f"{word} {second_word}") == 2]
