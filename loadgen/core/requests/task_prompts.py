"""The requests of tasks: messages, tool calls and their results along the graph of each task.

Request task * width + position is the same on every worker, in any order and at any time. The
position of a request is its turn. The last request of a task has the last position, however many
turns come before it.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from loadgen_sdk.request import Request

from loadgen.core.requests.chunks import ChunkSpec, Corpus
from loadgen.core.requests.generated_prompts import GeneratedPrompts
from loadgen.core.requests.prompts import ANY_TARGET, AssistantTurn, PromptTarget
from loadgen.core.requests.sampling import LengthSampler, length_sampler, random_bytes
from loadgen.core.requests.task_graphs import TaskGraphs, TaskRequest
from loadgen.core.requests.text_generator import Text
from loadgen.core.requests.tokenizer import Tokenizer
from loadgen.core.requests.tool_definitions import build_tool_definition
from loadgen.core.workload.tasks import largest_value

if TYPE_CHECKING:
    from loadgen.core.workload.tasks import Documents, Task, TaskStep


CONTEXTS_CACHED = 64  # Contexts are long. The next turn of a task begins with the last one.
LENGTHS_CACHED = 1 << 14
CALL_ID_CHARACTERS = 9  # Some chat templates require this length.


class _Context(NamedTuple):
    """The messages of a request, and their content tokens as far as they are known."""

    messages: list[dict[str, Any]]
    tokens: int


class _Response(NamedTuple):
    """A response as later requests send it, and its content tokens. They are 0 for a real one."""

    turn: AssistantTurn
    tokens: int


class _ToolResult(NamedTuple):
    """The result of a tool call: the name of the tool, and the text that it returned."""

    tool: str
    text: Text


class _Documents(NamedTuple):
    """The documents of a request: the numbers of the chunks, and the tokens of each chunk."""

    chunks: tuple[int, ...]
    tokens_each: int

    @property
    def tokens(self) -> int:
        return len(self.chunks) * self.tokens_each


class _AddedLengths(NamedTuple):
    """The lengths of what one request of a task adds to the context that it continues.

    Attributes:
        documents: The documents that it sends.
        other_tokens: The tokens of the messages and results that it sends, without documents.
        output_tokens: The requested tokens of its response.
    """

    documents: _Documents
    other_tokens: int
    output_tokens: int


SegmentOwner = str | int | tuple[int, ...]
"""Where a part of a prompt comes from.

