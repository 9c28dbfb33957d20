"""Measures every client that this process makes from now on, whoever makes it: frameworks make their own.

LangChain, LlamaIndex and others build their clients inside. `auto` wraps the constructors of the packages' client
classes, so that each new client is instrumented in place, and LiteLLM's functions. A package that is imported later is
wrapped then: `auto` imports none. Clients made before are left as they are.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import WrongUse
from ..prices import Prices
from .budget import Given
from .call import Switch
from .finishing import later
from .labels import Labels
from .measurement import Measurement
from .packages import LITELLM, OPTIONS, PACKAGES, Options, install, measured_litellm
from .policy import Observer, Observers, make_policy
from .retry import Retry
from .throttle import Throttle
from .trace_recorder import ShapeRecorder

log = logging.getLogger("loadgen_sdk")

NAMES = ("openai", "anthropic", "litellm")
VARIABLE = "LOADGEN_SDK_AUTO"

_REPLACED = (
    "chat",
    "beta",
    "completions",
    "responses",
    "embeddings",
    "batches",
    "messages",
    "images",
    "audio",
    "with_raw_response",
    "with_streaming_response",
    "copy",
    "with_options",
    "max_retries",
    "_process_response",
    OPTIONS,
)
"""The attributes of a client that `install` sets."""


class Auto:
    """What `auto` returns. `stop()`, or the end of a `with` block, undoes it, also for the clients made meanwhile."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._undo: list[Callable[[], None]] = []
        self._clients: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        self.running = True
        for name in NAMES:
            if (module := sys.modules.get(name)) is not None:
                self.wrap(module)
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        """Python asks this before it imports a module: one of these packages is wrapped as soon as it is loaded."""
        if name not in NAMES:
            return None
        finders = (
            finder
            for finder in sys.meta_path
            if finder is not self and hasattr(finder, "find_spec")
        )
        spec = next(
            filter(None, (finder.find_spec(name, path, target) for finder in finders)), None
        )
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_wrap(module: ModuleType) -> None:
                load(module)
                if self.running:
                    self.wrap(module)

            spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec

    def wrap(self, module: ModuleType) -> None:
        """Wrap the classes of a package's clients, or LiteLLM's functions."""
        if module.__name__ == "litellm":
            plain = {name: vars(module)[name] for name, *_ in LITELLM if name in vars(module)}
            vars(module).update(measured_litellm(module, self._options))
            self._undo.append(functools.partial(vars(module).update, plain))
        for package in PACKAGES:
            if package.name == module.__name__:
                for name in package.classes:
                    self._wrap_class(getattr(module, name))

    def _wrap_class(self, kind: type) -> None:
        make: Callable[..., None] = kind.__init__  # type: ignore[misc]

        @functools.wraps(make)
        def instrumented(client: Any, *args: Any, **kwargs: Any) -> None:
            make(client, *args, **kwargs)
            if OPTIONS in vars(
                client
            ):  # a subclass calls the constructor of its base, which is wrapped too
                return
            plain = {name: vars(client)[name] for name in _REPLACED if name in vars(client)}
            self._clients[client] = {
                **plain,
                "max_retries": client.max_retries,
            }  # openai's own is a property
            try:
                install(client, client, self._options)
            except Exception:  # a class of a shape that nobody has thought of: it works as before
                log.exception("a %s is not measured", type(client).__name__)
                self._restore(client)

        def undo() -> None:
            if kind.__init__ is instrumented:  # type: ignore[misc]
                kind.__init__ = make  # type: ignore[misc]

        self._undo.append(undo)
        kind.__init__ = instrumented  # type: ignore[misc]

    def stop(self) -> None:
        """Undo it, also for what others keep of a client (LangChain its resources). May be called twice."""
        self.running = self._options.switch.is_on = False
        with suppress(ValueError):
            sys.meta_path.remove(self)
        while self._undo:
            self._undo.pop()()
        for client in [*self._clients]:
            self._restore(client)

    def _restore(self, client: Any) -> None:
        plain, attributes = self._clients.pop(client), vars(client)
        for name in _REPLACED:  # what is not in `plain`, its class makes when it is next used
            attributes.pop(name, None)
        for name, value in plain.items():
            setattr(client, name, value)

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
    labels: Labels | None = None,
    budget: Given = None,
) -> Auto:
    """Measure every client of openai and anthropic that is made from now on, and LiteLLM's functions.

    For frameworks that make their own clients. The arguments are those of `instrument`. Call it before they do; one
    `auto` at a time. Raises WrongUse when none of these packages is installed, or `auto` is on already.
    """
    if all(
        sys.modules.get(name) is None and importlib.util.find_spec(name) is None for name in NAMES
    ):
        raise WrongUse(
            "not_installed",
            f"auto() measures clients of {', '.join(NAMES)}: none of them is installed",
        )
    policy = make_policy(
        on_measurement, prices, throttle, retry, record, keep_content, labels, budget
    )
    if _active and _active[0].running:
        raise WrongUse(
            "conflict", "auto() is on already", "stop() the first one, or give it every observer"
        )
    _active[:] = [Auto(Options(policy, ask_usage, Switch()))]
    return _active[0]


_active: list[Auto] = []


def from_environment() -> None:
    """What the variable LOADGEN_SDK_AUTO asks for, when Python starts: otel, prometheus, or files, with commas.

    A file gets one JSON object per call. A word that means nothing is said on stderr; the application starts anyway.
    A second call does nothing: Python reads the line of every folder of packages, and two may have this one installed.
    """
    if _active:
        return
    try:
        auto([_observer(word) for word in os.environ[VARIABLE].split(",") if word.strip()])
    except Exception as error:
        print(
            f"loadgen_sdk: {VARIABLE}={os.environ[VARIABLE]} is without effect: {error}",
            file=sys.stderr,
        )


def _observer(word: str) -> Observer:
    word = word.strip()
    if word in ("otel", "prometheus"):
        from .telemetry import OpenTelemetry, Prometheus

        return OpenTelemetry() if word == "otel" else Prometheus()
    path = Path(word)
    with path.open("a", encoding="utf-8"):
        pass

    def append(measurement: Measurement) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(measurement.to_json() + "\n")

    return lambda measurement: later(functools.partial(append, measurement))
