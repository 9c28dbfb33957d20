"""Tokens of images, audio and files in a prompt, by the rules that the providers publish. Pure.

Sources, as of autumn 2026: OpenAI, "Images and vision" (tiles and patches) and "Audio" (a token per
100 ms); Anthropic, "Vision" (squares of 28 pixels) and "PDF support" (1,500 to 3,000 tokens a
page). Only the head of an image is decoded, because its size is enough.
"""

from __future__ import annotations

import binascii
import math
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

_WAV_HEADER_CHARS = 64
"""The base64 of the header of a WAV file, which has 44 bytes."""

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
        """Return the factor, at most 1, by which an image is shrunk to meet the limits.

        The limits are the longest side and the number of patches, which are squares of _PATCH_PX.
        """
        side_scale = min(1.0, limits.max_side_px / max(size))
        patch_columns = math.ceil(size.width * side_scale / _PATCH_PX)
        patch_rows = math.ceil(size.height * side_scale / _PATCH_PX)
        if patch_columns * patch_rows <= limits.max_patches:
            return side_scale
        return _scale_to_patches(size, limits.max_patches)


def _scale_to_patches(size: ImageSize, max_patches: int) -> float:
    """Return the factor by which an image with too many patches is shrunk to the allowed number.

    This follows "Images and vision" of OpenAI. The image is first shrunk to the area of
    `max_patches` whole patches. Its sides may then have a fraction of a patch, for example 50.5 x
    49.5 patches for 2500 allowed ones. It is shrunk further until one side is a whole number of
    patches and neither is rounded up. Of the two factors that do so, 50 / 50.5 for the width and
    49 / 49.5 for the height, the smaller one is used.
    """
    max_area_px = _PATCH_PX * _PATCH_PX * max_patches
    area_scale = math.sqrt(max_area_px / (size.width * size.height))
    patches_across = size.width * area_scale / _PATCH_PX
    patches_down = size.height * area_scale / _PATCH_PX
    factor_for_whole_width = math.floor(patches_across) / patches_across
    factor_for_whole_height = math.floor(patches_down) / patches_down
    return area_scale * min(factor_for_whole_width, factor_for_whole_height)


_SQUARE_PX = 28


class Squares(NamedTuple):
    """Counts the tokens of an image as squares of 28 x 28 pixels, each of which is a token.

    An image is shrunk, without a change of its shape, until it meets both limits.

    Attributes:
        max_side_px: The longest side in pixels.
        max_squares: The number of squares.
    """

    max_side_px: int
    max_squares: int

    def count_tokens(self, size: ImageSize, detail: str) -> int:  # noqa: ARG002
        """Return the tokens of an image, which is shrunk to the largest size within both limits.

        Args:
            size: The size of the image.
            detail: Not used, because Anthropic has one way to count. The other rules use it.
        """
        longer_px = max(size)
        if not self._fits(size, longer_px):
            longer_px = self._largest_fitting_px(size)
        return _count_squares(_resize(size, longer_px))

    def _largest_fitting_px(self, size: ImageSize) -> int:
        """Return the largest length of the longer side with which a too large image fits.

        It is found by bisection: an image that fits also fits with a shorter side.
        """
        fitting_px = 1
        too_long_px = max(size)
        while too_long_px - fitting_px > 1:
            middle_px = (fitting_px + too_long_px) // 2
            if self._fits(size, middle_px):
                fitting_px = middle_px
            else:
                too_long_px = middle_px

        return fitting_px

    def _fits(self, size: ImageSize, longer_px: int) -> bool:
        """Return True if an image meets both limits once its longer side has `longer_px`."""
        resized = _resize(size, longer_px)
        padded_side_px = math.ceil(longer_px / _SQUARE_PX) * _SQUARE_PX
        return padded_side_px <= self.max_side_px and _count_squares(resized) <= self.max_squares


def _resize(size: ImageSize, longer_px: int) -> ImageSize:
    """Return the size of an image of the same shape whose longer side has `longer_px`.

    The longer side is returned as the width, whichever it is.
    """
    shorter_px = max(1, round(longer_px * min(size) / max(size)))
    return ImageSize(longer_px, shorter_px)


