"""How accurate are TTFT, TPOT and the timestamp uncertainty, compared with the endpoint's log?

    python benchmarks/truth.py [--alone] [--seconds 20] [--rates 10000,25000]

Poisson arrivals, 200 tokens with 10 ms between them. The client has one core for all its processes,
the endpoint has the other. The endpoint reads its clock right before each send. This is the true
time, except for one send and for delays of the endpoint between the two, because a core is shared
with others. So an error counts as bounded within the timestamp uncertainty + 0.1 ms. `explained`
also allows the time until the endpoint reads its clock again, which is after the send. It takes
some minutes and prints the errors by load, with their limits.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import rig
from numpy.typing import NDArray

from loadgen.core.results import store
from loadgen.core.stats.quantiles import quantile_of
from loadgen.sim.server.send_log import SentRequests, parse_log

TOKENS, ITL_MS = 200, 10
LIMITS = {10_000: (0.2, 1.0), 25_000: (0.3, 2.0)}  # ms: of TTFT p50, p99
MAX_TPOT_ERROR, MIN_BOUNDED_FRACTION, MAX_TIMESTAMP_UNCERTAINTY_MS = 0.005, 0.999, 1.0
# Between the endpoint's clock reading and the kernel timestamp: one send, or a preemption.
TOLERANCE_NS = 100_000


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracy of a run against the endpoint's log.

    `*_error` of a quantile: reported - true quantile.
    """

    count: int  # ok requests found in both
    ttft_p50_ms: float  # true: first token sent - due
    ttft_p99_ms: float
    ttft_p50_error_ms: float
    ttft_p99_error_ms: float
    tpot_p50_error_share: float | None  # relative; null when no answer has two tokens
    error_p50_ms: float  # of |reported - true first token| per request
    error_p99_ms: float
    error_max_ms: float
    stamp_error_p50_ms: float
    stamp_error_p99_ms: float
    # Share of requests whose error is within their timestamp uncertainty + TOLERANCE_NS.
    bounded_share: float
    # The same, with the true time anywhere up to the endpoint's next clock reading.
    explained_share: float


class RequestMatch(NamedTuple):
    """Requests that are both in the records of a run and in the log of its endpoint.

    Each array has an element per request: its number in the log, and the index of its record.
    """

    numbers: NDArray[np.int64]
    rows: NDArray[np.int64]


def match_requests(rows: NDArray[np.void], log: SentRequests, run_id: str) -> RequestMatch:
    """Match the ok requests of a run with those that the endpoint answered, by slot.

    The slot is the number of a request in the schedule. The id of a request in the log is
    "RUN_ID-SLOT"; those of other runs are left out.
    """
    prefix = f"{run_id}-"
    number_by_slot = {
        int(request.id.removeprefix(prefix)): request.number
        for request in log.requests
        if request.id.startswith(prefix) and request.status == 200
    }
    numbers_with_sends = set(np.unique(log.request).tolist())
    has_first_token = (rows["status"] == 0) & (rows["first_token_ns"] >= 0)
    numbers = []

    matched_rows = []
    for row_index in np.flatnonzero(has_first_token).tolist():
        number = number_by_slot.get(int(rows["slot"][row_index]))
        if number is not None and number in numbers_with_sends:
            numbers.append(number)
            matched_rows.append(row_index)

    return RequestMatch(np.array(numbers, np.int64), np.array(matched_rows, np.int64))


class SendTimes(NamedTuple):
    """When the endpoint sent each matched request, in ns since the start of the run.

    `next_send` is the send of any request that follows the first one in the log. The endpoint reads
    its clock again then.
    """

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    next_send: NDArray[np.int64]


def find_send_times(log: SentRequests, numbers: NDArray[np.int64], start_ns: int) -> SendTimes:
    """Return the first and the last send of some requests, and the send after the first."""
    sent_ns = log.sent_ns - start_ns
    count = int(log.request.max()) + 1
    first_index = np.full(count, -1, np.int64)
    last_index = np.full(count, -1, np.int64)
    indices = np.arange(len(log.request))

    # Of several assignments to an element, the last one counts. So the first send of a request is
    # assigned in reverse order.
    first_index[log.request[::-1]] = indices[::-1]
    last_index[log.request] = indices
    next_index = np.minimum(first_index[numbers] + 1, len(sent_ns) - 1)

    return SendTimes(
        first=sent_ns[first_index[numbers]],
        last=sent_ns[last_index[numbers]],
        next_send=sent_ns[next_index],
    )


