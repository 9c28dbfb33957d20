"""Output events of one stage during a run: the gaps between them, their stamp errors, and how many per 10 ms. Pure."""

from __future__ import annotations

import numpy as np
from loadgen_sdk.dialects.reader import Flow
from numpy.typing import NDArray

from loadgen.results.record import BIN_NS
from loadgen.stats.quantiles import Histogram

GROWING_BINS = 1_000  # last bins of the timeline, which may still change: an event is counted within 10 s


class Timeline:
    """Output events of one stage: histograms of the gaps between them and of their stamp errors, counts per BIN_NS."""

    __slots__ = ("_start_ns", "bins", "errors", "first", "flow", "gaps", "used")

    def __init__(self, start_ns: int) -> None:
        self.flow = Flow()
        self.gaps = Histogram()
        self.errors = Histogram()
        self.bins: NDArray[np.int64] = np.zeros(1024, np.int64)
        self.first = 0  # number of the bin in `bins[0]`; earlier bins are stored and final
        self.used = 0
        self._start_ns = start_ns

    def fold(self) -> None:
        """Count what `flow` has collected, then clear it."""
        flow = self.flow
        if flow.gaps:
            self.gaps.add(np.array(flow.gaps, np.int64))
            flow.gaps.clear()
        if flow.instants:
            self.errors.add_zeros(len(flow.instants) - len(flow.errors))
            self.errors.add(np.array(flow.errors, np.int64))
            flow.errors.clear()
            bin_numbers = (np.array(flow.instants, np.int64) - self._start_ns) // BIN_NS - self.first
            flow.instants.clear()
            counts = np.bincount(np.maximum(bin_numbers, 0))
            if len(counts) > len(self.bins):
                larger = np.zeros(len(counts) * 2, np.int64)
                larger[: len(self.bins)] = self.bins
                self.bins = larger
            self.bins[: len(counts)] += counts
            self.used = max(self.used, len(counts))

    def stored(self) -> None:
        """Everything so far is on disk: keep only the bins that may still change."""
        final = self.used - GROWING_BINS
        if final > GROWING_BINS:
            self.bins[:GROWING_BINS] = self.bins[final : self.used]
            self.bins[GROWING_BINS:] = 0
            self.first += final
            self.used = GROWING_BINS
