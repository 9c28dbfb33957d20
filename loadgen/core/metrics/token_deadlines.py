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

from loadgen.core.metrics.columns import Columns, is_measured, is_of_class, join_arrays
from loadgen.core.metrics.request_metrics import count_textless_tokens, streamed_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from loadgen.core.results.gaps import RequestGaps
    from loadgen.core.results.manifest import RunManifest
    from loadgen.core.slo import TokenDeadlines

    Ints = NDArray[np.int64]


class _SlotPositions(NamedTuple):
    """Where some slots are in a sorted array of slots.

    Attributes:
        positions: The position of each slot, or any position if the array does not have the slot.
        is_known: Whether the array has each slot.
    """

    positions: NDArray[np.intp]
    is_known: NDArray[np.bool_]


def _find_slots(sorted_slots: Ints, slots: Ints) -> _SlotPositions:
    """Return where each of `slots` is in a sorted array, which has at least one slot.

    For example, slot 7 is at position 1 of the array [3, 7, 9], and slot 5 is not known.
    """
    # A slot above the last one of the array gets a position after its end.
    last_position = len(sorted_slots) - 1
    positions = np.minimum(np.searchsorted(sorted_slots, slots), last_position)
    return _SlotPositions(positions, is_known=sorted_slots[positions] == slots)


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
        """Return the fluidity index of each of some requests, NaN for each request without one.

        The fluidity index is the fraction of the token deadlines of a response that were met.

        Args:
            slots: The numbers of the requests in the schedule, in any order.
        """
        if len(self.slots) == 0:
            return np.full(len(slots), np.nan)

        positions, is_known = _find_slots(self.slots, slots)
        indices: NDArray[np.float64] = np.where(is_known, self.indices[positions], np.nan)
        return indices

    def select_slots(self, slots: Ints) -> DeadlineCounts:
        """Return the counts of some requests, in the order of `slots`.

        Requests without counts, such as failed ones, are left out.

        Args:
            slots: The numbers of the requests in the schedule.
        """
        if len(self.slots) == 0:
            return self

        positions, is_known = _find_slots(self.slots, slots)
        known_positions = positions[is_known]
        return DeadlineCounts(*(column[known_positions] for column in self))


class _Responses(NamedTuple):
    """Successful streamed responses, one entry each, in ascending order of their slots.

    Attributes:
        slots: The slot of each response.
        ttft_ns: The time from its scheduled time to its first token.
        gap_counts: The number of gaps between its output events.
        first_event_tokens: The tokens of its first output event.
        later_tokens: The tokens of its later events together.
    """

    slots: Ints
    ttft_ns: Ints
    gap_counts: Ints
    first_event_tokens: Ints
    later_tokens: Ints

    def select(self, selection: NDArray[np.bool_] | NDArray[np.intp]) -> _Responses:
        """Return some of the responses, selected by a mask or by their positions."""
        return _Responses(*(column[selection] for column in self))


class DeadlineGroup(NamedTuple):
    """Requests that have the same token deadlines, such as those of one request class.

    Attributes:
        stages: The request records of each stage of the load.
        deadlines: The time limits of the first token and of each later token.
    """

    stages: Sequence[Columns]
    deadlines: TokenDeadlines


def count_deadlines_of_run(
    manifest: RunManifest, rows: NDArray[np.void], gaps: Iterable[RequestGaps] | None
) -> DeadlineCounts | None:
    """Count the token deadlines of all measured responses of a run, each by the SLO of its class.

    Requests whose SLO sets no deadlines are left out. Return None if no SLO sets any, or if the run
    did not store its token times.

    Args:
        manifest: The manifest of the run, with its SLO or those of its request classes.
        rows: The records of all stages.
        gaps: The times between the events of each response, None if they were not stored.
    """
    groups = list(_group_by_deadlines(manifest, rows))
    if gaps is None or not groups:
        return None
    return _merge_counts(count_deadlines_of_groups(groups, gaps))