def compare_with_log(
    rows: NDArray[np.void], log: SentRequests, run_id: str, start_ns: int
) -> Truth | None:
    """Compare the ok requests of a run with the log of its endpoint.

    The endpoint reads its clock just before each send. The true time lies between that reading and
    the next one in the log, which follows the return of the send.

    Returns:
        The errors of the run, or None if no request is in both.
    """
    match = match_requests(rows, log, run_id)
    if not len(match.rows):
        return None

    sent = find_send_times(log, match.numbers, start_ns)
    matched = rows[match.rows]
    due_ns = matched["due_ns"]
    reported_ns = matched["first_token_ns"]
    uncertainty_ns = matched["stamp_error_ns"]
    error_ns = reported_ns - sent.first
    is_too_early = error_ns < -TOLERANCE_NS
    beyond_uncertainty_ns = error_ns - uncertainty_ns
    until_next_reading_ns = np.maximum(sent.next_send - sent.first, 0)
    is_bounded = ~is_too_early & (beyond_uncertainty_ns <= TOLERANCE_NS)
    is_explained = ~is_too_early & (beyond_uncertainty_ns <= until_next_reading_ns + TOLERANCE_NS)
    true_ttft_ns = sent.first - due_ns
    reported_ttft_ns = reported_ns - due_ns
    true_p50_ms = _quantile_ms(true_ttft_ns, 0.5)
    true_p99_ms = _quantile_ms(true_ttft_ns, 0.99)

    return Truth(
        count=len(matched),
        ttft_p50_ms=true_p50_ms,
        ttft_p99_ms=true_p99_ms,
        ttft_p50_error_ms=_quantile_ms(reported_ttft_ns, 0.5) - true_p50_ms,
        ttft_p99_error_ms=_quantile_ms(reported_ttft_ns, 0.99) - true_p99_ms,
        tpot_p50_error_share=_tpot_p50_error(matched, sent),
        error_p50_ms=_quantile_ms(np.abs(error_ns), 0.5),
        error_p99_ms=_quantile_ms(np.abs(error_ns), 0.99),
        error_max_ms=_quantile_ms(np.abs(error_ns), 1.0),
        stamp_error_p50_ms=_quantile_ms(uncertainty_ns, 0.5),
        stamp_error_p99_ms=_quantile_ms(uncertainty_ns, 0.99),
        bounded_share=float(np.mean(is_bounded)),
        explained_share=float(np.mean(is_explained)),
    )


def _quantile_ms(values_ns: NDArray[np.generic], p: float) -> float:
    """Return a quantile in ms, rounded to 0.1 microseconds."""
    return round(quantile_of(values_ns, p) / 1e6, 4)


def measure_once(rate: float, seconds: float, lockstep: bool) -> tuple[dict[str, Any], Truth]:
    """Run one load; return what it cost, and how accurate it is by the endpoint's log.

    The load has so many events per second, in responses of TOKENS tokens. With `lockstep`, all
    responses get their events at the same time. Raises SystemExit if a request failed.
    """
    with tempfile.TemporaryDirectory(prefix="loadgen-truth-") as run_dir:
        log_path = f"{run_dir}/sends"
        with rig.serve_endpoint(
            ttft="normal:120ms,25ms",
            itl=f"{ITL_MS}ms",
            lockstep=lockstep,
            log_events="all",
            log=log_path,
        ) as server:
            arguments = {
                "url": server.url,
                "folder": run_dir,
                "requests": {"input_tokens": 20, "output_tokens": TOKENS},
                "request_rate": rate / TOKENS,
                "duration": seconds,
            }
            # The client is a process of its own on one core: the script ours.py.
            result = rig.measure_client_and_server(
                server.url, lambda: rig.run_contender("ours.py", "load", arguments)
            )

        log = parse_log(Path(log_path).read_bytes())
        rows = store.read_run(Path(run_dir)).rows

    truth = compare_with_log(rows, log, result["run_id"], result["start_ns"])
    failed = result["requests"] - result["ok"]
    if truth is None or failed:
        raise SystemExit(f"{failed} of {result['requests']} requests failed")

    return result, truth


class Limit(NamedTuple):
    """A value of a run that has a limit, which is an upper or a lower bound."""

    description: str
    value: float
    limit: float
    is_upper_bound: bool = True

    def describe(self) -> str:
        """Return the value, and whether it keeps its limit."""
        verdict = rig.format_limit_check(self.value, self.limit, is_upper_bound=self.is_upper_bound)
        return f"{self.description} {self.value:.4g}: {verdict}"


