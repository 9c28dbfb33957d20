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


class _Documents(NamedTuple):
    """The documents of a request: the numbers of the chunks, and the tokens of each chunk."""

    chunks: tuple[int, ...]
    tokens_each: int

    @property
    def tokens(self) -> int:
        """Return the tokens of all documents together."""
        return len(self.chunks) * self.tokens_each


class _AddedLengths(NamedTuple):
    """The lengths of what one request of a task adds to the context that it continues.

    Attributes:
        documents: The documents that it sends.
        tokens_without_documents: The tokens of the messages and results that it sends.
        output_tokens: The requested tokens of its response.
    """

    documents: _Documents
    tokens_without_documents: int
    output_tokens: int


SegmentOwner = str | int | tuple[int, ...]
"""What identifies the text of a part of a prompt. Two parts with equal owners have equal texts.

- a step name, for its system message and the tool definitions
- a request id, for the messages that the request added and the response to it
- the numbers of a document and all documents before it, for a document
"""


class PromptSegment(NamedTuple):
    """A part of a prompt: what identifies its text, and its content tokens."""

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

        # The definitions of tools in the body of each chat, and their tokens.
        self._tools = [
            build_tool_definition(name, tool.schema_tokens, tokenizer, self._texts)
            for name, tool in task.known_tools.items()
        ]
        self._tools_tokens = sum(tool.schema_tokens for tool in task.known_tools.values())

        # From these the lengths and documents of each request are drawn.
        self._result_length_samplers = _build_result_length_samplers(task)
        self._message_length_samplers = _build_message_length_samplers(task)
        self._document_sources = _build_document_sources(task, self._lengths_key)

        # The caches belong to the instance, not to the class, so that they are freed with it.
        self._cached_added_lengths = functools.lru_cache(LENGTHS_CACHED)(self._added_lengths)
        self._cached_scripted_context = functools.lru_cache(CONTEXTS_CACHED)(
            self._build_scripted_context
        )

    # -- the protocol of prompts -----------------------------------------------------------------

    def __getitem__(self, request_id: int) -> Request:
        return self.with_replies(request_id, {})

    def with_replies(self, request_id: int, replies: Mapping[int, AssistantTurn]) -> Request:
        """Return a request with real responses of earlier turns. Others come from the seed."""
        task_index, turn = self.task_and_turn(request_id)
        if self._is_non_generative(task_index, turn):
            return self._build_embedding_or_ranking(request_id, task_index, turn)
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
        """Return the number of the task of a request, and the turn (position) in that task.

        Each task has a block of `self.turns` ids, as many as the largest task needs. The last
        request of a task always has the last id of the block. With blocks of 5 ids, task 2 has the
        ids 10 to 14. If it has 3 requests, their ids are 10, 11 and 14.

        Raises IndexError for an id that the task does not use, such as 12 and 13.
        """
        task_index, position = divmod(request_id, self.turns)
        last_position = self.turns - 1
        last_turn = len(self.graphs[task_index]) - 1
        if position == last_position:
            return task_index, last_turn
        if position < last_turn:
            return task_index, position

        raise IndexError(request_id)

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

        A segment is a part of the prompt, with its length and an owner that identifies its text.
        Two prompts that begin with segments of the same owners begin with the same text, so the
        cache compares owners in place of texts.
        """
        task_index, turn = self.task_and_turn(request_id)
        conversation_turns = self._context_turns(task_index, turn)

        # A prompt begins with the tool definitions and the system message, which are the same in
        # all conversations that begin with the same step.
        first_step = self.graphs[task_index][conversation_turns[0]].step
        system_tokens = self._task.steps[first_step].system_tokens
        segments = [PromptSegment(owner=first_step, tokens=self._tools_tokens + system_tokens)]

        # Then each request of the conversation adds its documents, which other tasks may send too,
        # and its messages with the response to them. No other task has the same messages, so they
        # are identified by the id of their request. The last request has no response yet.
        for conversation_turn in conversation_turns:
            lengths = self._cached_added_lengths(task_index, conversation_turn)
            if lengths.documents.chunks:
                segments += _document_segments(lengths.documents)

            message_tokens = lengths.tokens_without_documents
            has_response = conversation_turn != turn
            if has_response:
                message_tokens += lengths.output_tokens

            id_of_turn = task_index * self.turns + conversation_turn
            segments.append(PromptSegment(owner=id_of_turn, tokens=message_tokens))

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
        """Return how many content tokens all messages of a request have by the workload.

        A request contains its whole conversation (context). For example, the request of the third
        turn contains the system message, the new messages of turns 0 to 2, and the responses to
        turns 0 and 1. `turn` is the turn of the request itself.
        """
        conversation_turns = self._context_turns(task_index, turn)
        first_step = self._step(task_index, conversation_turns[0])
        system_tokens = first_step.system_tokens

        new_message_tokens = sum(
            self._new_tokens(task_index, conversation_turn)
            for conversation_turn in conversation_turns
        )

        earlier_turns = conversation_turns[:-1]
        response_tokens = sum(
            self.graphs.output_tokens(task_index, earlier_turn) for earlier_turn in earlier_turns
        )

        return system_tokens + new_message_tokens + response_tokens

    def _added_lengths(self, task_index: int, turn: int) -> _AddedLengths:
        """Return the lengths of what a request, and then its response, add to the conversation."""
        documents = self._documents(task_index, turn)
        return _AddedLengths(
            documents,
            tokens_without_documents=self._new_tokens(task_index, turn) - documents.tokens,
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

        Some requests repeat the user message of an earlier one. The repeated text is the same, so
        its length is decided by the request that sent the message first, the original.

        The chat template of the server adds tokens to each conversation. The workload requests the
        length of the complete prompt, so the message that begins a conversation is shorter by these
        tokens.
        """
        original_turn = self._original_turn_of_message(task_index, turn)
        original_request = self.graphs[task_index][original_turn]
        sample_length = self._message_length_samplers[original_request.step]

        # The same index always draws the same length.
        draw_index = self._draw_index(task_index, original_turn)
        tokens = sample_length(self._lengths_key, "input", draw_index)

        is_chat = not self._is_non_generative(task_index, original_turn)
        begins_conversation = original_request.continued_turn is None
        has_template_tokens = is_chat and begins_conversation

        return self._subtract_template(tokens) if has_template_tokens else tokens

    def _original_turn_of_message(self, task_index: int, turn: int) -> int:
        """Return the first request that sends the user message of a request, maybe itself."""
        repeated_turn = self.graphs[task_index][turn].repeated_message_turn
        return turn if repeated_turn is None else repeated_turn

    def _documents(self, task_index: int, turn: int) -> _Documents:
        """Return the documents that a request sends, as chunks of a corpus.

        Only the first request of a step sends any. These are documents of an earlier ranking if the
        step has the key `best`, the number of documents to send. They are drawn from the corpus of
        the step if it has the key `documents`.
        """
        request = self.graphs[task_index][turn]
        step = self._task.steps[request.step]
        if not request.is_first_of_step:
            return NO_DOCUMENTS
        if step.best is not None:
            return self._first_ranked_documents(task_index, request, step.best)

        if step.documents is not None:
            source = self._document_sources[request.step]
            draw_index = self._draw_index(task_index, turn)
            return self._draw_documents(source, draw_index, step.documents.tokens)

        return NO_DOCUMENTS

    def _draw_documents(
        self, source: _DocumentSource, draw_index: int, tokens_each: int
    ) -> _Documents:
        """Draw the documents of a request, whose random values have this index."""
        count = source.sample_count(self._lengths_key, "documents", draw_index)
        chunks = source.corpus.chunks_of(draw_index)[:count]
        return _Documents(chunks, tokens_each)

    def _first_ranked_documents(
        self, task_index: int, request: TaskRequest, count: int
    ) -> _Documents:
        """Return the `count` best documents of the ranking request that a request waits for.

        Which documents are the best is not read from the response of the server. Query and
        documents are random texts, none of which is more relevant than another one. So the first
        documents that the ranking request sent count as the best.

        There is such a ranking request, because a workload without one is refused.
        """
        ranking_turn = next(
            turn for turn in request.predecessors if self._step(task_index, turn).kind == "rerank"
        )
        ranked_documents = self._documents(task_index, ranking_turn)
        return _Documents(ranked_documents.chunks[:count], ranked_documents.tokens_each)

    def _draw_index(self, task_index: int, turn: int) -> int:
        """Return the index under which the values of a request are drawn from the seed.

        It is another one for each request of a run, and depends on no other request.
        """
        return task_index * self.turns + turn

    def _is_non_generative(self, task_index: int, turn: int) -> bool:
        """Return True for a request for embeddings or a ranking."""
        return self._step(task_index, turn).kind != "chat"

    def _step(self, task_index: int, turn: int) -> TaskStep:
        """Return the step that a request belongs to."""
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
        return self._cached_scripted_context(task_index, turn)

    def _build_scripted_context(self, task_index: int, turn: int) -> _Context:
        """Build all messages of a request whose earlier responses come from the seed."""
        return self._build_context(task_index, turn, replies={})

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
        if _sends_message(request):
            user_texts.append(self._message_text(task_index, turn))

        new_texts = user_texts + [result.output for result in tool_results]
        if request.continued_turn is None:
            return self._build_new_context(request.step, new_texts)

        continued_context = self._context(task_index, request.continued_turn, replies)
        response = self._response(task_index, request.continued_turn, replies)
        messages = continued_context.messages.copy()
        messages += self._response_messages(
            draw_index=self._draw_index(task_index, turn),
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
            draw_index = self._draw_index(task_index, turn)
            tokens = self._result_tokens(task_index, turn)
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


def _document_segments(documents: _Documents) -> list[PromptSegment]:
    """Return a segment for each document of a request, to compare with other prompts.

    A prefix cache can reuse a document only if all documents before it are the same too. A segment
    is therefore identified by the numbers of its document and all documents before it: documents 7
    and 3 give segments with the identities (7,) and (7, 3).
    """
    return [
        PromptSegment(owner=documents.chunks[:count], tokens=documents.tokens_each)
        for count in range(1, len(documents.chunks) + 1)
    ]


def _sends_message(request: TaskRequest) -> bool:
    """Return True if a request sends a user message, its own or a repeated one."""
    return request.has_message or request.repeated_message_turn is not None


class _DocumentSource(NamedTuple):
    """Where a step takes its documents from: a corpus, and how many of them a request sends."""

    corpus: Corpus
    sample_count: LengthSampler


def _build_result_length_samplers(task: Task) -> dict[str, LengthSampler]:
    """Return the sampler of the result length of each tool whose result the model gets."""
    return {name: length_sampler(tool.result_tokens) for name, tool in task.known_tools.items()}


def _build_message_length_samplers(task: Task) -> dict[str, LengthSampler]:
    """Return the sampler of the message length of each step with a user message of its own."""
    return {
        name: length_sampler(step.input_tokens)
        for name, step in task.steps.items()
        if step.input_tokens
    }


def _build_document_sources(task: Task, key: bytes) -> dict[str, _DocumentSource]:
    """Return the source of the documents of each step that sends some. `key` decides the draws."""
    return {
        name: _build_document_source(step.documents, key)
        for name, step in task.steps.items()
        if step.documents is not None
    }


def _build_document_source(documents: Documents, key: bytes) -> _DocumentSource:
    """Return the source of the documents of a step.

    For each request, the corpus draws the largest possible number of documents, and the request
    sends the first of them. `key` decides the draws.
    """
    largest_count = largest_value(documents.count) or 0
    spec = ChunkSpec(largest_count, documents.tokens, documents.corpus, documents.zipf)
    return _DocumentSource(Corpus(spec, key), length_sampler(documents.count))