def _group_by_deadlines(manifest: RunManifest, rows: NDArray[np.void]) -> Iterator[DeadlineGroup]:
    """Yield the measured requests that have token deadlines, grouped by their deadlines.

    A run with request classes has a group for each class whose SLO sets deadlines. Any other run
    has one group, if its SLO sets deadlines.
    """
    is_measured_row = is_measured(manifest, rows)
    if not manifest.classes:
        deadlines = None if manifest.slo is None else manifest.slo.find_token_deadlines()
        if deadlines is not None:
            yield DeadlineGroup([Columns(rows, is_measured_row)], deadlines)
        return

    for plan in manifest.classes:
        deadlines = None if plan.slo is None else plan.slo.find_token_deadlines()
        if deadlines is not None:
            is_in_group = is_measured_row & is_of_class(manifest, plan.name, rows)
            yield DeadlineGroup([Columns(rows, is_in_group)], deadlines)


def _merge_counts(parts: Sequence[DeadlineCounts]) -> DeadlineCounts:
    """Return the counts of different requests as one, in ascending order of their slots."""
    merged = DeadlineCounts(
        slots=np.concatenate([part.slots for part in parts]),
        deadlines=np.concatenate([part.deadlines for part in parts]),
        missed=np.concatenate([part.missed for part in parts]),
    )
    order_by_slot = np.argsort(merged.slots, kind="stable")
    return DeadlineCounts(*(column[order_by_slot] for column in merged))


def count_deadlines_of_groups(
    groups: Sequence[DeadlineGroup], gaps: Iterable[RequestGaps]
) -> list[DeadlineCounts]:
    """Count the token deadlines that the responses of each group of requests met and missed.

    A token deadline is the time by which an output token has to arrive. Each group has different
    deadlines, and a request may be in several groups.

    Args:
        groups: The groups of requests.
        gaps: The times between the output events of each response. They are read only once, because
            they may be larger than memory.

    Returns:
        The counts of each group.
    """
    counters = [
        _DeadlineCounter(_list_responses(group.stages), group.deadlines) for group in groups
    ]
    for block in gaps:
        for counter in counters:
            counter.add_gaps(block)
    return [counter.counts() for counter in counters]


def count_token_deadlines(
    stages: Sequence[Columns], gaps: Iterable[RequestGaps], deadlines: TokenDeadlines
) -> DeadlineCounts:
    """Count the token deadlines that each successful response met and missed.

    The deadline of the first token is a fixed time after its request. The deadline of each later
    token is a fixed time after the previous token.

    A response comes as events of one or more tokens. A response is left out if the times between
    its events are not known, or if several tokens came in a single event, because the times of
    these tokens are not known.

    Args:
        stages: The request records of each stage of the load.
        gaps: The times between the events of each response. Each block is for some responses.
        deadlines: The time limits of the first token and of each later token.
    """
    group = DeadlineGroup(stages, deadlines)
    counts_of_groups = count_deadlines_of_groups([group], gaps)
    return counts_of_groups[0]


def _list_responses(stages: Sequence[Columns]) -> _Responses:
    """Return the streamed successful responses of all stages of a load.

    They are in ascending order of their slots, the numbers of their requests in the schedule.
    """
    parts = [_list_responses_of_stage(columns) for columns in stages]
    responses = _Responses(
        slots=join_arrays([part.slots for part in parts]),
        ttft_ns=join_arrays([part.ttft_ns for part in parts]),
        gap_counts=join_arrays([part.gap_counts for part in parts]),
        first_event_tokens=join_arrays([part.first_event_tokens for part in parts]),
        later_tokens=join_arrays([part.later_tokens for part in parts]),
    )
    order_by_slot = np.argsort(responses.slots, kind="stable")
    return responses.select(order_by_slot)


