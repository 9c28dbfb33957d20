"""The requests of a replayed trace: its lengths and shared prefixes, with words drawn from seed and salt.

Pure: request `number` is the same on every worker, in any order, at any time, as in `prompts`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
from loadgen_sdk.request import Request

from loadgen.core import format
from loadgen.core.requests.prompts import NO_LENGTHS, SyntheticPrompts
from loadgen.core.requests.tokenizer import Tokenizer
from loadgen.core.workload.trace_sessions import TraceSessions
from loadgen.core.workload.traces import Trace


class TracePrompts(SyntheticPrompts):
    """Prompts with the lengths of a trace, and shared prefixes where its hashes are equal; new text in every run.

    Request `number` is row `number`; after the last row the rows repeat with other text. With `sessions` it is
    `session * turns + place`, as the chains of the schedule have it. `template_tokens`: tokens that
    the server adds to a prompt. They are subtracted, because the lengths of a trace are counts of a server and include
    them. A row's `model` is sent where it is one of `models`, those that the server lists; else the run's is.
    """

    history = "scripted"

    def __init__(
        self,
        trace: Trace,
        seed: int,
        salt: int,
        tokenizer: Tokenizer,
        template_tokens: int = 0,
        api: str = "chat",
        sessions: TraceSessions | None = None,
        models: Collection[str] = (),
    ) -> None:
        super().__init__(NO_LENGTHS, seed, salt, tokenizer, template_tokens, api)
        self.trace, self._sessions, self._models = trace, sessions, models
        self.turns = 1 if sessions is None else sessions.turns
        self._block_text_cached = functools.lru_cache(maxsize=4096)(self._block_text)

    def place(self, number: int) -> tuple[int, int]:
        """How often the trace was played before this request, and its row."""
        if self._sessions is None:
            return divmod(number, len(self.trace))
        cycle, session, turn = self._turn_of(self._sessions, number)
        return cycle, int(self._sessions.rows(session)[turn])

    def _turn_of(self, sessions: TraceSessions, number: int) -> tuple[int, int, int]:
        """The cycle, session and turn of a request. Raises IndexError for a number that its session has not."""
        chain, place = divmod(number, self.turns)
        cycle, session = divmod(chain, len(sessions))
        size = int(sessions.sizes[session])
        if sessions.is_session[session] and place == self.turns - 1:
            return cycle, session, size - 1
        if place >= (size - 1 if sessions.is_session[session] else 1):
            raise IndexError(number)
        return cycle, session, place

    def _of_session(self, sessions: TraceSessions, number: int) -> tuple[int, int]:
        """The session of a request, -1 where it stands alone, and its turn there."""
        _, session, turn = self._turn_of(sessions, number)
        return (number // self.turns if sessions.is_session[session] else -1), turn

    def numbers(self, count: int) -> Iterable[int]:
        if self._sessions is None:
            return range(count)
        return itertools.islice(self._numbers(self._sessions), count)

    def _numbers(self, sessions: TraceSessions) -> Iterator[int]:
        for chain in itertools.count():
            first, size = chain * self.turns, int(sessions.sizes[chain % len(sessions)])
            if sessions.is_session[chain % len(sessions)]:
                yield from range(first, first + size - 1)
                yield first + self.turns - 1
            else:
                yield first

    def __getitem__(self, number: int) -> Request:
        cycle, row = self.place(number)
        session, turn = (
            (-1, 0) if self._sessions is None else self._of_session(self._sessions, number)
        )
        tokens_left = self.requested_input_tokens(number)
        pieces: list[str] = []
        for position, block in enumerate(self.trace.blocks(row)):
            block_tokens = min(tokens_left, self.trace.tokens_of[block])
            if block_tokens:
                pieces.append(self._block_text_cached(cycle, block, block_tokens, position == 0))
                tokens_left -= block_tokens
        if tokens_left and pieces:
            pieces.append(self._own_text(number, tokens_left))
        text, prompt_tokens = "".join(pieces), self.requested_input_tokens(number)
        if not pieces:
            text, prompt_tokens = self._exact_text(
                "user", number, tokens_left, self._unique_head(number, tokens_left)
            )
        elif not self._tokenizer.additive:
            prompt_tokens = self._tokenizer.count(text)
        return Request(
            id=f"{self._id}-{number}",
            prompt=text,
            max_tokens=None if self._api == "embeddings" else self.requested_output_tokens(number),
            input_tokens=prompt_tokens,
            input_source=self._tokenizer.tag,
            extra=self._extra(row),
            session=session,
            turn=turn,
        )

    def _extra(self, row: int) -> dict[str, Any]:
        """The fields of the body that a row of the trace asks for."""
        asked = int(self.trace.asked[row])
        fields = self.trace.fields[asked] if asked >= 0 else {}
        return {
            name: value
            for name, value in fields.items()
            if name != "model" or value in self._models
        }

    def requested_input_tokens(self, number: int) -> int:
        return max(1, int(self.trace.input_tokens[self.place(number)[1]]) - self._template)

    def sequence_lengths(self, number: int) -> tuple[int, ...]:
        return (self.requested_input_tokens(number),)

    def requested_output_tokens(self, number: int) -> int:
        return int(self.trace.output_tokens[self.place(number)[1]])

    def warnings(self, n: int) -> list[str]:
        messages = []
        if n > len(self.trace):
            asked = format.counted(n, "request")
            messages.append(
                f"{asked} from a trace of {len(self.trace):,}: it comes again with other text"
            )
        if self._sessions is None and (session_count := self._count_sessions()):
            sessions = format.counted(session_count, "session")
            messages.append(
                f"the trace has {sessions} of several requests, which are sent as unrelated "
                "requests; --set trace_replay=sessions sends each after the one before it"
            )
        if self._sessions is not None and not len(self.trace.hashes):
            messages.append(
                "the trace does not say what prompts share: later ones of a session begin with other text"
            )
        if self.trace.skipped:
            skipped = format.counted(
                self.trace.skipped, "row of the trace had", "rows of the trace had"
            )
            messages.append(f"{skipped} no answer: left out")
        if self.trace.bad_rows:
            bad = format.counted(
                self.trace.bad_rows, "bad row of the trace is", "bad rows of the trace are"
            )
            messages.append(f"{bad} left out, the first {self.trace.first_bad}")
        if names := sorted({name for fields in self.trace.fields for name in fields}):
            messages.append(f"rows of the trace ask for {', '.join(names)}, which is sent")
        models = {str(fields["model"]) for fields in self.trace.fields if "model" in fields}
        if unlisted := sorted(models.difference(self._models)):
            messages.append(
                f"the server lists no {', '.join(unlisted)}: rows that ask for it go to the run's model"
            )
        return messages

    def _count_sessions(self) -> int:
        """Return the number of sessions in the trace that have more than one request."""
        groups = self.trace.group[self.trace.group >= 0]
        return int((np.unique(groups, return_counts=True)[1] > 1).sum())

    def _block_text(self, cycle: int, block: int, n: int, first: bool) -> str:
        head = self._starts[block % len(self._starts)]
        return self._random_text(f"block {cycle}", block, n, (head if first else " " + head,))

    def _own_text(self, number: int, n: int) -> str:
        head = self._starts[number % len(self._starts)]
        return self._random_text("own", number, n, (" " + head,))
