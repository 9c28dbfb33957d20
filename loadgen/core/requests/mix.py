"""Requests of several classes in one run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from loadgen_sdk.request import Request

from loadgen.core import seeds
from loadgen.core.requests.prompts import AssistantTurn, Prompts
from loadgen.core.requests.slot_layout import SlotLayout
from loadgen.core.requests.task_prompts import TaskPrompts

if TYPE_CHECKING:
    from loadgen.core.workload.request_classes import RequestClass

SESSIONS_PER_BLOCK = 1024
"""The number of sessions whose classes are drawn together, which is faster than one by one."""
BLOCKS_CACHED = 1024
"""The number of blocks that stay in memory.

They are many, because virtual users of a closed loop do not start sessions in order.
"""


class ClassRequest(NamedTuple):
    """A request of a class: the index of the class, and the id of the request in the class."""

    class_index: int
    request_id: int


class MixPrompts:
    """Requests of several classes, with the model and the priority of their classes.

    A session is a single request, a conversation or a task. The class of each session is drawn from
    its number. Session n of the mix has the content of session n of its class, so a class that
    reads a file or a trace uses only some of its rows.

    The ids of requests are those of a `SlotLayout`, whose blocks have the size that the class with
    the most turns needs.

    Attributes:
        names: The names of the classes.
        class_prompts: The requests of each class, in the order of `names`.
        turns: The most requests that a session of any class has.
        history: "server" if any class sends real responses again, else "scripted".
        session_shares: The requested share of each class in all sessions.
    """

    def __init__(
        self, classes: Mapping[str, RequestClass], seed: int, class_prompts: Sequence[Prompts]
    ) -> None:
        """Mix the requests of several classes.

        Args:
            classes: The classes by name, with the weight, the model and the priority of each.
            seed: Decides which class each session belongs to.
            class_prompts: The requests of each class, in the order of `classes`.
        """
        self.names = tuple(classes)
        self.class_prompts = class_prompts
        self.turns = max(prompts.turns for prompts in class_prompts)
        self._layout = SlotLayout(block_size=self.turns)
        self._layouts_of_classes = [SlotLayout(prompts.turns) for prompts in class_prompts]

        # Later turns of a conversation repeat the responses to earlier ones. These are the real
        # responses of the server, or generated ones, which is called "scripted". The real responses
        # are recorded as soon as one class needs them.
        needs_real_responses = any(prompts.history == "server" for prompts in class_prompts)
        self.history = "server" if needs_real_responses else "scripted"

        # Validation has scaled the weights so that they add up to 1.
        self.session_shares = [float(request_class.weight) for request_class in classes.values()]
        self._extra_fields = [_extra_fields(request_class) for request_class in classes.values()]
        self._seed = seed
        self._cached_classes = functools.lru_cache(BLOCKS_CACHED)(self._draw_classes)

    def _draw_classes(self, block: int) -> list[int]:
        """Return the index of the class of each session in a block of SESSIONS_PER_BLOCK."""
        first_session = block * SESSIONS_PER_BLOCK
        sessions = np.arange(first_session, first_session + SESSIONS_PER_BLOCK)
        classes: list[int] = seeds.draw_classes(self._seed, self.session_shares, sessions).tolist()
        return classes

    def class_of(self, session: int) -> int:
        """Return the index of the class of a session."""
        block, index_in_block = divmod(session, SESSIONS_PER_BLOCK)
        return self._cached_classes(block)[index_in_block]

    def class_and_id(self, request_id: int) -> ClassRequest:
        """Return the class of a request of the mix, and the id of the request in that class.

        A session has the same number in the mix and in its class, but its requests have other ids
        there if the sessions of the class are smaller. Raises IndexError for an id that is not
        used.
        """
        session = self._layout.session_of(request_id)
        class_index = self.class_of(session)
        layout_of_class = self._layouts_of_classes[class_index]
        return ClassRequest(class_index, self._layout.same_turn_in(layout_of_class, request_id))

    def __getitem__(self, request_id: int) -> Request:
        """Build a request, with the model and the priority of its class."""
        class_index, id_in_class = self.class_and_id(request_id)
        request = self.class_prompts[class_index][id_in_class]
        return self._with_extra_fields(class_index, request)

    def with_replies(self, request_id: int, replies: Mapping[int, AssistantTurn]) -> Request:
        """Return a request with real responses of earlier turns."""
        class_index, id_in_class = self.class_and_id(request_id)
        request = self.class_prompts[class_index].with_replies(id_in_class, replies)
        return self._with_extra_fields(class_index, request)

    def _with_extra_fields(self, class_index: int, request: Request) -> Request:
        """Return a request with the model and the priority of its class, if the class sets them."""
        extra = self._extra_fields[class_index]
        if not extra:
            return request
        return msgspec.structs.replace(request, extra=request.extra | extra)

    def needs_replies(self, request_id: int) -> bool:
        """Return True if a request cannot be built before earlier responses."""
        class_index, id_in_class = self.class_and_id(request_id)
        return self.class_prompts[class_index].needs_replies(id_in_class)

    def request_ids(self, count: int) -> Iterator[int]:
        """Return the ids of the first requests."""
        if self.turns == 1:
            return iter(range(count))
        ids_by_session = (self._ids_of_session(session) for session in itertools.count())
        return itertools.islice(itertools.chain.from_iterable(ids_by_session), count)

    def _ids_of_session(self, session: int) -> Iterator[int]:
        """Return an iterator over the ids of a session: a single request, conversation or task."""
        prompts = self.class_prompts[self.class_of(session)]
        return self._layout.slots_of(
            session,
            turn_count=_count_session_requests(prompts, session),
            is_single_request=prompts.turns == 1,
        )

    def input_tokens(self, request_id: int) -> int | None:
        """Return the content tokens of a prompt as it is built, or None if they are unknown."""
        class_index, id_in_class = self.class_and_id(request_id)
        return self.class_prompts[class_index].input_tokens(id_in_class)

    def requested_input_tokens(self, request_id: int) -> int | None:
        """Return the requested content tokens of a prompt, or None if none are requested."""
        class_index, id_in_class = self.class_and_id(request_id)
        return self.class_prompts[class_index].requested_input_tokens(id_in_class)

    def requested_output_tokens(self, request_id: int) -> int | None:
        """Return the requested output tokens of a request, or None if none are requested."""
        class_index, id_in_class = self.class_and_id(request_id)
        return self.class_prompts[class_index].requested_output_tokens(id_in_class)

    def is_single_request(self, request_id: int) -> bool:
        """Return True if a request is no part of a task or conversation."""
        class_index, _ = self.class_and_id(request_id)
        return self.class_prompts[class_index].turns == 1

    def warnings(self, request_count: int) -> list[str]:
        """Return the warnings of all classes, each with the name of its class."""
        messages: list[str] = []
        classes = zip(self.names, self.class_prompts, self.session_shares, strict=True)
        for name, prompts, share in classes:
            warnings = prompts.warnings(round(request_count * share))
            messages += [f"class {name}: {warning}" for warning in warnings]
        return messages


def _count_session_requests(prompts: Prompts, session: int) -> int:
    """Return how many requests a session has: a single request, conversation or task.

    All conversations of a class have equally many. The number of a task is drawn.
    """
    if isinstance(prompts, TaskPrompts):
        return len(prompts.graphs[session])
    return prompts.turns


def _extra_fields(request_class: RequestClass) -> dict[str, Any]:
    """Return the body fields that all requests of a class have."""
    fields = {"model": request_class.model, "priority": request_class.priority}
    return {name: value for name, value in fields.items() if value is not None}


class ClassAndStep(NamedTuple):
    """The name of the class of a request and of its step in a task, "" if there is none."""

    class_name: str
    step: str


def class_and_step(prompts: Prompts, request_id: int) -> ClassAndStep:
    """Return the names of the class of a request and of its step in a task.

    A request has a class if it belongs to a mix of several classes, and a step if it belongs to a
    task. In a mix with a class of tasks it can have both.
    """
    if not isinstance(prompts, MixPrompts):
        return ClassAndStep(class_name="", step=_step_name(prompts, request_id))

    class_index, id_in_class = prompts.class_and_id(request_id)
    class_prompts = prompts.class_prompts[class_index]
    return ClassAndStep(
        class_name=prompts.names[class_index], step=_step_name(class_prompts, id_in_class)
    )


def _step_name(prompts: Prompts, request_id: int) -> str:
    """Return the name of the step of a request in its task, "" if it belongs to no task."""
    if not isinstance(prompts, TaskPrompts):
        return ""
    task_index, turn = prompts.task_and_turn(request_id)
    return prompts.graphs[task_index][turn].step