def _list_responses_of_stage(columns: Columns) -> _Responses:
    """Return the successful responses of one stage whose tokens came as a stream.

    A streamed response consists of output events, each with one or more tokens. The `later` events
    are those after the first event, and a gap is the time between two consecutive events.
    """
    events = columns["output_events"].astype(np.int64)
    tokens = streamed_tokens(columns).astype(np.int64)
    first_event_tokens = np.maximum(columns["first_event_tokens"], 1).astype(np.int64)
    later_events = events - 1
    later_tokens = tokens - first_event_tokens

    # Some tokens have no text, such as the end token, and come in no event. If there are more
    # tokens than later events even without these, an event has several tokens.
    textless_tokens = count_textless_tokens(columns["finish_reason"], tokens)
    surplus_tokens = later_tokens - later_events
    has_one_token_per_event = surplus_tokens <= textless_tokens

    has_ttft = columns.is_known("first_token_ns") & columns.is_known("due_ns")
    has_token_times = (later_events > 0) | has_one_token_per_event
    is_usable = columns.is_ok & has_ttft & has_token_times

    responses = _Responses(
        slots=columns["slot"],
        ttft_ns=columns["first_token_ns"] - columns["due_ns"],
        gap_counts=later_events,
        first_event_tokens=first_event_tokens,
        later_tokens=np.where(has_one_token_per_event, later_events, later_tokens),
    )
    return responses.select(is_usable)


class _LocatedGaps(NamedTuple):
    """The gaps of some responses, one entry per response.

    Attributes:
        positions: The position of the response in `_Responses`.
        gap_starts: The index of its first gap in the array of all gaps.
        gap_counts: The number of its gaps.
    """

    positions: NDArray[np.intp]
    gap_starts: Ints
    gap_counts: Ints

    def sort_longest_first(self) -> _LocatedGaps:
        """Return the same responses, those with the most gaps first."""
        longest_first = np.argsort(-self.gap_counts, kind="stable")
        return _LocatedGaps(*(column[longest_first] for column in self))

    def select_with_gap(self, gap_number: int) -> _LocatedGaps:
        """Return the responses that have a gap with this number (0, 1, ...).

        The responses must be sorted with the most gaps first, so that these are the first ones.
        """
        response_count = int(np.count_nonzero(self.gap_counts > gap_number))
        return _LocatedGaps(*(column[:response_count] for column in self))