def _count_squares(size: ImageSize) -> int:
    """Return how many squares of _SQUARE_PX cover an image. A part of a square counts as one."""
    return math.ceil(size.width / _SQUARE_PX) * math.ceil(size.height / _SQUARE_PX)


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

    The rule is that of the longest name in IMAGE_RULES with which the name of the model begins. The
    table also has an empty name (_ANY_OTHER_MODEL), with which every name begins.

    Args:
        model: The name of the model, with or without the prefix of a router or of Bedrock, such as
            "openai/gpt-4o" or "anthropic.claude-3-haiku".
        size: The size of the image.
        detail: The requested detail, such as "low" or "high". With "" and "auto", the model uses
            its default detail.
    """
    name_without_router = model.rpartition("/")[2]  # "openai/gpt-4o" becomes "gpt-4o"
    name = name_without_router.rpartition("anthropic.")[2]
    matching_prefixes = [prefix for prefix in IMAGE_RULES if name.startswith(prefix)]
    longest_prefix = max(matching_prefixes, key=len)
    return IMAGE_RULES[longest_prefix].count_tokens(size, detail)


_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_GIF_MAGICS = (b"GIF87a", b"GIF89a")
_JPEG_MAGIC = b"\xff\xd8"


def read_image_size(data_base64: str) -> ImageSize | None:
    """Return the size of a PNG, GIF, WebP or JPEG image, or None for anything else.

    Only the start of the image is decoded. Return None as well for a size without an area.
    """
    data = _decode_base64(data_base64[:_MAX_HEAD_CHARS])
    size = _read_size(data)
    if size is None or size.width <= 0 or size.height <= 0:
        return None
    return size


def _read_size(data: bytes) -> ImageSize | None:
    """Return the size in the header of an image, whose format its first bytes (the magic) tell."""
    is_webp = data[:4] == b"RIFF" and data[8:12] == b"WEBP"
    if is_webp:
        return _read_webp_size(data)
    if data.startswith(_PNG_MAGIC):
        # Width and height are the first fields of the chunk IHDR, whose content begins at byte 16.
        return ImageSize(width=_big_endian(data[16:20]), height=_big_endian(data[20:24]))
    if data.startswith(_GIF_MAGICS):
        # Width and height follow directly after the 6 bytes of the magic.
        return ImageSize(width=_little_endian(data[6:8]), height=_little_endian(data[8:10]))
    if data.startswith(_JPEG_MAGIC):
        return _read_jpeg_size(data)

    return None


def estimate_audio_tokens(data_base64: str) -> int:
    """Return the tokens of audio, which are proportional to its duration.

    The duration is the size of the data divided by its bytes per second. A WAV file states these in
    its header. For any other format, and for audio that is not in the request (""), usual values
    are assumed.
    """
    if not data_base64:
        return round(_UNKNOWN_AUDIO_S * _AUDIO_TOKENS_PER_S)
    size_bytes = len(data_base64) * 3 // 4
    bytes_per_s = _read_wav_bytes_per_s(data_base64) or _AUDIO_BYTES_PER_S
    duration_s = size_bytes / bytes_per_s
    return max(1, round(duration_s * _AUDIO_TOKENS_PER_S))


def _read_wav_bytes_per_s(data_base64: str) -> int:
    """Return the bytes per second in the header of a WAV file, or 0 for any other format."""
    header = _decode_base64(data_base64[:_WAV_HEADER_CHARS])
    is_wav = header[:4] == b"RIFF" and header[8:12] == b"WAVE"
    return _little_endian(header[28:32]) if is_wav else 0


def estimate_file_tokens(data_base64: str) -> int:
    """Return the tokens of a file: a page for each 50 kB, and at least one page."""
    size_bytes = len(data_base64) * 3 / 4
    return _TOKENS_PER_PAGE * max(1, round(size_bytes / _BYTES_PER_PAGE))


def _decode_base64(data_base64: str) -> bytes:
    """Return the bytes of a text without its incomplete end, or b"" if it is not base64."""
    complete_chars = len(data_base64) // 4 * 4
    try:
        return binascii.a2b_base64(data_base64[:complete_chars])
    except ValueError:
        return b""


_WEBP_SIZE_BITS = 14
_WEBP_SIZE_MASK = (1 << _WEBP_SIZE_BITS) - 1
"""A side of a WebP image has 14 bits. Other bits of the same bytes have another meaning."""


def _read_webp_size(data: bytes) -> ImageSize:
    """Return the size of a WebP image.

    A WebP file has chunks. The first one begins at byte 12 with its kind, and its payload begins at
    byte 20. The kind decides where the payload has the size. The layouts are in
    https://developers.google.com/speed/webp/docs/riff_container.
    """
    chunk_kind = data[12:16]
    if chunk_kind == b"VP8X":  # extended: 4 bytes of flags, then both sides minus 1, 24 bits each
        width = _little_endian(data[24:27]) + 1
        height = _little_endian(data[27:30]) + 1
    elif chunk_kind == b"VP8L":  # lossless: a signature byte, then both sides minus 1, 14 bits each
        size_bits = _little_endian(data[21:25])
        width_bits = size_bits & _WEBP_SIZE_MASK
        height_bits = (size_bits >> _WEBP_SIZE_BITS) & _WEBP_SIZE_MASK
        width = width_bits + 1
        height = height_bits + 1
    else:  # lossy: 6 bytes of tags, then both sides, 14 bits each, with 2 bits of scaling
        width = _little_endian(data[26:28]) & _WEBP_SIZE_MASK
        height = _little_endian(data[28:30]) & _WEBP_SIZE_MASK

    return ImageSize(width, height)


_JPEG_FRAME_HEADER_BYTES = 9
_JPEG_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""The markers of frame headers. The three others of this range are tables and an extension."""


def _read_jpeg_size(data: bytes) -> ImageSize | None:
    """Return the size in the frame header of a JPEG, or None if the header is not in `data`.

    After two bytes for the start of the image, a JPEG is a sequence of segments:

        byte 0       0xFF
        byte 1       the marker: the kind of segment
        bytes 2, 3   the length of the segment without the first two bytes
        byte 4       in a frame header, the bits per sample
        bytes 5, 6   in a frame header, the height
        bytes 7, 8   in a frame header, the width
    """
    start = 2
    while start + _JPEG_FRAME_HEADER_BYTES <= len(data) and data[start] == 0xFF:
        marker = data[start + 1]
        if marker in _JPEG_FRAME_HEADERS:
            height = _big_endian(data[start + 5 : start + 7])
            width = _big_endian(data[start + 7 : start + 9])
            return ImageSize(width, height)

        if marker == 0xFF:
            start += 1  # a fill byte before a marker
        else:
            segment_length = _big_endian(data[start + 2 : start + 4])
            start += 2 + segment_length

    return None


def _big_endian(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _little_endian(data: bytes) -> int:
    return int.from_bytes(data, "little")
