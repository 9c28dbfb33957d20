"""Messages between two processes that know one token: pickled values, each with a digest that only they can make. IO.

Both sides begin with random bytes, and the key of the connection is made from the token and both: what was recorded of
another connection is of no use. A message is unpickled only where its digest is right. Nothing is encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import pickle
import secrets
from typing import Any

from loadgen.core.errors import UserError

TOKEN = "LOADGEN_TOKEN"
TOKEN_BYTES = 16  # at least
_RANDOM, _DIGEST, _LENGTH = 32, 32, 8
FIRST_BYTES, MOST_BYTES = (
    64 << 10,
    1 << 30,
)  # of a message: before the other side has shown that it knows the token


def token() -> bytes:
    """The token of this process. Raises UserError where the environment has none."""
    found = os.environ.get(TOKEN, "").encode()
    if len(found) < TOKEN_BYTES:
        what = f"agents and their driver know each other by a token of at least {TOKEN_BYTES} characters"
        raise UserError(
            "missing_option",
            what,
            TOKEN,
            f"the same on all: export {TOKEN}=$(openssl rand -hex 16)",
        )
    return found


class Channel:
    """One connection, behind its greeting. A failure of it, and its end, is a ConnectionError."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, *, asks: bool
    ) -> None:
        self._reader, self._writer, self._key = reader, writer, key
        self._own, self._other = (b"ask", b"answer") if asks else (b"answer", b"ask")
        self._sent = self._received = 0

    def send(self, value: Any) -> None:
        """Send a value, without waiting."""
        data = pickle.dumps(value)
        digest = self._digest(self._own, self._sent, data)
        self._writer.write(len(data).to_bytes(_LENGTH, "little") + digest + data)
        self._sent += 1

    async def receive(self) -> Any:
        """The next value of the other side."""
        head = await _exactly(self._reader, _LENGTH + _DIGEST)
        length, digest = int.from_bytes(head[:_LENGTH], "little"), head[_LENGTH:]
        if length > (MOST_BYTES if self._received else FIRST_BYTES):
            raise ConnectionError("a message that is too long")
        data = await _exactly(self._reader, length)
        if not hmac.compare_digest(digest, self._digest(self._other, self._received, data)):
            raise ConnectionError("the other side knows another token")
        self._received += 1
        return pickle.loads(data)

    def _digest(self, side: bytes, number: int, data: bytes) -> bytes:
        return hmac.digest(self._key, side + number.to_bytes(8, "little") + data, "sha256")

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


async def greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, known: bytes, *, asks: bool
) -> Channel:
    """The channel of a new connection. `known`: the token. `asks`: this side has made the connection."""
    own = secrets.token_bytes(_RANDOM)
    writer.write(own)
    other = await _exactly(reader, _RANDOM)
    key = hmac.digest(known, own + other if asks else other + own, "sha256")
    return Channel(reader, writer, key, asks=asks)


async def _exactly(reader: asyncio.StreamReader, length: int) -> bytes:
    try:
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError:
        raise ConnectionError("the other side has closed the connection") from None
