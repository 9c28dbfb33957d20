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
from typing import Any

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


def compare_with_log(
    rows: NDArray[np.void], log: SentRequests, run_id: str, start_ns: int
) -> Truth | None:
    """Compare the ok rows of a run with the log of its endpoint; None if no request is in both.

    The endpoint reads its clock just before each send. The true time lies between that reading and
    the next one in the log, which follows the return of the send.
    """
    prefix = run_id + "-"
    slots = np.full(max((request.number for request in log.requests), default=-1) + 1, -1, np.int64)
    for request in log.requests:
        if request.id.startswith(prefix) and request.status == 200:
            slots[request.number] = int(request.id.removeprefix(prefix))
    answered_rows = np.flatnonzero((rows["status"] == 0) & (rows["first_token_ns"] >= 0))
    row_of_slot = np.full(
        int(max(slots.max(initial=-1), rows["slot"].max(initial=-1))) + 1, -1, np.int64
    )
    row_of_slot[rows["slot"][answered_rows]] = answered_rows
    log_order = np.arange(len(log.request))
    first_send = np.full(len(slots), -1, np.int64)
    last_send = first_send.copy()
    first_send[log.request[::-1]] = log_order[::-1]
    last_send[log.request] = log_order
    request_numbers = np.flatnonzero((slots >= 0) & (first_send >= 0))
    matched_rows = row_of_slot[slots[request_numbers]]
    request_numbers, matched_rows = (
        request_numbers[matched_rows >= 0],
        matched_rows[matched_rows >= 0],
    )
    if not len(matched_rows):
        return None
    sent = log.sent_ns - start_ns
    true_first, true_last = sent[first_send[request_numbers]], sent[last_send[request_numbers]]
    next_send = sent[np.minimum(first_send[request_numbers] + 1, len(sent) - 1)]
    due, reported, stamp_error = (
        rows[name][matched_rows] for name in ("due_ns", "first_token_ns", "stamp_error_ns")
    )
    error = reported - true_first
    over_stamp_error, is_early = error - stamp_error, error < -TOLERANCE_NS
    slack = np.maximum(next_send - true_first, 0)
    multi_token = rows["output_tokens"][matched_rows] > 1
    gaps = rows["output_tokens"][matched_rows][multi_token] - 1
    true_tpot = (true_last - true_first)[multi_token] / gaps
    tpot = (rows["last_token_ns"][matched_rows] - reported)[multi_token] / gaps
    return Truth(
        count=len(matched_rows),
        ttft_p50_ms=_quantile_ms(true_first - due, 0.5),
        ttft_p99_ms=_quantile_ms(true_first - due, 0.99),
        ttft_p50_error_ms=_quantile_ms(reported - due, 0.5) - _quantile_ms(true_first - due, 0.5),
        ttft_p99_error_ms=_quantile_ms(reported - due, 0.99) - _quantile_ms(true_first - due, 0.99),
        tpot_p50_error_share=quantile_of(tpot, 0.5) / quantile_of(true_tpot, 0.5) - 1
        if len(gaps)
        else None,
        error_p50_ms=_quantile_ms(np.abs(error), 0.5),
        error_p99_ms=_quantile_ms(np.abs(error), 0.99),
        error_max_ms=_quantile_ms(np.abs(error), 1.0),
        stamp_error_p50_ms=_quantile_ms(stamp_error, 0.5),
        stamp_error_p99_ms=_quantile_ms(stamp_error, 0.99),
        bounded_share=float(np.mean((over_stamp_error <= TOLERANCE_NS) & ~is_early)),
        explained_share=float(np.mean((over_stamp_error <= slack + TOLERANCE_NS) & ~is_early)),
    )


def _quantile_ms(values_ns: NDArray[np.generic], p: float) -> float:
    """Return a quantile in ms, rounded to 0.1 microseconds."""
    return round(quantile_of(values_ns, p) / 1e6, 4)


