"""The types of the sections of summary.json that `core.analysis` computes.

None stands for what is not known.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loadgen.core.stats.intervals import LEVEL


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of slow requests.

    Attributes:
        code: client, held_back, network, startup, stalls, target, power, kv_cache, and so on;
            docs/reference/summary.md has all of them.
        share: The share of the slow requests that show the cause, or of their excess latency that
            it explains.
        sure: likely or possible.
        evidence: What shows it, as a sentence.
    """

    code: str
    share: float
    sure: str
    evidence: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What changed together with the latency of the slow requests.

    Attributes:
        text: A paragraph; it is empty if nothing was slow, or if no cause stands out.
        slow: Ok requests whose TTFT exceeded that of fast ones by `causes.SLOW_FACTOR`.
        causes: The causes, the one to look at first.
        not_examined: What was not examined and why; "" if every cause was.
    """

    text: str = ""
    slow: int = 0
    causes: tuple[Cause, ...] = ()
    not_examined: str = ""


PercentileName = Literal["p50", "p99", "slowest"]
"""The requests that a split is about: those near a quantile, or the slowest 1 %."""


class TtftSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The mean TTFT of the requests near a quantile, and its parts, which add up to it.

    Attributes:
        at: Which requests.
        requests: How many they are.
        ttft_ms: Their mean TTFT.
        client_ms: How late the load generator was.
        connect_ms: The wait for a new connection.
        queue_ms: The wait in the queue of the server. None if the server does not report it.
        prefill_ms: The prefill. None if the server does not report it.
        transfer_ms: The transfer of the KV cache. None if the server does not report it.
        rest_ms: The network, and everything that the server does not report.
    """

    at: PercentileName
    requests: int
    ttft_ms: float
    client_ms: float
    connect_ms: float
    queue_ms: float | None = None
    prefill_ms: float | None = None
    transfer_ms: float | None = None
    rest_ms: float


class E2eSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The mean E2E of the requests near a quantile, and its parts.

    `stall_ms` are the largest gaps that are stalls (see `Stalls`).
    """

    at: PercentileName
    requests: int
    e2e_ms: float
    ttft_ms: float
    decode_ms: float
    stall_ms: float


class SplitGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The splits of a group of ok requests.

    `by` says what the group is one of: all, target, class, or prompt, for a quarter of the requests
    by prompt length.
    """

    by: str
    name: str = ""
    requests: int
    ttft: tuple[TtftSplit, ...]
    e2e: tuple[E2eSplit, ...]


