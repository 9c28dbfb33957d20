"""A model of when a simulated server without a physical engine emits tokens.

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
_SPLITMIX_STEP = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio
_DRAWN_GAPS = 4096  # number of times between tokens that are drawn in advance
_GAP_STRIDE = 977  # a prime: requests that arrive together begin far apart among the drawn gaps
_MAX_SIGMA = 10.0  # exp(10) is 22,000: no latency spreads that much, so it is a mistake
# Numbers of the random streams that this module draws from; fault_injection.py uses 3 and 4.
_TTFT_RANDOM_STREAM = 1
_ITL_RANDOM_STREAM = 2


def parse_duration_ns(text: str, option: str = "") -> int:
    """Return a duration in ns that a user wrote. A number without a unit means seconds.

    Args:
        text: The duration, such as `20ms`.
        option: The command-line option with this value, such as `--itl`, for the error.

    Raises:
        UserError: The text is no duration.
    """
    try:
        return units.duration_ns(text, default_unit="s")
    except units.InvalidValueError as error:
        raise UserError(error.code, f'"{text}" {error}', option, error.hint) from None


def draw_uniform(seed: int, *stream_path: int) -> float:
    """Return a uniform random number in [0, 1) that depends on the arguments only.

    The numbers of a random generator depend on how many were drawn before. This function hashes its
    arguments instead, so each request gets the same number in every run, whatever happens to other
    requests. The hash uses the two operations of the generator splitmix64: adding a constant to the
    state, and mixing the bits of the state.

    Args:
        seed: The seed of the server.
        stream_path: Numbers that tell draws apart, such as the purpose of the draw and the number
            of the request.
    """
    state = seed & _MASK_64_BITS
    for number in stream_path:
        # At least one step is added, so that the number 0 changes the state, too.
        step_count = number + 1
        state = (state + _SPLITMIX_STEP * step_count) & _MASK_64_BITS
        state = _mix_bits(state)

    upper_53_bits = state >> 11  # as many as the significand of a float has
    return upper_53_bits * 2.0**-53


def _mix_bits(state: int) -> int:
    """Return 64 bits that each depend on all bits of the state.

    This is the output function of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom
    Number Generators", 2014). The shifts and factors are from its reference implementation.
    """
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64_BITS
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64_BITS
    return state ^ (state >> 31)


class DurationDistribution(Struct, frozen=True, kw_only=True):
    """A distribution of durations.

    Attributes:
        kind: `fixed` is always the same duration. A `normal` value below 0 becomes 0.
        center_ns: The duration of `fixed`, the mean of `normal`, the median of `lognormal`.
        spread: The standard deviation of `normal` in ns. For `lognormal`, the standard deviation of
            the natural logarithm, which has no unit.
    """

    kind: DistributionKind = "fixed"
    center_ns: int = 0
    spread: float = 0.0

    def draw(self, seed: int, *stream_path: int) -> int:
        """Return one duration in ns that depends on the arguments only.

        Args:
            seed: The seed of the server.
            stream_path: Numbers that tell draws apart, such as the purpose of the draw and the
                number of the request.
        """
        if self.kind == "fixed":
            return self.center_ns
        deviation = self.spread * _draw_standard_normal(seed, *stream_path)
        if self.kind == "normal":
            return max(0, round(self.center_ns + deviation))
        # lognormal: the logarithm of the duration has a normal distribution
        return round(self.center_ns * math.exp(deviation))


def _draw_standard_normal(seed: int, *stream_path: int) -> float:
    """Return a random number of the standard normal distribution. See `draw_uniform`.

    The Box-Muller transform converts two uniform numbers to a normal one.
    """
    first_uniform = draw_uniform(seed, *stream_path, 0)
    second_uniform = draw_uniform(seed, *stream_path, 1)
    # The first uniform number may be 0, which has no logarithm; 1 minus it never is.
    radius = math.sqrt(-2.0 * math.log(1.0 - first_uniform))
    return radius * math.cos(2.0 * math.pi * second_uniform)


def parse_distribution(text: str, option: str = "") -> DurationDistribution:
    """Parse a distribution of durations.

    The formats are:

    - `5ms` or `fixed:5ms`: always the same duration
    - `normal:5ms,1ms`: a normal distribution with its mean and its standard deviation
    - `lognormal:120ms,0.25`: a lognormal distribution with its median and the standard deviation of
      the logarithm of the duration

    Args:
        text: The distribution.
        option: The command-line option with this value, such as `--itl`, for the error.

    Raises:
        UserError: The text has another format.
    """
    kind, colon, parameters = text.partition(":")
    kind = kind.strip()
    if not colon:
        return DurationDistribution(center_ns=parse_duration_ns(text, option))

    match kind:
        case "fixed":
            return DurationDistribution(center_ns=parse_duration_ns(parameters, option))
        case "normal":
            return _parse_normal(parameters, option)
        case "lognormal":
            return _parse_lognormal(parameters, option)

    hint = "use fixed, normal or lognormal"
    raise UserError("unknown_name", f'unknown distribution "{kind}"', option, hint)


def _parse_normal(parameters: str, option: str) -> DurationDistribution:
    """Parse the mean and the standard deviation of a normal distribution, such as `5ms,1ms`."""
    mean, _, deviation = parameters.partition(",")
    return DurationDistribution(
        kind="normal",
        center_ns=parse_duration_ns(mean, option),
        spread=parse_duration_ns(deviation, option),
    )


def _parse_lognormal(parameters: str, option: str) -> DurationDistribution:
    """Parse the median and sigma of a lognormal distribution, such as `120ms,0.25`."""
    median, _, sigma_text = parameters.partition(",")
    sigma = _parse_sigma(sigma_text, option)
    return DurationDistribution(
        kind="lognormal", center_ns=parse_duration_ns(median, option), spread=sigma
    )


def _parse_sigma(text: str, option: str) -> float:
    """Parse sigma of a lognormal distribution: the standard deviation of the logarithm.

    Args:
        text: The number.
        option: The command-line option with this value, such as `--itl`, for the error.

    Raises:
        UserError: The text is not a number, or the number is out of range.
    """
    try:
        sigma = float(text)
    except ValueError:
        sigma = math.nan  # which is in no range

    if not 0.0 <= sigma < _MAX_SIGMA:
        problem = f'the deviation "{text}" must be a number from 0 to {_MAX_SIGMA:g}'
        raise UserError("invalid_value", problem, option, "for example lognormal:120ms,0.25")

    return sigma


class _TokenStream:
    """The state of one request whose tokens are emitted one after the other.

    Attributes:
        key: Names the request to the caller. None after a cancellation, because a stream cannot be
            removed from the middle of the heap or queue; it is skipped when it comes to the front.
        arrival_index: Counts the requests by arrival, from 0.
        arrival_ns: When the request arrived.
        input_tokens: The length of the prompt.
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
        """Create a stream that has not started. The class describes the attributes."""
        self.key: Hashable | None = key
        self.arrival_index = arrival_index
        self.arrival_ns = arrival_ns
        self.input_tokens = input_tokens
        self.remaining_tokens = output_tokens
        self.next_tokens = 1
        self.has_started = False


