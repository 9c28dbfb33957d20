"""Packs the vocabulary of the files in this directory: `python pack.py cl100k_base.tiktoken`.

It is not used at run time. The input is the published rank file of cl100k_base. Its SHA-256 is
checked, so that everybody gets the same files.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
import sys
from pathlib import Path

PUBLISHED_SHA256 = "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
"""The hash of the rank file, as pinned in tiktoken."""
WORD_COUNT = 16_384
"""The words that are packed. With a power of two, 16 random bits choose a word without bias."""
FIRST_WORD_COUNT = 4_096
"""Of these, the words that are one token without a leading space, too."""

EXCLUDED_HASHES = """
0033728f 0508a634 0632813d 071254f2 08775183 08a841e9 0bcc639f 0f28c496 102626ea 119a07e7 11cf8376
120f6e5b 12a667c9 130229cd 13a465fc 158869a9 16ea09fc 1d0864b8 1d4761ce 1f5758ae 205063ee 2062f800
2166cdf8 25390976 2944474a 2a6060b5 2a6937d7 2b865e9b 2bda9b4d 2c32c156 2d66da9f 2f34b7a4 31506a84
32c2aaad 33740da8 345e2468 38012c26 39b37b37 3b6f250d 3c50fceb 3ca67c82 405fd93a 4140197e 41d882eb
4426e54c 460ed72c 489a8455 4d262fbd 4dc94185 522788b6 52a29815 5304378d 566f532d 575a0729 586acb3c
594810ad 59cc3cb8 5a020aa8 5a36615e 5a5a6b12 5a9d9dce 5b6b791f 61dd29f2 6556c1a5 6577be77 665cb762
6672b930 6a1434ee 6ac3c336 6ada028b 6adc452d 6ccffa49 6d899981 6ef9d9fd 70a4ce37 70aafb42 70fc4b74
737dd1bc 74305616 75e78d45 787f20c1 78a00d18 7902e270 796e43a5 7d2969e3 7e372b9f 7e85c676 7f5a9ba1
7fcbaa12 82d243e8 83ebccea 84f3d3e1 85880eee 85fc17f7 867d7897 8693f216 89133bc0 8a7f0572 8b7d3d77
8bbe1842 8c5c0439 8f5083e3 937d56e4 94a2b576 94f1883b 9557070a 984979b9 986c9900 98b52c4b 98d44e13
9915ba2d 99e367bc 9a22e5ed 9a4eac2d 9ae315a9 9ddcab3a 9f3a8f72 a1c1a3b7 a2d3fcd6 a3686065 a448294a
a4c7815e a52ff550 a6ee0e6b a76d588d a9f41dff aa0ab19b ab26f696 ac17e2db ac3180d2 ad505b0b ade74a96
affc8757 b3d1c062 b578aac0 b690cdbe b9c4682d ba6fb01a ba7463ed baa9c153 bb61ef40 bd331fb1 bd778891
bdb1cc25 be2db2bf c183fffb c2c3b68b c3de533e c549addc c8bd849e c91d7a20 c94b2acc c9f3c15a cbbd0f71
cc020323 cd2eb083 d0a32ecf d11f3961 d5405925 d75a838d d92f4cf1 db775d1d dcb50ee3 dcd2ee35 dd32831e
dd92623b e1490e2a e273db21 e3dc18bf e512a055 e5fa9445 e6836793 e9143a29 e99d5524 ebc98c1e ed45d626
efac1343 eff26b18 f32a17ff f32c13a3 f50c51ed f59e28f8 f6952d6e f6a9dcb1 f9d0d9b1 fa1597ae fbcaa22d
fc3086f6 fd70ad90
"""
"""The beginning of the SHA-256 of words that do not belong in a prompt.

Hashes are listed in place of the words, so that nobody has to read them.
"""


def read_tokens(rank_file: bytes) -> list[bytes]:
    """Return the tokens of a rank file in order of rank. Raises ValueError if a rank is missing."""
    tokens = []
    for expected_rank, line in enumerate(rank_file.splitlines()):
        token, rank = line.split()
        if int(rank) != expected_rank:
            raise ValueError(f"rank {expected_rank} is missing")
        tokens.append(base64.b64decode(token))
    return tokens


def pack_tokens(tokens: list[bytes]) -> bytes:
    """Return tokens as bytes: for each one a byte with its length, and the token itself."""
    return b"".join(bytes([len(token)]) + token for token in tokens)


def select_words(tokens: list[bytes]) -> list[str]:
    """Return WORD_COUNT English words that are one token each with a leading space.

    They are lower-case words of three letters or more. The ones with the lowest ranks, which are
    the most frequent, come first. The first FIRST_WORD_COUNT of them are also one token without the
    space, so that a text can begin with them.
    """
    known_tokens = set(tokens)
    excluded_hashes = set(EXCLUDED_HASHES.split())
    candidates = []
    for token in tokens:
        word = token.removeprefix(b" ")
        is_word = re.fullmatch(rb" [a-z]{3,}", token) is not None
        if is_word and hashlib.sha256(word).hexdigest()[:8] not in excluded_hashes:
            candidates.append(word.decode())
    first_words = [word for word in candidates if word.encode() in known_tokens][:FIRST_WORD_COUNT]
    already_selected = set(first_words)
    other_words = [word for word in candidates if word not in already_selected]
    return (first_words + other_words)[:WORD_COUNT]


def main() -> None:
    """Write the two packed files beside this script, and print their hashes."""
    rank_file = Path(sys.argv[1]).read_bytes()
    if hashlib.sha256(rank_file).hexdigest() != PUBLISHED_SHA256:
        sys.exit("this is not the published cl100k_base.tiktoken")
    tokens = read_tokens(rank_file)
    contents = {
        "cl100k.ranks": pack_tokens(tokens),
        "cl100k.words": "\n".join(select_words(tokens)).encode(),
    }
    for name, content in contents.items():
        path = Path(__file__).with_name(f"{name}.gz")
        path.write_bytes(gzip.compress(content, 9, mtime=0))
        print(name, hashlib.sha256(content).hexdigest())


if __name__ == "__main__":
    main()
