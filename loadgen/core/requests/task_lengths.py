"""The lengths of what each request of a task sends, and which documents it sends.

They are drawn from the seed. No text is built for that.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from loadgen.core.requests.chunks import ChunkSpec, Corpus
from loadgen.core.requests.generated_prompts import without_template_tokens
from loadgen.core.requests.sampling import LengthSampler, length_sampler
from loadgen.core.requests.task_graphs import TaskGraphs, TaskRequest
from loadgen.core.workload.tasks import largest_value

if TYPE_CHECKING:
    from loadgen.core.workload.tasks import Documents

LENGTHS_CACHED = 1 << 14


class DocumentChunks(NamedTuple):
    """The documents of a request, which are chunks of a corpus.

    Attributes:
        chunks: The numbers of the chunks, or () if the request has no documents.
        tokens_each: The tokens of each chunk.
    """

    chunks: tuple[int, ...] = ()
    tokens_each: int = 0

    @property
    def tokens(self) -> int:
        """Return the tokens of all documents together."""
        return len(self.chunks) * self.tokens_each


class AddedLengths(NamedTuple):
    """The lengths of what one request of a task adds to the conversation that it continues.

    Attributes:
        documents: The documents that it sends.
        message_tokens: The tokens of all other messages and tool results that it sends.
        output_tokens: The requested tokens of its response.
    """

    documents: DocumentChunks
    message_tokens: int
    output_tokens: int


class _DocumentSource(NamedTuple):
    """Where a step takes its documents from: a corpus, and how many of them a request sends."""

    corpus: Corpus
    sample_count: LengthSampler


class TaskLengths:
    """Draws the lengths of what the requests of tasks send.

    A request is identified by the number of its task (`task_index`) and by its position in that
    task (`turn`). The same request always has the same lengths.
    """

    def __init__(self, graphs: TaskGraphs, key: bytes, template_tokens: int) -> None:
        """Prepare a sampler of random lengths for each step and tool of a task.

        Args:
            graphs: The requests of each task, and the requests that each one waits for.
            key: Decides the random draws.
            template_tokens: The tokens that the chat template of the server adds to a prompt.
        """
        self._graphs = graphs
        self._key = key
        self._template_tokens = template_tokens

        # The samplers by the name of the step or tool. Some steps have no message or no documents.
        steps = graphs.task.steps
        self._message_samplers = {
            name: length_sampler(step.input_tokens)
            for name, step in steps.items()
            if step.input_tokens
        }
        self._result_samplers = {
            name: length_sampler(tool.result_tokens)
            for name, tool in graphs.task.known_tools.items()
        }
        self._document_sources = {
            name: _build_document_source(step.documents, key)
            for name, step in steps.items()
            if step.documents is not None
        }

        # A cache per instance. A decorator would share one cache and keep all instances alive.
        self.added_by = functools.lru_cache(LENGTHS_CACHED)(self._measure_added)

    def conversation_tokens(self, task_index: int, turn: int) -> int:
        """Return the number of content tokens of all messages that a request sends.

        A request sends its whole conversation. For example, the request of the third turn contains
        the system message, the new messages of turns 0 to 2, and the responses to turns 0 and 1.
        """
        conversation_turns = self._graphs.conversation_turns(task_index, turn)
        first_step = self._graphs.step(task_index, conversation_turns[0])
        tokens = first_step.system_tokens

        for conversation_turn in conversation_turns:
            added = self.added_by(task_index, conversation_turn)
            tokens += added.documents.tokens + added.message_tokens
            has_response = conversation_turn != turn
            if has_response:
                tokens += added.output_tokens

        return tokens

    def _measure_added(self, task_index: int, turn: int) -> AddedLengths:
        """Return the lengths of what a request and its response add to a conversation.

        A request adds documents and messages. The messages are the responses of parallel branches,
        the result of a tool, and a user message. The system message is not included.
        """
        request = self._graphs[task_index][turn]

        branch_responses_tokens = sum(
            self._graphs.output_tokens(task_index, branch_turn)
            for branch_turn in request.branch_turns
        )
        message_tokens = branch_responses_tokens
        if request.tool_of_result:
            message_tokens += self.result_tokens(task_index, turn)
        if sends_message(request):
            message_tokens += self.message_tokens(task_index, turn)

        return AddedLengths(
            documents=self.documents(task_index, turn),
            message_tokens=message_tokens,
            output_tokens=self._graphs.output_tokens(task_index, turn),
        )

    def result_tokens(self, task_index: int, turn: int) -> int:
        """Return the tokens of the tool result that a request sends, drawn for this request.

        Args:
            task_index: The number of the task.
            turn: The position of the request in the task.
        """
        tool = self._graphs[task_index][turn].tool_of_result
        sample_length = self._result_samplers[tool]
        draw_index = self._graphs.draw_index(task_index, turn)
        return sample_length(self._key, "tool", draw_index)

    def message_tokens(self, task_index: int, turn: int) -> int:
        """Return the number of content tokens of the user message that a request sends.

        A request may repeat the user message of an earlier request, and then has the same number.
        The configured length of the first message of a chat includes the tokens that the server's
        chat template adds, so these are subtracted: 500 requested tokens and a template of 12 are a
        message of 488 tokens.

        Args:
            task_index: The number of the task.
            turn: The position of the request in the task.
        """
        # The request that sends the message first.
        origin_turn = self._graphs.message_turn(task_index, turn)
        origin = self._graphs[task_index][origin_turn]

        sample_length = self._message_samplers[origin.step]
        draw_index = self._graphs.draw_index(task_index, origin_turn)
        configured_tokens = sample_length(self._key, "input", draw_index)

        is_chat = self._graphs.is_chat(task_index, origin_turn)
        begins_conversation = origin.continued_turn is None
        if is_chat and begins_conversation:
            return without_template_tokens(configured_tokens, self._template_tokens)
        return configured_tokens

    def documents(self, task_index: int, turn: int) -> DocumentChunks:
        """Return the documents that a request sends, as chunks of a corpus.

        Only the first request of a step sends documents:

        - A step with the key `best: N` sends the N best documents of an earlier ranking.
        - A step with the key `documents` sends random documents of a corpus.

        Args:
            task_index: The number of the task.
            turn: The position of the request in the task.
        """
        request = self._graphs[task_index][turn]
        step = self._graphs.step(task_index, turn)
        if not request.is_first_of_step:
            return DocumentChunks()
        if step.best is not None:
            return self._first_ranked_documents(task_index, request, step.best)
        if step.documents is None:
            return DocumentChunks()

        # The corpus draws the largest possible number of documents, and the request sends some.
        source = self._document_sources[request.step]
        draw_index = self._graphs.draw_index(task_index, turn)
        document_count = source.sample_count(self._key, "documents", draw_index)
        drawn_chunks = source.corpus.chunks_of(draw_index)
        return DocumentChunks(drawn_chunks[:document_count], step.documents.tokens)

    def _first_ranked_documents(
        self, task_index: int, request: TaskRequest, count: int
    ) -> DocumentChunks:
        """Return the documents that a request uses as the best ones of an earlier ranking.

        A ranking is a request of the kind "rerank", which sends documents to be sorted by
        relevance. All of them are random texts, none of which is more relevant than another one. So
        the first `count` documents stand for the best ones, and the response is not read.

        Every workload in which a step needs a ranking has one before the step.
        """
        ranking_turns = [
            turn
            for turn in request.predecessors
            if self._graphs.step(task_index, turn).kind == "rerank"
        ]
        ranked_documents = self.documents(task_index, ranking_turns[0])
        return DocumentChunks(ranked_documents.chunks[:count], ranked_documents.tokens_each)


def sends_message(request: TaskRequest) -> bool:
    """Return True if a request sends a user message, its own or a repeated one."""
    return request.has_message or request.repeated_message_turn is not None


def _build_document_source(documents: Documents, key: bytes) -> _DocumentSource:
    """Return where a step takes its documents from: a corpus, and their number for each request.

    The number may be random. The corpus therefore lists the largest possible number of documents
    for each request, of which the request sends only the first ones.

    Args:
        documents: The section of the workload about the documents of the step.
        key: Decides all random draws.
    """
    spec = ChunkSpec(
        largest_value(documents.count), documents.tokens, documents.corpus, documents.zipf
    )
    return _DocumentSource(corpus=Corpus(spec, key), sample_count=length_sampler(documents.count))
