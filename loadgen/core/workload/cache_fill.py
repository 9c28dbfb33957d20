"""Fill the prefix cache of the server before sessions that begin in the middle.

With `start: middle`, the first session of each virtual user begins at a later turn of its
trajectory. A stage that is not measured is added before the load. It sends one request for each of
these sessions, whose prompt is the conversation so far and whose response has one token. When all
of them have ended, the server has the beginnings in its cache, and the sessions continue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core.workload.stages import Closed, Stage
from loadgen.core.workload.trajectories import Trajectories

if TYPE_CHECKING:
    from loadgen.core.workload.schema import Workload

CACHE_FILL = "cache fill"
"""The name of the added stage in results."""


class CacheFillStage(Stage):
    """The added stage. The next stage begins when all of its requests have ended."""


def with_cache_fill(workload: Workload) -> Workload:
    """Add a stage that fills the server's prefix cache, if sessions begin in the middle.

    The stage has one request for each virtual user, whose prompt is the conversation before the
    turn with which the session begins. A workload whose sessions begin with their first turn, or
    that already has the stage, is returned as it is.
    """
    requests = workload.requests
    if not isinstance(requests, Trajectories) or requests.start != "middle":
        return workload

    first_stage = workload.stages[0]
    if isinstance(first_stage, CacheFillStage) or not isinstance(first_stage.arrival, Closed):
        return workload

    users = first_stage.arrival.concurrency
    if first_stage.count is not None:
        users = min(users, first_stage.count)

    fill = CacheFillStage.model_construct(
        name=CACHE_FILL,
        arrival=Closed.model_construct(concurrency=users),
        count=users,
        measured=False,
    )
    return workload.model_copy(update={"stages": (fill, *workload.stages)})


def count_cache_fills(workload: object) -> int:
    """Return how many sessions at the start of a run fill the prefix cache of the server.

    Return 0 for an object without stages of a load, such as a class of requests.
    """
    stages = getattr(workload, "stages", ())
    first_stage = stages[0] if stages else None
    if not isinstance(first_stage, CacheFillStage):
        return 0
    return first_stage.count or 0
