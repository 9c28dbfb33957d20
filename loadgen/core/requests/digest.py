"""Fingerprints of the prompts of a run.

A fingerprint covers the texts of the requests, their requested lengths and their ids.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable

import msgspec
from loadgen_sdk.hashing import sum_of_hashes
from loadgen_sdk.request import Request

from loadgen.core.requests.prompts import Prompts
from loadgen.core.requests.synthetic_prompts import iter_requests

ENDLESS_SAMPLE = 64
"""The number of requests that represent a load without a fixed number of requests."""

REQUESTS_HASHED_TOGETHER = 8
"""More requests than this would not stay in the cache of the processor until they are hashed."""

DIGEST_MODULUS = 1 << 128

_NO_SALT = 0
"""`sum_of_hashes` takes a salt with each text, to tell equal texts apart. Here all texts differ,
because each contains the id of its request."""

_encode_json = msgspec.json.Encoder().encode


class Digest:
    """A fingerprint that is computed while requests are built.

    It is the sum of one hash per request, and each hash includes the id of the request. So it
    does not depend on how requests are divided among workers, nor on the order of `add`. Requests
    that are added together are hashed together, which takes about 6 us per request of 1,300 tokens.

    Attributes:
        total: The sum of the hashes modulo DIGEST_MODULUS.
        count: The number of requests.
        includes_replies: Whether messages of the assistant are included. They are left out if they
            are real replies of a server, which are not part of the load.
    """

    __slots__ = ("count", "includes_replies", "total")

    def __init__(self, total: int = 0, count: int = 0, *, includes_replies: bool = True) -> None:
        self.total = total
        self.count = count
        self.includes_replies = includes_replies

    def add(self, requests: Iterable[tuple[int, Request]]) -> None:
        """Add requests, each with its id."""
        added_requests = list(requests)
        self.add_sum(len(added_requests), self._sum_hashes(added_requests))

    def _sum_hashes(self, requests: Iterable[tuple[int, Request]]) -> bytes:
        """Return the sum of the hashes of requests, as a little-endian number.

        The hash of a request covers its id, its requested lengths, its texts and further body
        fields. Real replies of a server, which later requests of a conversation contain, are left
        out, because they differ in every run. The hashes are added up, because a sum does not
        depend on the order of the requests: workers send them in different orders.
        """
        hashed_texts = []
        for request_id, request in requests:
            messages = request.messages
            if messages is not None and not self.includes_replies:
                messages = [message for message in messages if message.get("role") != "assistant"]

            # What the workload decides. Fingerprints of earlier runs depend on this order.
            content = (
                request_id,
                request.max_tokens,
                request.exact_output,
                messages,
                request.prompt,
                request.extra,
            )
            hashed_texts.append((_NO_SALT, _encode_json(content)))

        return sum_of_hashes(hashed_texts)

    def add_sum(self, count: int, hash_sum: bytes) -> None:
        """Add `count` requests, or their bodies, by the sum of their hashes (little-endian)."""
        self.count += count
        self.total = (self.total + int.from_bytes(hash_sum, "little")) % DIGEST_MODULUS

    def hexdigest(self) -> str:
        """Return 32 hex digits that are equal for equal sets of numbered requests."""
        return hashlib.blake2b(f"{self.count} {self.total}".encode(), digest_size=16).hexdigest()


def fingerprint(prompts: Prompts, count: int | None) -> str:
    """Return the fingerprint of the first `count` requests, by building each of them.

    Two runs with equal fingerprints have sent the same prompts with the same ids. During a run the
    same value is computed with a `Digest`, to which each request is added when it is built.

    A load without a fixed number of requests has the count None. The fingerprint then covers its
    first ENDLESS_SAMPLE requests, and begins with "first" and this number.
    """
    covered_count = ENDLESS_SAMPLE if count is None else count
    # Messages of the assistant are either in the workload ("scripted"), or real replies of the
    # server, which differ in every run.
    digest = Digest(includes_replies=prompts.history == "scripted")

    # Requests are built in batches, which is faster than one by one.
    request_ids = iter(prompts.request_ids(covered_count))
    while batch := list(itertools.islice(request_ids, REQUESTS_HASHED_TOGETHER)):
        digest.add(zip(batch, iter_requests(prompts, batch), strict=True))

    prefix = f"first{ENDLESS_SAMPLE}-" if count is None else ""
    return prefix + digest.hexdigest()
