"""The requests of tasks: messages, tool calls and their results along the graph of each task.

A request depends only on the workload, the seed and its id, so it is the same on every worker, in
any order and at any time. Its turn is its position in its task.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from loadgen_sdk.request import Request

from loadgen.core.requests.generated_prompts import GeneratedPrompts
from loadgen.core.requests.prompts import ANY_TARGET, AssistantTurn, PromptTarget
from loadgen.core.requests.sampling import random_bytes
from loadgen.core.requests.task_graphs import TaskGraphs
from loadgen.core.requests.task_lengths import (
    LENGTHS_CACHED,
    DocumentChunks,
    TaskLengths,
    sends_message,
)
from loadgen.core.requests.text_generator import Text
from loadgen.core.requests.tokenizer import Tokenizer
from loadgen.core.requests.tool_definitions import build_tool_definition

if TYPE_CHECKING:
    from loadgen.core.workload.tasks import Task


CONTEXTS_CACHED = 64  # Contexts are long. The next turn of a task begins with the last one.
CALL_ID_CHARACTERS = 9  # Some chat templates require this length.
CALL_ID_BYTES = 5  # Each byte gives two hexadecimal characters.


class _Context(NamedTuple):
    """The messages of a request, and their content tokens as far as they are known."""

    messages: list[dict[str, Any]]
    tokens: int


class _Response(NamedTuple):
    """A response as later requests send it, and its content tokens. They are 0 for a real one."""

    message: AssistantTurn
    tokens: int


class _ToolResult(NamedTuple):
    """The result of a tool call: the name of the tool, and the text that it returned."""

    tool: str
    output: Text


SegmentOwner = str | int | tuple[int, ...]
"""What identifies the text of a part of a prompt. Two parts with equal owners have equal texts.

