"""Count how many token deadlines each response met and missed, for the fluidity index.

Pure. The fluidity index of a response is the fraction of its token deadlines that it met. It is
defined by Etalon (Agrawal et al., arXiv 2407.07000, section 4, 2024-07). This module follows the
authors' program, which also says how many deadlines a late token misses: the function
`get_request_level_deadline_miss_rate` in `etalon/metrics/metric_utils.py` of
github.com/project-etalon/etalon (commit 09d935e, 2024-08-29), and the algorithm "fluidity-index
Computation" of arXiv 2507.09019v1 (2025-07):

- The first token is due after the TTFT deadline, and each later token one TPOT deadline after the
  token before it.
- A token that is early leaves slack, which the tokens after it may use.
- A token that is late misses one deadline, and one more for each further TPOT deadline that passed
  before it. After it, the deadlines start anew, and there is no slack.

The times of single tokens are not recorded, but those of output events are. The tokens after the
first event are distributed evenly over the later events, as the metric TPOT does. The tokens of one
event arrive at the same time, so that all but the first of them are early by one TPOT deadline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.core.metrics.request_metrics import count_textless_tokens, streamed_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.results.gaps import RequestGaps
    from loadgen.core.slo import TokenDeadlines

    Ints = NDArray[np.int64]


class DeadlineCounts(NamedTuple):
    """The token deadlines of some responses, one entry each, in ascending order of their slots.

    Attributes:
        slots: The slot of each response: the number of its request in the schedule.
        deadlines: Its token deadlines, at least one.
        missed: The deadlines that it missed.
    """

    slots: Ints
    deadlines: Ints
    missed: Ints

    @property
    def indices(self) -> NDArray[np.float64]:
        """The fluidity index of each response: the fraction of its deadlines that it met."""
        indices: NDArray[np.float64] = (self.deadlines - self.missed) / self.deadlines
        return indices

    def look_up_indices(self, slots: Ints) -> NDArray[np.float64]:
        """Return the fluidity index of the responses of these slots, NaN where it is not known.

        Args:
            slots: The slots of any requests, in any order.
        """
        if not len(self.slots):
            return np.full(len(slots), np.nan)
        positions = np.minimum(np.searchsorted(self.slots, slots), len(self.slots) - 1)
        is_known = self.slots[positions] == slots
        indices: NDArray[np.float64] = np.where(is_known, self.indices[positions], np.nan)
        return indices


class _Responses(NamedTuple):
    """Successful streamed responses, one entry each, in ascending order of their slots.

    Attributes:
        slots: The slot of each response.
        ttft_ns: The time from its scheduled time to its first token.
        gap_counts: The number of gaps between its output events.
        first_event_tokens: The tokens of its first output event.
        later_tokens: The tokens of its later events, or -1 if each of them has one token.
    """

    slots: Ints
    ttft_ns: Ints
    gap_counts: Ints
    first_event_tokens: Ints
    later_tokens: Ints

    def select(self, selection: NDArray[np.bool_] | NDArray[np.intp]) -> _Responses:
        """Return some of the responses, selected by a mask or by their positions."""
        return _Responses(*(column[selection] for column in self))


def count_token_deadlines(
    stages: Sequence[Columns], gaps: Iterable[RequestGaps], deadlines: TokenDeadlines
) -> DeadlineCounts:
    """Count the deadlines that successful responses met and missed.

    A response is left out if the gaps between its events are not known, or if all its tokens came
    in one event although it has several, which shows nothing about their times.

    Args:
        stages: The records of the requests, by stage.
        gaps: The times between the output events of each response.
        deadlines: The deadlines.
    """
    responses = _list_responses(stages)
    counter = _DeadlineCounter(responses, deadlines)
    for block in gaps:
        counter.add_gaps(block)
    return counter.counts()


def _list_responses(stages: Sequence[Columns]) -> _Responses:
    """Return the successful responses of all stages whose tokens came as a stream."""
    parts = [_list_responses_of_stage(columns) for columns in stages]
    columns_of_parts = zip(*parts, strict=True) if parts else [[np.zeros(0, np.int64)]] * 5
    responses = _Responses(*(np.concatenate(columns) for columns in columns_of_parts))
    return responses.select(np.argsort(responses.slots, kind="stable"))


def _list_responses_of_stage(columns: Columns) -> _Responses:
    """Return the successful responses of one stage whose tokens came as a stream."""
    events = columns["output_events"].astype(np.int64)
    tokens = streamed_tokens(columns).astype(np.int64)
    first_event_tokens = np.maximum(columns["first_event_tokens"], 1).astype(np.int64)
    gap_counts = events - 1
    later_tokens = tokens - first_event_tokens

    # A token without text comes in no event, so it has no time. What remains above one token per
    # event shows that events carry several tokens.
    textless_tokens = count_textless_tokens(columns["finish_reason"], tokens)
    surplus_tokens = later_tokens - gap_counts
    has_one_token_per_event = surplus_tokens <= textless_tokens

    has_first_token = columns.is_known("first_token_ns") & columns.is_known("due_ns")
    has_token_times = (gap_counts > 0) | has_one_token_per_event
    is_streamed = columns.is_ok & has_first_token & has_token_times
    responses = _Responses(
        slots=columns["slot"],
        ttft_ns=columns["first_token_ns"] - columns["due_ns"],
        gap_counts=gap_counts,
        first_event_tokens=first_event_tokens,
        later_tokens=np.where(has_one_token_per_event, -1, later_tokens),
    )
    return responses.select(is_streamed)


class _DeadlineCounter:
    """Counts the deadlines of many responses at once.

    A loop over the events of a response has to be in order, because slack is carried on. So the
    loop is over the numbers of the events, and each step treats one event of every response.
    """

    def __init__(self, responses: _Responses, deadlines: TokenDeadlines) -> None:
        """Count the deadlines of the first events.

        Args:
            responses: The responses.
            deadlines: The deadlines of their tokens.
        """
        self._responses = responses
        self._per_token_ns = deadlines.per_token_ns
        self._slack_ns = np.zeros(len(responses.slots), np.int64)
        self._deadlines = np.zeros(len(responses.slots), np.int64)
        self._missed = np.zeros(len(responses.slots), np.int64)
        self._is_complete = responses.gap_counts <= 0

        everything = np.arange(len(responses.slots))
        self._add_event(
            everything, responses.ttft_ns, responses.first_event_tokens, deadlines.first_token_ns
        )

    def add_gaps(self, gaps: RequestGaps) -> None:
        """Count the deadlines of all events after the first one of some responses.

        Gaps of other requests, such as failed ones, are ignored.
        """
        positions, gap_starts = self._find_responses(gaps)
        if not len(positions):
            return

        # With the longest response first, those that have a next event are always the first ones.
        longest_first = np.argsort(-self._responses.gap_counts[positions], kind="stable")
        positions = positions[longest_first]
        gap_starts = gap_starts[longest_first]
        gap_counts = self._responses.gap_counts[positions]

        for gap_number in range(int(gap_counts[0])):
            active = int(np.searchsorted(-gap_counts, -gap_number, side="left"))
            active_positions = positions[:active]
            self._add_event(
                active_positions,
                gaps.values[gap_starts[:active] + gap_number],
                self._tokens_after_gap(active_positions, gap_number),
                self._per_token_ns,
            )
        self._is_complete[positions] = True

    def counts(self) -> DeadlineCounts:
        """Return the deadlines of the responses whose gaps are all known."""
        is_complete = self._is_complete
        return DeadlineCounts(
            slots=self._responses.slots[is_complete],
            deadlines=self._deadlines[is_complete],
            missed=self._missed[is_complete],
        )

    def _find_responses(self, gaps: RequestGaps) -> tuple[NDArray[np.intp], Ints]:
        """Return the positions of the responses that have gaps here, and where their gaps start.

        A response is left out if it has another number of gaps than its record says, as in a
        damaged file, or if its gaps were added before.
        """
        known_slots = self._responses.slots
        if not len(known_slots) or not len(gaps.slots):
            return np.zeros(0, np.intp), np.zeros(0, np.int64)

        positions = np.minimum(np.searchsorted(known_slots, gaps.slots), len(known_slots) - 1)
        is_usable = known_slots[positions] == gaps.slots
        is_usable &= self._responses.gap_counts[positions] == gaps.counts
        is_usable &= ~self._is_complete[positions]
        gap_starts = np.cumsum(gaps.counts) - gaps.counts
        return positions[is_usable], gap_starts[is_usable]

    def _tokens_after_gap(self, positions: NDArray[np.intp], gap_number: int) -> Ints:
        """Return the tokens of the event after a gap, the share of an even distribution.

        Of 10 tokens in 4 events, the events have 2, 3, 2 and 3 tokens. Each event has at least one.
        """
        later_tokens = self._responses.later_tokens[positions]
        gap_counts = self._responses.gap_counts[positions]
        tokens_before = gap_number * later_tokens // gap_counts
        tokens_up_to = (gap_number + 1) * later_tokens // gap_counts
        return np.maximum(tokens_up_to - tokens_before, 1)

    def _add_event(
        self, positions: NDArray[np.intp], waits_ns: Ints, tokens: Ints, deadline_ns: int
    ) -> None:
        """Count the deadlines of one event of each of some responses.

        Args:
            positions: The positions of the responses.
            waits_ns: The time that the event came after the one before it.
            tokens: The tokens of the event.
            deadline_ns: The deadline of its first token, without slack.
        """
        lateness_ns = waits_ns - deadline_ns - self._slack_ns[positions]
        is_late = lateness_ns > 0
        missed = np.where(is_late, 1 + lateness_ns // self._per_token_ns, 0)
        slack_ns = np.where(is_late, 0, -lateness_ns)

        tokens_at_same_time = tokens - 1
        self._slack_ns[positions] = slack_ns + tokens_at_same_time * self._per_token_ns
        self._missed[positions] += missed
        self._deadlines[positions] += np.maximum(missed, 1) + tokens_at_same_time
