"""Why the slow requests were slow: the causes whose traces they carry, in one paragraph with the evidence. Pure.

Each cause is looked for by its own trace: where in TTFT the time went, when the slow requests were due, at which
target, behind which prompts, what the servers' pages said. The first cause whose trace is clear is named, the special
before the general: a stall makes a queue too, so the queue is named only where nothing that makes one is seen. Where no
trace is clear, nothing is said. `benchmarks/causes.py` holds this against injected causes, and against runs without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from loadgen.core.analysis import queue_of_few
from loadgen.core.metrics.columns import UNDEFINED, Columns, JoinedColumns, order_by_time
from loadgen.core.metrics.replica_keys import replica_keys, replica_name
from loadgen.core.metrics.request_metrics import sendable_ns
from loadgen.core.metrics.sections import Cause, Explanation
from loadgen.core.server_metrics import energy, series

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    from loadgen.core.results.manifest import RunManifest
    from loadgen.core.server_metrics.series import MetricSample

    Ints = NDArray[np.int64]
    Mask = NDArray[np.bool_]

FEWEST = 200  # ok requests: with fewer, slow requests are not compared with fast ones
MOST = 200_000  # requests that are looked at: of more, every second, third ...
FAST = 0.2  # quantile of TTFT that stands for a request that met no trouble
SLOW = 3.0  # times that TTFT is slow; a run with fewer such requests than 1 % has none to explain
FEWEST_SLOW = 10
MOSTLY = 0.5  # share of the excess that a part of TTFT has to explain
BESIDE = 0.05  # of the mean TTFT: such a lateness of the client stands beside another cause
CLEARLY = 0.7  # share of the slow requests that have to carry a trace
EARLY = 0.15  # of the time: a start-up
PAUSE_S = 3.0  # without a slow request, between two bursts of them
FEWEST_BURSTS = 3
EVEN = 0.2  # largest variation of the distances between bursts that come at a fixed distance
BRIEF = 0.4  # largest share of the time that bursts take
STEP = 1.2  # factor by which TPOT changes for good
APART = 0.9  # share of the requests before and after a step that are on their side of its middle
STEADY = 1.1  # factor within which TPOT and the load stay on either side of a step
FULL = 0.9  # of the KV cache
FEWEST_READS = 3  # of the metrics pages that have to show it
LONG = 4.0  # times the median prompt
FEW_LONG, MANY_LONG = 0.005, 0.3  # share of prompts that are long
LOOKED_AT = 300  # slow requests, and as many others, whose neighbours are looked at
CAPPED = (
    0.5  # more of the readings than before, at which the hardware says why its clocks are lower
)
AS_LONG = 1.1  # times the prompts of the fast requests: as long as these
GROWTH = 1.5  # of the median TTFT, from the first third of the time to the last


class _Case(msgspec.Struct, frozen=True):
    """The requests in order of their due instants, and what the detectors look at: TTFT without the lateness of the
    client, and as slow none that was sent late by more than a fast answer takes.
    """

    rows: JoinedColumns
    ttft: Ints
    slow: Mask
    fast: Mask
    time: NDArray[np.float64]  # of the due instants, from 0 to 1
    span_s: float
    part: Ints  # target and replica
    stride: int  # one of so many requests is among the rows
    excess: dict[
        str, float
    ]  # part of TTFT -> its share of what the slow took longer; {}: too few are slow
    pages: dict[str, series.MetricCurve]  # quantity of the servers' metrics pages -> its values
    manifest: RunManifest
    samples: Sequence[MetricSample]  # of the pages of servers and hardware


def explain(
    measured: Sequence[Columns],
    manifest: RunManifest,
    samples: Sequence[MetricSample] = (),
    unsound: Collection[str] = (),
) -> Explanation:
    """Return the causes of the slow requests among the measured records.

    Args:
        measured: The measured records.
        manifest: The manifest of the run.
        samples: What the metrics pages of the servers said.
        unsound: Metrics that are withheld, so that they are no evidence.
    """
    everything = JoinedColumns(measured, ok=True, keep=False)
    streamed = everything.measure("ttft") != UNDEFINED
    requests = int(np.count_nonzero(streamed))
    if requests < FEWEST:
        return _explain_few(measured, requests, manifest, samples)
    due, slot = everything["due_ns"], everything["slot"]
    if streamed.all():
        in_order = order_by_time(due, slot)
    else:
        in_order = np.flatnonzero(streamed)[order_by_time(due[streamed], slot[streamed])]
    stride = _stride(len(in_order))
    rows = JoinedColumns(measured, ok=True, order=in_order[::stride])
    del due, slot, streamed, in_order
    ttft, due, late = rows.measure("ttft"), rows["due_ns"], _late(rows)
    slow, fast, is_slow = _slow(ttft, np.zeros_like(ttft))
    served = ttft - late
    own_slow, own_fast, is_own = _slow(served, late)
    span = max(int(due[-1] - due[0]), 1)
    case = _Case(
        rows,
        served,
        own_slow,
        own_fast,
        (due - due[0]) / span,
        span / 1e9,
        replica_keys(rows).astype(np.int64),
        stride,
        _excess(rows, served, late, own_slow, own_fast) if is_own else {},
        series.curves(samples),
        manifest,
        samples,
    )
    left_out = (_power, _batch) if "tpot" in unsound else ()
    detectors = [detect for detect in (_DETECTORS if is_own else _OF_ALL) if detect not in left_out]
    found = [cause for detect in detectors if (cause := detect(case)) is not None]
    of_all = bool(found) and (found[0].code in ("held_back", "power", "batch") or not is_own)
    client = _longer(late, slow, fast) / _longer(ttft, slow, fast) if is_slow else 0.0
    if client >= MOSTLY:
        of_them = f": {client:.0%} of what they took longer had passed before they were sent"
        found, own_slow, of_all = [_client(client, of_them), *found], slow, False
    elif found and (share := float(late.mean() / ttft.mean())) >= BESIDE:
        found.append(_client(share, f" too, by {share:.0%} of the mean TTFT", "possible"))
    if not found:
        queue = _queue_of_missed_ttft(rows, ttft, late, manifest, samples)
        return Explanation(
            slow=int(slow.sum()),
            text="" if queue is None else f"{queue.sure.capitalize()}: {queue.evidence}.",
            causes=() if queue is None else (queue,),
        )
    several = f"{own_slow.sum():,} of {len(ttft):,} requests took more than {SLOW:g} times the usual TTFT: "
    text = f"{found[0].sure.capitalize()}: {'' if of_all else several}{found[0].evidence}."
    also = f" Also: {'; '.join(cause.evidence for cause in found[1:])}." if found[1:] else ""
    return Explanation(text=text + also, slow=int(slow.sum()), causes=tuple(found))


def _explain_few(
    measured: Sequence[Columns],
    requests: int,
    manifest: RunManifest,
    samples: Sequence[MetricSample],
) -> Explanation:
    """Return what is known of too few requests to compare slow ones with fast ones.

    A queue that explains most of a missed TTFT is named. All other causes are not examined.
    """
    if not requests:
        return Explanation()
    too_few = (
        f"{requests:,} requests are too few to compare slow ones with fast ones, which takes "
        f"{FEWEST} or more"
    )
    if requests < queue_of_few.FEWEST:
        return Explanation(not_examined=too_few)
    everything = JoinedColumns(measured, ok=True, keep=False)
    rows = JoinedColumns(measured, ok=True, order=queue_of_few.in_order_of_due(everything))
    queue = _queue_of_missed_ttft(rows, rows.measure("ttft"), _late(rows), manifest, samples)
    if queue is None:
        return Explanation(not_examined=too_few)
    text = f"{queue.sure.capitalize()}: {queue.evidence}."
    return Explanation(text=text, causes=(queue,), not_examined=f"other causes, since {too_few}")


def _queue_of_missed_ttft(
    rows: JoinedColumns,
    ttft: Ints,
    late: Ints,
    manifest: RunManifest,
    samples: Sequence[MetricSample],
) -> Cause | None:
    """Return the queue if the run missed a TTFT objective and a queue explains most of it."""
    limit_ns = queue_of_few.missed_ttft_limit(ttft, manifest.slo)
    if limit_ns is None:
        return None
    return queue_of_few.find_queue(queue_of_few.MissedTtft(rows, ttft, late, limit_ns, samples))


def _late(rows: JoinedColumns) -> Ints:
    """How late each request was sent by the client's own doing. A client that was stopped opens connections late too:
    no sooner than it sent what had been due before, on connections that were open.
    """
    able, due, sent = sendable_ns(rows), rows["due_ns"], rows["sent_ns"]
    stopped_until = np.maximum.accumulate(np.where(rows["reused"] > 0, sent, 0))
    late: Ints = sent - able + np.clip(stopped_until - due, 0, able - due)
    return late


def _slow(ttft: Ints, late: Ints) -> tuple[Mask, Mask, bool]:
    """Which requests are slow, which fast, of those not later than a fast answer takes; and whether the slow ones are
    enough to be explained.
    """
    usual = np.quantile(ttft, FAST, method="lower")
    slow = (ttft > SLOW * usual) & (late <= usual)
    fast = (ttft <= np.median(ttft)) & ~slow & (late <= usual)
    return slow, fast, stand_out(int(slow.sum()), len(ttft)) and bool(fast.any())


def _stride(requests: int) -> int:
    return requests // MOST + 1


def looked_at(requests: int) -> int:
    """How many of so many ok requests with a TTFT are looked at: `Explanation.slow` is of these."""
    return -(-requests // _stride(requests))


def stand_out(slow: int, requests: int) -> bool:
    """Whether so many slow ones of the requests looked at are enough to be explained."""
    return slow >= max(FEWEST_SLOW, requests // 100)


def _excess(
    rows: JoinedColumns, ttft: Ints, late: Ints, slow: Mask, fast: Mask
) -> dict[str, float]:
    """What the slow requests took longer than the fast ones, as shares of the parts of TTFT. `late`: not in it."""
    parts = {"connect": rows["sent_ns"] - rows["due_ns"] - late}
    for name in ("queue", "prefill", "transfer"):
        told = rows[f"server_{name}_ns"]
        if (told >= 0).all():
            parts[name] = told
    parts["rest"] = ttft - sum(parts.values())
    return {
        name: _longer(values, slow, fast) / _longer(ttft, slow, fast)
        for name, values in parts.items()
    }


def _longer(values: Ints, slow: Mask, fast: Mask) -> float:
    return float(values[slow].mean() - values[fast].mean())


def _cause(code: str, share: float, evidence: str, sure: str = "likely") -> Cause:
    return Cause(code=code, share=min(share, 1.0), sure=sure, evidence=evidence)


def _client(share: float, late: str, sure: str = "likely") -> Cause:
    text = f"the load generator was late{late}; use more workers, or a host of its own"
    return _cause("client", share, text, sure)


def _network(case: _Case) -> Cause | None:
    """Waiting for a connection; and what is left of TTFT, where the server accounts for the rest of it."""
    connect = case.excess["connect"]
    accounted = "queue" in case.excess and "prefill" in case.excess
    share = connect + (case.excess["rest"] if accounted else 0.0)
    if share < MOSTLY:
        return None
    what = (
        "waiting for a connection"
        if connect > share / 2
        else "in the network, or before the server began to count"
    )
    return _cause("network", share, f"{share:.0%} of what they took longer was spent {what}")


def _held_back(case: _Case) -> Cause | None:
    """Answers that come whole, so that TTFT is the time of the whole answer."""
    rows = case.rows
    share = float(
        ((rows["last_token_ns"] == rows["first_token_ns"]) & (rows["output_tokens"] > 1)).mean()
    )
    text = f"{share:.0%} of the answers came whole: a proxy, a gateway or the server itself holds them back to their end"
    return (
        None
        if share < CLEARLY
        else _cause("held_back", share, f"{text}, so TTFT is the time of all of it")
    )


def _startup(case: _Case) -> Cause | None:
    early = case.time < EARLY
    share = float(early[case.slow].mean())
    if share < CLEARLY:
        return None
    until_s = float(case.time[case.slow & early].max()) * case.span_s
    text = f"{share:.0%} of them were due in the first {until_s:.0f} s: the server was starting up; a longer --warmup"
    return _cause("startup", share, f"{text} leaves that out")


def _stalls(case: _Case) -> Cause | None:
    """Short bursts of slow requests at a fixed distance."""
    at = case.time[case.slow] * case.span_s
    first = np.concatenate([[0], np.flatnonzero(np.diff(at) > PAUSE_S) + 1])
    last = np.append(first[1:], len(at)) - 1
    sizes = last - first + 1
    large = sizes >= max(
        3.0, 0.25 * float(np.median(sizes))
    )  # not the odd slow request between two bursts
    starts, lengths, share = (
        at[first[large]],
        (at[last] - at[first])[large],
        float(sizes[large].sum() / len(at)),
    )
    distances = np.diff(starts)
    if len(starts) < FEWEST_BURSTS or share < CLEARLY or lengths.sum() > BRIEF * case.span_s:
        return None
    if distances.std() > EVEN * distances.mean():
        return None
    text = f"{share:.0%} of them came in {len(starts)} bursts, one every {distances.mean():.0f} s: something holds the"
    return _cause("stalls", share, f"{text} server up that often")


def _target(case: _Case) -> Cause | None:
    names, place, counts = np.unique(case.part, return_inverse=True, return_counts=True)
    of_slow = np.bincount(place[case.slow], minlength=len(names)) / case.slow.sum()
    worst = int(np.argmax(of_slow))
    share, usual = float(of_slow[worst]), float(counts[worst] / len(case.part))
    if share < CLEARLY or share < 1.5 * usual:
        return None
    name = replica_name(int(names[worst]), case.manifest)
    return _cause(
        "target",
        share,
        f"{share:.0%} of them were at {name}, which serves {usual:.0%} of all requests",
    )


def _power(case: _Case) -> Cause | None:
    """TPOT that rises at one instant and stays, while no more is asked for."""
    tpot = case.rows.measure("tpot")
    known = tpot != UNDEFINED
    values, time = tpot[known].astype(float), case.time[known]
    best, factor, cut = 0.0, 1.0, 0.0
    for at in np.arange(0.15, 0.9, 0.05):
        before, after = (
            values[time < at - 0.03],
            values[time >= at + 0.03],
        )  # the answers in between had some of both
        if min(len(before), len(after)) < FEWEST_SLOW:
            continue
        usual = float(np.median(before))
        ratio = float(np.median(after)) / max(usual, 1.0)
        if ratio < STEP or _rises(before) or _rises(after):
            continue
        middle = usual * ratio**0.5
        apart = min(float((before < middle).mean()), float((after > middle).mean()))
        if apart > best:
            best, factor, cut = apart, ratio, float(at)
    more_asked = (case.time >= cut).mean() / max(1 - cut, 0.01) > STEADY * (
        case.time < cut
    ).mean() / max(cut, 0.01)
    if best < APART or more_asked:
        return None
    text = f"from {cut * case.span_s:.0f} s on every token took {factor - 1:.0%} longer, though no more was asked for"
    told = _capped(case, cut)
    return _cause(
        "power",
        best,
        f"{text}: {told or 'the machine became slower (a power or thermal cap, or a neighbour)'}",
    )


def _capped(case: _Case, cut: float) -> str:
    """What the hardware says of it: reasons for lower clocks that came with the step; "" where it says nothing."""
    first_s = float(case.rows["due_ns"][0]) / 1e9
    edges = (first_s, first_s + cut * case.span_s, first_s + case.span_s)
    before, after = (energy.capped(case.samples, *edges[i : i + 2]) for i in (0, 1))
    for reason, share in after.items():
        usual = before.get(reason, 0.0)
        if share - usual >= CAPPED:
            return f"the GPUs were held back by a {reason} at {share:.0%} of the readings, before that at {usual:.0%}"
    return ""


def _rises(values: NDArray[np.float64]) -> bool:
    third = max(len(values) // 3, 1)
    return bool(np.median(values[-third:]) > STEADY * np.median(values[:third]))


def _values(case: _Case, quantity: str) -> Sequence[float]:
    return case.pages[quantity].values if quantity in case.pages else ()


def _preemptions(case: _Case) -> Cause | None:
    reads = sum(
        value > 0 for value in (*_values(case, series.PREEMPTED), *_values(case, series.PAUSED))
    )
    share = (
        case.excess.get("queue", 0.0) + case.excess.get("prefill", 0.0)
        if "queue" in case.excess
        else 1.0
    )
    if reads < FEWEST_READS:
        return None
    text = f"at {reads} reads of its metrics page the server had taken requests out of its batch for want of KV cache"
    return _cause("preemptions", share, text)


def _kv_cache(case: _Case) -> Cause | None:
    use = _values(case, series.KV_USE)
    full = sum(value >= FULL for value in use)
    share = case.excess.get("queue", case.excess["rest"])
    if full < FEWEST_READS or share < MOSTLY:
        return None
    text = f"the KV cache was {FULL:.0%} full or more at {full} of {len(use)} reads of the metrics page, and requests"
    return _cause("kv_cache", share, f"{text} waited for room in it")


def _long_prompts(case: _Case) -> Cause | None:
    """Requests that have a prompt much longer than usual, or were sent while one was being read."""
    tokens, sent, first = (
        case.rows[name] for name in ("input_tokens", "sent_ns", "first_token_ns")
    )
    limit = LONG * float(np.median(tokens))
    long = np.flatnonzero(tokens > limit)
    if not FEW_LONG * len(tokens) <= len(long) <= MANY_LONG * len(tokens):
        return None

    def share_behind(places: Ints) -> float:
        looked_at = places[:: max(len(places) // LOOKED_AT, 1)].tolist()
        behind = 0
        for i in looked_at:
            there = long[case.part[long] == case.part[i]]
            behind += bool(
                tokens[i] > limit or ((sent[there] < first[i]) & (first[there] > sent[i])).any()
            )
        return behind / len(looked_at)

    slow, fast = share_behind(np.flatnonzero(case.slow)), share_behind(np.flatnonzero(case.fast))
    if slow < CLEARLY or slow < 2 * fast:
        return None
    text = f"{slow:.0%} of them have a prompt of more than {limit:,.0f} tokens or waited while one was read"
    return _cause("long_prompts", slow, f"{text}; of the fast ones {fast:.0%}")


def _queue(case: _Case) -> Cause | None:
    accounted = "queue" in case.excess
    share = case.excess["queue" if accounted else "rest"]
    if as_prefill := accounted and share < MOSTLY and _waits_in_prefill(case):
        share += case.excess["prefill"]
    grew = _growth(case)
    if share < MOSTLY or not grew:
        return None
    where = "in the server's queue" if accounted else "in the server, probably in its queue"
    if as_prefill:
        where = "in the server, whose account calls it prefill though their prompts are no longer than others"
    sure = "likely" if accounted and not as_prefill else "possible"
    return _cause("queue", share, f"they waited {where}, {grew}", sure)


def _growth(case: _Case) -> str:
    """How far TTFT grew from the first third of the time to the last; "" where it did not, or all was due at once."""
    first, last = case.ttft[case.time < 1 / 3], case.ttft[case.time >= 2 / 3]
    if not len(first) or not len(last):
        return ""
    early, late = float(np.median(first)) / 1e6, float(np.median(last)) / 1e6
    words = f"which grew: median TTFT {early:,.0f} ms in the first third of the load, {late:,.0f} ms in the last"
    return "" if late < GROWTH * early else words


def _missed(case: _Case, metric: str, values: Ints) -> float:
    """The tightest limit of the SLO for this metric that these values miss, in ms; 0 where none is missed."""
    terms = [
        term
        for term in (case.manifest.slo.terms if case.manifest.slo else ())
        if term.metric == metric
    ]
    missed = [
        term.limit_ns for term in terms if (values > term.limit_ns).mean() > 1 - term.quantile
    ]
    return min(missed, default=0) / 1e6


def _waits(case: _Case) -> Cause | None:
    """All waited alike in a queue: one that grew, or that was there from the start and breaks a promise of TTFT."""
    grew, missed = _growth(case), _missed(case, "ttft", case.ttft)
    if (case.rows["server_queue_ns"] < 0).any():
        said = f"all requests waited in the server, probably in its queue, {grew}"
        return _cause("queue", 1.0, said, "possible") if grew and missed else None
    queue, whole = float(case.rows["server_queue_ns"].mean()) / 1e6, float(case.ttft.mean()) / 1e6
    if not (grew or missed) or queue < MOSTLY * whole:
        return None
    text = f"all requests waited in the server's queue, {f'{grew}; ' if grew else ''}{queue:,.0f} of a mean TTFT of"
    return _cause(
        "queue", queue / whole, f"{text} {whole:,.0f} ms: more was asked for than it carries"
    )


def _batch(case: _Case) -> Cause | None:
    """A promise of TPOT that is missed: what is decoded at once shares the server.

    Likely where tokens took longer while more was decoded; possible where all took as long.
    """
    tpot = case.rows.measure("tpot")
    known = tpot != UNDEFINED
    tpot, first, done = tpot[known], case.rows["first_token_ns"][known], case.rows["done_ns"][known]
    limit_ms = _missed(case, "tpot", tpot) if len(tpot) >= FEWEST else 0
    if not limit_ms:
        return None
    middle = first + (done - first) // 2
    begun, ended = (np.searchsorted(np.sort(at), middle, side="right") for at in (first, done))
    decoded = (begun - ended) * case.stride
    few, many = decoded <= np.quantile(decoded, 0.2), decoded >= np.quantile(decoded, 0.8)
    low_ms, high_ms = (float(np.median(tpot[which])) / 1e6 for which in (few, many))
    low, high = (int(np.median(decoded[which])) for which in (few, many))
    limit = f"the limit is {limit_ms:,.4g} ms"
    if high_ms >= STEP * low_ms:
        between = (low_ms * high_ms) ** 0.5 * 1e6
        share = min(float((tpot[few] < between).mean()), float((tpot[many] > between).mean()))
        text = f"a token took {low_ms:,.4g} ms while {low:,} answers were decoded at once, {high_ms:,.4g} ms with {high:,}"
        said = _cause(
            "batch",
            share,
            f"{text}, and {limit}: a lower rate, or more replicas, leaves fewer at once",
        )
    else:
        usual = float(np.median(tpot))
        share = float((abs(tpot / usual - 1) < STEP - 1).mean())
        text = f"a token of nearly every answer took {usual / 1e6:,.4g} ms, with {low:,} to {high:,} decoded at once"
        said = _cause(
            "batch",
            share,
            f"{text}, and {limit}: too many at once, or the server's own speed",
            "possible",
        )
    return said if share >= CLEARLY else None


def _waits_in_prefill(case: _Case) -> bool:
    """Whether the account of the server counts waiting as prefill: it took the slow requests longer, though their
    prompts are not longer than those of the fast ones. Dynamo's begins when a worker has the request.
    """
    tokens = case.rows["input_tokens"]
    slow, fast = tokens[case.slow], tokens[case.fast]
    if "prefill" not in case.excess or int(min(slow.min(), fast.min())) < 0:
        return False
    return float(slow.mean()) <= AS_LONG * float(fast.mean())


_DETECTORS: tuple[Callable[[_Case], Cause | None], ...] = (
    _held_back,
    _network,
    _startup,
    _stalls,
    _target,
    _power,
    _preemptions,
    _kv_cache,
    _long_prompts,
    _queue,
    _batch,
)
_OF_ALL = (_held_back, _power, _waits, _batch)  # where no request stands out
