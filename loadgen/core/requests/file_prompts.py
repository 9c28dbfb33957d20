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
"""Most output tokens of a row that does not say how long its response should be."""
UNLIMITED = "unlimited"
"""The `output_tokens` with which such rows are sent without a limit."""

MAX_CACHED_FILE_BYTES = 1 << 23
"""The rows of a larger file are read from the file again whenever they are sent."""


class OutputLength(NamedTuple):
    """The requested output tokens. They are an upper bound if they are not exact."""

    tokens: int | None
    is_exact: bool


class FilePrompts:
    """The rows of the user's file, in file order or shuffled once by the seed.

    After the last row the first one follows again. A row is sent as written and its prompt is not
    counted first: servers report their count, and `input_tokens` counts on demand if they do not.
    """

    turns = 1
    history = "scripted"

    def __init__(
        self, requests: FromFile, seed: int, tokenizer: Tokenizer, api: str = "chat"
    ) -> None:
        # Workers without a data set do not need this module.
        from loadgen.core.workload.dataset import read_rows

        self.rows = read_rows(requests.path)
        is_small_file = self.rows.starts[-1] <= MAX_CACHED_FILE_BYTES
        self._read_row = (
            functools.cache(self.rows.__getitem__) if is_small_file else self.rows.__getitem__
        )
        self._tokenizer = tokenizer
        self._lengths_key = derive_key(seed)
        self._sample_output: LengthSampler | None = None
        self._default_limit: int | None = DEFAULT_OUTPUT_LIMIT
        if requests.output_tokens == UNLIMITED or api in NON_GENERATIVE_APIS:
            self._default_limit = None
        elif requests.output_tokens:
            self._sample_output = length_sampler(requests.output_tokens)
        self._row_order = self._shuffled_order() if requests.order == "shuffled" else None

    def _shuffled_order(self) -> NDArray[np.int64]:
        drawn = random_bytes(self._lengths_key, "order", 0, 8 * len(self.rows))
        return np.argsort(np.frombuffer(drawn, dtype="<u8"), kind="stable")

    def __getitem__(self, number: int) -> Request:
        index = number % len(self.rows)
        if self._row_order is not None:
            index = int(self._row_order[index])
        row = self._read_row(index)
        output = self._output_length(row, number)
        return Request(
            id=f"{self.rows.sha256[:8]}-{number}",
            messages=row.messages,
            prompt=row.prompt,
            max_tokens=output.tokens,
            exact_output=output.is_exact,
            extra=row.extra,
        )

    def _output_length(self, row: DatasetRow, number: int) -> OutputLength:
        """Return the output length of a row, or that of the workload or of the recorded answer."""
        if row.output_tokens is not None:
            return OutputLength(row.output_tokens, row.exact_output)
        if self._sample_output is not None:
            tokens = self._sample_output(self._lengths_key, "output", number)
            return OutputLength(tokens, is_exact=True)
        if row.answer:
            return OutputLength(max(self._tokenizer.count(row.answer), 1), is_exact=True)
        return OutputLength(self._default_limit, is_exact=False)

    def with_replies(
        self,
        number: int,
        replies: Mapping[int, AssistantTurn],  # noqa: ARG002 - part of the protocol
    ) -> Request:
        """Return the request; no row continues an earlier one."""
        return self[number]

    def needs_replies(self, number: int) -> bool:  # noqa: ARG002 - part of the protocol
        """Return False; no row continues an earlier one."""
        return False

    def numbers(self, count: int) -> Iterable[int]:
        """Return the numbers of the first requests."""
        return range(count)

    def input_tokens(self, number: int) -> int | None:
        """Return the content tokens of a row, or None if it has parts that are not text."""
        return count_content_tokens(self[number], self._tokenizer)

    def requested_input_tokens(self, number: int) -> int | None:
        """Return the content tokens of a row, like `input_tokens`; they are sent as they are."""
        return self.input_tokens(number)

    def requested_output_tokens(self, number: int) -> int | None:
        """Return the requested output tokens, or None if the output is not limited."""
        return self[number].max_tokens

    def sequence_lengths(self, number: int) -> tuple[int, ...]:
        """Return the tokens of each sequence of a request for embeddings or a ranking.

        The sequences are the text of the row, or each of its documents together with that text.
        """
        text_tokens = self.input_tokens(number) or 1
        documents = self[number].extra.get("documents")
        if not documents:
            return (text_tokens,)
        texts = [
            document if isinstance(document, str) else str(document.get("text", ""))
            for document in documents
        ]
        return tuple(text_tokens + self._tokenizer.count(text) for text in texts)

    def warnings(
        self,
        request_count: int,  # noqa: ARG002 - part of the protocol
    ) -> list[str]:
        """Return sentences about what was read, and about what of it is not sent."""
        messages = [*self.rows.notes]
        has_default_limit = self._default_limit is not None and self._sample_output is None
        if self.rows.without_length and has_default_limit:
            rows = format.counted(self.rows.without_length, "row")
            messages.append(
                f"{rows} without an output length: a limit of {self._default_limit:,} "
                "output tokens is sent; --output-tokens N sets the length, "
                "--output-tokens unlimited sends none"
            )
        if self.rows.ignored:
            messages.append(
                f"fields of {self.rows.path.name} that are not sent: {', '.join(self.rows.ignored)}"
            )
        return messages
