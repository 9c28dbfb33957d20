"""The embeddings and rerank APIs of the simulated server: parses requests and formats responses.

Both API flavors answer alike: embeddings as OpenAI's API does, rerank as vLLM and Jina do. Each
input of embeddings, and each document of rerank with the query before it, is a sequence of its own,
which the engine prefills.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any, Literal

import msgspec

from loadgen.sim.server.error_responses import malformed_body, refusal
from loadgen.sim.server.request_parser import (
    BodyDecoder,
    RequestRules,
    check_model,
    count_tokens,
)
from loadgen.sim.server.server_timing import RequestTiming
from loadgen.sim.server.wire_format import ParsedRequest, ResponseContext, ResponseFormatter

DEFAULT_DIMENSIONS = 1024
MAX_DIMENSIONS = 8192
MAX_SEQUENCES = 2048  # per request, as in OpenAI's API

NonGenerativeApi = Literal["embeddings", "rerank"]


class _EmbeddingsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    input: str | list[int | str | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None


class _Document(msgspec.Struct):
    text: str


class _RerankBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    query: str
    documents: list[str | _Document]
    top_n: int | None = None
    return_documents: bool = True
    truncate_prompt_tokens: int | None = None
    max_tokens_per_doc: int | None = None
    user: str | None = None


_decode_embeddings_body = msgspec.json.Decoder(_EmbeddingsBody).decode
_decode_rerank_body = msgspec.json.Decoder(_RerankBody).decode


def parse_embeddings_request(body: bytes, rules: RequestRules) -> ParsedRequest:
    """Parse and check a request to the embeddings API. Raises RefusalError.

    The engine prefills each input of the request (a text or a list of token ids) as a sequence of
    its own. The response has one embedding per input.
    """
    request: _EmbeddingsBody = _decode_body(body, _decode_embeddings_body, rules)
    check_model(request.model, rules)
    inputs = _normalize_inputs(request.input, rules)

    dimensions = request.dimensions
    if dimensions is not None and not 1 <= dimensions <= MAX_DIMENSIONS:
        text = f"dimensions must be from 1 to {MAX_DIMENSIONS}"
        raise refusal(rules.flavor, text, "dimensions")

    lengths = tuple(_count_input_tokens(value) for value in inputs)
    _check_sequences("embeddings", lengths, rules)
    normalized_request = msgspec.structs.replace(request, input=inputs)

    return _build_parsed_request("embeddings", normalized_request, body, lengths, rules)


def parse_rerank_request(body: bytes, rules: RequestRules) -> ParsedRequest:
    """Parse and check a request to the rerank API. Raises RefusalError.

    The model scores the query together with one document at a time. So the engine prefills one
    sequence per document: the query and the document.
    """
    request: _RerankBody = _decode_body(body, _decode_rerank_body, rules)
    check_model(request.model, rules)
    texts = [
        document if isinstance(document, str) else document.text for document in request.documents
    ]
    if not texts:
        raise malformed_body(rules.flavor, "documents must not be empty")

    query_tokens = _count_input_tokens(request.query)
    lengths = tuple(query_tokens + _count_input_tokens(text) for text in texts)
    _check_sequences("rerank", lengths, rules)
    normalized_request = msgspec.structs.replace(request, documents=texts)

    return _build_parsed_request("rerank", normalized_request, body, lengths, rules)


def _decode_body(body: bytes, decode: BodyDecoder, rules: RequestRules) -> Any:
    """Return the body decoded by `decode`. Raises RefusalError if it is malformed."""
    try:
        return decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise malformed_body(rules.flavor, str(error)) from None


def _normalize_inputs(
    value: str | list[int | str | list[int]], rules: RequestRules
) -> list[str | list[int]]:
    """Return the inputs of an embeddings request as a list of texts and lists of token ids.

    OpenAI's API accepts four forms: a text, several texts, the token ids of a text, or several
    lists of token ids. Raises RefusalError.
    """
    if isinstance(value, str):
        inputs: list[Any] = [value]
    elif value and all(isinstance(item, int) for item in value):
        inputs = [value]  # the token ids of one text
    else:
        inputs = value

    # A list must not mix token ids with texts or lists, and no input may be empty.
    is_valid = all(isinstance(item, str | list) and item for item in inputs)
    if not inputs or not is_valid:
        problem = "input must be a text, a list of token ids, or a list of these; none empty"
        raise malformed_body(rules.flavor, problem)

    return inputs


def _count_input_tokens(value: str | list[int]) -> int:
    """Return the number of tokens of a text or of a list of token ids."""
    if isinstance(value, str):
        return max(1, count_tokens(value))
    return len(value)


def _check_sequences(
    api: NonGenerativeApi, sequence_lengths: tuple[int, ...], rules: RequestRules
) -> None:
    """Raise RefusalError if a request has too many sequences, or if one of them is too long.

    A sequence must leave room for one token in the context. If prompts cannot be prefilled in
    parts, it must also fit into one iteration (`max_num_tokens`, 0 without this limit).
    """
    sequence_count = len(sequence_lengths)
    if sequence_count > MAX_SEQUENCES:
        text = f"at most {MAX_SEQUENCES} at once, got {sequence_count}"
        raise refusal(rules.flavor, text, param=api)

    max_input_tokens = rules.max_num_tokens or rules.max_seq_len - 1
    longest = max(sequence_lengths)
    if longest > max_input_tokens:
        text = (
            f"an input of {longest} tokens is longer than the {max_input_tokens} "
            "that this model takes"
        )
        raise refusal(rules.flavor, text, param=api, code="context_length_exceeded")


def _build_parsed_request(
    api: NonGenerativeApi,
    request: _EmbeddingsBody | _RerankBody,
    body: bytes,
    sequence_lengths: tuple[int, ...],
    rules: RequestRules,
) -> ParsedRequest:
    """Return the parsed request, which has no output tokens and no completion.

    Args:
        api: The API of the request.
        request: The decoded body.
        body: The body as bytes. The digest of the request is that of the whole body.
        sequence_lengths: The length of each sequence in tokens.
        rules: The options of the server.
    """
    seed = rules.seed.to_bytes(8, "little")
    return ParsedRequest(
        api=api,
        model=request.model,
        stream=False,
        input_tokens=sum(sequence_lengths),
        output_tokens=0,
        finish_reason="",
        digest=hashlib.blake2b(body, key=seed, digest_size=64).digest(),
        include_usage=True,
        continuous_usage=False,
        detokenize=True,
        sequence_lengths=sequence_lengths,
        decoded_body=request,
    )


class EmbeddingsFormatter(ResponseFormatter):
    """Formats the response to one embeddings or rerank request, which is never streamed."""

    def __init__(self, request: ParsedRequest, context: ResponseContext) -> None:
        self.flavor = context.flavor
        self._request = request
        self._request_number = context.request_number

    def format_body(
        self, reported_tokens: int, _timing: RequestTiming, *, has_finish_reason: bool = True
    ) -> bytes:
        """Return the JSON body of the response: the embeddings, or the ranked documents.

        All APIs have the same arguments. This API has neither output tokens nor a finish reason, so
        the arguments only matter with an injected failure, which makes the response wrong.

        Args:
            reported_tokens: 0, or more with the failure `wrong_count`. The usage then reports this
                number of tokens in addition to the input tokens.
            _timing: The server timing breakdown, which this API does not report.
            has_finish_reason: False with the failure `no_finish`. The response then has an empty
                list instead of the embeddings or documents.
        """
        usage_tokens = self._request.input_tokens + reported_tokens
        usage = {"prompt_tokens": usage_tokens, "total_tokens": usage_tokens}

        if self._request.api == "embeddings":
            return self._format_embeddings(usage, has_results=has_finish_reason)
        return self._format_ranking(usage, has_results=has_finish_reason)

    def _format_embeddings(self, usage: dict[str, int], *, has_results: bool) -> bytes:
        """Return the JSON body of a response with embeddings, which may be left out."""
        return msgspec.json.encode(
            {
                "object": "list",
                "data": self._build_embeddings() if has_results else [],
                "model": self._request.model,
                "usage": usage,
            }
        )

    def _format_ranking(self, usage: dict[str, int], *, has_results: bool) -> bytes:
        """Return the JSON body of a response with ranked documents, which may be left out."""
        return msgspec.json.encode(
            {
                "id": f"rerank-{self._request_number}",
                "model": self._request.model,
                "usage": usage,
                "results": self._rank_documents() if has_results else [],
            }
        )

    def _build_embeddings(self) -> list[dict[str, Any]]:
        """Return the embeddings of the inputs: unit vectors, each a function of its input.

        A vector is written as a list of numbers, or as base64 of little-endian 32-bit floats if the
        request asks for that.
        """
        body = self._request.decoded_body
        dimensions = body.dimensions or DEFAULT_DIMENSIONS

        embeddings = []
        for index, value in enumerate(body.input):
            vector = _unit_vector(msgspec.json.encode(value), dimensions)
            embedding: Any = vector.round(6).tolist()
            if body.encoding_format == "base64":
                embedding = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            embeddings.append({"object": "embedding", "index": index, "embedding": embedding})

        return embeddings

    def _rank_documents(self) -> list[dict[str, Any]]:
        """Return the documents in descending order of their relevance score.

        The score is a hash of the query and the document, from 0 to 1. The field `top_n` of the
        request limits the number of documents.
        """
        body = self._request.decoded_body
        results = []
        for index, text in enumerate(body.documents):
            pair = f"{body.query}\0{text}".encode("utf-8", "surrogatepass")
            score = int.from_bytes(hashlib.blake2b(pair, digest_size=4).digest()) / 2**32
            result: dict[str, Any] = {"index": index}
            if body.return_documents:
                result["document"] = {"text": text}
            result["relevance_score"] = score
            results.append(result)

        results.sort(key=lambda result: -result["relevance_score"])
        return results if body.top_n is None else results[: max(0, body.top_n)]


def _unit_vector(data: bytes, dimensions: int) -> Any:
    """Return a pseudo-random vector of length 1 as a float64 array, a function of `data`.

    Its numbers are 16-bit integers from SHAKE128, a hash function with any number of output bytes.
    0.5 is added, so that none of them is 0 and the length cannot be 0 either.
    """
    import numpy as np

    integers = np.frombuffer(hashlib.shake_128(data).digest(2 * dimensions), "<i2")
    vector = integers + 0.5
    length = np.sqrt((vector * vector).sum())
    return vector / length
