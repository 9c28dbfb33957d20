"""Write code once that runs both in blocking and in async clients.

Such code is a generator of type `Steps`. Where it would wait (send a request, sleep, acquire a
permit), it yields a function without arguments. Whoever runs the generator calls the function, in
an async client awaits what it returns, and sends the result back into the generator or throws the
exception into it. httpx writes its authentication flows in the same way. For example:

    def ping_twice(send: Callable[[], str]) -> Steps[str]:
        yield send
        response = yield send
        return response

    run_steps(ping_twice(client.ping))
    await run_steps_async(ping_twice(async_client.ping))
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
"""A generator that yields functions to call and gets their results. It returns a T."""


def replace_iterators(arguments: dict[str, Any]) -> None:
    """Replace iterators among the arguments of a call by lists, in place.

    A retry sends the arguments again and would find an iterator used up. Files are iterators too,
    but they stay, because the HTTP library can rewind them.
    """
    for name, value in arguments.items():
        if type(value) in _PLAIN_TYPES:
            continue
        is_iterator = hasattr(value, "__next__")
        is_file = hasattr(value, "read")
        if is_iterator and not is_file:
            arguments[name] = list(value)


_PLAIN_TYPES = frozenset((str, list, dict, int, float, bool, type(None)))
"""Types that are not iterators. Most arguments have one of them and need no further check."""


def run_steps(steps: Steps[T]) -> T:
    """Run a generator of a blocking client to its end and return what the generator returns.

    For each `result = yield function` in the generator, the function is called here, without
    arguments. Its result becomes the value of the `yield`, or its exception is raised there.

    Args:
        steps: The generator, which has not started yet.
    """
    try:
        function = next(steps)
        while True:
            try:
                result = function()
            except BaseException as error:
                # The generator may handle the error and yield another function.
                function = steps.throw(error)
            else:
                function = steps.send(result)
    except StopIteration as end:
        # This is how a generator returns: the StopIteration contains the value of its `return`.
        return end.value  # type: ignore[no-any-return]


def isawaitable(value: object) -> bool:
    """Return the same as `inspect.isawaitable`, which is slower for coroutines."""
    return type(value) is CoroutineType or inspect.isawaitable(value)


async def run_steps_async(steps: Steps[T]) -> T:
    """Run a generator of an async client to its end and return what the generator returns.

    For each `result = yield function` in the generator, the function is called here, without
    arguments, and its result is awaited if it is awaitable. The result becomes the value of the
    `yield`, or the exception is raised there.

    Args:
        steps: The generator, which has not started yet.
    """
    try:
        function = next(steps)
        while True:
            try:
                result = function()
                if isawaitable(result):
                    result = await result
            except BaseException as error:
                # The generator may handle the error and yield another function.
                function = steps.throw(error)
            else:
                function = steps.send(result)
    except StopIteration as end:
        # This is how a generator returns: the StopIteration contains the value of its `return`.
        return end.value  # type: ignore[no-any-return]


def as_function(make_steps: Callable[P, Steps[T]], *, is_blocking: bool) -> Callable[P, Any]:
    """Turn a generator function into a function that an application can call.

    The returned function takes the same arguments, runs the generator to its end, and returns what
    the generator returns. It is a plain function for a blocking client, and a coroutine function
    for an async one.

    Args:
        make_steps: The generator function. Its generators yield functions that may wait, such as
            one that sends a request (see `Steps`).
        is_blocking: The client is a blocking one.
    """
    if is_blocking:

        @functools.wraps(make_steps)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            return run_steps(make_steps(*args, **kwargs))

        return run

    @functools.wraps(make_steps)
    async def run_async(*args: P.args, **kwargs: P.kwargs) -> T:
        return await run_steps_async(make_steps(*args, **kwargs))

    return run_async