class _DeadlineCounter:
    """Counts the deadlines of many responses at once.

    A loop over the events of a response has to be in order, because slack is carried on. So the
    loop is over the numbers of the events, and each step treats one event of every response.
    """

    def __init__(self, responses: _Responses, deadlines: TokenDeadlines) -> None:
        """Start the counts with the first output event of each response.

        Args:
            responses: The responses, whose first events came `ttft_ns` after their requests.
            deadlines: The time limits of the first token and of each later token.
        """
        self._responses = responses
        self._per_token_ns = deadlines.per_token_ns

        # For each response, the spare time until its next deadline, and its deadlines up to now.
        response_count = len(responses.slots)
        self._slack_ns = np.zeros(response_count, np.int64)
        self._deadlines = np.zeros(response_count, np.int64)
        self._missed = np.zeros(response_count, np.int64)

        # A gap is the time between two events. A response without gaps has only a first event.
        has_only_first_event = responses.gap_counts <= 0
        self._is_complete = has_only_first_event

        all_positions = np.arange(response_count)
        self._add_event(
            positions=all_positions,
            waits_ns=responses.ttft_ns,
            tokens=responses.first_event_tokens,
            deadline_ns=deadlines.first_token_ns,
        )

    def add_gaps(self, gaps: RequestGaps) -> None:
        """Count the deadlines of all output events after the first one of some responses.

        A gap is the time between two output events of a response. Event 1 follows gap 0, and so on.
        The loop treats gap n of all responses at once. Gaps of failed requests are ignored.
        """
        located = self._locate_gaps(gaps).sort_longest_first()
        if len(located.positions) == 0:
            return

        longest_gap_count = int(located.gap_counts[0])
        for gap_number in range(longest_gap_count):
            active = located.select_with_gap(gap_number)
            self._add_event(
                positions=active.positions,
                waits_ns=gaps.values[active.gap_starts + gap_number],
                tokens=self._tokens_after_gap(active.positions, gap_number),
                deadline_ns=self._per_token_ns,
            )

        self._is_complete[located.positions] = True

    def counts(self) -> DeadlineCounts:
        """Return the met and missed deadlines of each response whose token times are all known."""
        is_complete = self._is_complete
        return DeadlineCounts(
            slots=self._responses.slots[is_complete],
            deadlines=self._deadlines[is_complete],
            missed=self._missed[is_complete],
        )

    def _locate_gaps(self, gaps: RequestGaps) -> _LocatedGaps:
        """Find the response to which the times between output events (gaps) belong.

        A list of gaps has the same slot as its response: the number of the request in the schedule.
        A response is left out if its record has a different number of gaps, as in a damaged file,
        or if its gaps were added before.
        """
        known_slots = self._responses.slots
        if len(known_slots) == 0 or len(gaps.slots) == 0:
            no_gaps = np.zeros(0, np.int64)
            return _LocatedGaps(no_gaps.astype(np.intp), no_gaps, no_gaps)

        positions, is_known = _find_slots(known_slots, gaps.slots)
        gap_counts = self._responses.gap_counts[positions]
        has_recorded_count = gap_counts == gaps.counts
        is_new = ~self._is_complete[positions]
        is_usable = is_known & has_recorded_count & is_new

        # The gaps of all responses are one after the other in one array.
        gap_starts = np.cumsum(gaps.counts) - gaps.counts
        return _LocatedGaps(
            positions=positions[is_usable],
            gap_starts=gap_starts[is_usable],
            gap_counts=gap_counts[is_usable],
        )

    def _tokens_after_gap(self, positions: NDArray[np.intp], gap_number: int) -> Ints:
        """Return how many tokens the output event after a gap has, for each response.

        A response comes as events of one or more tokens. Only the tokens of all events together are
        recorded, so they are distributed evenly: of 10 tokens in 4 events, the events have 2, 3, 2
        and 3 tokens. Each event has at least one token.

        Args:
            positions: The indices of the responses.
            gap_number: The number of the gap in each response. Gap 0 is before the second event.
        """
        later_tokens = self._responses.later_tokens[positions]
        later_events = self._responses.gap_counts[positions]  # one event after each gap

        # The tokens from the second event up to the end of an event are rounded down.
        tokens_up_to_previous_event = gap_number * later_tokens // later_events
        tokens_up_to_event = (gap_number + 1) * later_tokens // later_events
        return np.maximum(tokens_up_to_event - tokens_up_to_previous_event, 1)

    def _add_event(
        self, positions: NDArray[np.intp], waits_ns: Ints, tokens: Ints, deadline_ns: int
    ) -> None:
        """Count the token deadlines of the next output event of each of several responses.

        A token deadline is the time by which a token has to arrive, and an event brings one or more
        tokens at once. If its first token is early, the spare time (slack) extends the next
        deadline. If it is late, it misses one deadline, and one more for each complete time per
        token that it is late: 25 ms late at 10 ms per token misses 3 deadlines. All further tokens
        of the event meet their deadlines and leave slack. The rules are those of Etalon (arXiv
        2507.09019v1, "fluidity-index Computation").

        Args:
            positions: The positions of the responses in `self._responses`, one event each.
            waits_ns: The time from the event before to this event. For a first event, the TTFT.
            tokens: The number of tokens of the event.
            deadline_ns: The longest wait that is in time if there is no slack.
        """
        lateness_ns = waits_ns - deadline_ns - self._slack_ns[positions]
        is_late = lateness_ns > 0

        further_missed = lateness_ns // self._per_token_ns
        missed_by_first_token = np.where(is_late, 1 + further_missed, 0)
        slack_of_first_token_ns = np.where(is_late, 0, -lateness_ns)

        further_tokens = tokens - 1
        slack_of_further_tokens_ns = further_tokens * self._per_token_ns
        self._slack_ns[positions] = slack_of_first_token_ns + slack_of_further_tokens_ns

        # A first token that is in time has one deadline. A late one has as many as it missed.
        deadlines_of_first_token = np.maximum(missed_by_first_token, 1)
        self._deadlines[positions] += deadlines_of_first_token + further_tokens
        self._missed[positions] += missed_by_first_token
