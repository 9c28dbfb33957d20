"""Tokens of pictures, sounds and files in a prompt, by the rules that the providers publish. Pure.

Sources, as they stood in the autumn of 2026: OpenAI, "Images and vision" (tiles and patches) and "Audio" (a token per
100 ms); Anthropic, "Vision" (squares of 28 pixels) and "PDF support" (1,500 to 3,000 tokens a page). Only the head of a
picture is decoded, for its size.
"""

from __future__ import annotations

import binascii
import math
from bisect import bisect_right
from typing import NamedTuple

UNKNOWN_SIZE = (1024, 1024)  # of a picture that is not in the request: behind a URL, or an id
UNKNOWN_SECONDS = 10.0  # of a sound that is not in the request
AUDIO_TOKENS_PER_S = 10
BYTES_PER_S = 16_000  # of a sound that does not say: 128 kbit/s
FILE_TOKENS = 2250  # of a page, and of a file that is not in the request
PAGE_BYTES = 50_000
HEAD = 1 << 17  # base64 digits that are decoded; before the size of a JPEG there may be a preview


class Tiles(NamedTuple):
    """Fits into 2048 x 2048, then the shorter side to 768; each tile of 512 x 512 has a price, and all a base."""

    base: int
    tile: int

    def tokens(self, width: int, height: int, detail: str) -> int:
        if detail == "low":
            return self.base
        scale = min(1.0, 2048 / max(width, height))
        scale = min(scale, 768 / min(width, height))
        tiles = math.prod(math.ceil(round(side * scale, 6) / 512) for side in (width, height))
        return self.base + self.tile * tiles


class Room(NamedTuple):
    """What a picture is shrunk to: its longer side, and its patches."""

    longest: int
    patches: int


LOW, MIDDLE, HIGH, WIDE = Room(512, 256), Room(2048, 6144), Room(2048, 2500), Room(65_535, 2500)
ORIGINAL, WHOLE = Room(6000, 10_000), Room(65_535, 1 << 30)


class Patches(NamedTuple):
    """Patches of 32 x 32, times a factor of the model. auto: where no detail is asked for; None: as high."""

    factor: float
    high: Room
    original: Room | None = None
    auto: Room | None = None

    def tokens(self, width: int, height: int, detail: str) -> int:
        given = {"low": LOW, "high": self.high, "original": self.original}
        room = given.get(detail, self.auto) or self.high
        scale = min(1.0, room.longest / max(width, height))
        if math.ceil(width * scale / 32) * math.ceil(height * scale / 32) > room.patches:
            scale = math.sqrt(32 * 32 * room.patches / (width * height))
            scale *= min(
                math.floor(side * scale / 32) / (side * scale / 32) for side in (width, height)
            )
        patches = math.prod(math.ceil(round(side * scale / 32, 6)) for side in (width, height))
        return math.ceil(round(min(room.patches, patches) * self.factor, 6))


class Squares(NamedTuple):
    """Squares of 28 x 28, of the largest picture of this shape that has at most `most` within `longest`."""

    longest: int
    most: int

    def tokens(self, width: int, height: int, detail: str) -> int:
        longer, shorter = max(width, height), min(width, height)

        def squares(side: int) -> int:
            across = math.ceil(side / 28)
            down = math.ceil(max(1, round(side * shorter / longer)) / 28)
            return across * down if across * 28 <= self.longest else self.most + 1

        return squares(bisect_right(range(1, longer + 1), self.most, key=squares))