class Splits(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of TTFT and E2E.

    Attributes:
        accounted: Ok requests whose prefill the server reported.
        groups: The splits of each group of requests.
        reason: Why something cannot be split, as a sentence, or "".
    """

    accounted: int = 0
    groups: tuple[SplitGroup, ...] = ()
    reason: str = msgspec.field(default="not computed", name="why")


class SlowRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One of the slowest ok requests.

    `in_flight` and `waiting_input_tokens` describe the other requests at its target when it was
    sent: how many there were, and the prompt tokens of those that had no first token yet.

    Attributes:
        by: The latency by which it is one of the slowest: ttft or e2e.
        slot: Its slot in the schedule.
        id: What was sent as X-Request-Id, or "" if it was not sent.
        session: The number of its conversation or task, None for a request that stands alone.
        turn: Its turn in the conversation, from 0.
        target: The name of its target.
        due_s: When it was due.
        ttft_ms: Its TTFT.
        e2e_ms: Its E2E.
        client_ms: How late the load generator sent it.
        connect_ms: Its wait for a new connection.
        queue_ms: Its wait in the queue of the server.
        prefill_ms: Its prefill, as the server reports it.
        decode_ms: The time from its first token to its last one, as the client saw it.
        max_gap_ms: The largest gap between its output events.
        input_tokens: Its prompt tokens.
        cached_tokens: Its prompt tokens from the cache of the server.
        output_tokens: Its output tokens.
        in_flight: Other requests in flight at its target.
        waiting_input_tokens: Prompt tokens of those without a first token.
    """

    by: str
    slot: int
    id: str
    session: int | None = None
    turn: int | None = None
    target: str = ""
    due_s: float
    ttft_ms: float | None = None
    e2e_ms: float
    client_ms: float
    connect_ms: float
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    max_gap_ms: float
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    in_flight: int
    waiting_input_tokens: int


class VarianceTable(msgspec.Struct, frozen=True, kw_only=True):
    """The components of the variance of one latency.

    They are standard deviations in ms, whose squares add up; each `..._share` is the share of a
    square. `between`: of the means of the nodes. `time`: what all nodes have in common over time.
    `own_time`: the course of a single node over time. `within`: requests of one node and time.
    """

    metric: str
    mean_ms: float
    between_ms: float
    time_ms: float
    own_time_ms: float
    within_ms: float
    between_share: float
    time_share: float
    own_time_share: float
    within_share: float


class OutlierNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node whose mean does not belong to the spread of the others.

    `change` is relative to the mean of the others: 0.1 is 10 % more.
    """

    name: str
    metric: str
    mean_ms: float
    others_ms: float
    change: float


class BetweenNodes(msgspec.Struct, frozen=True, kw_only=True):
    """The differences between the nodes of a rack.

    Attributes:
        node_kind: What is compared: node, target or replica. "" if nothing was, see `reason`.
        nodes: How many were compared, or were to be.
        blocks: The number of blocks of time.
        level: The confidence of `outliers`, of all nodes and metrics together.
        variances: The components of the variance of each latency.
        outliers: The nodes that differ from the others.
        left_out: Nodes without enough ok requests to be compared.
        reason: Why nothing was compared, as a sentence.
    """

    node_kind: str = msgspec.field(default="", name="unit")
    nodes: int = 0
    blocks: int = 0
    level: float = LEVEL
    variances: tuple[VarianceTable, ...] = ()
    outliers: tuple[OutlierNode, ...] = msgspec.field(default=(), name="odd")
    left_out: tuple[str, ...] = msgspec.field(default=(), name="silent")
    reason: str = msgspec.field(default="there is one target", name="why")


Event = Literal["spike", "loss", "scale_up"]
"""A spike that ended, a replica or target that went away, or a replica that came."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """How the SLO was met again after one event.

    Attributes:
        event: The kind of the event.
        load_before: The load, or the number of replicas, before it, as text.
        load_after: The load, or the number of replicas, after it, as text.
        at_s: When it was.
        observed_s: For how long the run went on after it.
        resolution_s: The time that a group of requests takes, which is the resolution of
            `recovered_after_s`.
        slo_missed: Whether the SLO was missed before the event (in the spike, else by the last
            group of requests) or after it.
        recovered_after_s: Seconds from the event until the SLO was met again, 0 if it was met all
            the time. None if it was not met again within `observed_s`, or if `reason` is given.
        reason: Why nothing is known, as a sentence, or "".
    """

    event: Event = "spike"
    load_before: str = msgspec.field(name="spike")
    load_after: str = msgspec.field(name="after")
    at_s: float
    observed_s: float = msgspec.field(default=0.0, name="seen_s")
    resolution_s: float = msgspec.field(default=0.0, name="spacing_s")
    slo_missed: bool | None = msgspec.field(default=None, name="broken")
    recovered_after_s: float | None = msgspec.field(default=None, name="back_s")
    reason: str = msgspec.field(default="", name="why")


class TenantShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant got of what it requested.

    Attributes:
        name: The name of the tenant.
        classes: Its request classes.
        decided: Its requests with an outcome.
        ok_share: The share of them that are ok, None if there are none.
        good_share: The share within the SLO of their class. None without an SLO, or if it is
            withheld.
        output_per_s: Its output tokens per second.
    """

    name: str
    classes: tuple[str, ...]
    decided: int
    ok_share: float | None
    good_share: float | None = None
    output_per_s: float | None = None


class Fairness(msgspec.Struct, frozen=True, kw_only=True):
    """Jain's index over the tenants, of `ok_share` and of `good_share`.

    An index is None if a tenant does not have the share, or if all shares are 0. `worst` is the
    tenant with the smallest `good_share`, else `ok_share`, or "" if all have the same.
    """

    tenants: tuple[TenantShare, ...]
    ok_index: float | None = None
    good_index: float | None = None
    worst: str = ""


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """What speculative decoding gave, as the servers report it.

    The distributions over requests are `figures.acceptance` and `figures.accepted_length`.

    Attributes:
        requests: Requests with drafts.
        drafted: Drafted tokens.
        accepted: Accepted tokens.
        acceptance: Accepted by drafted tokens.
        length: Tokens per step of the model.
        server_acceptance: Accepted by drafted tokens, by the metrics pages.
        server_length: Tokens per step of the model, by the metrics pages.
        by_position: For each position of a draft, the share of all drafts whose token was accepted.
    """

    requests: int = 0
    drafted: int | None = None
    accepted: int | None = None
    acceptance: float | None = None
    length: float | None = None
    server_acceptance: float | None = None
    server_length: float | None = None
    by_position: tuple[float, ...] = ()


FidelityCode = Literal[
    "arrivals", "spacing", "rate", "lanes", "classes", "outputs", "prompts", "repeats", "cache"
]


class StimulusCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Whether one property of the delivered load is the requested one.

    Attributes:
        code: The property.
        requested: The requested value.
        delivered: The delivered value. None if it is not known.
        ok: None if it is not known, or nothing was requested.
        n: The number of gaps, requests or tokens that it rests on.
        p: For `arrivals`, the probability that chance makes gaps differ so much from their law.
    """

    code: FidelityCode
    requested: float | None = msgspec.field(default=None, name="asked")
    delivered: float | None = msgspec.field(default=None, name="seen")
    ok: bool | None
    n: int = 0
    p: float | None = None
