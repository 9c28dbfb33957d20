"""When a simulated server without a physical model emits tokens.

The caller passes the time; nothing here reads a clock. Every due time follows from the arrival and
from draws that are functions of the seed. So a late caller gets late emissions, but the due times
never drift. The physical engine (`fleet.Fleet`) has the same methods.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, Literal

from msgspec import Struct

from loadgen.core import units
from loadgen.core.errors import UserError


class Emission(Struct, gc=False):
    """Tokens of one request that are sent together."""

    key: Any  # of the request, as the caller submitted it
    tokens: int
    is_last: bool
    due_ns: int


DistributionKind = Literal["fixed", "normal", "lognormal"]

_MASK_64_BITS = (1 << 64) - 1
_DRAWN_GAPS = 4096  # times between tokens drawn in advance: a draw costs more than a token
_GAP_STRIDE = 977  # a prime: requests that arrive together begin far apart among the drawn gaps
_MAX_SIGMA = 10.0  # exp(10) is 22,000: no latency spreads that much, so it is a mistake
# Numbers of the random streams that this module draws from; fault_injection.py uses 3 and 4.
_TTFT_STREAM = 1
_ITL_STREAM = 2


def parse_duration_ns(text: str, where: str = "") -> int:
    """Return the duration in an option, in ns. A number without a unit means seconds.

    Raises:
        UserError: It is no duration.
    """
    try:
        return units.duration_ns(text, bare="s")
    except units.InvalidValueError as error:
        raise UserError(error.code, f'"{text}" {error}', where, error.hint) from None


def draw_uniform(seed: int, *path: int) -> float:
    """Return a number in [0, 1) that depends on the arguments only.

    The hash function splitmix64 (Steele, Lea and Flood 2014), whose constants these are, is applied
    to each number of the path in turn. A hash instead of a random generator gives each request the
    same number in whatever order requests are drawn.

    Args:
        seed: The seed of the server.
        path: Numbers that tell draws apart, such as the stream and the request.
    """
    state = seed & _MASK_64_BITS
    for number in path:
        state = (state + 0x9E3779B97F4A7C15 * (number + 1)) & _MASK_64_BITS
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64_BITS
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64_BITS
        state ^= state >> 31
    upper_53_bits = state >> 11  # as many as the significand of a float has
    return upper_53_bits * 2.0**-53


class DurationDistribution(Struct, frozen=True, kw_only=True):
    """A distribution of durations.

    `fixed` is always `at_ns`. `normal` has the mean `at_ns` and the standard deviation `spread` in
    ns; negative values become 0. `lognormal` has the median `at_ns`, and `spread` is the standard
    deviation of the logarithm.
    """

    kind: DistributionKind = "fixed"
    at_ns: int = 0
    spread: float = 0.0

    def draw(self, seed: int, *path: int) -> int:
        """Return one duration in ns that depends on the arguments only.

        The Box-Muller transform converts two uniform numbers to a normal one.
        """
        if self.kind == "fixed":
            return self.at_ns
        # The first uniform number may be 0, which has no logarithm; 1 minus it never is.
        radius = math.sqrt(-2.0 * math.log(1.0 - draw_uniform(seed, *path, 0)))
        standard_normal = radius * math.cos(2.0 * math.pi * draw_uniform(seed, *path, 1))
        if self.kind == "normal":
            return max(0, round(self.at_ns + self.spread * standard_normal))
        return round(self.at_ns * math.exp(self.spread * standard_normal))


def parse_distribution(text: str, where: str = "") -> DurationDistribution:
    """Parse `5ms`, `normal:5ms,1ms` or `lognormal:120ms,0.25`.

    The parameters are mean and standard deviation of a normal distribution, and median and standard
    deviation of the logarithm of a lognormal one. Raises UserError.
    """
    kind, colon, parameters = text.partition(":")
    kind = kind.strip()
    if not colon:
        return DurationDistribution(at_ns=parse_duration_ns(text, where))
    center, _, spread = parameters.partition(",")
    if kind == "fixed":
        return DurationDistribution(at_ns=parse_duration_ns(parameters, where))
    if kind == "normal":
        return DurationDistribution(
            kind="normal",
            at_ns=parse_duration_ns(center, where),
            spread=parse_duration_ns(spread, where),
        )
    if kind == "lognormal":
        sigma = _parse_sigma(spread, where)
        at_ns = parse_duration_ns(center, where)
        return DurationDistribution(kind="lognormal", at_ns=at_ns, spread=sigma)
    hint = "known: fixed, normal, lognormal"
    raise UserError("unknown_name", f'unknown distribution "{kind}"', where, hint)


def _parse_sigma(text: str, where: str) -> float:
    """Parse the standard deviation of a logarithm. Raises UserError."""
    try:
        sigma = float(text)
    except ValueError:
        sigma = math.nan  # in no range, so it is refused below
    if not 0.0 <= sigma < _MAX_SIGMA:
        problem = f'the deviation "{text}" must be a number from 0 to {_MAX_SIGMA:g}'
        raise UserError("invalid_value", problem, where, "for example lognormal:120ms,0.25")
    return sigma


class _Stream:
    """The state of one request whose tokens are emitted one after the other.

    Attributes:
        key: Names the request to the caller. None after a cancellation, because a stream cannot be
            removed from the middle of the heap or queue; it is skipped when it comes to the front.
        arrival_index: Counts the requests by arrival, from 0.
        next_tokens: How many tokens the next emission has. The first token is emitted alone.
        remaining_tokens: How many tokens are not emitted yet, those of the next emission included.
        has_started: Whether the request has got a slot.
    """

    __slots__ = (
        "arrival_index",
        "arrival_ns",
        "has_started",
        "input_tokens",
        "key",
        "next_tokens",
        "remaining_tokens",
    )

    def __init__(
        self,
        key: Hashable,
        arrival_index: int,
        arrival_ns: int,
        input_tokens: int,
        output_tokens: int,
    ) -> None:
        self.key: Hashable | None = key
        self.arrival_index = arrival_index
        self.arrival_ns = arrival_ns
        self.input_tokens = input_tokens
        self.remaining_tokens = output_tokens
        self.next_tokens = 1
        self.has_started = False


class LatencyOptions(Struct, frozen=True, kw_only=True):
    """The options of a `LatencyModel`.

    The first token of a request is emitted alone, then every `tokens_per_emission`, then the rest.
    `lockstep` moves every emission to a multiple of `itl` of the clock, as a batching engine does.
    `slots` limits how many requests are served at once, in order of arrival. `flood` leaves no time
    between the emissions of a stream.
    """

    ttft: DurationDistribution  # time to first token
    itl: DurationDistribution  # time between tokens
    per_input_token_ns: float = 0.0  # added to the time to first token
    tokens_per_emission: int = 1
    lockstep: bool = False
    slots: int | None = None
    flood: bool = False
    seed: int = 0

    def check(self) -> None:
        """Raise UserError if the options contradict each other.

        Lockstep needs a clock with a fixed period above 0, which is the time between tokens.
        """
        has_fixed_gap = self.itl.kind == "fixed" and self.itl.at_ns > 0
        if self.lockstep and not has_fixed_gap:
            problem = "needs a fixed time between tokens above 0"
            raise UserError("conflict", problem, "--lockstep", "for example --itl 20ms")
        if self.tokens_per_emission < 1 or (self.slots is not None and self.slots < 1):
            problem = "must be integers >= 1"
            raise UserError("out_of_range", problem, "--stream-interval, --slots")


class LatencyModel:
    """A server whose times are drawn: the first token after `ttft`, the others `itl` apart.

    An emission costs one heap operation.

    Attributes:
        active: Number of requests that have a slot and are not finished.
    """

    def __init__(self, options: LatencyOptions) -> None:
        options.check()
        itl = options.itl
        self.active = 0
        self._options = options
        self._tokens_per_emission = options.tokens_per_emission
        self._slots = options.slots
        self._flood = options.flood
        self._lockstep_ns = itl.at_ns if options.lockstep else 0
        self._fixed_gap_ns = itl.at_ns
        self._drawn_gaps_ns: list[int] = []
        if itl.kind != "fixed":
            indexes = range(_DRAWN_GAPS)
            self._drawn_gaps_ns = [itl.draw(options.seed, _ITL_STREAM, index) for index in indexes]
        # A heap of started streams: (due time of the next emission in ns, arrival index, stream).
        self._heap: list[tuple[int, int, _Stream]] = []
        self._queue: deque[_Stream] = deque()
        self._streams: dict[Hashable, _Stream] = {}
        self._now_ns = 0
        self._submitted = 0

    @property
    def queued(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._streams) - self.active

    def submit(self, now_ns: int, key: Hashable, input_tokens: int, output_tokens: int) -> None:
        """Add a request that arrives now.

        Raises ValueError if `key` is in use or `output_tokens` is below 1.
        """
        if output_tokens < 1 or key in self._streams:
            raise ValueError(
                f"needs a new key and at least one output token: {key!r}, {output_tokens}"
            )
        self._now_ns = now_ns
        stream = _Stream(key, self._submitted, now_ns, input_tokens, output_tokens)
        self._streams[key] = stream
        self._submitted += 1
        if self._slots is None or self.active < self._slots:
            self._start(stream, now_ns)
        else:
            self._queue.append(stream)

    def submit_prefills(
        self, now_ns: int, keys: Sequence[Hashable], lengths: Sequence[int]
    ) -> None:
        """Add sequences of these lengths in tokens. Each of them ends with its first token."""
        for key, tokens in zip(keys, lengths, strict=True):
            self.submit(now_ns, key, tokens, 1)

    def next_event_ns(self) -> int | None:
        """Return when the next emission is due, or None if there is none."""
        heap = self._heap
        while heap and heap[0][2].key is None:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def advance(self, now_ns: int) -> list[Emission]:
        """Return all emissions that are due by `now_ns`, in order of their due times.

        A slot that becomes free is given to the next request at the due time of the last token, not
        at the time of the call, so that a late caller delays nothing that follows.
        """
        self._now_ns = now_ns
        heap = self._heap
        emissions: list[Emission] = []
        while heap and heap[0][0] <= now_ns:
            due_ns, arrival_index, stream = heap[0]
            key = stream.key
            if key is None:
                heapq.heappop(heap)
                continue
            tokens = stream.next_tokens
            remaining = stream.remaining_tokens - tokens
            if remaining <= 0:
                emissions.append(Emission(key, tokens, True, due_ns))
                heapq.heappop(heap)
                del self._streams[key]
                self._free_slot(due_ns)
                continue
            emissions.append(Emission(key, tokens, False, due_ns))
            next_due_ns = self._next_due_ns(stream, due_ns, remaining)
            stream.remaining_tokens = remaining
            heapq.heapreplace(heap, (next_due_ns, arrival_index, stream))
        return emissions

    def cancel(self, key: Hashable) -> None:
        """Emit nothing more for `key`, and free its slot. Unknown keys are ignored."""
        stream = self._streams.pop(key, None)
        if stream is None:
            return
        stream.key = None
        if stream.has_started:
            self._free_slot(self._now_ns)

    def _next_due_ns(self, stream: _Stream, due_ns: int, remaining: int) -> int:
        """Choose how many of the remaining tokens a stream emits next, and return when."""
        tokens = self._tokens_per_emission
        if tokens > remaining:  # instead of `min`, because this runs once per emission
            tokens = remaining
        stream.next_tokens = tokens
        if self._flood:
            return self._now_ns + 1  # in the next call, so that streams take turns
        gaps_ns = self._drawn_gaps_ns
        if not gaps_ns:
            return due_ns + self._fixed_gap_ns * tokens
        # The drawn gaps are used again in a circle. Each request starts at a place of its own, and
        # goes on as its tokens become fewer.
        first_gap = stream.arrival_index * _GAP_STRIDE + stream.remaining_tokens
        for index in range(first_gap, first_gap + tokens):
            due_ns += gaps_ns[index % _DRAWN_GAPS]
        return due_ns

    def _start(self, stream: _Stream, start_ns: int) -> None:
        """Plan the first token of a request that gets a slot.

        With `lockstep` it is delayed to the next multiple of the time between tokens, so that all
        streams emit at the same times.
        """
        stream.has_started = True
        self.active += 1
        options = self._options
        due_ns = start_ns + options.ttft.draw(options.seed, _TTFT_STREAM, stream.arrival_index)
        due_ns += round(options.per_input_token_ns * stream.input_tokens)
        if self._lockstep_ns:
            due_ns = -(-due_ns // self._lockstep_ns) * self._lockstep_ns  # rounded up
        heapq.heappush(self._heap, (due_ns, stream.arrival_index, stream))

    def _free_slot(self, now_ns: int) -> None:
        """Free the slot of a request that ends, and start the requests that waited for it.

        Requests that were cancelled while they waited are skipped.
        """
        self.active -= 1
        queue = self._queue
        while queue and self._slots is not None and self.active < self._slots:
            stream = queue.popleft()
            if stream.key is not None:
                self._start(stream, max(now_ns, stream.arrival_ns))