def judge_limits(rate: float, truth: Truth) -> list[str]:
    """Return a line for each limit that exists for this rate of events per second."""
    if rate not in LIMITS:
        return []

    max_p50_error_ms, max_p99_error_ms = LIMITS[int(rate)]
    tpot_error = abs(truth.tpot_p50_error_share or 0.0)

    limits = [
        Limit("TTFT p50 error, ms", abs(truth.ttft_p50_error_ms), max_p50_error_ms),
        Limit("TTFT p99 error, ms", abs(truth.ttft_p99_error_ms), max_p99_error_ms),
        Limit("TPOT p50 error, share", tpot_error, MAX_TPOT_ERROR),
        Limit(
            "share of errors within their timestamp uncertainty + 0.1 ms",
            truth.bounded_share,
            MIN_BOUNDED_FRACTION,
            is_upper_bound=False,
        ),
    ]
    if rate == 10_000:
        limits.append(
            Limit(
                "median timestamp uncertainty, ms",
                truth.stamp_error_p50_ms,
                MAX_TIMESTAMP_UNCERTAINTY_MS,
            )
        )

    return [limit.describe() for limit in limits]


def _tpot_p50_error(matched: NDArray[np.void], sent: SendTimes) -> float | None:
    """Return the relative error of TPOT p50, or None if no response has two tokens."""
    has_gaps = matched["output_tokens"] > 1
    gaps = matched["output_tokens"][has_gaps] - 1
    if not len(gaps):
        return None

    true_tpot_ns = (sent.last - sent.first)[has_gaps] / gaps
    reported_ns = matched["last_token_ns"] - matched["first_token_ns"]
    reported_tpot_ns = reported_ns[has_gaps] / gaps

    return quantile_of(reported_tpot_ns, 0.5) / quantile_of(true_tpot_ns, 0.5) - 1


COLUMNS = (
    "load",
    "requests",
    "true TTFT p50 / p99, ms",
    "error of p50 / p99, ms",
    "per request p50 / p99 / max, ms",
    "TPOT p50 error",
    "timestamp uncertainty p50 / p99, ms",
    "bounded / explained",
    "client CPU",
    "server CPU",
    "reads/event",
    "remarks",
)


def format_row(name: str, result: dict[str, Any], truth: Truth) -> list[str]:
    """Return the row of a load: its errors, and what it cost."""
    tpot_error = truth.tpot_p50_error_share
    return [
        name,
        f"{truth.count:,}",
        f"{truth.ttft_p50_ms:.2f} / {truth.ttft_p99_ms:.2f}",
        f"{truth.ttft_p50_error_ms:+.3f} / {truth.ttft_p99_error_ms:+.3f}",
        f"{truth.error_p50_ms:.3f} / {truth.error_p99_ms:.3f} / {truth.error_max_ms:.2f}",
        "-" if tpot_error is None else f"{tpot_error:+.3%}",
        f"{truth.stamp_error_p50_ms:.3f} / {truth.stamp_error_p99_ms:.3f}",
        f"{truth.bounded_share:.2%} / {truth.explained_share:.2%}",
        f"{result['cpu_s'] / result['wall_s']:.0%}",
        f"{result['server_core_fraction']:.0%}",
        f"{result['reads_per_event']:.2f}",
        rig.describe_caveats(result),
    ]


def main() -> None:
    """Print the errors by load, and whether they are within the limits."""
    parser = rig.create_parser(__doc__, offers_realtime_priority=True)
    parser.add_argument("--rates", default="10000,25000", help="events/s")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of each; of fewer, p99 rests on too little"
    )
    args = rig.parse_arguments(parser, rates="2000", seconds=1.0)
    print(
        f"{args.seconds:g} s of Poisson arrivals, {TOKENS} tokens {ITL_MS} ms apart; client and "
        f"endpoint one core"
    )
    print(
        "each. Error of a quantile: reported - true. Per request: |reported - true first token|.\n"
    )
    rows = []

    conclusions = []
    for lockstep in (False, True):
        for rate in map(float, args.rates.split(",")):
            result, truth = measure_once(rate, args.seconds, lockstep)
            name = f"{rate:,.0f} events/s, {'lockstep' if lockstep else 'spread'}"
            rows.append(format_row(name, result, truth))
            conclusions += [f"- {name}: {line}" for line in judge_limits(rate, truth)]

    print(rig.format_table(COLUMNS, rows))
    print()
    print("\n".join(conclusions))


if __name__ == "__main__":
    main()
