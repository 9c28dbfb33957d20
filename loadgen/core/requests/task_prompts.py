"""The requests of tasks: messages, calls of tools and their results, growing along the graph of each task. Pure.

A step for embeddings or a ranking is a text, with the documents that are ranked.

Request `task * width + place` is the same on every worker, in any order, at any time, as in `prompts`. The place of a
request is its turn; of the last request of a task it is the last place, whatever the turns before it.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from loadgen_sdk.request import Request

from loadgen.core.requests.chunks import Corpus
from loadgen.core.requests.laws import length_sampler, random_bytes
from loadgen.core.requests.prompts import NO_LENGTHS, AssistantTurn, SyntheticPrompts
from loadgen.core.requests.task_graphs import Node, TaskGraphs
from loadgen.core.requests.tokenizer import Tokenizer
from loadgen.core.workload.tasks import largest_value

if TYPE_CHECKING:
    from loadgen.core.workload.tasks import Task, TaskStep


CONTEXTS_KEPT = 64  # as long as the conversations are; the next turn of one begins with the last
LENGTHS_KEPT = 1 << 14  # requests: a prompt of a task is as long as all that it continues


class _Context(NamedTuple):
    """What a request continues, as far as it was built: its messages, and their content tokens."""

    messages: list[dict[str, Any]]
    tokens: int


class TaskPrompts(SyntheticPrompts):
    """The requests of tasks of an agent. The answer before a tool's result stands in the context as a call of it.

    An answer from the seed is the argument of that call; a real answer stays what it was, and calls what the next
    request has a result of.
    """

    def __init__(
        self, task: Task, seed: int, salt: int, tokenizer: Tokenizer, template_tokens: int = 0
    ) -> None:
        super().__init__(NO_LENGTHS, seed, salt, tokenizer, template_tokens)
        self.graphs = TaskGraphs(task, seed)
        self.turns, self.history = self.graphs.width, task.history
        self._task = task
        self._messages = {
            name: length_sampler(step.input_tokens)
            for name, step in task.steps.items()
            if step.input_tokens
        }
        known = task.known_tools
        self._results = {kind: length_sampler(tool.result_tokens) for kind, tool in known.items()}
        self._tools = [self._definition(kind, tool.schema_tokens) for kind, tool in known.items()]
        self._tools_tokens = sum(tool.schema_tokens for tool in known.values())
        self._corpora = {
            name: _corpus(step, self._lengths_key)
            for name, step in task.steps.items()
            if step.documents
        }
        self._documents = {
            name: length_sampler(task.steps[name].documents.count) for name in self._corpora
        }  # type: ignore[union-attr]
        self._output = self.graphs.output_tokens
        self._lengths = functools.lru_cache(LENGTHS_KEPT)(self._drawn)
        self._scripted = functools.lru_cache(CONTEXTS_KEPT)(
            functools.partial(self._new_or_longer, replies={})
        )

    def __getitem__(self, number: int) -> Request:
        return self._built(number, {})

    def with_replies(self, number: int, replies: Mapping[int, AssistantTurn]) -> Request:
        return self._built(number, replies)

    def requested_input_tokens(self, number: int) -> int:
        task, turn = self.task_and_turn(number)
        if self._is_for_values(task, turn):
            return sum(self.sequence_lengths(number))
        return self._tools_tokens + self._asked(task, turn)

    def requested_output_tokens(self, number: int) -> int:
        return self.graphs.output_tokens(*self.task_and_turn(number))

    def task_and_turn(self, number: int) -> tuple[int, int]:
        """The task of a request, and its turn there. Raises IndexError for a number that the task has not."""
        task, place = divmod(number, self.turns)
        last = len(self.graphs[task]) - 1
        if place == self.turns - 1:
            return task, last
        if place >= last:
            raise IndexError(number)
        return task, place

    def _is_for_values(self, task: int, turn: int) -> bool:
        return self._task.steps[self.graphs[task][turn].step].kind != "chat"

    def sequence_lengths(self, number: int) -> tuple[int, ...]:
        """The tokens of each sequence of a request for values; () of a chat."""
        task, turn = self.task_and_turn(number)
        if not self._is_for_values(task, turn):
            return ()
        text, (chunks, tokens) = self._message_tokens(task, turn), self._documents_of(task, turn)
        return (text + tokens,) * len(chunks) or (text,)

    def prompt_segments(self, number: int) -> Iterator[tuple[str | int | tuple[int, ...], int]]:
        """Where each part of a prompt comes from, in order: its owner and its content tokens.

        The owner is a step (its system message and the tools' definitions, equal in all tasks), or the number of the
        request of this task that brought or generated it; of documents, these and those before them. Prompts with equal
        stretches at their beginning share them.
        """
        task, turn = self.task_and_turn(number)
        nodes, path = self.graphs[task], [turn]
        while nodes[path[-1]].context >= 0:
            path.append(nodes[path[-1]].context)
        begun = nodes[path[-1]].step
        yield begun, self._tools_tokens + self._task.steps[begun].system_tokens
        for one in reversed(path):
            chunks, tokens, own, output = self._lengths(task, one)
            for place in range(len(chunks)):
                yield chunks[: place + 1], tokens
            yield task * self.turns + one, own + (output if one != turn else 0)

    def needs_replies(self, number: int) -> bool:
        task, turn = self.task_and_turn(number)
        node = self.graphs[task][turn]
        return self.history == "server" and (
            node.context >= 0 or len(node.joined) > 0
        )  # never one for values

    def numbers(self, count: int) -> Iterator[int]:
        return islice(
            (number for task in itertools.count() for number in self.task_request_numbers(task)),
            count,
        )

    def task_request_numbers(self, task: int) -> Iterator[int]:
        """The numbers of the requests of a task."""
        first, last = task * self.turns, len(self.graphs[task]) - 1
        yield from range(first, first + last)
        yield first + self.turns - 1

    def warnings(self, n: int) -> list[str]:
        return []

    # -- lengths -------------------------------------------------------------------------------------------------

    def _drawn(self, task: int, turn: int) -> tuple[tuple[int, ...], int, int, int]:
        """The chunks of a request, the tokens of each, the other tokens that it brings, and those of its answer."""
        chunks, of_each = self._documents_of(task, turn)
        own = self._new_tokens(task, turn) - len(chunks) * of_each
        return chunks, of_each, own, self._output(task, turn)

    def _new_tokens(self, task: int, turn: int) -> int:
        """Content tokens that a request brings beside what it continues, and beside its system message."""
        node, place = self.graphs[task][turn], task * self.turns + turn
        tokens = sum(self._output(task, one) for one in node.joined)
        if node.tool:
            tokens += self._results[node.tool](self._lengths_key, "tool", place)
        if node.message or node.asks >= 0:
            tokens += self._message_tokens(task, turn)
        chunks, of_each = self._documents_of(task, turn)
        return tokens + len(chunks) * of_each

    def _message_tokens(self, task: int, turn: int) -> int:
        """Of the message that a request brings, its own or that of the request whose question it asks again."""
        asks = self.graphs[task][turn].asks
        asked = turn if asks < 0 else asks
        node = self.graphs[task][asked]
        tokens = self._messages[node.step](self._lengths_key, "input", task * self.turns + asked)
        is_first_of_chat = node.context < 0 and not self._is_for_values(task, asked)
        return self._without_template(tokens) if is_first_of_chat else tokens

    def _message(self, task: int, turn: int) -> tuple[str, int]:
        node = self.graphs[task][turn]
        place = task * self.turns + (turn if node.asks < 0 else node.asks)
        return self._said_before("user", place, self._message_tokens(task, turn))

    def _documents_of(self, task: int, turn: int) -> tuple[tuple[int, ...], int]:
        """The chunks that a request has, and the tokens of each: retrieved for it, or the best of those ranked before.

        Which ones are the best is drawn: it is not read from the ranking.
        """
        graph = self.graphs[task]
        node = graph[turn]
        step = self._task.steps[node.step]
        if step.best is not None and node.first:
            ranked = next(
                one for one in node.after if self._task.steps[graph[one].step].kind == "rerank"
            )
            chunks, tokens = self._documents_of(task, ranked)
            return chunks[: step.best], tokens
        if step.documents is None or not node.first:
            return (), 0
        place = task * self.turns + turn
        count = self._documents[node.step](self._lengths_key, "documents", place)
        return self._corpora[node.step].of(place)[:count], step.documents.tokens

    def _document_texts(self, task: int, turn: int) -> list[tuple[str, int]]:
        chunks, tokens = self._documents_of(task, turn)
        return [self._shared_text("chunk", chunk, tokens) for chunk in chunks]

    def _asked(self, task: int, turn: int) -> int:
        node = self.graphs[task][turn]
        tokens = self._new_tokens(task, turn)
        if node.context < 0:
            return tokens + self._task.steps[node.step].system_tokens
        return tokens + self._asked(task, node.context) + self._output(task, node.context)

    # -- messages ------------------------------------------------------------------------------------------------

    def _built(self, number: int, replies: Mapping[int, AssistantTurn]) -> Request:
        task, turn = self.task_and_turn(number)
        if self._is_for_values(task, turn):
            return self._for_values(number, task, turn)
        context = self._context(task, turn, replies)
        extra: dict[str, Any] = {"tools": self._tools} if self._tools else {}
        calls_tool = any(
            node.context == turn and node.tool for node in self.graphs[task]
        )  # its result comes next
        if self._task.tool_choice is not None and calls_tool:
            extra["tool_choice"] = self._task.tool_choice
        return Request(
            id=f"{self._id}-{number}",
            messages=context.messages,
            max_tokens=self._output(task, turn),
            input_tokens=None if replies else context.tokens + self._tools_tokens,
            input_source="" if replies else self._tokenizer.tag,
            extra=extra,
            session=task,
            turn=turn,
        )

    def _for_values(self, number: int, task: int, turn: int) -> Request:
        """A text to embed, or a query with the documents to rank. No output is asked for."""
        text, tokens = self._message(task, turn)
        documents = self._document_texts(task, turn)
        if documents:
            tokens = sum(
                tokens + of_document for _, of_document in documents
            )  # the query goes with each document
        return Request(
            id=f"{self._id}-{number}",
            prompt=text,
            max_tokens=0,
            input_tokens=tokens,
            input_source=self._tokenizer.tag,
            extra={"documents": [text for text, _ in documents]} if documents else {},
            session=task,
            turn=turn,
        )

    def _context(self, task: int, turn: int, replies: Mapping[int, AssistantTurn]) -> _Context:
        """The messages of a request, from the beginning of its context on."""
        return self._new_or_longer(task, turn, replies) if replies else self._scripted(task, turn)

    def _new_or_longer(
        self, task: int, turn: int, replies: Mapping[int, AssistantTurn]
    ) -> _Context:
        node, place = self.graphs[task][turn], task * self.turns + turn
        results: list[
            tuple[str, str, int]
        ] = []  # what was called, its result, and content tokens of that
        for one in node.joined:
            reply, tokens = self._reply(task, one, replies)
            results.append((self.graphs[task][one].step, reply.text, tokens))
        if node.tool:
            text, tokens = self._said_before(
                "tool", place, self._results[node.tool](self._lengths_key, "tool", place)
            )
            results.append((node.tool, text, tokens))
        said = self._document_texts(task, turn)
        if node.message or node.asks >= 0:
            said.append(self._message(task, turn))
        if node.context < 0:
            return self._new_context(
                node, [*said, *((text, tokens) for _, text, tokens in results)]
            )
        before = self._context(task, node.context, replies)
        reply, tokens = self._reply(task, node.context, replies)
        messages = [*before.messages, *self._answered(place, reply, results)]
        messages += [{"role": "user", "content": text} for text, _ in said]
        tokens += before.tokens + sum(n for _, _, n in results) + sum(n for _, n in said)
        return _Context(messages, tokens)

    def _new_context(self, node: Node, said: list[tuple[str, int]]) -> _Context:
        """A system message, and one message of the user: servers' templates want roles that take turns."""
        system_tokens = self._task.steps[node.step].system_tokens
        messages: list[dict[str, Any]] = []
        if system_tokens:
            text, system_tokens = self._shared_text(f"system {node.step}", 0, system_tokens)
            messages.append({"role": "system", "content": text})
        messages.append({"role": "user", "content": "\n\n".join(text for text, _ in said)})
        return _Context(messages, system_tokens + sum(tokens for _, tokens in said))

    def _reply(
        self, task: int, turn: int, replies: Mapping[int, AssistantTurn]
    ) -> tuple[AssistantTurn, int]:
        """The answer of an earlier request, real or from the seed, and its content tokens where it is from the seed."""
        place = task * self.turns + turn
        real = replies.get(turn)
        if real is not None:
            return real, 0
        text, tokens = self._said_before("reply", place, self._output(task, turn))
        return AssistantTurn(text), tokens

    def _answered(
        self, place: int, reply: AssistantTurn, results: list[tuple[str, str, int]]
    ) -> list[dict[str, Any]]:
        """The message of the assistant, with a call for each result, and the results."""
        if not results:
            return [{"role": "assistant", "content": reply.text}]
        calls = []
        for i, (name, _, _) in enumerate(results):
            if i < len(reply.calls):
                calls.append(reply.calls[i])
                continue
            # an answer without a call stands as the argument of the first one
            arguments = {"input": reply.text} if not reply.calls and not i else {}
            function = {"name": name, "arguments": json.dumps(arguments)}
            identity = random_bytes(self._texts_key, f"call {i}", place, 5).hex()[
                :9
            ]  # some templates want nine characters
            calls.append({"id": identity, "type": "function", "function": function})
        content = reply.text if reply.calls and reply.text else None
        messages: list[dict[str, Any]] = [
            {"role": "assistant", "content": content, "tool_calls": calls}
        ]
        for call, (_, text, _) in zip(calls, results, strict=True):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return messages

    def _definition(self, kind: str, tokens: int) -> dict[str, Any]:
        """The definition of a tool, of so many tokens as compact JSON; its description has what the rest leaves."""

        def with_description(text: str) -> dict[str, Any]:
            parameters = {
                "type": "object",
                "properties": {"input": {"type": "string"}},
                "required": ["input"],
            }
            return {
                "type": "function",
                "function": {"name": kind, "description": text, "parameters": parameters},
            }

        def counted(definition: dict[str, Any]) -> int:
            return self._tokenizer.count(json.dumps(definition, separators=(",", ":")))

        words = best = tokens - counted(with_description("x"))
        closest = tokens
        for _ in range(8):
            text, _ = self._exact_text("definition " + kind, 0, max(1, words))
            difference = tokens - counted(with_description(text))
            if abs(difference) < closest:
                best, closest = words, abs(difference)
            if not difference:
                break
            words += difference
        text, _ = self._exact_text("definition " + kind, 0, max(1, best))
        return with_description(text)


def _corpus(step: TaskStep, key: bytes) -> Corpus:
    documents: Any = step.documents
    return Corpus(documents.model_copy(update={"count": largest_value(documents.count)}), key)
