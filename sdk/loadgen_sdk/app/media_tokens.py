"""Tokens of images, audio and files in a prompt, by the rules that the providers publish. Pure.

Sources, as of autumn 2026: OpenAI, "Images and vision" (tiles and patches) and "Audio" (a token per
100 ms); Anthropic, "Vision" (squares of 28 pixels) and "PDF support" (1,500 to 3,000 tokens a
page). Only the head of an image is decoded, because its size is enough.
"""

from __future__ import annotations

import binascii
import math
from bisect import bisect_right
from typing import NamedTuple


class ImageSize(NamedTuple):
    """The size of an image in pixels."""

    width: int
    height: int


UNKNOWN_SIZE = ImageSize(1024, 1024)
"""Assumed for an image that is not in the request, but behind a URL or an id."""

_UNKNOWN_AUDIO_S = 10.0
"""Assumed for audio that is not in the request."""

_AUDIO_TOKENS_PER_S = 10
_AUDIO_BYTES_PER_S = 16_000
"""Assumed for audio whose format does not tell its rate: 128 kbit/s."""

_TOKENS_PER_PAGE = 2250
"""The middle of the range that Anthropic publishes. A file outside the request has one page."""

_BYTES_PER_PAGE = 50_000
_MAX_HEAD_CHARS = 1 << 17
"""How much base64 of an image is decoded. A preview may come before the size of a JPEG."""

_ROUNDING_DIGITS = 6
"""Sizes are rounded to this many digits, so that an error of a float adds no tile or patch."""

_TILE_PX = 512
_TILED_MAX_SIDE_PX = 2048
_TILED_SHORT_SIDE_PX = 768


class Tiles(NamedTuple):
    """Counts tiles of 512 x 512 pixels.

    The image is shrunk to fit into 2048 x 2048, and then so that its shorter side is 768 or less.

    Attributes:
        base: The tokens of every image, and all tokens at a low detail.
        tile: The tokens of each tile.
    """

    base: int
    tile: int

    def count_tokens(self, size: ImageSize, detail: str) -> int:
        """Return the tokens of an image at a detail, such as "low" or "high"."""
        if detail == "low":
            return self.base
        scale = min(1.0, _TILED_MAX_SIDE_PX / max(size))
        scale = min(scale, _TILED_SHORT_SIDE_PX / min(size))
        across = math.ceil(round(size.width * scale, _ROUNDING_DIGITS) / _TILE_PX)
        down = math.ceil(round(size.height * scale, _ROUNDING_DIGITS) / _TILE_PX)
        return self.base + self.tile * across * down


class PatchLimits(NamedTuple):
    """The size to which an image is shrunk before its patches are counted.

    Attributes:
        max_side_px: The longest side in pixels.
        max_patches: The number of patches.
    """

    max_side_px: int
    max_patches: int


_LOW = PatchLimits(512, 256)
_HIGH_6144 = PatchLimits(2048, 6144)
_HIGH_2500 = PatchLimits(2048, 2500)
_WIDE_2500 = PatchLimits(65_535, 2500)
_ORIGINAL_10000 = PatchLimits(6000, 10_000)
_UNLIMITED = PatchLimits(65_535, 1 << 30)

_PATCH_PX = 32


class Patches(NamedTuple):
    """Counts patches of 32 x 32 pixels.

    Attributes:
        factor: The tokens of a patch.
        high: The limits at a high detail.
        original: The limits at the detail "original". None if the model has no such detail.
        default: The limits if no detail is requested. None if they are those of a high detail.
    """

    factor: float
    high: PatchLimits
    original: PatchLimits | None = None
    default: PatchLimits | None = None

    def count_tokens(self, size: ImageSize, detail: str) -> int:
        """Return the tokens of an image at a detail, such as "low" or "high"."""
        limits = self._limits_for(detail)
        scale = self._scale(size, limits)
        across = math.ceil(round(size.width * scale / _PATCH_PX, _ROUNDING_DIGITS))
        down = math.ceil(round(size.height * scale / _PATCH_PX, _ROUNDING_DIGITS))
        patches = min(limits.max_patches, across * down)
        return math.ceil(round(patches * self.factor, _ROUNDING_DIGITS))

    def _limits_for(self, detail: str) -> PatchLimits:
        """Return the limits at a detail. An unknown one counts as none."""
        if detail == "low":
            return _LOW
        if detail == "high":
            return self.high
        if detail == "original":
            return self.original or self.high
        return self.default or self.high

    def _scale(self, size: ImageSize, limits: PatchLimits) -> float:
        """Return the factor, at most 1, by which an image is shrunk to meet the limits."""
        scale = min(1.0, limits.max_side_px / max(size))
        across = math.ceil(size.width * scale / _PATCH_PX)
        down = math.ceil(size.height * scale / _PATCH_PX)
        if across * down <= limits.max_patches:
            return scale
        # OpenAI shrinks to the area of the allowed patches, and then a little further, so that one
        # side is a whole number of patches.
        max_area_px = _PATCH_PX * _PATCH_PX * limits.max_patches
        scale = math.sqrt(max_area_px / (size.width * size.height))
        patches_across = size.width * scale / _PATCH_PX
        patches_down = size.height * scale / _PATCH_PX
        return scale * min(
            math.floor(patches_across) / patches_across, math.floor(patches_down) / patches_down
        )


