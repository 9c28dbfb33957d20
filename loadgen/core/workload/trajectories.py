"""The requests of a workload that replays recorded sessions: agent trajectories and conversations.

The rules of such a replay are those of published benchmarks of agents:

- MLPerf Endpoints, agentic inference (mlcommons/endpoints, examples/10_Agentic_Inference/README.md,
  read on 2026-11-30): one JSONL row per message, salts per pass and per conversation, and a
  measurement that ends with the first user.
- SemiAnalysis InferenceX AgentX (ai-dynamo/aiperf, docs/tutorials/agentx-mvp.md, read on
  2026-11-30): sessions begin in the middle with a filled cache, long pauses are capped, and each
  play of a trajectory has a salt of its own.

The comments at the fields are the descriptions of the keys in docs/reference/workload-file.md.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from loadgen.core import units
from loadgen.core.workload.distributions import Length
from loadgen.core.workload.fields import Duration
from loadgen.core.workload.file_models import Part
from loadgen.core.workload.request_kinds import ExistingFile

TrajectoryStart = Literal["beginning", "middle"]
TrajectoryEnd = Literal["all", "first"]
TrajectorySalt = Literal["session", "user", "pass", "none"]

DEFAULT_IDLE_CAP_NS = 60 * units.NS_PER_S
"""AgentX capped pauses at 60 s until its idle gap cap of 10 s (both in ai-dynamo/aiperf)."""


class Trajectories(Part):
    """Recorded sessions of agents, or conversations, of which every turn is sent.

    They are the rows of a file or of a data set of Hugging Face.
    """

    synonyms: ClassVar[dict[str, str]] = {
        "conversations": "trajectories",
        "multi_turn": "trajectories",
        "max_delay": "idle_cap",
        "inter_turn_delay_cap": "idle_cap",
        "enable_salt": "salt",
    }
    # The file, or the data set of Hugging Face, with the recorded sessions.
    trajectories: ExistingFile
    # Where the first session of each virtual user begins. With `middle`, that is a random turn.
    # Before the measurement, its earlier turns are sent once as a prompt, so that the prefix cache
    # of the server contains them. Later sessions begin with their first turn.
    start: TrajectoryStart = "beginning"
    # When a load with a number of sessions ends: with the last response of all of them (`all`), or
    # when a virtual user has no further session (`first`). After that no request starts.
    end: TrajectoryEnd = "all"
    # The longest pause between two turns. Longer recorded pauses are cut to it.
    idle_cap_ns: Duration = Field(default=DEFAULT_IDLE_CAP_NS, validation_alias="idle_cap")
    # A text that makes the prompts of a session unique, so that the server cannot find them in the
    # cache of an earlier play of the same trajectory. It stands before the whole conversation
    # (`session`), before the first message of the user (`user`, the rule of AgentX), or after the
    # system prompt, which has a salt for each pass over the data set (`pass`, the rule of MLPerf).
    salt: TrajectorySalt = "session"
    # The earlier responses in later turns: those of the data set (`recorded`), or the real ones of
    # the server (`server`). A data set without responses always uses the real ones.
    history: Literal["recorded", "server"] = "recorded"
    # The output tokens of turns that do not set them. Without this key, a response is as long as
    # the recorded one.
    output_tokens: Length | Literal["unlimited"] | None = None
    # The order of the sessions. `shuffled` is drawn from the seed.
    order: Literal["sequential", "shuffled"] = "sequential"
