"""The requests of a replayed trace: its lengths and common beginnings, in words drawn from the run's seed and salt.

Pure: request `number` is the same on every worker, in any order, at any time, as in `prompts`.
"""

from __future__ import annotations

import functools

from loadgen_sdk.request import Request

from loadgen.requests.prompts import SyntheticPrompts
from loadgen.requests.tokenizer import Tokenizer
from loadgen.workload.traces import Trace


class TracePrompts(SyntheticPrompts):
    """Prompts as long as the trace's, with common beginnings where its hashes are equal; fresh text in every run.

    Request `number` is row `number`; when the rows run out they come again with other text. `template_tokens`: what the
    server adds to a prompt, which the lengths of a trace, being a server's counts, contain already.
    """

    turns = 1
    history = "scripted"

    def __init__(self, trace: Trace, seed: int, salt: int, tokenizer: Tokenizer, template_tokens: int = 0) -> None:
        super().__init__(_ONE, seed, salt, tokenizer)
        self.trace, self._template = trace, max(0, template_tokens)
        self._block = functools.lru_cache(maxsize=4096)(self._block_text)

    def __getitem__(self, number: int) -> Request:
        cycle, row = divmod(number, len(self.trace))
        left = self.asked_input(number)
        pieces: list[str] = []
        for place, block in enumerate(self.trace.blocks(row)):
            n = min(left, self.trace.tokens_of[block])
            if n:
                pieces.append(self._block(cycle, block, n, place == 0))
                left -= n
        if left and pieces:
            pieces.append(self._own(number, left))
        text, counted = "".join(pieces), self.asked_input(number)
        if not pieces:
            text, counted = self._text("user", number, left, self._head(number, left))
        elif not self._tokenizer.additive:
            counted = self._tokenizer.count(text)
        return Request(
            id=f"{self._id}-{number}",
            prompt=text,
            max_tokens=self.asked_output(number),
            input_tokens=counted,
            input_source=self._tokenizer.tag,
        )

    def asked_input(self, number: int) -> int:
        return max(1, int(self.trace.input_tokens[number % len(self.trace)]) - self._template)

    def asked_output(self, number: int) -> int:
        return int(self.trace.output_tokens[number % len(self.trace)])

    def warnings(self, n: int) -> list[str]:
        found = []
        if n > len(self.trace):
            found.append(f"{n:,} requests from a trace of {len(self.trace):,}: it comes again with other text")
        if self.trace.skipped:
            found.append(f"{self.trace.skipped:,} rows of the trace had no answer and are left out")
        return found

    def _block_text(self, cycle: int, block: int, n: int, first: bool) -> str:
        head = self._starts[block % len(self._starts)]
        return self._joined(f"block {cycle}", block, n, (head if first else " " + head,))

    def _own(self, number: int, n: int) -> str:
        head = self._starts[number % len(self._starts)]
        return self._joined("own", number, n, (" " + head,))


class _One:
    """A law of one token: the lengths of a trace are its own."""

    tag = "fixed"
    value = 1


class _Requests:
    turns = None
    input_tokens = output_tokens = _One
    shared_prefix_tokens = system_tokens = 0
    prefixes = 1


_ONE = _Requests()