- a step name, for its system message and the tool definitions
- the number of a request, for the messages that it added and the response to it
- the numbers of a document and all documents before it, for a document
"""


class TaskAndTurn(NamedTuple):
    """The number of the task of a request, and the position of the request in that task."""

    task_index: int
    turn: int


class PromptSegment(NamedTuple):
    """A part of a prompt: what identifies its text, and its content tokens."""

    owner: SegmentOwner
    tokens: int


class TaskPrompts(GeneratedPrompts):
    """The requests of tasks, `prompts[request_id]`.

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
            salt: Decides the words of the texts, together with the seed. With another salt no
                prompt is in the prefix cache of the server yet.
            tokenizer: Counts tokens and supplies the words of the texts.
            target: What is known of the server that the requests are sent to.
        """
        super().__init__(seed, salt, tokenizer, target.template_tokens)
        self.history: str = task.history
        self.graphs = TaskGraphs(task, seed)
        self.turns: int = self.graphs.layout.block_size
        self._task = task
        self._lengths = TaskLengths(self.graphs, self._lengths_key, self._template_tokens)

        # Each chat contains the definitions of all tools that the model knows.
        self._tools = [
            build_tool_definition(name, tool.schema_tokens, tokenizer, self._texts)
            for name, tool in task.known_tools.items()
        ]
        self._tools_tokens = sum(tool.schema_tokens for tool in task.known_tools.values())

        # Later requests of a conversation repeat the segments and the messages of earlier ones.
        # Each instance has caches of its own, which are freed with it.
        self._added_segments = functools.lru_cache(LENGTHS_CACHED)(self._list_added_segments)
        build_scripted_context = functools.partial(self._build_context, replies={})
        self._scripted_context = functools.lru_cache(CONTEXTS_CACHED)(build_scripted_context)

    # -- the protocol of prompts -----------------------------------------------------------------

    def __getitem__(self, request_id: int) -> Request:
        return self.with_replies(request_id, {})

    def with_replies(self, request_id: int, replies: Mapping[int, AssistantTurn]) -> Request:
        """Return a request with real responses of earlier turns. Others come from the seed."""
        task_index, turn = self.task_and_turn(request_id)
        if self.graphs.is_chat(task_index, turn):
            return self._build_chat(request_id, task_index, turn, replies)
        return self._build_embedding_or_ranking(request_id, task_index, turn)

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
        """Return an iterator over the ids of the requests of a task."""
        return self.graphs.layout.slots_of(task_index, turn_count=len(self.graphs[task_index]))

    def task_and_turn(self, request_id: int) -> TaskAndTurn:
        """Return the number of the task of a request, and its position in that task.

        Raises IndexError for an id that the task does not use.
        """
        layout = self.graphs.layout
        task_index = layout.session_of(request_id)
        turn = layout.turn_of(request_id, turn_count=len(self.graphs[task_index]))
        return TaskAndTurn(task_index, turn)

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
        if self.graphs.is_chat(task_index, turn):
            return self._tools_tokens + self._lengths.conversation_tokens(task_index, turn)
        return sum(self.sequence_lengths(request_id))

    def requested_output_tokens(self, request_id: int) -> int:
        """Return the requested output tokens, 0 for embeddings and rankings."""
        task_index, turn = self.task_and_turn(request_id)
        return self.graphs.output_tokens(task_index, turn)

    def sequence_lengths(self, request_id: int) -> tuple[int, ...]:
        """Return the tokens of each sequence that the model reads, or () for a chat.

        An embedding is one sequence. A ranking has one for each document, together with the query.
        """
        task_index, turn = self.task_and_turn(request_id)
        if self.graphs.is_chat(task_index, turn):
            return ()

        text_tokens = self._lengths.message_tokens(task_index, turn)
        documents = self._lengths.documents(task_index, turn)
        if not documents.chunks:
            return (text_tokens,)

        return (text_tokens + documents.tokens_each,) * len(documents.chunks)

    def prompt_segments(self, request_id: int) -> list[PromptSegment]:
        """Return the segments of a prompt in order, for the prefix cache of the simulated server.

        A segment is a part of the prompt, with its length and an owner that identifies its text.
        Two prompts that begin with segments of the same owners begin with the same text, so the
        cache compares owners in place of texts.
        """
        task_index, turn = self.task_and_turn(request_id)
        conversation_turns = self.graphs.conversation_turns(task_index, turn)

        # A prompt begins with the tool definitions and the system message, which are the same in
        # all conversations that begin with the same step.
        first_step = self.graphs[task_index][conversation_turns[0]].step
        system_tokens = self._task.steps[first_step].system_tokens
        segments = [PromptSegment(owner=first_step, tokens=self._tools_tokens + system_tokens)]

        # Each request of the conversation adds others. Only the last one has no response yet.
        for conversation_turn in conversation_turns:
            has_response = conversation_turn != turn
            segments += self._added_segments(task_index, conversation_turn, has_response)

        return segments

    def _list_added_segments(
        self, task_index: int, turn: int, has_response: bool
    ) -> list[PromptSegment]:
        """Return the segments that a request adds to the conversation that it continues.

        They are its documents, which other tasks may send too, and its messages together with the
        response, if there is one. No other task has the same messages, so they are identified by
        the number of the request.
        """
        added = self._lengths.added_by(task_index, turn)
        message_tokens = added.message_tokens
        if has_response:
            message_tokens += added.output_tokens

        request_number = self.graphs.draw_index(task_index, turn)
        messages = PromptSegment(owner=request_number, tokens=message_tokens)
        return [*_document_segments(added.documents), messages]

    # -- texts -----------------------------------------------------------------------------------

    def _message_text(self, task_index: int, turn: int) -> Text:
        """Return the user message that a request sends, its own or a repeated one."""
        message_turn = self.graphs.message_turn(task_index, turn)
        draw_index = self.graphs.draw_index(task_index, message_turn)
        tokens = self._lengths.message_tokens(task_index, turn)
        return self._texts.history_text("user", draw_index, tokens)

    def _document_texts(self, task_index: int, turn: int) -> list[Text]:
        """Return the texts of the documents of a request, which other tasks may have as well."""
        documents = self._lengths.documents(task_index, turn)
        return [
            self._texts.shared_text("chunk", chunk, documents.tokens_each)
            for chunk in documents.chunks
        ]

    def _scripted_response(self, task_index: int, turn: int) -> Text:
        """Return the response to a request as it is drawn from the seed."""
        tokens = self.graphs.output_tokens(task_index, turn)
        draw_index = self.graphs.draw_index(task_index, turn)
        return self._texts.history_text("reply", draw_index, tokens)

    # -- requests --------------------------------------------------------------------------------

    def _build_embedding_or_ranking(self, request_id: int, task_index: int, turn: int) -> Request:
        """Build a request with a text to embed, or with a query and the documents to rank by it."""
        text = self._message_text(task_index, turn)
        documents = self._document_texts(task_index, turn)
        extra_fields: dict[str, Any] = {}

        tokens = text.tokens
        if documents:
            extra_fields["documents"] = [document.text for document in documents]
            # The query is read together with each document.
            tokens = sum(text.tokens + document.tokens for document in documents)

        return Request(
            id=self._wire_id(request_id),
            prompt=text.text,
            max_tokens=0,
            input_tokens=tokens,
            input_source=self._tokenizer.tag,
            extra=extra_fields,
            session=task_index,
            turn=turn,
        )

    def _build_chat(
        self, request_id: int, task_index: int, turn: int, replies: Mapping[int, AssistantTurn]
    ) -> Request:
        """Build a chat with all messages of its conversation and the definitions of the tools.

        Args:
            request_id: The id of the request.
            task_index: The number of the task.
            turn: The position of the request in the task.
            replies: Real responses of earlier turns. Others come from the seed.
        """
        context = self._context(task_index, turn, replies)
        input_tokens: int | None = context.tokens + self._tools_tokens

        input_source: str = self._tokenizer.tag
        if replies:
            # Only the server knows how many tokens its real responses have.
            input_tokens = None
            input_source = ""

        return Request(
            id=self._wire_id(request_id),
            messages=context.messages,
            max_tokens=self.graphs.output_tokens(task_index, turn),
            input_tokens=input_tokens,
            input_source=input_source,
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
        return self._scripted_context(task_index, turn)

    def _build_context(
        self, task_index: int, turn: int, replies: Mapping[int, AssistantTurn]
    ) -> _Context:
        """Build all messages of a request, with their tokens.

        A request that begins a new conversation (context) has a system message and one user
        message. Any other request has, in this order: the messages of the request that it
        continues, the response to that request, the results of tools, a user message for each
        document, and its own user message.

        Args:
            task_index: The number of the task.
            turn: The position of the request in the task.
            replies: The real responses of earlier turns. Other responses come from the seed.
        """
        request = self.graphs[task_index][turn]
        tool_results = self._tool_results(task_index, turn, replies)

        user_texts = self._document_texts(task_index, turn)
        if sends_message(request):
            user_texts.append(self._message_text(task_index, turn))

        new_texts = user_texts + [result.output for result in tool_results]
        if request.continued_turn is None:
            return self._build_new_context(request.step, new_texts)

        continued_context = self._context(task_index, request.continued_turn, replies)
        response = self._response(task_index, request.continued_turn, replies)
        messages = continued_context.messages.copy()
        messages += self._response_messages(
            draw_index=self.graphs.draw_index(task_index, turn),
            response=response.message,
            results=tool_results,
        )
        messages += [{"role": "user", "content": text.text} for text in user_texts]

        new_tokens = response.tokens + sum(text.tokens for text in new_texts)
        return _Context(messages, continued_context.tokens + new_tokens)

    def _build_new_context(self, step_name: str, texts: list[Text]) -> _Context:
        """Return a system message, if the step has one, and one user message with all texts.

        It is one message, because chat templates may require that roles alternate.
        """
        messages: list[dict[str, Any]] = []
        tokens = sum(text.tokens for text in texts)

        system_tokens = self._task.steps[step_name].system_tokens
        if system_tokens:
            system = self._texts.shared_text(f"system {step_name}", 0, system_tokens)
            messages.append({"role": "system", "content": system.text})
            tokens += system.tokens

        messages.append({"role": "user", "content": "\n\n".join(text.text for text in texts)})
        return _Context(messages, tokens)

    def _tool_results(
        self, task_index: int, turn: int, replies: Mapping[int, AssistantTurn]
    ) -> list[_ToolResult]:
        """Return the tool results that a request sends.

        The responses of parallel branches (sub-agents) come first. A chat API has no message for
        the response of a sub-agent, so the step of the branch is sent as if it were a tool that
        returned the response. Last comes the result of the tool that ran before the request.
        """
        request = self.graphs[task_index][turn]
        results: list[_ToolResult] = []
        for branch_turn in request.branch_turns:
            response = self._response(task_index, branch_turn, replies)
            output = Text(response.message.text, response.tokens)
            branch_step = self.graphs[task_index][branch_turn].step
            results.append(_ToolResult(tool=branch_step, output=output))

        if request.tool_of_result:
            draw_index = self.graphs.draw_index(task_index, turn)
            tokens = self._lengths.result_tokens(task_index, turn)
            output = self._texts.history_text("tool", draw_index, tokens)
            results.append(_ToolResult(tool=request.tool_of_result, output=output))

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
        self, draw_index: int, response: AssistantTurn, results: list[_ToolResult]
    ) -> list[dict[str, Any]]:
        """Return the message of the assistant and a message for each tool result after it.

        Without tool results, the message of the assistant is the text of the response. With tool
        results, the message must have a tool call for each of them. A response may have made no
        calls. Then calls are invented, the text of the response becomes an argument of the first
        call (`_invent_tool_call`), and the message has no other text.

        Args:
            draw_index: The number of the request, from which the ids of invented calls are drawn.
            response: The response of the assistant, real or drawn from the seed.
            results: The tool results that follow it, maybe none.
        """
        if not results:
            return [{"role": "assistant", "content": response.text}]

        calls = self._tool_calls(draw_index, response, results)
        has_text_and_calls = bool(response.calls and response.text)
        content = response.text if has_text_and_calls else None
        assistant_message = {"role": "assistant", "content": content, "tool_calls": calls}
        tool_messages = [
            {"role": "tool", "tool_call_id": call["id"], "content": result.output.text}
            for call, result in zip(calls, results, strict=True)
        ]

        return [assistant_message, *tool_messages]

    def _tool_calls(
        self, draw_index: int, response: AssistantTurn, results: list[_ToolResult]
    ) -> list[dict[str, Any]]:
        """Return a tool call for each tool result, because chat APIs refuse a result without one.

        The calls that the response contains come first. If there are more results, calls are
        invented for the others.
        """
        real_calls = response.calls[: len(results)]
        invented_calls = [
            self._invent_tool_call(draw_index, index, results[index].tool, response)
            for index in range(len(real_calls), len(results))
        ]
        return [*real_calls, *invented_calls]

    def _invent_tool_call(
        self, draw_index: int, call_index: int, tool: str, response: AssistantTurn
    ) -> dict[str, Any]:
        """Return a tool call that a response lacks, so that a tool result can be sent after it.

        A generated response is only a text. A model that calls a tool spends its tokens on the
        arguments of the call, so the text becomes the argument of the first invented call. Later
        calls, and calls that are added to real ones, have no arguments.

        Args:
            draw_index: The number of the request, from which the id of the call is drawn.
            call_index: The position of the call among all calls of the message.
            tool: The name of the tool.
            response: The response that the call is added to.
        """
        arguments = {}
        is_only_text = not response.calls
        if is_only_text and call_index == 0:
            arguments["input"] = response.text

        id_bytes = random_bytes(self._texts_key, f"call {call_index}", draw_index, CALL_ID_BYTES)
        return {
            "id": id_bytes.hex()[:CALL_ID_CHARACTERS],
            "type": "function",
            "function": {"name": tool, "arguments": json.dumps(arguments)},
        }


def _document_segments(documents: DocumentChunks) -> list[PromptSegment]:
    """Return a segment for each document of a request, to compare with other prompts.

    A prefix cache can reuse a document only if all documents before it are the same too. A segment
    is therefore identified by the numbers of its document and all documents before it: documents 7
    and 3 give segments with the identities (7,) and (7, 3).
    """
    return [
        PromptSegment(owner=documents.chunks[:count], tokens=documents.tokens_each)
        for count in range(1, len(documents.chunks) + 1)
    ]