class LatencyOptions(Struct, frozen=True, kw_only=True):
    """The options of a `LatencyModel`.

    Attributes:
        ttft: The time to first token.
        itl: The time between tokens.
        per_input_token_ns: Added to the time to first token for each token of the prompt.
        tokens_per_emission: Tokens that are emitted together. The first token is emitted alone.
        lockstep: Whether each emission takes place at a multiple of `itl`, as in a batching engine.
        slots: The most requests that are served at the same time, or None for no limit.
        flood: Whether there is no time between the emissions of a stream.
        seed: The seed of all draws.
    """

    ttft: DurationDistribution
    itl: DurationDistribution
    per_input_token_ns: float = 0.0
    tokens_per_emission: int = 1
    lockstep: bool = False
    slots: int | None = None
    flood: bool = False
    seed: int = 0

    def check(self) -> None:
        """Raise UserError if an option is out of range, or if options contradict each other."""
        self._check_lockstep()
        self._check_counts()

    def _check_lockstep(self) -> None:
        """Raise UserError if `lockstep` has no clock.

        With `lockstep`, all streams emit at the ticks of a clock. Its period is the time between
        tokens, which therefore has to be fixed and above 0.
        """
        has_fixed_period = self.itl.kind == "fixed" and self.itl.center_ns > 0
        if self.lockstep and not has_fixed_period:
            problem = "needs a fixed time between tokens above 0"
            raise UserError("conflict", problem, "--lockstep", "for example --itl 20ms")

    def _check_counts(self) -> None:
        """Raise UserError if `--stream-interval` (tokens_per_emission) or `--slots` is below 1.

        One error names both options, because they have the same range.
        """
        has_no_tokens = self.tokens_per_emission < 1
        has_no_slots = self.slots is not None and self.slots < 1
        if has_no_tokens or has_no_slots:
            raise UserError("out_of_range", "must be integers >= 1", "--stream-interval, --slots")


