"""Synthetic images: PNG files of a given size, drawn from a key, so that no two are alike. Pure.

An image is a grid of squares in random colours. It is small as a file, and has as many patches for a vision model as a
photograph of that size: what an encoder costs depends on the size alone.
"""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

from loadgen.core.requests.laws import random_bytes

SQUARE = 16  # pixels on a side


def render_png(key: bytes, index: int, width: int, height: int) -> bytes:
    """An RGB image of this size."""
    across, down = -(-width // SQUARE), -(-height // SQUARE)
    colours = np.frombuffer(random_bytes(key, "image", index, across * down * 3), np.uint8).reshape(
        down, across, 3
    )
    pixels = np.repeat(np.repeat(colours, SQUARE, axis=0), SQUARE, axis=1)[:height, :width]
    rows = np.concatenate(
        [np.zeros((height, 1), np.uint8), pixels.reshape(height, width * 3)], axis=1
    )  # filter: none
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def render_data_url(key: bytes, index: int, width: int, height: int) -> str:
    return (
        "data:image/png;base64," + base64.b64encode(render_png(key, index, width, height)).decode()
    )