OLDER_CLAUDE = (
    "claude-2",
    "claude-3",
    "claude-haiku-4",
    "claude-opus-4",
    "claude-sonnet-4",
)  # before 4.7
PICTURES: dict[str, Tiles | Patches | Squares] = {
    "": Tiles(85, 170),  # a model of another name: as gpt-4o
    "claude": Squares(2576, 4784),
    **dict.fromkeys(OLDER_CLAUDE, Squares(1568, 1568)),
    "claude-opus-4-7": Squares(2576, 4784),
    "claude-opus-4-8": Squares(2576, 4784),
    "computer-use": Tiles(65, 129),
    "gpt-4.1-mini": Patches(1.62, MIDDLE),
    "gpt-4.1-nano": Patches(2.46, MIDDLE),
    "gpt-4o-mini": Tiles(2833, 5667),
    "gpt-5": Tiles(70, 140),
    "gpt-5-mini": Patches(1.2, MIDDLE),
    "gpt-5-nano": Patches(2.46, MIDDLE),
    "gpt-5.2": Patches(1.2, MIDDLE),
    "gpt-5.3": Patches(1.2, MIDDLE),
    "gpt-5.4": Patches(1.2, HIGH, ORIGINAL),
    "gpt-5.5": Patches(1.2, HIGH, ORIGINAL, ORIGINAL),
    "gpt-5.6": Patches(1.2, WIDE, WHOLE, WHOLE),
    "gpt-6": Patches(1.2, WIDE, WHOLE, WHOLE),
    "o1": Tiles(75, 150),
    "o3": Tiles(75, 150),
    "o4-mini": Patches(1.72, MIDDLE),
}
"""The rule of a model: of the longest of these names with which its own begins."""


def picture_tokens(model: str, size: tuple[int, int], detail: str) -> int:
    """Tokens of a picture of this size. detail: as asked for; "" and "auto" are what the model does without it."""
    name = model.rpartition("/")[2].rpartition("anthropic.")[2]  # as routers and Bedrock write it
    rule = PICTURES[max((known for known in PICTURES if name.startswith(known)), key=len)]
    return rule.tokens(*size, detail)


def picture_size(base64: str) -> tuple[int, int] | None:
    """Width and height of a PNG, GIF, WebP or JPEG; None for what is none of them."""
    data = decoded(base64[:HEAD])
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        found = (_big(data[16:20]), _big(data[20:24]))
    elif data.startswith((b"GIF87a", b"GIF89a")):
        found = (_little(data[6:8]), _little(data[8:10]))
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        found = _webp_size(data)
    else:
        found = _jpeg_size(data) if data.startswith(b"\xff\xd8") else (0, 0)
    return found if min(found) > 0 else None


def sound_tokens(base64: str) -> int:
    """Tokens of a sound: of a WAV by the rate in its head, of another format by a common rate."""
    if not base64:
        return round(UNKNOWN_SECONDS * AUDIO_TOKENS_PER_S)
    head, size = decoded(base64[:64]), len(base64) * 3 // 4
    is_wav = head[:4] == b"RIFF" and head[8:12] == b"WAVE"
    rate = (_little(head[28:32]) if is_wav else 0) or BYTES_PER_S
    return max(1, round(size / rate * AUDIO_TOKENS_PER_S))


def file_tokens(base64: str) -> int:
    """Tokens of a file: a page for each 50 kB, and one at least."""
    return FILE_TOKENS * max(1, round(len(base64) * 3 / 4 / PAGE_BYTES))


def decoded(base64: str) -> bytes:
    """The bytes of the whole groups of `base64`; b"" for what is none."""
    try:
        return binascii.a2b_base64(base64[: len(base64) // 4 * 4])
    except ValueError:
        return b""


def _webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return _little(data[24:27]) + 1, _little(data[27:30]) + 1
    if kind == b"VP8L":
        bits = _little(data[21:25])
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return _little(data[26:28]) & 0x3FFF, _little(data[28:30]) & 0x3FFF


def _jpeg_size(data: bytes) -> tuple[int, int]:
    """From the frame header, which comes after other segments."""
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return _big(data[at + 7 : at + 9]), _big(data[at + 5 : at + 7])
        at += 1 if marker == 0xFF else 2 + _big(data[at + 2 : at + 4])
    return 0, 0


def _big(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")
