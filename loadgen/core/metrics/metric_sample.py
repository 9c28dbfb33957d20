"""The values of one metric of requests, and the statistics of these values. Pure numpy."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from loadgen.core.metrics import sample_bounds
from loadgen.core.metrics.columns import as_selection, drop_undefined
from loadgen.core.stats.quantiles import QUANTILES, Values, quantile_index
from loadgen.figures import METRICS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.metrics.sample_bounds import Range, StatisticRanges
    from loadgen.core.stats.quantiles import Distribution


class RequestMetricSample:
    """The values of a metric that has one value per request, such as TTFT.

    Statistics are cached. The values themselves are computed again for each new statistic, because
    a cache of them would take too much memory for millions of requests.
    """

    def __init__(self, columns: Sequence[Columns], metric: str) -> None:
        """Create the sample of a metric, without computing a value yet.

        Args:
            columns: The records of the requests. The sample is complete only if no records are
                added to this list later.
            metric: The name of the metric.
        """
        self._columns = columns
        self._metric = metric

        # The values, and the ranges of uncertain values, by their index in the ordered sample.
        self._value_at_index: dict[int, float] = {}
        self._range_at_index: dict[int, Range] = {}

    def values(self) -> Values:
        """Compute the values of all requests that have one."""
        blocks = (block for columns in self._columns for block in columns.blocks())
        values_of_blocks = (_measure_sample(block, self._metric) for block in blocks)
        request_count = sum(len(columns) for columns in self._columns)
        return Values.of_arrays(values_of_blocks, max_count=request_count)

    @cached_property
    def distribution(self) -> Distribution:
        """The distribution of the values. Its statistics are in ms."""
        values = self.values()
        distribution = values.distribution()

        # An SLO compares quantiles in ns, so the exact values are cached as well.
        for index in _quantile_indices(values.count):
            self._value_at_index[index] = values.nth(index)

        return distribution

    def nth_value(self, index_in_order: int) -> float:
        """Return the value at an index of the ordered sample, where 0 is the smallest value."""
        if index_in_order not in self._value_at_index:
            self._value_at_index[index_in_order] = self.values().nth(index_in_order)
        return self._value_at_index[index_in_order]

    @cached_property
    def statistic_ranges(self) -> StatisticRanges | None:
        """The range in which each statistic lies, or None if all values are certain.

        An event may have arrived earlier than its timestamp, so that a latency is only known to lie
        in a range.
        """
        value_bounds = sample_bounds.bound_metric(self._columns, self._metric)
        if value_bounds is None:
            return None

        # The bounds of all values are not kept, so the ranges of the quantiles are cached now.
        for index in _quantile_indices(len(value_bounds)):
            self._range_at_index[index] = value_bounds.bound_nth(index)

        return value_bounds.bound_statistics()

    def nth_range(self, index_in_order: int) -> Range | None:
        """Return the range in which the value at an index of the ordered sample lies.

        Return None if all values of the metric are certain.
        """
        are_all_certain = self.statistic_ranges is None
        if are_all_certain:
            return None

        is_cached = index_in_order in self._range_at_index
        if not is_cached:
            value_bounds = sample_bounds.bound_metric(self._columns, self._metric)
            if value_bounds is not None:
                self._range_at_index[index_in_order] = value_bounds.bound_nth(index_in_order)

        return self._range_at_index.get(index_in_order)


def _quantile_indices(count: int) -> list[int]:
    """Return the index of each reported quantile in an ordered sample of `count` values.

    The list is empty if there are no values.
    """
    if count == 0:
        return []
    return [quantile_index(count, probability) for _, probability in QUANTILES]


def _measure_sample(columns: Columns, metric: str) -> NDArray[np.int64]:
    """Return the values of a metric that has one value per request, without undefined ones.

    A metric of the server, such as TTFT, has values for ok requests. A metric of the client, such
    as the send delay, has values for all sent requests.
    """
    definition = METRICS.get(metric)
    is_of_all_sent = definition is not None and definition.sample == "sent"
    is_in_sample = columns.is_known("sent_ns") if is_of_all_sent else columns.is_ok

    selected = as_selection(is_in_sample)
    return drop_undefined(columns.measure(metric)[selected])
