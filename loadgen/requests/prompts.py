"""Workload + seed + salt -> requests. Pure: request `number` is the same on every worker, in any order, at any time.

Every draw is a hash of (seed, salt, what it is for, number), see `lengths`; nothing is carried from one request to the
next. Nothing here waits, sends, or knows a tokenizer's library.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from loadgen_sdk.request import Request

from loadgen.requests import dataset
from loadgen.requests.laws import draw, key, law, together
from loadgen.requests.tokenizer import Tokenizer

HEAD = 4  # content tokens by which unique prompts differ (metrics.md)
FIRST = 64  # requests that stand for an endless load in its fingerprint
SAMPLE = 256  # conversations whose lengths are looked at for warnings
CHECKED = 16  # requests that are built and counted for them, where counting is needed


class Prompts(Protocol):
    """`prompts[number]` for any number from 0; how many are sent is the timetable's affair.

    With conversations, number = conversation * turns + turn, and the history in `prompts[number]` is the scripted one.
    """

    turns: int
    history: str  # "scripted" | "server"

    def __getitem__(self, number: int) -> Request: ...

    def turn_with(self, number: int, replies: Sequence[str]) -> Request:
        """The same request with the real `replies` of the turns before it in place of the scripted ones."""

    def input_tokens(self, number: int) -> int | None:
        """Content tokens of the prompt; counts the text where the request came without a count."""

    def warnings(self, n: int) -> list[str]:
        """What the user should know about the first `n` requests."""


class SyntheticPrompts:
    """Prompts of exact length, made of words that are one token each.

    The (first) user message has `input_tokens`, the first `shared_prefix_tokens` of them from one of `prefixes` shared
    texts; a system message of `system_tokens`, the same for all, stands before it. A tool result is sent as a user
    message, which every server accepts without a tool call before it. Tokens of the chat template are not counted.
    """

    def __init__(self, requests: Any, seed: int, salt: int, tokenizer: Tokenizer) -> None:
        turns = requests.turns
        self.turns: int = turns.count if turns else 1
        self.history: str = turns.history if turns else "scripted"
        self._laws = requests.input_tokens, requests.output_tokens
        self._input, self._output = law(requests.input_tokens), law(requests.output_tokens)
        self._tool_result = law(turns.tool_result_tokens) if turns else None
        self._prefix_tokens: int = requests.shared_prefix_tokens
        self._prefixes: int = requests.prefixes
        self._system_tokens: int = requests.system_tokens
        self._tokenizer = tokenizer
        self._lengths_key, self._text_key = key(seed), key(seed, salt)
        self._starts, self._words = tokenizer.starts, tokenizer.words
        copies = 1 + 65_535 // len(
            self._words
        )  # 16 bits choose a word: without bias where the words are a power of two
        self._drawn = np.array((list(self._words) * copies)[:65_536], dtype=object)
        # number -> (step * number + offset) mod combinations is one to one, in its low digits as well
        self._combinations = len(self._starts) * len(self._words) ** (HEAD - 1)
        self._offset = int.from_bytes(draw(self._text_key, "offset", 0, 16), "little")
        self._step = int.from_bytes(draw(self._text_key, "step", 0, 16), "little") | 1
        while math.gcd(self._step, self._combinations) != 1:
            self._step += 2
        self._shared = functools.lru_cache(maxsize=256)(self._text)
        self._id = self._text_key.hex()[:8]

    def __getitem__(self, number: int) -> Request:
        return self._request(number, None)

    def turn_with(self, number: int, replies: Sequence[str]) -> Request:
        if len(replies) != number % self.turns:
            raise ValueError(f"turn {number % self.turns} follows that many replies, not {len(replies)}")
        return self._request(number, replies)

    def input_tokens(self, number: int) -> int | None:
        return self[number].input_tokens

    def asked_input(self, number: int) -> int:
        """Content tokens that the workload asks for: what `input_tokens` is, unless the tokenizer cannot be matched."""
        conversation, turn = divmod(number, self.turns)
        if not turn:
            return self._system_tokens + self._opening_tokens(conversation)
        first = number - turn
        history = sum(self.asked_output(before) + self._tool_tokens(before + 1) for before in range(first, number))
        return self._system_tokens + self._opening_tokens(conversation) + history

    def asked_output(self, number: int) -> int:
        return self._output(self._lengths_key, "output", number)

    def asked(self, numbers: range) -> tuple[list[int], list[int]]:
        """`asked_input` and `asked_output` of each of these requests, which stand alone: made together, so faster."""
        if self.turns > 1:
            raise ValueError("turns of a conversation do not stand alone")
        into = together(self._laws[0], self._lengths_key, "input", numbers)
        if system := self._system_tokens:
            into = [system + tokens for tokens in into]
        return into, together(self._laws[1], self._lengths_key, "output", numbers)

    def group_of(self, conversation: int) -> int:
        """Which of the `prefixes` shared texts a conversation (a request that stands alone) begins with."""
        return int.from_bytes(draw(self._lengths_key, "which prefix", conversation, 8), "little") % self._prefixes

    def warnings(self, n: int) -> list[str]:
        found = []
        conversations = range(min(-(-n // self.turns), SAMPLE))
        own = min((self._opening_tokens(one) - self._prefix_tokens for one in conversations), default=HEAD)
        if own < HEAD:
            found.append(
                f"some prompts have only {max(0, own)} tokens of their own, {HEAD} are needed to make each of them "
                "different: the server's prefix cache may know them"
            )
        if not self._tokenizer.additive:
            sample = range(min(n, CHECKED))
            inexact = sum(self[one].input_tokens != self.asked_input(one) for one in sample)
            if inexact:
                found.append(
                    f"{inexact} of the first {len(sample)} prompts could not be given exactly the tokens asked for "
                    f"with {self._tokenizer.name}; each request carries its true count"
                )
        return found

    def _request(self, number: int, replies: Sequence[str] | None) -> Request:
        conversation, turn = divmod(number, self.turns)
        content, n = self._opening(conversation)
        alone = not self._system_tokens and self.turns == 1
        messages: list[dict[str, Any]] = []
        if self._system_tokens:
            system, system_n = self._shared("system", 0, self._system_tokens)
            messages.append({"role": "system", "content": system})
            n += system_n
        messages.append({"role": "user", "content": content})
        for before in range(turn):
            at = number - turn + before
            if replies is None:
                reply, reply_n = self._text("reply", at, self.asked_output(at))
                n += reply_n
            else:
                reply = replies[before]
            result, result_n = self._text("tool", at + 1, self._tool_tokens(at + 1))
            n += result_n
            messages += {"role": "assistant", "content": reply}, {"role": "user", "content": result}
        return Request(
            id=f"{self._id}-{number}",
            prompt=content if alone else None,
            messages=None if alone else messages,
            max_tokens=self.asked_output(number),
            input_tokens=n if replies is None else None,
            input_source=self._tokenizer.tag if replies is None else "",
            session=conversation if self.turns > 1 else -1,
            turn=turn,
        )

    def _opening_tokens(self, conversation: int) -> int:
        return self._input(self._lengths_key, "input", conversation)

    def _opening(self, conversation: int) -> tuple[str, int]:
        """First user message of a conversation: shared prefix, then the unique part."""
        n = self._opening_tokens(conversation)
        if not self._prefix_tokens:
            return self._text("user", conversation, n, self._head(conversation, n))
        prefix, prefix_n = self._shared("prefix", self.group_of(conversation), min(n, self._prefix_tokens))
        own = n - self._prefix_tokens
        if own <= 0:
            return prefix, prefix_n
        return self._text("user", conversation, own, self._head(conversation, own), prefix + " ", prefix_n)

    def _tool_tokens(self, number: int) -> int:
        return self._tool_result(self._lengths_key, "tool", number) if self._tool_result else 0

    def _text(
        self, purpose: str, index: int, n: int, head: Sequence[str] = (), before: str = "", before_n: int = 0
    ) -> tuple[str, int]:
        """`before` and n tokens that open with `head`, and the tokens of both together.

        Where the pieces do not simply add up, the text is counted and words are added or taken away until it fits;
        where that does not end, the nearest text is returned with its true count.
        """
        if n <= 0:
            return before, before_n
        if not head:
            choice = int.from_bytes(draw(self._text_key, purpose + " start", index, 4), "little")
            head = (self._starts[choice % len(self._starts)],)
        text = before + self._joined(purpose, index, n, head)
        if self._tokenizer.additive:
            return text, before_n + n
        wanted, pieces = before_n + n, n
        counted = best_n = self._tokenizer.count(text)
        best = text
        for _ in range(8):
            if counted == wanted:
                return text, counted
            pieces = max(1, pieces + wanted - counted)
            text = before + self._joined(purpose, index, pieces, head)
            counted = self._tokenizer.count(text)
            if abs(counted - wanted) < abs(best_n - wanted):
                best, best_n = text, counted
        return best, best_n

    def _joined(self, purpose: str, index: int, pieces: int, head: Sequence[str]) -> str:
        tail = pieces - len(head)
        if tail <= 0:
            return "".join(head[:pieces])
        choices = np.frombuffer(draw(self._text_key, purpose, index, 2 * tail), dtype="<u2")
        return "".join(head) + "".join(self._drawn.take(choices).tolist())

    def _head(self, index: int, n: int) -> list[str]:
        """The first words of a unique part (at most HEAD): different for every index as far as n words can be."""
        rest, first = divmod((self._step * index + self._offset) % self._combinations, len(self._starts))
        head = [self._starts[first]]
        for _ in range(min(n, HEAD) - 1):
            rest, word = divmod(rest, len(self._words))
            head.append(self._words[word])
        return head


class FilePrompts:
    """The rows of the user's file, in its order or shuffled once by the seed; from the start again when they run out.

    A row is sent as it is written and not counted before: servers report what they counted, and `input_tokens` counts
    on demand where they do not.
    """

    turns = 1
    history = "scripted"

    def __init__(self, requests: Any, seed: int, tokenizer: Tokenizer) -> None:
        self.rows = dataset.read_rows(requests.path)
        self._tokenizer = tokenizer
        self._output = law(requests.output_tokens) if requests.output_tokens else None
        self._lengths_key = key(seed)
        self._order: np.ndarray[Any, np.dtype[np.int64]] | None = None
        if requests.order == "shuffled":
            ranks = np.frombuffer(draw(self._lengths_key, "order", 0, 8 * len(self.rows)), dtype="<u8")
            self._order = np.argsort(ranks, kind="stable")

    def __getitem__(self, number: int) -> Request:
        index = number % len(self.rows)
        row = self.rows[index if self._order is None else int(self._order[index])]
        asked, exact = row.output_tokens, row.exact_output
        if asked is None and self._output is not None:
            asked, exact = self._output(self._lengths_key, "output", number), True
        return Request(
            id=f"{self.rows.sha256[:8]}-{number}",
            messages=row.messages,
            prompt=row.prompt,
            max_tokens=asked,
            exact_output=exact,
            extra=row.extra,
        )

    def turn_with(self, number: int, replies: Sequence[str]) -> Request:
        if replies:
            raise ValueError("a row of a file is one request; it follows no replies")
        return self[number]

    def input_tokens(self, number: int) -> int | None:
        """Content tokens of the row's texts; None where it has parts that are not text (pictures, sound)."""
        return counted(self[number], self._tokenizer)

    def warnings(self, n: int) -> list[str]:
        found = []
        if n > len(self.rows):
            found.append(
                f"{n:,} requests from {len(self.rows):,} rows: prompts repeat, and a server's prefix cache will notice"
            )
        if self.rows.ignored:
            found.append(f"fields of {self.rows.path.name} that are not sent: {', '.join(self.rows.ignored)}")
        return found


