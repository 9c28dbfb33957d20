"""What the verdict on a run is judged by: its manifest, its summary and a few further values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from loadgen.core import limits
from loadgen.core.results.manifest import ReasonCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.core.metrics.summary import Summary
    from loadgen.core.results.manifest import RunManifest, WorkerSample
    from loadgen.core.stats.quantiles import Distribution


def make_code(code: str, **values: Any) -> ReasonCode:
    """Return a code with the values that its sentence in `reasons` shows."""
    return ReasonCode(code=code, values=values)


class ReferenceLatency(NamedTuple):
    """The latency that errors of the client are compared with, also if it is not shown.

    A request that is sent 1 ms late is a large error for a TTFT of 5 ms and none for one of 500 ms.

    Attributes:
        name: The statistic: the p50 of TTFT, or of E2E if responses are not streamed.
        p50_ms: Its value. None if no request has a value.
    """

    name: str
    p50_ms: float | None

    @classmethod
    def of_samples(cls, ttft: Distribution, e2e: Distribution) -> ReferenceLatency:
        """Return the p50 of TTFT, or of E2E if there is no TTFT.

        Args:
            ttft: The distribution of TTFT, before anything is withheld.
            e2e: The distribution of E2E, before anything is withheld.
        """
        if ttft.p50 is not None:
            return cls(name="TTFT p50", p50_ms=ttft.p50)
        return cls(name="E2E p50", p50_ms=e2e.p50)


class VerdictInputs(msgspec.Struct, frozen=True):
    """What the verdict needs beside the summary.

    Attributes:
        reference_latency: The latency that errors of the client are compared with.
        dead_workers: The numbers of the workers that died.
        sends: Measured requests that were sent.
        prompt_count_difference: By what share the server's prompt token counts differ from ours,
            such as 0.02 if the server counts 2 % more. None if it is not known.
        repeated_prompts: Requests with a prompt that was sent before.
        requested_tokens: Output tokens requested by the ok requests whose output was counted.
        received_tokens: Output tokens of these requests.
        is_slo_missed: Whether the SLO is missed also without the requests that the client dropped.
            None if that is not known.
        remarks: What is unusual about ok responses, with the number of responses.
    """

    reference_latency: ReferenceLatency
    dead_workers: list[int]
    sends: int
    prompt_count_difference: float | None
    repeated_prompts: int
    requested_tokens: int
    received_tokens: int
    is_slo_missed: bool | None = None
    remarks: dict[str, int] = {}


@dataclass(frozen=True)
class RunEvidence:
    """What a run is judged by.

    Attributes:
        manifest: The manifest of the run.
        summary: The summary, complete but for the verdict.
        inputs: What the verdict needs beside the summary.
        worker_samples: The samples that each worker takes of itself.
    """

    manifest: RunManifest
    summary: Summary
    inputs: VerdictInputs
    worker_samples: Sequence[WorkerSample]

    @property
    def is_closed_loop(self) -> bool:
        """Whether a measured stage has virtual users, which send one request after the other."""
        return self.largest_concurrency > 0

    @property
    def largest_concurrency(self) -> int:
        """The number of virtual users of the largest measured closed loop, or 0 without one."""
        measured = (stage for stage in self.manifest.stages if stage.measured)
        return max((stage.concurrency or 0 for stage in measured), default=0)

    @property
    def is_concurrency_unfilled(self) -> bool:
        """Whether a closed loop sent fewer requests than it has virtual users.

        Some virtual users sent nothing then, and the load never had its concurrency.
        """
        return 0 < self.inputs.sends < self.largest_concurrency

    @property
    def has_short_responses(self) -> bool:
        """Whether so many of the requested output tokens are missing that it is another load."""
        shortest_accepted = self.inputs.requested_tokens * (1 - limits.SHORTENED)
        return self.inputs.received_tokens < shortest_accepted

    @property
    def has_wrong_prompt_lengths(self) -> bool:
        """Whether the server counts much longer or shorter prompts than were requested."""
        # The server also counts the tokens of its chat template, whose number may not be known.
        difference_share = self.inputs.prompt_count_difference
        if difference_share is None or self.manifest.template_tokens is None:
            return False

        # The prompts of a recorded workload have no requested length in tokens.
        have_prompts_requested_length = (
            self.manifest.prompt_lengths_requested or self.manifest.random_words
        )
        is_difference_large = abs(difference_share) > limits.PROMPT_LENGTHS
        return have_prompts_requested_length and is_difference_large
