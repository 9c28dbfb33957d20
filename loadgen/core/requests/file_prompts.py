"""The requests of a data set of the user."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from loadgen_sdk.request import Request
from loadgen_sdk.wire_formats.server_profiles import NON_GENERATIVE_APIS

from loadgen.core import format
from loadgen.core.requests.prompts import AssistantTurn, count_content_tokens
from loadgen.core.requests.sampling import (
    LengthSampler,
    derive_key,
    length_sampler,
    random_bytes,
)
from loadgen.core.requests.tokenizer import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.core.workload.dataset_rows import DatasetRow
    from loadgen.core.workload.request_kinds import FromFile

DEFAULT_OUTPUT_LIMIT = 1024
"""The limit of output tokens for a row that does not say how long its response should be."""
UNLIMITED = "unlimited"
"""The value of `output_tokens` with which rows that have no length are sent without a limit."""

MAX_CACHED_FILE_BYTES = 1 << 23
"""The rows of a larger file are read from the file again whenever they are sent."""


class OutputLength(NamedTuple):
    """The requested output tokens of a row.

    Attributes:
        tokens: The number of tokens, or None if the request has no limit.
        is_exact: Whether the response must have exactly so many tokens. Otherwise they are an upper
            bound.
    """

    tokens: int | None
    is_exact: bool


class FilePrompts:
    """The rows of the user's file, in file order or shuffled once by the seed.

    After the last row the first one follows again. A row is sent as written and its prompt is not
    counted first: servers report their count, and `input_tokens` counts on demand if they do not.

    Attributes:
        turns: 1, as each row is a request that stands alone.
        history: "scripted", as no row contains a response of the server.
        rows: The rows of the file.
    """

    turns = 1
    history = "scripted"

    def __init__(
        self, source: FromFile, seed: int, tokenizer: Tokenizer, api: str = "chat"
    ) -> None:
        """Read and check the file.

        Args:
            source: Which file, in which order, and how long the responses are.
            seed: Decides the order of the rows and the lengths that are drawn.
            tokenizer: Counts the tokens of prompts and of recorded responses.
            api: The API that requests are sent to.
        """
        # Workers without a data set do not need this module.
        from loadgen.core.workload.dataset import read_question_rows, read_rows

        read = read_question_rows if source.check_answers else read_rows
        self.rows = read(source.path)
        is_small_file = self.rows.byte_count <= MAX_CACHED_FILE_BYTES
        self._read_row = functools.cache(self.rows.read) if is_small_file else self.rows.read
        self._tokenizer = tokenizer
        self._lengths_key = derive_key(seed)
        self._output_sampler = _output_sampler(source, api)
        self._default_output_limit = _default_output_limit(source, api)
        self._row_order = self._shuffled_order() if source.order == "shuffled" else None

    def _shuffled_order(self) -> NDArray[np.int64]:
        """Return the indices of all rows in an order that is drawn from the seed.

        The rows are sorted by a random integer of 64 bits for each.
        """
        random_integers = random_bytes(self._lengths_key, "order", 0, 8 * len(self.rows))
        return np.argsort(np.frombuffer(random_integers, dtype="<u8"), kind="stable")

    def __getitem__(self, request_id: int) -> Request:
        """Build a request from its row of the file.

        The rows repeat after the last one. The id that is sent begins with the hash of the file,
        which identifies the data set.
        """
        index = request_id % len(self.rows)
        if self._row_order is not None:
            index = int(self._row_order[index])

        row = self._read_row(index)
        output = self._output_length(row, request_id)
        return Request(
            id=f"{self.rows.sha256[:8]}-{request_id}",
            messages=row.messages,
            prompt=row.prompt,
            max_tokens=output.tokens,
            exact_output=output.is_exact,
            extra=row.extra,
        )

    def _output_length(self, row: DatasetRow, request_id: int) -> OutputLength:
        """Return the output length of a row, from the first source that has one.

        These are the row itself, `output_tokens` of the workload, the response that is recorded in
        the row, and the default limit.
        """
        if row.output_tokens is not None:
            return OutputLength(row.output_tokens, row.is_exact_length)

        if self._output_sampler is not None:
            tokens = self._output_sampler(self._lengths_key, "output", request_id)
            return OutputLength(tokens, is_exact=True)

        if row.recorded_response:
            return OutputLength(max(self._tokenizer.count(row.recorded_response), 1), is_exact=True)

        return OutputLength(self._default_output_limit, is_exact=False)

    def with_replies(
        self,
        request_id: int,
        replies: Mapping[int, AssistantTurn],  # noqa: ARG002 - part of the protocol
    ) -> Request:
        """Return the request; no row continues an earlier one."""
        return self[request_id]

    def needs_replies(self, request_id: int) -> bool:  # noqa: ARG002 - part of the protocol
        """Return False; no row continues an earlier one."""
        return False

    def request_ids(self, count: int) -> Iterable[int]:
        """Return the ids of the first requests."""
        return range(count)

    def input_tokens(self, request_id: int) -> int | None:
        """Return the content tokens of a row, or None if it has parts that are not text."""
        return count_content_tokens(self[request_id], self._tokenizer)

    def requested_input_tokens(self, request_id: int) -> int | None:
        """Return the content tokens of a row, like `input_tokens`; they are sent as they are."""
        return self.input_tokens(request_id)

    def requested_output_tokens(self, request_id: int) -> int | None:
        """Return the requested output tokens, or None if the output is not limited."""
        return self[request_id].max_tokens

    def sequence_lengths(self, request_id: int) -> tuple[int, ...]:
        """Return the number of tokens of each sequence that the model reads for a request.

        An embedding has one sequence, the text of the row. A ranking has one for each document of
        the row: the query (the text of the row) together with the document. A text that cannot be
        counted, or that is empty, counts as one token.
        """
        text_tokens = self.input_tokens(request_id) or 1
        documents = self[request_id].extra.get("documents")
        if not documents:
            return (text_tokens,)

        document_texts = [
            document if isinstance(document, str) else str(document.get("text", ""))
            for document in documents
        ]
        return tuple(text_tokens + self._tokenizer.count(text) for text in document_texts)

    def warnings(
        self,
        request_count: int,  # noqa: ARG002 - part of the protocol
    ) -> list[str]:
        """Return sentences about what the requests have that the user may not expect.

        They say how the file was read, how many rows get the default limit of output tokens, and
        which fields of the rows are not sent.
        """
        messages = [*self.rows.notes]
        has_default_limit = self._default_output_limit is not None and self._output_sampler is None
        if self.rows.rows_without_length and has_default_limit:
            messages.append(self._describe_default_limit())

        if self.rows.ignored_fields:
            fields = ", ".join(self.rows.ignored_fields)
            messages.append(f"these fields of {self.rows.path.name} are not sent: {fields}")

        return messages

    def _describe_default_limit(self) -> str:
        """Return the warning that rows without an output length are sent with a default limit."""
        rows = format.counted(self.rows.rows_without_length, "row")
        return (
            f"{rows} without an output length are sent with a limit of "
            f"{self._default_output_limit:,} output tokens. --output-tokens N "
            "sets the length, --output-tokens unlimited sends none"
        )


def _output_sampler(source: FromFile, api: str) -> LengthSampler | None:
    """Return the sampler of `output_tokens`, or None if the workload sets no length."""
    if api in NON_GENERATIVE_APIS or source.output_tokens in (None, UNLIMITED):
        return None
    return length_sampler(source.output_tokens)


def _default_output_limit(source: FromFile, api: str) -> int | None:
    """Return the limit for rows without any output length, or None if they are sent without one.

    Embeddings and rankings have no output tokens to limit.
    """
    if api in NON_GENERATIVE_APIS or source.output_tokens == UNLIMITED:
        return None
    return DEFAULT_OUTPUT_LIMIT