def counted(request: Request, tokenizer: Tokenizer) -> int | None:
    """Content tokens of a request, without those of the chat template; None where a part of it is not text."""
    if request.prompt is not None:
        return tokenizer.count(request.prompt) if isinstance(request.prompt, str) else len(request.prompt)
    n = 0
    for message in request.messages or ():
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
            text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            if not isinstance(text, str):
                return None
            n += tokenizer.count(text)
    return n


class Digest:
    """The prompts fingerprint, gathered while requests are built: text, asked lengths and order.

    It is the sum of one hash per request with its number inside, so it is the same however requests are spread over
    workers and in whatever order they are added. With `replies` False the assistant's turns are left out: real replies
    are not the load's doing (`prompts.history == "server"`). About 10 us per request of 1,300 tokens.
    """

    __slots__ = ("count", "replies", "total")

    def __init__(self, total: int = 0, count: int = 0, *, replies: bool = True) -> None:
        self.total, self.count, self.replies = total, count, replies

    def add(self, number: int, request: Request) -> None:
        messages = request.messages
        if messages is not None and not self.replies:
            messages = [message for message in messages if message.get("role") != "assistant"]
        sent = (number, request.max_tokens, request.exact_output, messages, request.prompt, request.extra)
        value = hashlib.blake2b(msgspec.json.encode(sent), digest_size=16).digest()
        self.total = (self.total + int.from_bytes(value, "little")) % (1 << 128)
        self.count += 1

    def merge(self, other: Digest) -> None:
        self.total = (self.total + other.total) % (1 << 128)
        self.count += other.count

    def hexdigest(self) -> str:
        """32 hex digits. Equal for equal sets of (number, request)."""
        return hashlib.blake2b(f"{self.count} {self.total}".encode(), digest_size=16).hexdigest()


def fingerprint(prompts: Prompts, n: int | None) -> str:
    """The prompts fingerprint of requests 0 .. n-1: what a `Digest` fed with the same requests says.

    Builds each of them; a run feeds a Digest with what it builds anyway. With n None (a load without end, of which
    every server takes as much as it can) the first FIRST requests stand for all, and the text says so.
    """
    digest = Digest(replies=prompts.history == "scripted")
    for number in range(FIRST if n is None else n):
        digest.add(number, prompts[number])
    return digest.hexdigest() if n is not None else f"first{FIRST}-{digest.hexdigest()}"
