"""When a simulated server emits tokens: a pure model on absolute times, without sockets, clocks or sleeping.

Nothing here reads a clock: the caller passes the time. Every instant follows from the arrival and from draws that are
pure functions of the seed. So a late caller gets late *emissions*, but the planned times never drift. The physical
engine (`fleet.Fleet`) has the same methods: `submit`, `prefill`, `next_ns`, `advance`, `cancel`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush, heapreplace
from typing import Any

from msgspec import Struct

from loadgen.core import units
from loadgen.core.errors import UserError

Emission = tuple[Any, int, bool, int]
"""`(key, tokens, finished, due_ns)`: request, number of tokens, whether this is its last emission, planned time."""

_MASK = (1 << 64) - 1
_GAPS = (
    4096  # pre-drawn random inter-token times: one draw per token would cost more than the token
)


def parse_duration_ns(text: str, where: str = "") -> int:
    """A duration given as a flag, in ns; a bare number means seconds. Raises UserError."""
    try:
        return units.duration_ns(text, bare="s")
    except units.Wrong as wrong:
        raise UserError(wrong.code, f'"{text}" {wrong}', where, wrong.hint) from None


def draw_uniform(seed: int, *names: int) -> float:
    """A number in [0, 1): a pure function of its arguments (splitmix64 applied to each in turn)."""
    state = seed & _MASK
    for name in names:
        state = (state + 0x9E3779B97F4A7C15 * (name + 1)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


class DurationDistribution(Struct, frozen=True, kw_only=True):
    """A distribution of durations.

    `fixed`: always `at_ns`. `normal`: mean `at_ns`, standard deviation `spread` in ns, negative values become 0.
    `lognormal`: median `at_ns`, and `spread` is the standard deviation of the logarithm.
    """

    kind: str = "fixed"
    at_ns: int = 0
    spread: float = 0.0

    def draw(self, seed: int, *names: int) -> int:
        """One duration in ns: a pure function of the arguments (Box-Muller transform of two values of `draw_uniform`)."""
        if self.kind == "fixed":
            return self.at_ns
        radius = math.sqrt(-2.0 * math.log(1.0 - draw_uniform(seed, *names, 0)))
        z = radius * math.cos(2.0 * math.pi * draw_uniform(seed, *names, 1))
        if self.kind == "normal":
            return max(0, round(self.at_ns + self.spread * z))
        return round(self.at_ns * math.exp(self.spread * z))


def parse_distribution(text: str, where: str = "") -> DurationDistribution:
    """Parse `5ms`, `normal:5ms,1ms` (mean, standard deviation) or `lognormal:120ms,0.25` (median, sigma).

    Sigma is the standard deviation of the logarithm. Raises UserError.
    """
    kind, colon, rest = text.partition(":")
    kind = kind.strip()
    if not colon:
        return DurationDistribution(at_ns=parse_duration_ns(text, where))
    if kind not in ("fixed", "normal", "lognormal"):
        raise UserError(
            "unknown_name", f'unknown law "{kind}"', where, "known: fixed, normal, lognormal"
        )
    at, _, spread = rest.partition(",")
    if kind == "fixed":
        return DurationDistribution(at_ns=parse_duration_ns(rest, where))
    if kind == "normal":
        return DurationDistribution(
            kind=kind, at_ns=parse_duration_ns(at, where), spread=parse_duration_ns(spread, where)
        )
    try:
        sigma = float(spread)
    except ValueError:
        sigma = -1.0
    if not 0.0 <= sigma < 10.0:
        raise UserError(
            "invalid_value",
            f'not a deviation of the logarithm: "{spread}"',
            where,
            "write it as lognormal:120ms,0.25",
        )
    return DurationDistribution(kind=kind, at_ns=parse_duration_ns(at, where), spread=sigma)


class _Stream:
    __slots__ = ("arrival", "input_tokens", "key", "left", "next", "number", "started")

    def __init__(
        self, key: Hashable | None, number: int, arrival: int, input_tokens: int, left: int
    ) -> None:
        self.key = key  # None: cancelled; its entry in heap or queue is skipped
        self.number = number
        self.arrival = arrival
        self.input_tokens = input_tokens
        self.left = left
        self.next = 1  # the first token is emitted alone, whatever `step` is
        self.started = False


class LatencyModel:
    """A server without a physical model: each request gets its first token after `ttft`, the others `itl` apart.

    `step` tokens are emitted at once (stream_interval): the first alone, then every `step`, then the rest. `lockstep`
    puts every emission on a multiple of `itl` of the clock, as a batching engine does. `slots` limits how many requests
    are served at once, first come, first served. `flood` leaves no time between the emissions of a stream. The
    amortised cost of an emission is one heap operation.
    """

    def __init__(
        self,
        *,
        ttft: DurationDistribution,
        itl: DurationDistribution,
        per_input_token_ns: float = 0.0,
        step: int = 1,
        lockstep: bool = False,
        slots: int | None = None,
        flood: bool = False,
        seed: int = 0,
    ) -> None:
        if lockstep and (itl.kind != "fixed" or itl.at_ns <= 0):
            raise UserError(
                "conflict",
                "lockstep needs a fixed inter-token time above 0",
                "--lockstep",
                "for example --itl 20ms",
            )
        if step < 1 or (slots is not None and slots < 1):
            raise UserError(
                "out_of_range",
                "stream interval and slots must be at least 1",
                "--stream-interval, --slots",
            )
        self._ttft, self._per_input_token_ns, self._seed = ttft, per_input_token_ns, seed
        self._step, self._slots, self._flood = step, slots, flood
        self._tick = itl.at_ns if lockstep else 0
        self._gap = itl.at_ns
        self._gaps = [] if itl.kind == "fixed" else [itl.draw(seed, 2, i) for i in range(_GAPS)]
        self._heap: list[tuple[int, int, _Stream]] = []
        self._queue: deque[_Stream] = deque()
        self._streams: dict[Hashable, _Stream] = {}
        self._now = self._number = self.active = 0

    @property
    def queued(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._streams) - self.active

    def submit(self, now_ns: int, key: Hashable, input_tokens: int, output_tokens: int) -> None:
        """A request arrives. `key` is chosen by the caller.

        Raises ValueError if `key` is in use or `output_tokens` is below 1.
        """
        if output_tokens < 1 or key in self._streams:
            raise ValueError(
                f"needs a new key and at least one output token: {key!r}, {output_tokens}"
            )
        self._now = now_ns
        stream = self._streams[key] = _Stream(
            key, self._number, now_ns, input_tokens, output_tokens
        )
        self._number += 1
        if self._slots is None or self.active < self._slots:
            self._start(stream, now_ns)
        else:
            self._queue.append(stream)

    def prefill(self, now_ns: int, keys: Sequence[Hashable], lengths: Sequence[int]) -> None:
        """Several sequences arrive, of which each ends with its first token."""
        for key, tokens in zip(keys, lengths, strict=True):
            self.submit(now_ns, key, tokens, 1)

    def next_ns(self) -> int | None:
        """When the next emission is due; None: nothing is due."""
        heap = self._heap
        while heap and heap[0][2].key is None:
            heappop(heap)
        return heap[0][0] if heap else None

    def advance(self, now_ns: int) -> list[Emission]:
        """All emissions due by `now_ns`, in order of due time."""
        self._now = now_ns
        heap, gap, gaps, step, flood = self._heap, self._gap, self._gaps, self._step, self._flood
        out: list[Emission] = []
        while heap and heap[0][0] <= now_ns:
            due, number, stream = heap[0]
            key = stream.key
            if key is None:
                heappop(heap)
                continue
            tokens = stream.next
            left = stream.left - tokens
            if left <= 0:
                out.append((key, tokens, True, due))
                heappop(heap)
                del self._streams[key]
                self._free_slot(due)
                continue
            out.append((key, tokens, False, due))
            stream.next = next_tokens = step if step < left else left
            if flood:
                next_due = now_ns + 1  # in the next call, so that streams take turns
            elif gaps:
                at = number * 977 + stream.left
                next_due = due + sum(gaps[(at + i) % _GAPS] for i in range(next_tokens))
            else:
                next_due = due + gap * next_tokens
            stream.left = left
            heapreplace(heap, (next_due, number, stream))
        return out

    def cancel(self, key: Hashable) -> None:
        """The client has gone: no more emissions of `key`, and its slot is free. Unknown keys are ignored."""
        stream = self._streams.pop(key, None)
        if stream is None:
            return
        stream.key = None
        if stream.started:
            self._free_slot(self._now)

    def _start(self, stream: _Stream, at_ns: int) -> None:
        stream.started = True
        self.active += 1
        due = at_ns + self._ttft.draw(self._seed, 1, stream.number)
        due += round(self._per_input_token_ns * stream.input_tokens)
        if self._tick:
            due = -(-due // self._tick) * self._tick
        heappush(self._heap, (due, stream.number, stream))

    def _free_slot(self, at_ns: int) -> None:
        self.active -= 1
        queue = self._queue
        while queue and self._slots is not None and self.active < self._slots:
            stream = queue.popleft()
            if stream.key is not None:
                self._start(stream, max(at_ns, stream.arrival))
