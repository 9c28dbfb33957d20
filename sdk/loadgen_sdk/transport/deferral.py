"""Decide from the recent traffic whether sockets of streams should be read late.

A *deferred* socket does not wake the process when data arrives. It is read about every millisecond,
together with all other deferred sockets (see `receiver.py`). That saves time only under heavy
traffic, and it costs exact timestamps if events of one stream arrive faster than it is read. A read
that holds several events is called *merged*: only the newest of them has an exact timestamp.
"""

from __future__ import annotations

DECISION_PERIOD_NS = 100_000_000
"""How often the policy is reconsidered."""

DEFER_FROM_READS_PER_S = 4_000
DEFER_DOWN_TO_READS_PER_S = 2_000
"""The rates of reads at which deferring starts and ends. The gap between them avoids toggling."""

READS_PER_MERGED_READ = 100
"""Deferring ends if more than one in this many reads is merged."""

DEFER_PAUSE_NS = 1_000_000_000
"""The first pause after too many merged reads. Each further pause in a row is twice as long."""

_NS_PER_S = 1_000_000_000


class DeferralPolicy:
    """Decides whether to defer, from the reads of the last decision period.

    Attributes:
        is_deferring_worthwhile: The decision: there are many reads, and few of them are merged.
    """

    def __init__(self, now: int) -> None:
        """Start without deferring. The first decision period begins at `now`, in ns."""
        self.is_deferring_worthwhile = False

        # The counts of the current decision period
        self._period_started_at = now
        self._reads = 0
        self._timely_reads = 0  # reads of polls that were not late
        self._timely_merged_reads = 0

        # The pause after too many merged reads
        self._paused_until = 0
        self._next_pause_ns = DEFER_PAUSE_NS

    def count_reads(self, reads: int, merged_reads: int, *, is_timely: bool) -> None:
        """Count the reads of one poll of the deferred sockets.

        A deferred socket does not wake the process when data arrives. It is read later, together
        with others, which saves work. The counts tell whether it is read too late.

        Args:
            reads: How many sockets were read.
            merged_reads: How many of these reads held several events, of which only the newest has
                an exact timestamp. Many of them mean that deferring harms the measurement.
            is_timely: The poll was made at its planned time. Reads of a late poll are not counted
                as evidence: they are merged because the process was busy, not because of deferring.
        """
        self._reads += reads
        if is_timely:
            self._timely_reads += reads
            self._timely_merged_reads += merged_reads

    def is_decision_due(self, now: int) -> bool:
        """Return True if the current decision period is over."""
        return now - self._period_started_at > DECISION_PERIOD_NS

    def decide(self, now: int) -> bool:
        """Decide from the reads of the last period whether to read sockets late ("defer").

        That is worthwhile if there are many reads, because it saves wake-ups of the process, and if
        few of them are merged: a merged read holds several events, of which only the newest has an
        exact timestamp. After too many merged reads, deferring pauses for a while.

        The next period begins now.

        Args:
            now: The monotonic time, in ns.

        Returns:
            Whether the decision (`is_deferring_worthwhile`) has changed.
        """
        was_worthwhile = self.is_deferring_worthwhile
        reads_per_s = self._reads * _NS_PER_S // (now - self._period_started_at)
        if was_worthwhile:
            self.is_deferring_worthwhile = self._should_continue(now, reads_per_s)
        else:
            self.is_deferring_worthwhile = self._should_begin(now, reads_per_s)

        self._start_period(now)
        return self.is_deferring_worthwhile != was_worthwhile

    def _should_begin(self, now: int, reads_per_s: int) -> bool:
        """Return True if reads are frequent and no pause of deferring is left."""
        return reads_per_s >= DEFER_FROM_READS_PER_S and now >= self._paused_until

    def _should_continue(self, now: int, reads_per_s: int) -> bool:
        """Return True if reads are still frequent and few of them were merged.

        A merged read holds several events. One in READS_PER_MERGED_READ reads may be merged. If
        more are, a pause of deferring begins now.
        """
        allowed_merged_reads = self._timely_reads / READS_PER_MERGED_READ
        has_too_many_merged = self._timely_merged_reads > allowed_merged_reads
        self._update_pause(now, has_too_many_merged)
        return reads_per_s >= DEFER_DOWN_TO_READS_PER_S and not has_too_many_merged

    def _start_period(self, now: int) -> None:
        """Begin a decision period without reads."""
        self._period_started_at = now
        self._reads = 0
        self._timely_reads = 0
        self._timely_merged_reads = 0

    def _update_pause(self, now: int, has_too_many_merged: bool) -> None:
        """Do not defer sockets for a while if that has merged too many reads.

        The traffic probably stays as it is, so that trying again soon would merge reads again. Each
        pause in a row is therefore twice as long as the one before.
        """
        if has_too_many_merged:
            self._paused_until = now + self._next_pause_ns
            self._next_pause_ns *= 2
        else:
            self._next_pause_ns = DEFER_PAUSE_NS
