"""`timeout` of asyncio, which Python 3.10 does not have: there it is that of the package async-timeout."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):  # noqa: UP036 - the SDK alone runs on 3.10
    from asyncio import timeout
else:
    import asyncio
    from collections.abc import AsyncIterator
    from contextlib import asynccontextmanager

    import async_timeout

    @asynccontextmanager
    async def timeout(seconds: float | None) -> AsyncIterator[None]:
        """As of Python 3.11: it raises the builtin TimeoutError."""
        try:
            async with async_timeout.timeout(seconds):
                yield
        except asyncio.TimeoutError:  # noqa: UP041 - another class in Python 3.10
            raise TimeoutError from None


__all__ = ["timeout"]