def measure_once(rate: float, seconds: float, lockstep: bool) -> tuple[dict[str, Any], Truth]:
    """Run one load and compare its records with the endpoint's log."""
    options = {
        "ttft": "normal:120ms,25ms",
        "itl": f"{ITL_MS}ms",
        "lockstep": lockstep,
        "log_events": "all",
    }
    with tempfile.TemporaryDirectory(prefix="loadgen-truth-") as scratch:
        requests = {"input_tokens": 20, "output_tokens": TOKENS}
        load = {"requests": requests, "request_rate": rate / TOKENS, "duration": seconds}
        log_path = f"{scratch}/sends"
        with rig.serve_endpoint(**options, log=log_path) as server:
            arguments = {"url": server.url, "folder": scratch, **load}
            result = rig.measure_with_server(
                server.url, lambda: rig.run_contender("ours.py", "drive", arguments)
            )
        log = parse_log(Path(log_path).read_bytes())
        rows = store.read_run(Path(scratch)).rows
    truth = compare_with_log(rows, log, result["run_id"], result["start_ns"])
    if truth is None or result["ok"] != result["requests"]:
        raise SystemExit(
            f"{result['requests'] - result['ok']} of {result['requests']} requests failed"
        )
    return result, truth


def judge_limits(rate: float, truth: Truth) -> list[str]:
    """Return a line for each limit that exists for this rate."""
    if rate not in LIMITS:
        return []
    p50, p99 = LIMITS[int(rate)]
    lines = [
        ("TTFT p50 error, ms", abs(truth.ttft_p50_error_ms), p50, True),
        ("TTFT p99 error, ms", abs(truth.ttft_p99_error_ms), p99, True),
        ("TPOT p50 error, share", abs(truth.tpot_p50_error_share or 0.0), MAX_TPOT_ERROR, True),
        (
            "share of errors within their timestamp uncertainty + 0.1 ms",
            truth.bounded_share,
            MIN_BOUNDED_FRACTION,
            False,
        ),
    ]
    if rate == 10_000:
        lines.append(
            (
                "median timestamp uncertainty, ms",
                truth.stamp_error_p50_ms,
                MAX_TIMESTAMP_UNCERTAINTY_MS,
                True,
            )
        )
    return [
        f"{description} {value:.4g}: {rig.describe_limit(value, limit, most=most)}"
        for description, value, limit, most in lines
    ]


def main() -> None:
    """Print the errors by load, and whether they are within the limits."""
    parser = rig.create_parser(__doc__, alone=True)
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
    rows, conclusions = [], []
    for lockstep in (False, True):
        for rate in map(float, args.rates.split(",")):
            result, truth = measure_once(rate, args.seconds, lockstep)
            name = f"{rate:,.0f} events/s, {'lockstep' if lockstep else 'spread'}"
            tpot = (
                "-" if truth.tpot_p50_error_share is None else f"{truth.tpot_p50_error_share:+.3%}"
            )
            rows.append(
                [
                    name,
                    f"{truth.count:,}",
                    f"{truth.ttft_p50_ms:.2f} / {truth.ttft_p99_ms:.2f}",
                    f"{truth.ttft_p50_error_ms:+.3f} / {truth.ttft_p99_error_ms:+.3f}",
                    f"{truth.error_p50_ms:.3f} / {truth.error_p99_ms:.3f} / "
                    f"{truth.error_max_ms:.2f}",
                    tpot,
                    f"{truth.stamp_error_p50_ms:.3f} / {truth.stamp_error_p99_ms:.3f}",
                    f"{truth.bounded_share:.2%} / {truth.explained_share:.2%}",
                    f"{result['cpu_s'] / result['wall_s']:.0%}",
                    f"{result['server_share']:.0%}",
                    f"{result['reads_per_event']:.2f}",
                    rig.describe_caveats(result),
                ]
            )
            conclusions += [f"- {name}: {line}" for line in judge_limits(rate, truth)]
    columns = [
        "load",
        "requests",
        "true TTFT p50 / p99, ms",
        "error of p50 / p99, ms",
        "per request p50 / p99 / max, ms",
    ]
    columns += [
        "TPOT p50 error",
        "timestamp uncertainty p50 / p99, ms",
        "bounded / explained",
        "client CPU",
        "server CPU",
    ]
    print(rig.format_table([*columns, "reads/event", "remarks"], rows))
    print()
    print("\n".join(conclusions))


if __name__ == "__main__":
    main()