def _draw_gaps_ns(options: LatencyOptions) -> list[int]:
    """Return drawn times between tokens, or an empty list if that time is fixed.

    They are drawn in advance and used again and again, because a draw costs more than an emission.
    """
    itl = options.itl
    if itl.kind == "fixed":
        return []
    return [itl.draw(options.seed, _ITL_RANDOM_STREAM, index) for index in range(_DRAWN_GAPS)]


def _round_up_to_multiple(value: int, divisor: int) -> int:
    """Return the smallest multiple of `divisor` that is not below `value`: 20 for 17 and 10."""
    return value + -value % divisor


class LatencyModel:
    """A server whose times are drawn: the first token after `ttft`, the others `itl` apart.

    An emission costs one heap operation.

    Attributes:
        active_count: Number of requests that have a slot and are not finished.
    """

    def __init__(self, options: LatencyOptions) -> None:
        """Create an idle server. Raises UserError if the options contradict each other."""
        options.check()
        self.active_count = 0
        self._options = options
        self._now_ns = 0  # the time of the last call
        self._submitted_count = 0

        # Copies of options, because attributes of this object are read faster, once per emission.
        self._tokens_per_emission = options.tokens_per_emission
        self._max_active = options.slots

        # A gap is the time between two tokens of a stream. With the option `flood` there are no
        # gaps. Otherwise the gaps are drawn or, if that list is empty, all have a fixed length.
        self._has_no_gaps = options.flood
        self._drawn_gaps_ns = _draw_gaps_ns(options)
        self._fixed_gap_ns = options.itl.center_ns

        self._streams: dict[Hashable, _TokenStream] = {}  # all that are not finished, by key
        self._queue: deque[_TokenStream] = deque()  # those that wait for a slot

        # A heap of started streams: (due time of the next emission in ns, arrival index, stream).
        self._heap: list[tuple[int, int, _TokenStream]] = []

    @property
    def queued_count(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._streams) - self.active_count

    def submit(self, now_ns: int, key: Hashable, input_tokens: int, output_tokens: int) -> None:
        """Add a request that arrives now. It starts if a slot is free, or else waits for one.

        Args:
            now_ns: The time of arrival.
            key: Names the request in emissions and in `cancel`.
            input_tokens: The length of the prompt.
            output_tokens: The length of the output, at least 1.

        Raises:
            ValueError: The key is in use, or there is less than one output token.
        """
        if output_tokens < 1 or key in self._streams:
            raise ValueError(
                f"needs a new key and at least one output token: {key!r}, {output_tokens}"
            )

        self._now_ns = now_ns
        stream = _TokenStream(key, self._submitted_count, now_ns, input_tokens, output_tokens)
        self._streams[key] = stream
        self._submitted_count += 1

        if self._max_active is None or self.active_count < self._max_active:
            self._start(stream, now_ns)
        else:
            self._queue.append(stream)

    def submit_prefills(
        self, now_ns: int, keys: Sequence[Hashable], lengths: Sequence[int]
    ) -> None:
        """Add the sequences of a non-generative request (embeddings, rerank).

        A sequence is one of the texts of the request. It is done with its prefill, which is
        simulated as a request for one output token.

        Args:
            now_ns: The time of arrival.
            keys: One key per sequence, which names it in emissions.
            lengths: The length of each sequence in tokens.
        """
        for key, input_tokens in zip(keys, lengths, strict=True):
            self.submit(now_ns, key, input_tokens, output_tokens=1)

    def next_event_ns(self) -> int | None:
        """Return when the next emission is due, or None if there is none.

        Cancelled streams at the front of the heap are removed. They have no key any more.
        """
        heap = self._heap
        while heap:
            due_ns, _, stream = heap[0]
            is_cancelled = stream.key is None
            if not is_cancelled:
                return due_ns
            heapq.heappop(heap)

        return None

    def advance(self, now_ns: int) -> list[Emission]:
        """Return all emissions that are due by `now_ns`, in order of their due times.

        After each emission, the next one of the same stream is planned. After the last one, the
        stream frees its slot (one of the places for requests that are served at the same time), and
        a request that waits for a slot starts. Both happen at the time at which the emission was
        due, not at the time of the call. So a late caller delays nothing that follows.
        """
        self._now_ns = now_ns
        heap = self._heap

        emissions: list[Emission] = []
        while heap:
            due_ns, arrival_index, stream = heap[0]  # the stream that emits next
            if due_ns > now_ns:
                break

            is_cancelled = stream.key is None
            if is_cancelled:
                heapq.heappop(heap)
                continue

            tokens_left = stream.remaining_tokens - stream.next_tokens  # after this emission
            is_last = tokens_left <= 0
            emissions.append(Emission(stream.key, stream.next_tokens, is_last, due_ns))

            if is_last:
                heapq.heappop(heap)
                del self._streams[stream.key]
                self._free_slot(due_ns)
            else:
                next_due_ns = self._plan_next_emission(stream, due_ns, tokens_left)
                # One operation on the heap instead of two, a pop and a push.
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

    def _plan_next_emission(self, stream: _TokenStream, due_ns: int, tokens_left: int) -> int:
        """Set how many tokens a stream emits next, and return when they are due.

        The time between two tokens (a gap) is fixed, drawn, or 0 with the option `flood`.

        Args:
            stream: The stream, whose token counts are updated.
            due_ns: When the last emission of the stream was due.
            tokens_left: How many tokens the stream has left after it.
        """
        tokens = self._tokens_per_emission
        if tokens > tokens_left:  # faster than `min`, and this runs once per emission
            tokens = tokens_left

        if self._has_no_gaps:
            # One nanosecond later, so that the emission comes with the next call of `advance`. If
            # it came with the current one, a stream would emit all of its tokens in one call,
            # before the other streams.
            next_due_ns = self._now_ns + 1
        elif not self._drawn_gaps_ns:
            next_due_ns = due_ns + self._fixed_gap_ns * tokens
        else:
            next_due_ns = due_ns + self._sum_drawn_gaps_ns(stream, tokens)

        stream.next_tokens = tokens
        stream.remaining_tokens = tokens_left
        return next_due_ns

    def _sum_drawn_gaps_ns(self, stream: _TokenStream, tokens: int) -> int:
        """Return the sum of the drawn gaps before the next `tokens` tokens of a stream, in ns.

        All streams use the same list of drawn gaps, which begins again after its end. The position
        in the list depends on the arrival of the stream and on its remaining tokens. So each stream
        begins somewhere else, and moves on with each emission.
        """
        first_position = stream.arrival_index * _GAP_STRIDE + stream.remaining_tokens
        sum_ns = 0
        for position in range(first_position, first_position + tokens):
            sum_ns += self._drawn_gaps_ns[position % _DRAWN_GAPS]
        return sum_ns

    def _start(self, stream: _TokenStream, start_ns: int) -> None:
        """Start a request: it takes one of the slots, and its first token is planned.

        The time to the first token is drawn, plus a fixed time per token of the prompt. With the
        option `lockstep`, the token is delayed until the next tick of a clock, so that all requests
        get their tokens at the same times. The period of the clock is the time between two tokens,
        which is fixed with this option.

        Args:
            stream: The tokens of the request, none of which has been emitted.
            start_ns: When the request starts.
        """
        stream.has_started = True
        self.active_count += 1

        options = self._options
        drawn_ns = options.ttft.draw(options.seed, _TTFT_RANDOM_STREAM, stream.arrival_index)
        prompt_ns = round(options.per_input_token_ns * stream.input_tokens)
        due_ns = start_ns + drawn_ns + prompt_ns
        if options.lockstep:
            due_ns = _round_up_to_multiple(due_ns, self._fixed_gap_ns)

        heapq.heappush(self._heap, (due_ns, stream.arrival_index, stream))

    def _free_slot(self, end_ns: int) -> None:
        """Free the slot of a request that ends, and start the next requests that wait for one.

        A caller of `advance` may come late. Suppose a request ended at 10 ms, another one arrived
        at 12 ms, and the caller comes at 15 ms. Then the other request starts at 12 ms.

        Args:
            end_ns: When the request ended: its last emission was due, or it was cancelled.
        """
        self.active_count -= 1
        if self._max_active is None:
            return  # without a limit, no request waits

        while self._queue and self.active_count < self._max_active:
            stream = self._queue.popleft()
            is_cancelled = stream.key is None  # `cancel` takes the key away
            if not is_cancelled:
                start_ns = max(end_ns, stream.arrival_ns)
                self._start(stream, start_ns)
