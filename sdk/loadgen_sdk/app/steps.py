"""Run work that is the same for blocking and async callers.

A generator yields each step that may wait, and gets its result or its exception. A runner runs the
steps, and it alone knows how to wait.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from types import CoroutineType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Steps = Generator[Callable[[], Any], Any, T]


def repeatable(arguments: dict[str, Any]) -> None:
    """Replace iterators by lists, because another attempt would find them used up.

    Files are kept, because the HTTP library rewinds them.
    """
    for name, value in arguments.items():
        if type(value) in _PLAIN_TYPES:
            continue
        if hasattr(value, "__next__") and not hasattr(value, "read"):
            arguments[name] = list(value)


_PLAIN_TYPES = frozenset((str, list, dict, int, float, bool, type(None)))
"""Types that are no iterators, for a quick answer."""


def run_blocking(steps: Steps[T]) -> T:
    """Run the steps in this thread."""
    try:
        step = next(steps)
        while True:
            try:
                result = step()
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def isawaitable(value: Any) -> bool:
    """Return the same as `inspect.isawaitable`, which is slower for coroutines."""
    return type(value) is CoroutineType or inspect.isawaitable(value)


async def run_async(steps: Steps[T]) -> T:
    """Run the steps in this task, and await what they return if that is possible."""
    try:
        step = next(steps)
        while True:
            try:
                result = step()
                if isawaitable(result):
                    result = await result
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def runner(make_steps: Callable[P, Steps[T]], blocking: bool) -> Callable[P, Any]:
    """Return a function, or a coroutine function, that runs the steps."""
    if blocking:

        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            return run_blocking(make_steps(*args, **kwargs))

        return functools.wraps(make_steps)(run)

    async def run_in_loop(*args: P.args, **kwargs: P.kwargs) -> T:
        return await run_async(make_steps(*args, **kwargs))

    return functools.wraps(make_steps)(run_in_loop)