_SQUARE_PX = 28


class Squares(NamedTuple):
    """Counts squares of 28 x 28 pixels, each a token.

    An image is shrunk, without a change of its shape, until it meets both limits.

    Attributes:
        max_side_px: The longest side in pixels.
        max_squares: The number of squares.
    """

    max_side_px: int
    max_squares: int

    def count_tokens(self, size: ImageSize, detail: str) -> int:  # noqa: ARG002 - as the others
        """Return the tokens of an image. Anthropic has no details.

        The longer side is shrunk to the largest number of pixels at which both limits are met.
        """
        longer_px = max(size)
        shorter_px = min(size)

        def count_squares(longer_side_px: int) -> int:
            """Return the squares if the longer side has this length.

            A side that is too long counts as more squares than allowed.
            """
            shorter_side_px = max(1, round(longer_side_px * shorter_px / longer_px))
            across = math.ceil(longer_side_px / _SQUARE_PX)
            if across * _SQUARE_PX > self.max_side_px:
                return self.max_squares + 1
            return across * math.ceil(shorter_side_px / _SQUARE_PX)

        # The number grows with the side, so the largest side within the limits can be bisected.
        sides_px = range(1, longer_px + 1)
        largest_side_px = bisect_right(sides_px, self.max_squares, key=count_squares)
        return count_squares(largest_side_px)


_CLAUDE_BEFORE_4_7 = (
    "claude-2",
    "claude-3",
    "claude-haiku-4",
    "claude-opus-4",
    "claude-sonnet-4",
)
_ANY_OTHER_MODEL = ""

IMAGE_RULES: dict[str, Tiles | Patches | Squares] = {
    _ANY_OTHER_MODEL: Tiles(85, 170),  # the rule of gpt-4o
    "claude": Squares(2576, 4784),
    **dict.fromkeys(_CLAUDE_BEFORE_4_7, Squares(1568, 1568)),
    "claude-opus-4-7": Squares(2576, 4784),
    "claude-opus-4-8": Squares(2576, 4784),
    "computer-use": Tiles(65, 129),
    "gpt-4.1-mini": Patches(1.62, _HIGH_6144),
    "gpt-4.1-nano": Patches(2.46, _HIGH_6144),
    "gpt-4o-mini": Tiles(2833, 5667),
    "gpt-5": Tiles(70, 140),
    "gpt-5-mini": Patches(1.2, _HIGH_6144),
    "gpt-5-nano": Patches(2.46, _HIGH_6144),
    "gpt-5.2": Patches(1.2, _HIGH_6144),
    "gpt-5.3": Patches(1.2, _HIGH_6144),
    "gpt-5.4": Patches(1.2, _HIGH_2500, _ORIGINAL_10000),
    "gpt-5.5": Patches(1.2, _HIGH_2500, _ORIGINAL_10000, _ORIGINAL_10000),
    "gpt-5.6": Patches(1.2, _WIDE_2500, _UNLIMITED, _UNLIMITED),
    "gpt-6": Patches(1.2, _WIDE_2500, _UNLIMITED, _UNLIMITED),
    "o1": Tiles(75, 150),
    "o3": Tiles(75, 150),
    "o4-mini": Patches(1.72, _HIGH_6144),
}
"""How a model counts the tokens of images. The longest name with which its own begins applies."""


