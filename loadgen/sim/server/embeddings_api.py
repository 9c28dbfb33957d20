"""Embeddings and rerank of the simulated server: their request bodies, and the numbers that it answers with. Pure.

Both dialects answer alike: embeddings as the public API has them, rerank as vLLM and Jina have it. Each input of
embeddings, and each document of rerank with the query before it, is a sequence of its own, which the engine prefills.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any, Literal

import msgspec

from loadgen.sim.server.request_parser import RequestRules, check_model, count_tokens
from loadgen.sim.server.wire_format import DONE, Dialect, ParsedRequest, malformed, refused

DIMENSIONS = 1024
MOST_DIMENSIONS = 8192
MOST_SEQUENCES = 2048  # of one request, as the public API has it


class _Embeddings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    input: str | list[int | str | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None


class _Document(msgspec.Struct):
    text: str


class _Rerank(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    query: str
    documents: list[str | _Document]
    top_n: int | None = None
    return_documents: bool = True
    truncate_prompt_tokens: int | None = None
    max_tokens_per_doc: int | None = None
    user: str | None = None


_READERS: dict[str, Any] = {
    "embeddings": msgspec.json.Decoder(_Embeddings).decode,
    "rerank": msgspec.json.Decoder(_Rerank).decode,
}


def parse_values(
    body: bytes, api: Literal["embeddings", "rerank"], rules: RequestRules
) -> ParsedRequest:
    """The request in `body`. Raises Refusal for everything that this server refuses."""
    try:
        request = _READERS[api](body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
        raise malformed(rules.dialect, str(wrong)) from None
    check_model(request.model, rules)
    sequences = _of_inputs(request, rules) if api == "embeddings" else _of_documents(request, rules)
    if len(sequences) > MOST_SEQUENCES:
        raise refused(rules.dialect, f"at most {MOST_SEQUENCES} at once, got {len(sequences)}", api)
    longest = rules.max_num_tokens or rules.max_seq_len - 1
    if (tokens := max(sequences)) > longest:
        text = f"an input of {tokens} tokens is longer than the {longest} that this model takes"
        raise refused(rules.dialect, text, api, code="context_length_exceeded")
    return ParsedRequest(
        api=api,
        model=request.model,
        stream=False,
        input_tokens=sum(sequences),
        output_tokens=0,
        finish_reason="",
        digest=hashlib.blake2b(body, key=rules.seed.to_bytes(8, "little"), digest_size=64).digest(),
        include_usage=True,
        continuous_usage=False,
        detokenize=True,
        sequences=sequences,
        asked=request,
    )


def _of_inputs(request: _Embeddings, rules: RequestRules) -> tuple[int, ...]:
    """The tokens of each input. Makes `request.input` a list of texts and of lists of token ids."""
    given = request.input
    if isinstance(given, str):
        given = [given]
    elif given and all(isinstance(token, int) for token in given):
        given = [[token for token in given if isinstance(token, int)]]
    if not given or any(isinstance(one, int) or not one for one in given):
        raise malformed(
            rules.dialect,
            "input must be a text, a list of token ids, or a list of these; none empty",
        )
    if request.dimensions is not None and not 1 <= request.dimensions <= MOST_DIMENSIONS:
        raise refused(
            rules.dialect, f"dimensions must be from 1 to {MOST_DIMENSIONS}", "dimensions"
        )
    request.input = given
    return tuple(_tokens(one) for one in given)


def _of_documents(request: _Rerank, rules: RequestRules) -> tuple[int, ...]:
    """The tokens of each document with the query. Makes `request.documents` a list of texts."""
    texts: list[Any] = [one if isinstance(one, str) else one.text for one in request.documents]
    if not texts:
        raise malformed(rules.dialect, "documents must not be empty")
    request.documents = texts
    return tuple(_tokens(request.query) + _tokens(text) for text in texts)


def _tokens(given: Any) -> int:
    return max(1, count_tokens(given)) if isinstance(given, str) else len(given)


class ValueScript:
    """The bytes of the answer to one request. It comes whole, so there is no text before or after a token."""

    head = tail = b""
    done = DONE

    def __init__(self, ask: ParsedRequest, dialect: Dialect, number: int, created: int) -> None:
        self._ask, self.dialect, self._number = ask, dialect, number

    def whole(
        self, counted: int, finish: bool = True, metrics: Any = None, meta_info: Any = None
    ) -> bytes:
        """The JSON body. Without `finish` it has no values; its usage reports `counted` tokens too many."""
        tokens = self._ask.input_tokens + counted
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        values = (
            (self._vectors() if self._ask.api == "embeddings" else self._ranks()) if finish else []
        )
        if self._ask.api == "embeddings":
            answer = {"object": "list", "data": values, "model": self._ask.model, "usage": usage}
        else:
            answer = {
                "id": f"rerank-{self._number}",
                "model": self._ask.model,
                "usage": usage,
                "results": values,
            }
        return msgspec.json.encode(answer)

    def _vectors(self) -> list[dict[str, Any]]:
        """A unit vector for each input, which only its text decides."""
        import numpy as np

        asked = self._ask.asked
        size = asked.dimensions or DIMENSIONS
        vectors = []
        for index, given in enumerate(asked.input):
            drawn = np.frombuffer(
                hashlib.shake_128(msgspec.json.encode(given)).digest(2 * size), "<i2"
            )
            odd = drawn + 0.5
            vector = odd / np.sqrt((odd * odd).sum())
            value: Any = vector.round(6).tolist()
            if asked.encoding_format == "base64":
                value = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            vectors.append({"object": "embedding", "index": index, "embedding": value})
        return vectors

    def _ranks(self) -> list[dict[str, Any]]:
        """The documents by a score that only query and document decide, the best first."""
        asked = self._ask.asked
        ranks = []
        for index, text in enumerate(asked.documents):
            drawn = hashlib.blake2b(
                f"{asked.query}\0{text}".encode("utf-8", "surrogatepass"), digest_size=4
            ).digest()
            rank: dict[str, Any] = {
                "index": index,
                "document": {"text": text},
                "relevance_score": int.from_bytes(drawn) / 2**32,
            }
            if not asked.return_documents:
                del rank["document"]
            ranks.append(rank)
        ranks.sort(key=lambda rank: -rank["relevance_score"])
        return ranks if asked.top_n is None else ranks[: max(0, asked.top_n)]
