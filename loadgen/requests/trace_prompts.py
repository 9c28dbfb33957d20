"""The requests of a replayed trace: its lengths and shared prefixes, with words drawn from seed and salt.

Pure: request `number` is the same on every worker, in any order, at any time, as in `prompts`.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

from loadgen_sdk.request import Request

from loadgen import format
from loadgen.requests.prompts import SyntheticPrompts
from loadgen.requests.tokenizer import Tokenizer
from loadgen.workload.traces import Trace


class TracePrompts(SyntheticPrompts):
    """Prompts with the lengths of a trace, and shared prefixes where its hashes are equal; new text in every run.

    Request `number` is row `number`; after the last row the rows repeat with other text. `template_tokens`: tokens that
    the server adds to a prompt. They are subtracted, because the lengths of a trace are counts of a server and include
    them.
    """

    turns = 1
    history = "scripted"

    def __init__(
        self, trace: Trace, seed: int, salt: int, tokenizer: Tokenizer, template_tokens: int = 0, api: str = "chat"
    ) -> None:
        super().__init__(_PLACEHOLDER, seed, salt, tokenizer, template_tokens, api)
        self.trace = trace
        self._block_text_cached = functools.lru_cache(maxsize=4096)(self._block_text)

    def __getitem__(self, number: int) -> Request:
        cycle, row = divmod(number, len(self.trace))
        tokens_left = self.asked_input(number)
        pieces: list[str] = []
        for position, block in enumerate(self.trace.blocks(row)):
            block_tokens = min(tokens_left, self.trace.tokens_of[block])
            if block_tokens:
                pieces.append(self._block_text_cached(cycle, block, block_tokens, position == 0))
                tokens_left -= block_tokens
        if tokens_left and pieces:
            pieces.append(self._own_text(number, tokens_left))
        text, prompt_tokens = "".join(pieces), self.asked_input(number)
        if not pieces:
            text, prompt_tokens = self._exact_text("user", number, tokens_left, self._unique_head(number, tokens_left))
        elif not self._tokenizer.additive:
            prompt_tokens = self._tokenizer.count(text)
        return Request(
            id=f"{self._id}-{number}",
            prompt=text,
            max_tokens=None if self._api == "embeddings" else self.asked_output(number),
            input_tokens=prompt_tokens,
            input_source=self._tokenizer.tag,
        )

    def asked_input(self, number: int) -> int:
        return max(1, int(self.trace.input_tokens[number % len(self.trace)]) - self._template)

    def sequences(self, number: int) -> tuple[int, ...]:
        return (self.asked_input(number),)

    def asked_output(self, number: int) -> int:
        return int(self.trace.output_tokens[number % len(self.trace)])

    def warnings(self, n: int) -> list[str]:
        messages = []
        if n > len(self.trace):
            asked = format.counted(n, "request")
            messages.append(f"{asked} from a trace of {len(self.trace):,}: it comes again with other text")
        if self.trace.skipped:
            skipped = format.counted(self.trace.skipped, "row of the trace had", "rows of the trace had")
            messages.append(f"{skipped} no answer: left out")
        if self.trace.bad_rows:
            bad = format.counted(self.trace.bad_rows, "bad row of the trace is", "bad rows of the trace are")
            messages.append(f"{bad} left out, the first {self.trace.first_bad}")
        return messages

    def _block_text(self, cycle: int, block: int, n: int, first: bool) -> str:
        head = self._starts[block % len(self._starts)]
        return self._random_text(f"block {cycle}", block, n, (head if first else " " + head,))

    def _own_text(self, number: int, n: int) -> str:
        head = self._starts[number % len(self._starts)]
        return self._random_text("own", number, n, (" " + head,))


# The real lengths come from the trace.
_ONE_TOKEN = SimpleNamespace(tag="fixed", value=1)
_PLACEHOLDER = SimpleNamespace(
    turns=None, input_tokens=_ONE_TOKEN, output_tokens=_ONE_TOKEN, shared_prefix_tokens=0, system_tokens=0, prefixes=1
)
