"""Instruments every OpenAI client that this process makes from now on, whoever makes it: frameworks make their own.

LangChain, LlamaIndex and others build their clients inside. `auto` wraps the constructors of the package's client
classes, so that each new client is instrumented in place. Clients made before are left as they are.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import WrongUse
from ..transport.openai_client import client_classes
from .instrumentation import _OPTIONS, Options, install
from .measurement import Prices
from .policy import Observers, make_policy
from .retry import Retry
from .throttle import Throttle
from .trace_recorder import ShapeRecorder


class Auto:
    """What `auto` returns. `stop()`, or the end of a `with` block, undoes it, also for the clients made meanwhile."""

    def __init__(self, classes: tuple[type, ...], options: Options) -> None:
        self._constructors: list[tuple[type, Callable[..., None], Callable[..., None]]] = []
        self._clients: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        for kind in classes:
            self._wrap(kind, options)

    def _wrap(self, kind: type, options: Options) -> None:
        make: Callable[..., None] = kind.__init__  # type: ignore[misc]
        clients = self._clients

        @functools.wraps(make)
        def instrumented(client: Any, *args: Any, **kwargs: Any) -> None:
            make(client, *args, **kwargs)
            if _OPTIONS not in vars(client):  # a subclass calls the constructor of its base, which is wrapped too
                clients[client] = {name: vars(client)[name] for name in _REPLACED if name in vars(client)}
                install(client, client, options)

        self._constructors.append((kind, make, instrumented))
        kind.__init__ = instrumented  # type: ignore[misc]

    def stop(self) -> None:
        """Undo it. May be called twice. Resources that were taken from a client before stay measured."""
        while self._constructors:
            kind, make, instrumented = self._constructors.pop()
            if kind.__init__ is instrumented:  # type: ignore[misc]
                kind.__init__ = make  # type: ignore[misc]
        for client, plain in [*self._clients.items()]:
            attributes = vars(client)
            for name in _REPLACED:  # what is not in `plain`, its class makes when it is next used
                attributes.pop(name, None)
            attributes.update(plain)
        self._clients.clear()

    def __enter__(self) -> Auto:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def auto(
    on_measurement: Observers = None,
    *,
    prices: Prices = None,
    throttle: Throttle | None = None,
    retry: Retry | None = None,
    record: ShapeRecorder | None = None,
    ask_usage: bool | None = None,
    keep_content: bool = False,
    labels: Mapping[str, str | int] | None = None,
) -> Auto:
    """Instrument every OpenAI client that is made from now on, with these arguments of `instrument`.

    For frameworks that make their own clients. Call it before they do; one `auto` at a time. Raises WrongUse when the
    openai package is not installed, or `auto` is on already.
    """
    try:
        classes = client_classes()
    except ImportError:
        raise WrongUse("auto() instruments clients of the openai package, which is not installed") from None
    policy = make_policy(on_measurement, prices, throttle, retry, record, keep_content, labels)
    if _active and _active[0]._constructors:
        raise WrongUse("auto() is on already", "stop() the first one, or give it every observer")
    _active[:] = [Auto(classes, Options(policy, ask_usage))]
    return _active[0]


_active: list[Auto] = []

_REPLACED = ("chat", "beta", "completions", "responses", "embeddings", "with_raw_response", "with_streaming_response",
             "copy", "with_options", "max_retries", _OPTIONS)  # fmt: skip
"""The attributes of a client that `install` sets."""