A step for its system message and tool definitions, the id of the request that sent or generated
a part, or a document and all documents before it.
"""


class PromptSegment(NamedTuple):
    """A part of a prompt: where it comes from, and its content tokens."""

    owner: SegmentOwner
    tokens: int


NO_DOCUMENTS = _Documents((), 0)


class TaskPrompts(GeneratedPrompts):
    """The requests of tasks.

    The response before the result of a tool appears in the context as a call of that tool. A
    response from the seed becomes the argument of the call. A real response stays as it is, and
    calls are added to it if it lacks them.
    """

    def __init__(
        self,
        task: Task,
        seed: int,
        salt: int,
        tokenizer: Tokenizer,
        target: PromptTarget = ANY_TARGET,
    ) -> None:
        """Prepare what all tasks have in common, so that building a request is fast.

        Args:
            task: The steps and tools of a task, as the workload describes them.
            seed: Decides the lengths and the choices that are drawn for each task.
            salt: Decides the texts, together with the seed.
            tokenizer: Counts tokens and supplies the words of the texts.
            target: What is known of the server that the requests are sent to.
        """
        super().__init__(seed, salt, tokenizer, target.template_tokens)
        self.graphs = TaskGraphs(task, seed)
        self.turns: int = self.graphs.width
        self.history: str = task.history
        self._task = task

        # Samplers of the token counts of user messages, by step, and of tool results, by tool.
        # Only the results of known tools, which have a length, are sent to the model.
        self._message_length_samplers = {
            name: length_sampler(step.input_tokens)
            for name, step in task.steps.items()
            if step.input_tokens
        }
        known_tools = task.known_tools
        self._result_length_samplers = {
            name: length_sampler(tool.result_tokens) for name, tool in known_tools.items()
        }
        self._tools = [
            build_tool_definition(name, tool.schema_tokens, tokenizer, self._texts)
            for name, tool in known_tools.items()
        ]
        self._tools_tokens = sum(tool.schema_tokens for tool in known_tools.values())

        # The document collection of each step that sends documents, and how many a request sends.
        self._corpora: dict[str, Corpus] = {}
        self._document_count_samplers: dict[str, LengthSampler] = {}
        for name, step in task.steps.items():
            if step.documents is not None:
                self._corpora[name] = _build_corpus(step.documents, self._lengths_key)
                self._document_count_samplers[name] = length_sampler(step.documents.count)

        self._cached_added_lengths = functools.lru_cache(LENGTHS_CACHED)(self._added_lengths)
        self._cached_scripted_context = functools.lru_cache(CONTEXTS_CACHED)(
            functools.partial(self._build_context, replies={})
        )

    # -- the protocol of prompts -----------------------------------------------------------------

    def __getitem__(self, request_id: int) -> Request:
        return self.with_replies(request_id, {})

    def with_replies(self, request_id: int, replies: Mapping[int, AssistantTurn]) -> Request:
        """Return a request with real responses of earlier turns. Others come from the seed."""
        task_index, turn = self.task_and_turn(request_id)
        if self._is_non_generative(task_index, turn):
            return self._build_non_generative(request_id, task_index, turn)
        return self._build_chat(request_id, task_index, turn, replies)

    def needs_replies(self, request_id: int) -> bool:
        """Return True if a request contains real responses of earlier requests."""
        task_index, turn = self.task_and_turn(request_id)
        request = self.graphs[task_index][turn]
        has_earlier_responses = request.continued_turn is not None or len(request.branch_turns) > 0
        return self.history == "server" and has_earlier_responses

    def request_ids(self, count: int) -> Iterator[int]:
        """Return the ids of the first requests."""
        ids_by_task = (self.ids_of_task(task_index) for task_index in itertools.count())
        return itertools.islice(itertools.chain.from_iterable(ids_by_task), count)

    def ids_of_task(self, task_index: int) -> Iterator[int]:
        """Yield the ids of the requests of a task."""
        first_id = task_index * self.turns
        last_turn = len(self.graphs[task_index]) - 1
        yield from range(first_id, first_id + last_turn)
        yield first_id + self.turns - 1

    def task_and_turn(self, request_id: int) -> tuple[int, int]:
        """Return the task of a request and its turn in that task.

        The last request of a task has the last of its ids, however many turns come before it.
        Raises IndexError for an id that the task does not use.
        """
        task_index, position = divmod(request_id, self.turns)
        last_turn = len(self.graphs[task_index]) - 1
        if position == self.turns - 1:
            return task_index, last_turn
        if position >= last_turn:
            raise IndexError(request_id)
        return task_index, position

    def warnings(self, request_count: int) -> list[str]:  # noqa: ARG002 - part of the protocol
        """Return no warnings."""
        return []

    # -- lengths ---------------------------------------------------------------------------------

    def input_tokens(self, request_id: int) -> int | None:
        """Return the content tokens of a prompt as it is built."""
        return self[request_id].input_tokens

    def requested_input_tokens(self, request_id: int) -> int:
        """Return the requested content tokens of a prompt, tool definitions included."""
        task_index, turn = self.task_and_turn(request_id)
        if self._is_non_generative(task_index, turn):
            return sum(self.sequence_lengths(request_id))
        return self._tools_tokens + self._context_tokens(task_index, turn)

    def requested_output_tokens(self, request_id: int) -> int:
        """Return the requested output tokens, 0 for embeddings and rankings."""
        return self.graphs.output_tokens(*self.task_and_turn(request_id))

    def sequence_lengths(self, request_id: int) -> tuple[int, ...]:
        """Return the tokens of each sequence that the model reads, or () for a chat.

        An embedding is one sequence. A ranking has one for each document, together with the query.
        """
        task_index, turn = self.task_and_turn(request_id)
        if not self._is_non_generative(task_index, turn):
            return ()
        text_tokens = self._message_tokens(task_index, turn)
        documents = self._documents(task_index, turn)
        if not documents.chunks:
            return (text_tokens,)
        return (text_tokens + documents.tokens_each,) * len(documents.chunks)

    def prompt_segments(self, request_id: int) -> list[PromptSegment]:
        """Return the segments of a prompt in order, for the prefix cache of the simulated server.

        Prompts that begin with equal segments share that beginning, so the cache compares segments
        in place of texts. The first segment is the tool definitions and the system message. Then
        each request of the conversation (context) adds a segment for each of its documents, and one
        for its other messages and its response.
        """
        task_index, turn = self.task_and_turn(request_id)
        context_turns = self._context_turns(task_index, turn)
        first_step = self.graphs[task_index][context_turns[0]].step
        system_tokens = self._task.steps[first_step].system_tokens
        segments = [PromptSegment(first_step, self._tools_tokens + system_tokens)]
        first_id = task_index * self.turns
        for context_turn in context_turns:
            lengths = self._cached_added_lengths(task_index, context_turn)
            # The condition saves a call for the many turns without documents.
            if lengths.documents.chunks:
                segments += _document_segments(lengths.documents)
            tokens = lengths.other_tokens
            if context_turn != turn:
                tokens += lengths.output_tokens  # The response is a part of later prompts only.
            segments.append(PromptSegment(first_id + context_turn, tokens))
        return segments

    def _context_turns(self, task_index: int, turn: int) -> list[int]:
        """Return the turns whose messages are in a request, from the first to the request itself.

        A request contains all messages of the request that it continues, which may in turn continue
        an earlier one. The first of them began the conversation (context).
        """
        graph = self.graphs[task_index]
        newest_first = [turn]
        continued_turn = graph[turn].continued_turn
        while continued_turn is not None:
            newest_first.append(continued_turn)
            continued_turn = graph[continued_turn].continued_turn
        return newest_first[::-1]

    def _context_tokens(self, task_index: int, turn: int) -> int:
        """Return the requested content tokens of all messages of a request.

        A request that begins a new conversation has a system message and its new messages. Any
        other request has all messages of the request that it continues, the response to that
        request, and its new messages.
        """
        request = self.graphs[task_index][turn]
        new_tokens = self._new_tokens(task_index, turn)
        if request.continued_turn is None:
            return self._task.steps[request.step].system_tokens + new_tokens
        continued_tokens = self._context_tokens(task_index, request.continued_turn)
        response_tokens = self.graphs.output_tokens(task_index, request.continued_turn)
        return continued_tokens + response_tokens + new_tokens

    def _added_lengths(self, task_index: int, turn: int) -> _AddedLengths:
        """Return the lengths of what a request, and then its response, add to the conversation."""
        documents = self._documents(task_index, turn)
        return _AddedLengths(
            documents,
            other_tokens=self._new_tokens(task_index, turn) - documents.tokens,
            output_tokens=self.graphs.output_tokens(task_index, turn),
        )

    def _new_tokens(self, task_index: int, turn: int) -> int:
        """Return the content tokens that a request adds to the conversation that it continues.

        They are those of its documents, of the responses of parallel branches, of the result of a
        tool and of its user message. The system message of a new conversation is not included.
        """
        request = self.graphs[task_index][turn]
        tokens = self._documents(task_index, turn).tokens
        for branch_turn in request.branch_turns:
            tokens += self.graphs.output_tokens(task_index, branch_turn)
        if request.tool_of_result:
            tokens += self._result_tokens(task_index, turn)
        if _sends_message(request):
            tokens += self._message_tokens(task_index, turn)
        return tokens

    def _result_tokens(self, task_index: int, turn: int) -> int:
        """Return the tokens of the tool result that a request sends."""
        sample_length = self._result_length_samplers[self.graphs[task_index][turn].tool_of_result]
        return sample_length(self._lengths_key, "tool", self._draw_index(task_index, turn))

    def _message_tokens(self, task_index: int, turn: int) -> int:
        """Return the content tokens of the user message that a request sends.

        A request without a message of its own repeats the message of an earlier request, with the
        same length. The workload sets the length of a prompt as the server counts it, with the
        tokens of the chat template. So the first message of a chat is shorter by these.
        """
        original_turn = self._original_turn_of_message(task_index, turn)
        original_request = self.graphs[task_index][original_turn]
        sample_length = self._message_length_samplers[original_request.step]
        draw_index = self._draw_index(task_index, original_turn)
        tokens = sample_length(self._lengths_key, "input", draw_index)

        begins_context = original_request.continued_turn is None
        if begins_context and not self._is_non_generative(task_index, original_turn):
            return self._subtract_template(tokens)
        return tokens

    def _original_turn_of_message(self, task_index: int, turn: int) -> int:
        """Return the first request that sends the user message of a request, maybe itself."""
        repeated_turn = self.graphs[task_index][turn].repeated_message_turn
        return turn if repeated_turn is None else repeated_turn

    def _documents(self, task_index: int, turn: int) -> _Documents:
        """Return the documents that a request sends, as chunks of a corpus.

        Only the first request of a step sends any. A step with `best` sends the best documents of
        the ranking before it. A step with `documents` sends some that are drawn from its corpus.
        """
        request = self.graphs[task_index][turn]
        step = self._task.steps[request.step]
        if not request.is_first_of_step:
            return NO_DOCUMENTS
        if step.best is not None:
            return self._best_documents(task_index, request, step.best)
        if step.documents is None:
            return NO_DOCUMENTS
        draw_index = self._draw_index(task_index, turn)
        sample_count = self._document_count_samplers[request.step]
        count = sample_count(self._lengths_key, "documents", draw_index)
        chunks = self._corpora[request.step].chunks_of(draw_index)[:count]
        return _Documents(chunks, step.documents.tokens)

    def _best_documents(self, task_index: int, request: TaskRequest, count: int) -> _Documents:
        """Return `count` documents of the ranking that a request waits for.

        The response of the server to the ranking is not read, because the texts are random and have
        no relevance. The first documents that were drawn for the ranking count as the best.
        """
        ranking_turn = next(
            turn for turn in request.predecessors if self._step(task_index, turn).kind == "rerank"
        )
        ranked_documents = self._documents(task_index, ranking_turn)
        return _Documents(ranked_documents.chunks[:count], ranked_documents.tokens_each)

    def _draw_index(self, task_index: int, turn: int) -> int:
        """Return the index under which the values of a request are drawn from the seed."""
        return task_index * self.turns + turn

    def _is_non_generative(self, task_index: int, turn: int) -> bool:
        """Return True for a request for embeddings or a ranking."""
        return self._step(task_index, turn).kind != "chat"

    def _step(self, task_index: int, turn: int) -> TaskStep:
        return self._task.steps[self.graphs[task_index][turn].step]

    # -- texts -----------------------------------------------------------------------------------

    def _message_text(self, task_index: int, turn: int) -> Text:
        """Return the user message that a request sends, its own or a repeated one."""
        draw_index = self._draw_index(task_index, self._original_turn_of_message(task_index, turn))
        return self._texts.history_text("user", draw_index, self._message_tokens(task_index, turn))

    def _document_texts(self, task_index: int, turn: int) -> list[Text]:
        """Return the texts of the documents of a request, which other tasks may have as well."""
        documents = self._documents(task_index, turn)
        return [
            self._texts.shared_text("chunk", chunk, documents.tokens_each)
            for chunk in documents.chunks
        ]

    def _scripted_response(self, task_index: int, turn: int) -> Text:
        """Return the response to a request as it is drawn from the seed."""
        tokens = self.graphs.output_tokens(task_index, turn)
        return self._texts.history_text("reply", self._draw_index(task_index, turn), tokens)

    # -- requests --------------------------------------------------------------------------------

    def _build_non_generative(self, request_id: int, task_index: int, turn: int) -> Request:
        """Build a text to embed, or a query with the documents to rank."""
        text = self._message_text(task_index, turn)
        documents = self._document_texts(task_index, turn)
        tokens = text.tokens
        if documents:
            # The query is read together with each document.
            tokens = sum(text.tokens + document.tokens for document in documents)
        return Request(
            id=self._wire_id(request_id),
            prompt=text.text,
            max_tokens=0,
            input_tokens=tokens,
            input_source=self._tokenizer.tag,
            extra={"documents": [document.text for document in documents]} if documents else {},
            session=task_index,
            turn=turn,
        )

    def _build_chat(
        self, request_id: int, task_index: int, turn: int, replies: Mapping[int, AssistantTurn]
    ) -> Request:
        """Build a chat with all messages of its context and the definitions of the tools."""
        context = self._context(task_index, turn, replies)
        # Only the server knows how many tokens its real responses have.
        has_known_length = not replies
        return Request(
            id=self._wire_id(request_id),
            messages=context.messages,
            max_tokens=self.graphs.output_tokens(task_index, turn),
            input_tokens=context.tokens + self._tools_tokens if has_known_length else None,
            input_source=self._tokenizer.tag if has_known_length else "",
            extra=self._tool_fields(task_index, turn),
            session=task_index,
            turn=turn,
        )

    def _tool_fields(self, task_index: int, turn: int) -> dict[str, Any]:
        """Return the body fields `tools` and `tool_choice` of a request.

        `tool_choice` can force the model to call a tool. It is only sent if the response should
        contain a call, that is, if a later request continues with the result of a tool.
        """
        fields: dict[str, Any] = {}
        if self._tools:
            fields["tools"] = self._tools
        should_call_tool = any(
            later_request.continued_turn == turn and later_request.tool_of_result
            for later_request in self.graphs[task_index]
        )
        if self._task.tool_choice is not None and should_call_tool:
            fields["tool_choice"] = self._task.tool_choice
        return fields

    def _context(
        self, task_index: int, turn: int, replies: Mapping[int, AssistantTurn]
    ) -> _Context:
        """Return all messages of a request.

        Contexts without real responses are cached, because each turn begins with the last one.
        """
        if replies:
            return self._build_context(task_index, turn, replies)
        return self._cached_scripted_context(task_index, turn)

    def _build_context(
        self, task_index: int, turn: int, replies: Mapping[int, AssistantTurn]
    ) -> _Context:
        """Build all messages of a request.

        A request that begins a new conversation (context) has a system message and one user
        message. Any other request has, in this order: the messages of the request that it
        continues, the response to that request, the results of tools, a user message for each
        document, and its own user message.

        Args:
            task_index: The number of the task.
            turn: The request of the task.
            replies: The real responses of earlier turns. Other responses come from the seed.
        """
        request = self.graphs[task_index][turn]
        results = self._tool_results(task_index, turn, replies)
        user_texts = self._document_texts(task_index, turn)
        if _sends_message(request):
            user_texts.append(self._message_text(task_index, turn))
        if request.continued_turn is None:
            system_tokens = self._task.steps[request.step].system_tokens
            texts = user_texts + [result.text for result in results]
            return self._build_new_context(request.step, system_tokens, texts)

        continued = self._context(task_index, request.continued_turn, replies)
        response = self._response(task_index, request.continued_turn, replies)
        messages = list(continued.messages)
        messages += self._response_messages(
            self._draw_index(task_index, turn), response.turn, results
        )
        messages += [{"role": "user", "content": text.text} for text in user_texts]
        tokens = continued.tokens + response.tokens
        tokens += sum(result.text.tokens for result in results)
        tokens += sum(text.tokens for text in user_texts)
        return _Context(messages, tokens)

    def _build_new_context(self, step: str, system_tokens: int, texts: list[Text]) -> _Context:
        """Return a system message, if the step has one, and one user message with all texts.

        It is one message, because chat templates may require that roles alternate.
        """
        messages: list[dict[str, Any]] = []
        tokens = sum(text.tokens for text in texts)
        if system_tokens:
            system = self._texts.shared_text(f"system {step}", 0, system_tokens)
            messages.append({"role": "system", "content": system.text})
            tokens += system.tokens
        messages.append({"role": "user", "content": "\n\n".join(text.text for text in texts)})
        return _Context(messages, tokens)

    def _tool_results(
        self, task_index: int, turn: int, replies: Mapping[int, AssistantTurn]
    ) -> list[_ToolResult]:
        """Return the tool results that a request sends.

        The responses of parallel branches come first. Each is sent as if its step were a tool that
        returned the response. Last comes the result of the tool that ran before the request.
        """
        request = self.graphs[task_index][turn]
        results: list[_ToolResult] = []
        for branch_turn in request.branch_turns:
            response = self._response(task_index, branch_turn, replies)
            text = Text(response.turn.text, response.tokens)
            results.append(_ToolResult(self.graphs[task_index][branch_turn].step, text))
        if request.tool_of_result:
            draw_index = self._draw_index(task_index, turn)
            text = self._texts.history_text(
                "tool", draw_index, self._result_tokens(task_index, turn)
            )
            results.append(_ToolResult(request.tool_of_result, text))
        return results

    def _response(
        self, task_index: int, turn: int, replies: Mapping[int, AssistantTurn]
    ) -> _Response:
        """Return the response to an earlier request, the real one if there is one."""
        if turn in replies:
            return _Response(replies[turn], 0)
        scripted = self._scripted_response(task_index, turn)
        return _Response(AssistantTurn(scripted.text), scripted.tokens)

    def _response_messages(
        self, request_id: int, response: AssistantTurn, results: list[_ToolResult]
    ) -> list[dict[str, Any]]:
        """Return the message of the assistant and a message for each tool result after it.

        Each result must answer a tool call in the message of the assistant. The first calls are
        those that the response really has, and calls for the other results are added.
        """
        if not results:
            return [{"role": "assistant", "content": response.text}]
        calls = list(response.calls[: len(results)])
        calls += [
            self._make_tool_call(request_id, index, results[index].tool, response)
            for index in range(len(calls), len(results))
        ]
        # The text of a response without calls is the argument of the first call.
        content = response.text if response.calls and response.text else None
        messages: list[dict[str, Any]] = [
            {"role": "assistant", "content": content, "tool_calls": calls}
        ]
        for call, result in zip(calls, results, strict=True):
            messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": result.text.text}
            )
        return messages

    def _make_tool_call(
        self, request_id: int, index: int, tool: str, response: AssistantTurn
    ) -> dict[str, Any]:
        """Return a tool call that a response lacks, so that a tool result can answer it.

        If the response has no call at all, its text becomes the argument of the first call. `index`
        is the position of the call among all calls of the response.
        """
        is_argument = not response.calls and index == 0
        arguments = {"input": response.text} if is_argument else {}
        call_id = random_bytes(self._texts_key, f"call {index}", request_id, 5).hex()
        return {
            "id": call_id[:CALL_ID_CHARACTERS],
            "type": "function",
            "function": {"name": tool, "arguments": json.dumps(arguments)},
        }


def _document_segments(documents: _Documents) -> list[PromptSegment]:
    """Return a segment for each document of a request.

    A prefix cache can reuse a document only after the same documents. So the owner of a segment is
    the document together with all documents before it.
    """
    return [
        PromptSegment(documents.chunks[:count], documents.tokens_each)
        for count in range(1, len(documents.chunks) + 1)
    ]


def _sends_message(request: TaskRequest) -> bool:
    """Return True if a request sends a user message, its own or a repeated one."""
    return request.has_message or request.repeated_message_turn is not None


def _build_corpus(documents: Documents, key: bytes) -> Corpus:
    """Return a corpus from which the largest possible number of documents is drawn."""
    count = largest_value(documents.count) or 0
    return Corpus(ChunkSpec(count, documents.tokens, documents.corpus, documents.zipf), key)
