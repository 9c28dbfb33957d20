"""What is worked out of millions of requests holds few arrays as long as they are."""

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from loadgen.core.metrics.accumulator import MetricAccumulator
from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.load import count_in_flight, gap_variation
from loadgen.core.metrics.windows import Span
from loadgen.core.results.record import ROW
from loadgen.core.stats.quantiles import Values

COUNT = 500_000
S = 10**9


def requests_with_long_responses() -> MetricAccumulator:
    """Return an accumulator of responses that took up to 50 s, after some failed requests."""
    rows, draw = np.zeros(COUNT, ROW), np.random.default_rng(1)
    rows["due_ns"] = rows["sent_ns"] = np.arange(COUNT) * 1_000
    rows["first_token_ns"] = rows["due_ns"] + draw.integers(1, 50 * S, COUNT)
    rows["end_ns"] = rows["done_ns"] = rows["last_token_ns"] = rows["first_token_ns"] + 5
    rows["input_tokens"], rows["status"][:1_000], rows["sent_ns"][:1_000] = 7, 1, -1
    metric_accumulator = MetricAccumulator()
    metric_accumulator.columns.append(Columns(rows))
    return metric_accumulator


CASES: dict[str, tuple[Callable[[MetricAccumulator], object], float]] = {
    "distribution": (
        lambda of: Values.of_arrays(
            np.array_split(of.columns[0]["done_ns"], 9), COUNT
        ).distribution(),
        1.2,
    ),
    "in flight": (
        lambda of: count_in_flight(of.columns, Span(start_s=0.0, end_s=60.0, duration_s=60.0)),
        3.5,
    ),
    "gaps": (lambda of: gap_variation(of.columns[0]["done_ns"], of.columns[0]["stage"]), 2.6),
    "ended": (lambda of: of.amounts("ok").between(0.0, 50.0), 1.9),
    "input": (lambda of: of.amounts("input").between(0.0, 50.0), 3.6),
}


@pytest.mark.parametrize("name", CASES)
def test_computations_allocate_few_arrays_as_long_as_the_run(name: str) -> None:
    work, most = CASES[name]
    metric_accumulator = requests_with_long_responses()
    for field in (
        "sent_ns",
        "done_ns",
        "first_token_ns",
        "end_ns",
        "status",
        "stage",
        "input_tokens",
    ):
        metric_accumulator.columns[0][field]  # kept as those of a file are
    tracemalloc.start()
    work(metric_accumulator)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < most * 8 * COUNT, f"{peak / 8 / COUNT:.2f} arrays"
