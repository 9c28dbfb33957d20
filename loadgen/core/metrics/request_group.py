"""The requests of which a summary reports rates: those of a run, or of one part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.metrics.windows import Window


@dataclass(frozen=True)
class RequestGroup:
    """Requests that are summarized together, and what their rates depend on.

    They are the measured requests of a run, or those of a stage, target, class, model or step.

    Attributes:
        requests: The requests.
        all_stages: The requests of the same target, class, model or step in all stages of the run,
            measured or not. All of them count as requests in flight.
        window: The intervals that rates are computed over.
        gpus: The number of GPUs that served the requests, None if not known.
        timeline: Per stage, output events per bin of time. If it is empty, the tokens of a response
            are spread evenly from its first to its last token.
        arrival: The arrival process as written in the workload, "" for a part of the run.
        requests_of_run: All measured requests of the run, if `requests` are those of a part that is
            summarized over the window of the run. None otherwise.
    """

    requests: MetricAccumulator
    all_stages: Sequence[MetricAccumulator]
    window: Window
    gpus: int | None = None
    timeline: Sequence[NDArray[np.int64]] = ()
    arrival: str = ""
    requests_of_run: MetricAccumulator | None = None
