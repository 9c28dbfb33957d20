"""The types of the sections of summary.json that `core.analysis` computes from the records of a run."""

from __future__ import annotations

from typing import Literal

import msgspec

from loadgen.core.stats.intervals import LEVEL


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One cause. `share`: of the slow requests that carry its trace, or of their excess that it explains."""

    code: str  # client, held_back, network, startup, stalls, target, power, kv_cache, and so on: docs/summary.md
    share: float
    sure: str  # likely, possible
    evidence: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What moved with the slow requests.

    `text` is a paragraph; it is empty if nothing was slow, or if no cause stands out.
    """

    text: str = ""
    slow: int = 0  # ok requests whose TTFT was SLOW times that of the fast ones
    causes: tuple[Cause, ...] = ()  # the first is the one to look at
    not_examined: str = ""  # what was not looked for, and why; "": every cause was


Near = Literal["p50", "p99", "slowest"]


class TtftSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The mean TTFT of the requests near a quantile, and its parts, which add up to it. Null: the server does not say.

    `slowest`: the slowest 1 %. `client`: the load generator was late. `connect`: waiting for a new connection. `rest`:
    the network, and everything that the server does not account for.
    """

    at: Near
    requests: int
    ttft_ms: float
    client_ms: float
    connect_ms: float
    queue_ms: float | None = None
    prefill_ms: float | None = None
    transfer_ms: float | None = None  # of the KV cache
    rest_ms: float


class E2eSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The mean E2E of the requests near a quantile, and its parts. `stall`: largest gaps that are stalls (Stalls)."""

    at: Near
    requests: int
    e2e_ms: float
    ttft_ms: float
    decode_ms: float
    stall_ms: float


class SplitGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The splits of all ok requests, or of those of one target, of one class, or of a quarter by prompt length."""

    by: str  # all, target, class, prompt
    name: str = ""
    requests: int
    ttft: tuple[TtftSplit, ...]
    e2e: tuple[E2eSplit, ...]


class Splits(msgspec.Struct, frozen=True, kw_only=True):
    """Where TTFT and E2E go. `why`: why something cannot be split, in words; else empty."""

    accounted: int = 0  # ok requests with a server's account of their prefill
    groups: tuple[SplitGroup, ...] = ()
    why: str = "not computed"


class SlowRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One of the slowest ok requests. Null: not known.

    `in_flight` and `waiting_input_tokens` are of the others at its target when it was sent: how many there were, and
    the prompt tokens of those that had no first token yet.
    """

    by: str  # ttft, e2e: by which it is one of the slowest
    slot: int
    id: str  # sent as X-Request-Id; "": not sent
    session: int | None = (
        None  # of a conversation or task, with its turn from 0; null of a request that stands alone
    )
    turn: int | None = None
    target: str = ""
    due_s: float
    ttft_ms: float | None = None
    e2e_ms: float
    client_ms: float
    connect_ms: float
    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None  # by the client: first token to last one
    max_gap_ms: float
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    in_flight: int
    waiting_input_tokens: int


class VarianceTable(msgspec.Struct, frozen=True, kw_only=True):
    """Where the variance of one latency lies. Standard deviations in ms; their squares add up, and `..._share` of them.

    `between`: of the nodes' means. `time`: what all nodes have in common over time. `own_time`: a node's own course.
    `within`: requests of one node and time.
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


class OddNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node whose mean does not belong to the spread of the others."""

    name: str
    metric: str
    mean_ms: float
    others_ms: float
    change: float  # against the mean of the others: 0.1 is 10 % more


class BetweenNodes(msgspec.Struct, frozen=True, kw_only=True):
    """The variance table of a rack. `unit`: what is compared, node, target or replica; "": nothing was, see `why`.

    `nodes`: how many were compared, or were to be. `odd`: the nodes that stand out, of all nodes and metrics together
    with confidence `level`. `silent`: nodes without enough ok requests to be compared.
    """

    unit: str = ""
    nodes: int = 0
    blocks: int = 0
    level: float = LEVEL
    variances: tuple[VarianceTable, ...] = ()
    odd: tuple[OddNode, ...] = ()
    silent: tuple[str, ...] = ()
    why: str = "there is one target"


Event = Literal["spike", "loss", "scale_up"]


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """The way back to the SLO after one event.

    event: a spike that ended, a replica or target that went away, or a replica that came. spike, after: the two loads,
    or the two numbers of replicas, in words. at_s: when it was. broken: whether the SLO was missed before it (in the
    spike, else by the last GROUP requests) or after it. back_s: seconds from `at_s` until it held again, to the spacing
    of GROUP requests; 0 where it held all the time after. Null: it was not back within `seen_s`, or `why` says why
    nothing can be told.
    """

    event: Event = "spike"
    spike: str
    after: str
    at_s: float
    seen_s: float = 0.0
    spacing_s: float = 0.0
    broken: bool | None = None
    back_s: float | None = None
    why: str = ""


class TenantShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant got of what it asked for."""

    name: str
    classes: tuple[str, ...]
    decided: int  # requests with an outcome of their own
    ok_share: float | None  # of these; null: there were none
    good_share: float | None = None  # within the SLO of their class; null: without one, or withheld
    output_per_s: float | None = None


class Fairness(msgspec.Struct, frozen=True, kw_only=True):
    """Jain's index over the tenants of `ok_share` and of `good_share`; null where a tenant has none, or all have 0.

    worst: the tenant with the smallest `good_share`, else `ok_share`; "": all have the same.
    """

    tenants: tuple[TenantShare, ...]
    ok_index: float | None = None
    good_index: float | None = None
    worst: str = ""


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """What speculation gave, by the servers' accounts of the ok requests, and by their metrics pages.

    requests: with drafts in their account. acceptance: accepted by drafted tokens. length: tokens of a step. The
    distributions over requests are figures, `figures.acceptance` and `figures.accepted_length`. server_acceptance,
    server_length: the same by the pages. by_position: of all drafts, the share whose token at this place was accepted.
    Null or empty: not said.
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
    """One property of the load. `ok` null: it cannot be told, or nothing was declared."""

    code: FidelityCode
    asked: float | None = None
    seen: float | None = None
    ok: bool | None
    n: int = 0  # what it rests on: gaps, requests, tokens
    p: float | None = None  # of `arrivals`: probability of gaps so far from their law, by chance
