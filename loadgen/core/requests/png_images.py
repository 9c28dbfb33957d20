"""Synthetic PNG images of a given size, drawn from a key so that no two images are alike.

An image is a grid of squares in random colors. Its file is small, but it has as many patches for a
vision model as a photograph of its size, and the cost of an encoder depends on the size alone.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from typing import NamedTuple

import numpy as np

from loadgen.core.requests.sampling import random_bytes

SQUARE_PIXELS = 16
CHANNELS = 3  # red, green and blue
BITS_PER_CHANNEL = 8
COLOR_TYPE_RGB = 2
FILTER_NONE = 0
FASTEST_COMPRESSION = 1
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class ImageSize(NamedTuple):
    """The size of an image in pixels."""

    width: int
    height: int


def render_data_url(key: bytes, index: int, size: ImageSize) -> str:
    """Return an image as a URL that contains its data."""
    return "data:image/png;base64," + base64.b64encode(render_png(key, index, size)).decode()


def render_png(key: bytes, index: int, size: ImageSize) -> bytes:
    """Return an image as the bytes of a PNG file.

    A PNG file is a signature and three chunks: the header with the size, the compressed lines of
    pixels, and the end. Each line begins with a byte that says how it is filtered.
    """
    pixels = _draw_pixels(key, index, size).reshape(size.height, size.width * CHANNELS)
    filter_column = np.full((size.height, 1), FILTER_NONE, np.uint8)
    scan_lines = np.concatenate([filter_column, pixels], axis=1)

    # The three zeros are the only methods of compression and filtering, and no interlacing.
    header = struct.pack(
        ">IIBBBBB", size.width, size.height, BITS_PER_CHANNEL, COLOR_TYPE_RGB, 0, 0, 0
    )
    return b"".join(
        [
            PNG_SIGNATURE,
            _chunk(b"IHDR", header),
            _chunk(b"IDAT", zlib.compress(scan_lines.tobytes(), FASTEST_COMPRESSION)),
            _chunk(b"IEND", b""),
        ]
    )


def _draw_pixels(key: bytes, index: int, size: ImageSize) -> np.ndarray:
    """Return an array of colors with the shape (height, width, channels).

    Squares at the right and the lower edge are cut if the size is no multiple of SQUARE_PIXELS.
    """
    columns = math.ceil(size.width / SQUARE_PIXELS)
    rows = math.ceil(size.height / SQUARE_PIXELS)
    random_colors = random_bytes(key, "image", index, columns * rows * CHANNELS)
    squares = np.frombuffer(random_colors, np.uint8).reshape(rows, columns, CHANNELS)
    pixels = np.repeat(np.repeat(squares, SQUARE_PIXELS, axis=0), SQUARE_PIXELS, axis=1)
    return pixels[: size.height, : size.width]


def _chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file: its length, kind, data and checksum."""
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)
