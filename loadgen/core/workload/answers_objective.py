"""Check whether the objective of an SLO on checked answers can be judged. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from loadgen.core.errors import UserError
from loadgen.core.workload.request_classes import Mix, list_question_classes

if TYPE_CHECKING:
    from loadgen.core.workload.schema import Workload


def answers_objective_errors(workload: Workload) -> Iterator[UserError]:
    """Yield an error for each reason why the objective on answers cannot be judged.

    The load needs questions with known answers. The objective is judged for the load as a whole, so
    no class may have an SLO of its own.
    """
    if workload.slo is None or workload.slo.answers_share is None:
        return

    if not list_question_classes(workload.requests):
        yield UserError(
            "missing_key",
            message="the objective answers needs questions with known answers in the load",
            where="slo.answers",
            hint="add --check-answers FILE, or check_answers: true to requests that read a file",
        )

    if not isinstance(workload.requests, Mix):
        return
    classes = workload.requests.classes.values()
    if any(request_class.slo is not None for request_class in classes):
        yield UserError(
            "unsupported",
            message="the objective answers is judged for the whole load, but classes of it have "
            "SLOs of their own",
            where="slo.answers",
            hint="remove the slo of each class, or the objective answers",
        )
