"""The requests of several classes in one run: each request is one of its class, which seed and number decide. Pure."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from loadgen_sdk.request import Request

from loadgen import seeds
from loadgen.requests.prompts import Prompts

BLOCK = 1024  # requests whose classes are drawn together
BLOCKS = 1024  # blocks in memory; lanes of a closed loop ask out of order


class MixPrompts:
    """Request `number` is request `number` of its class, with the model and the priority of that class.

    A class of prompts from a file takes the row of the request's own number, so that its rows come in no order.
    """

    turns = 1
    history = "scripted"

    def __init__(self, classes: Mapping[str, Any], seed: int, parts: Sequence[Prompts]) -> None:
        self.names, self.parts = tuple(classes), parts
        self._weights = [one.weight for one in classes.values()]
        self._extras = [
            {name: value for name in ("model", "priority") if (value := getattr(one, name)) is not None}
            for one in classes.values()
        ]

        @functools.lru_cache(maxsize=BLOCKS)
        def block(index: int) -> list[int]:
            numbers = np.arange(index * BLOCK, (index + 1) * BLOCK)
            drawn: list[int] = seeds.classes(seed, self._weights, numbers).tolist()
            return drawn

        self._block = block

    def class_of(self, number: int) -> int:
        """The index of the class of a request."""
        index, place = divmod(number, BLOCK)
        return self._block(index)[place]

    def __getitem__(self, number: int) -> Request:
        index = self.class_of(number)
        request, extra = self.parts[index][number], self._extras[index]
        return msgspec.structs.replace(request, extra=request.extra | extra) if extra else request

    def turn_with(self, number: int, replies: Sequence[str]) -> Request:
        return self[number]

    def input_tokens(self, number: int) -> int | None:
        return self.parts[self.class_of(number)].input_tokens(number)

    def warnings(self, n: int) -> list[str]:
        named = zip(self.names, self.parts, self._weights, strict=True)
        return [f"class {name}: {words}" for name, part, share in named for words in part.warnings(round(n * share))]