def estimate_image_tokens(model: str, size: ImageSize, detail: str) -> int:
    """Return the tokens of an image in a prompt.

    Args:
        model: The name of the model, with or without the prefix of a router or of Bedrock.
        size: The size of the image.
        detail: The requested detail. "" and "auto" stand for what the model does without it.
    """
    name_without_router = model.rpartition("/")[2]
    name = name_without_router.rpartition("anthropic.")[2]  # without the prefix of Bedrock
    # The empty prefix of _ANY_OTHER_MODEL always matches.
    matching_prefixes = [prefix for prefix in IMAGE_RULES if name.startswith(prefix)]
    longest_prefix = max(matching_prefixes, key=len)
    return IMAGE_RULES[longest_prefix].count_tokens(size, detail)


def read_image_size(base64: str) -> ImageSize | None:
    """Return the size of a PNG, GIF, WebP or JPEG image, or None for anything else."""
    data = _decode_base64(base64[:_MAX_HEAD_CHARS])
    size: ImageSize | None = None
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        size = ImageSize(_big_endian(data[16:20]), _big_endian(data[20:24]))
    elif data.startswith((b"GIF87a", b"GIF89a")):
        size = ImageSize(_little_endian(data[6:8]), _little_endian(data[8:10]))
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        size = _read_webp_size(data)
    elif data.startswith(b"\xff\xd8"):
        size = _read_jpeg_size(data)
    if size is None or min(size) <= 0:
        return None
    return size


def estimate_audio_tokens(base64: str) -> int:
    """Return the tokens of audio by its duration, which is estimated from its size.

    The bytes per second are those in the head of a WAV file, and a common rate for other formats.
    Without data, when the audio is outside of the request, a usual duration is assumed.
    """
    if not base64:
        return round(_UNKNOWN_AUDIO_S * _AUDIO_TOKENS_PER_S)
    head = _decode_base64(base64[:64])
    bytes_per_s = 0
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        bytes_per_s = _little_endian(head[28:32])
    duration_s = len(base64) * 3 // 4 / (bytes_per_s or _AUDIO_BYTES_PER_S)
    return max(1, round(duration_s * _AUDIO_TOKENS_PER_S))


def estimate_file_tokens(base64: str) -> int:
    """Return the tokens of a file: a page for each 50 kB, and at least one page."""
    size_bytes = len(base64) * 3 / 4
    return _TOKENS_PER_PAGE * max(1, round(size_bytes / _BYTES_PER_PAGE))


def _decode_base64(base64: str) -> bytes:
    """Return the bytes of a text without its incomplete end, or b"" if it is not base64."""
    complete_chars = len(base64) // 4 * 4
    try:
        return binascii.a2b_base64(base64[:complete_chars])
    except ValueError:
        return b""


def _read_webp_size(data: bytes) -> ImageSize:
    """Return the size of a WebP image, by the kind of its first chunk.

    https://developers.google.com/speed/webp/docs/riff_container has the layouts.
    """
    chunk_kind = data[12:16]
    if chunk_kind == b"VP8X":
        return ImageSize(_little_endian(data[24:27]) + 1, _little_endian(data[27:30]) + 1)
    if chunk_kind == b"VP8L":
        bits = _little_endian(data[21:25])
        return ImageSize((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    return ImageSize(_little_endian(data[26:28]) & 0x3FFF, _little_endian(data[28:30]) & 0x3FFF)


_JPEG_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""The markers of frame headers. The three others of this range are tables and an extension."""


def _read_jpeg_size(data: bytes) -> ImageSize | None:
    """Return the size in the frame header of a JPEG, or None if the header is not in `data`."""
    offset = 2
    while offset + 9 <= len(data) and data[offset] == 0xFF:
        marker = data[offset + 1]
        if marker in _JPEG_FRAME_HEADERS:
            height = _big_endian(data[offset + 5 : offset + 7])
            width = _big_endian(data[offset + 7 : offset + 9])
            return ImageSize(width, height)
        if marker == 0xFF:  # a fill byte before a marker
            offset += 1
        else:
            offset += 2 + _big_endian(data[offset + 2 : offset + 4])
    return None


def _big_endian(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _little_endian(data: bytes) -> int:
    return int.from_bytes(data, "little")
