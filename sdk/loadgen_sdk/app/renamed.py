"""Names of arguments as they were: an error that says the new one. Pure."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ..errors import WrongUse

P = ParamSpec("P")
T = TypeVar("T")


def renamed(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """The function, which refuses these old names (old=new) of its keyword arguments. Raises WrongUse."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for old in names.keys() & kwargs.keys():
                raise WrongUse(
                    "unknown_name", f"{old}= is called {names[old]}= now", f"write {names[old]}="
                )
            return function(*args, **kwargs)

        return checked

    return decorate


def gone(**names: str) -> Callable[[Any, str], Any]:
    """A `__getattr__` for old names (old=what to write instead)."""

    def get(self: Any, name: str) -> Any:
        what = f"{type(self).__name__} has no {name}"
        raise AttributeError(f"{what}: write {names[name]}" if name in names else what)

    return get
