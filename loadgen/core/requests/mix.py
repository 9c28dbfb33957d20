"""Several classes in one run: of which class a start is, a request, a conversation or a task, seed and number decide.

Pure.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from loadgen_sdk.request import Request

from loadgen.core import seeds
from loadgen.core.requests.prompts import AssistantTurn, Prompts
from loadgen.core.requests.task_prompts import TaskPrompts

BLOCK = 1024  # starts whose classes are drawn together
BLOCKS = 1024  # blocks in memory; lanes of a closed loop ask out of order


class MixPrompts:
    """Start n is start n of its class, with the model and the priority of that class.

    Request `n * turns + place`: `turns` is that of the class with most, so that a single request uses the first of its
    places alone, and a conversation of fewer turns the first ones and the last. A class from a file or a trace takes
    the row of the start's own number, so that its rows come in no order.
    """

    def __init__(self, classes: Mapping[str, Any], seed: int, parts: Sequence[Prompts]) -> None:
        self.names, self.parts = tuple(classes), parts
        self.turns = max(part.turns for part in parts)
        self.history = "server" if any(part.history == "server" for part in parts) else "scripted"
        self.shares = [float(one.weight) for one in classes.values()]  # of all starts
        self._extras = [
            {
                name: value
                for name in ("model", "priority")
                if (value := getattr(one, name)) is not None
            }
            for one in classes.values()
        ]

        @functools.lru_cache(maxsize=BLOCKS)
        def block(index: int) -> list[int]:
            numbers = np.arange(index * BLOCK, (index + 1) * BLOCK)
            drawn: list[int] = seeds.classes(seed, self.shares, numbers).tolist()
            return drawn

        self._block = block

    def class_of(self, start: int) -> int:
        """The index of the class of a start."""
        index, place = divmod(start, BLOCK)
        return self._block(index)[place]

    def class_and_number(self, number: int) -> tuple[int, int]:
        """The class of a request, and its number among those of that class. Raises IndexError for an unused number."""
        start, place = divmod(number, self.turns)
        index = self.class_of(start)
        turns = self.parts[index].turns
        if turns > 1 and place == self.turns - 1:
            place = turns - 1
        elif place >= max(1, turns - 1):
            raise IndexError(number)
        return index, start * turns + place

    def __getitem__(self, number: int) -> Request:
        index, own_number = self.class_and_number(number)
        return self._as_sent(index, self.parts[index][own_number])

    def with_replies(self, number: int, replies: Mapping[int, AssistantTurn]) -> Request:
        index, own_number = self.class_and_number(number)
        return self._as_sent(index, self.parts[index].with_replies(own_number, replies))

    def _as_sent(self, index: int, request: Request) -> Request:
        extra = self._extras[index]
        return msgspec.structs.replace(request, extra=request.extra | extra) if extra else request

    def needs_replies(self, number: int) -> bool:
        index, own_number = self.class_and_number(number)
        return self.parts[index].needs_replies(own_number)

    def numbers(self, count: int) -> Iterator[int]:
        if self.turns == 1:
            return iter(range(count))
        return itertools.islice(
            (number for start in itertools.count() for number in self._of_start(start)), count
        )

    def _of_start(self, start: int) -> Iterator[int]:
        """The numbers of the requests of a start."""
        part, first = self.parts[self.class_of(start)], start * self.turns
        size = len(part.graphs[start]) if isinstance(part, TaskPrompts) else part.turns
        if part.turns == 1:
            yield first
            return
        yield from range(first, first + size - 1)
        yield first + self.turns - 1

    def input_tokens(self, number: int) -> int | None:
        index, own_number = self.class_and_number(number)
        return self.parts[index].input_tokens(own_number)

    def requested_input_tokens(self, number: int) -> int | None:
        index, own_number = self.class_and_number(number)
        return self.parts[index].requested_input_tokens(own_number)

    def requested_output_tokens(self, number: int) -> int | None:
        index, own_number = self.class_and_number(number)
        return self.parts[index].requested_output_tokens(own_number)

    def stands_alone(self, number: int) -> bool:
        """Whether a request is no part of a task or conversation."""
        return self.parts[self.class_and_number(number)[0]].turns == 1

    def warnings(self, n: int) -> list[str]:
        named = zip(self.names, self.parts, self.shares, strict=True)
        return [
            f"class {name}: {words}"
            for name, part, share in named
            for words in part.warnings(round(n * share))
        ]


def class_and_step(prompts: Prompts, number: int) -> tuple[str, str]:
    """The class of a request, and its step if it is one of a task; "" where there are none."""
    name = ""
    if isinstance(prompts, MixPrompts):
        index, number = prompts.class_and_number(number)
        name, prompts = prompts.names[index], prompts.parts[index]
    if not isinstance(prompts, TaskPrompts):
        return name, ""
    task, turn = prompts.task_and_turn(number)
    return name, prompts.graphs[task][turn].step
