"""Work that is the same for blocking and async callers: a generator yields each step that may wait, a runner does it.

The generator decides, and is sent what came of a step, or is thrown its exception. The runner alone knows how to wait.
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
    """Put lists in the place of iterators: another attempt, and another endpoint, would find them used up."""
    for name, value in arguments.items():
        if (
            type(value) not in _PLAIN and hasattr(value, "__next__") and not hasattr(value, "read")
        ):  # a file is rewound by the HTTP library
            arguments[name] = list(value)


_PLAIN = frozenset(
    (str, list, dict, int, float, bool, type(None))
)  # are no iterators: the quick answer


def run_blocking(steps: Steps[T]) -> T:
    """Do the steps in this thread."""
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
    """As `inspect.isawaitable`, quick where a coroutine is given."""
    return type(value) is CoroutineType or inspect.isawaitable(value)


async def run_async(steps: Steps[T]) -> T:
    """Do the steps in this task. What a step returns is awaited if it can be."""
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
    """A function, or a coroutine function, that does the steps."""
    if blocking:

        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            return run_blocking(make_steps(*args, **kwargs))

        return functools.wraps(make_steps)(run)

    async def run_in_loop(*args: P.args, **kwargs: P.kwargs) -> T:
        return await run_async(make_steps(*args, **kwargs))

    return functools.wraps(make_steps)(run_in_loop)
