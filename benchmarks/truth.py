"""How accurate are TTFT, TPOT and the timestamp uncertainty, compared with the endpoint's log?

    python benchmarks/truth.py [--alone] [--seconds 20] [--rates 10000,25000]

Requests arrive as a Poisson process and get 200 tokens with 10 ms between them. The client has one
core for all its processes, the endpoint has the other. The endpoint reads its clock right before
each send, and this reading counts as the true time. It differs from the time at which the token
left the endpoint by the duration of one send, and by any delay of the endpoint between the two,
because a core is shared with others. So two fractions of the requests are printed: those whose
error is within the timestamp uncertainty + 0.1 ms, and those whose error is within the same bound
if the token may have left at any time before the endpoint read its clock again, which it does after
the send. The script takes some minutes and prints the errors by load, with their limits.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rig
from numpy.typing import NDArray

from loadgen.core.results import store
from loadgen.core.stats.quantiles import quantile_of
from loadgen.sim.server.send_log import SentRequests, parse_log

TOKENS_PER_RESPONSE = 200
ITL_MS = 10  # time between two tokens of a response

# What may pass between the endpoint's clock reading and the kernel's timestamp: one send.
SEND_TOLERANCE_NS = 100_000


class TtftErrorLimits(NamedTuple):
    """The largest allowed errors of the quantiles of TTFT, in ms."""

    p50_ms: float
    p99_ms: float


TTFT_ERROR_LIMITS = {10_000: TtftErrorLimits(0.2, 1.0), 25_000: TtftErrorLimits(0.3, 2.0)}
"""The limits by events per second; other rates have none."""

MAX_TPOT_P50_RELATIVE_ERROR = 0.005
MIN_WITHIN_UNCERTAINTY_FRACTION = 0.999
UNCERTAINTY_LIMIT_RATE = 10_000  # events per second; the limit below is only for this rate
MAX_MEDIAN_UNCERTAINTY_MS = 1.0


@dataclass(frozen=True, kw_only=True)
class TimingAccuracy:
    """How accurate the times of a run are, compared with the log of its endpoint.

    The error of a quantile is the reported quantile minus the true one. The error of a request is
    the absolute difference between the reported and the true time of its first token.
    """

    request_count: int
    true_ttft_p50_ms: float
    true_ttft_p99_ms: float
    ttft_p50_error_ms: float
    ttft_p99_error_ms: float
    tpot_p50_relative_error: float | None  # None if no response has two tokens
    request_error_p50_ms: float
    request_error_p99_ms: float
    request_error_max_ms: float
    uncertainty_p50_ms: float  # the timestamp uncertainty that the run reports
    uncertainty_p99_ms: float

    # Fraction of the requests whose error is at most their timestamp uncertainty + 0.1 ms
    within_uncertainty: float

    # The same if the token may have left at any time before the endpoint's next clock reading
    within_uncertainty_and_server_delay: float


class SendTimes(NamedTuple):
    """When the endpoint sent one response, in ns since the start of the run.

    `next_reading_ns` is the endpoint's first clock reading after it sent the first token. It is the
    time of the next send in the log, which may belong to another response.
    """

    first_token_ns: int
    last_token_ns: int
    next_reading_ns: int


def find_send_times(log: SentRequests, start_ns: int) -> dict[int, SendTimes]:
    """Return when each request of the log got its tokens, by the number of the request."""
    sent_ns = (log.sent_ns - start_ns).tolist()
    last_index = len(sent_ns) - 1
    times: dict[int, SendTimes] = {}
    for index, request_number in enumerate(log.request.tolist()):
        earlier = times.get(request_number)
        if earlier is None:
            next_reading_ns = sent_ns[min(index + 1, last_index)]
            times[request_number] = SendTimes(sent_ns[index], sent_ns[index], next_reading_ns)
        else:
            times[request_number] = earlier._replace(last_token_ns=sent_ns[index])

    return times


@dataclass(frozen=True)
class MatchedRequests:
    """Requests that are both in the records of a run and in the log of its endpoint.

    Each array has one element per request. `records` are the request records of the client, the
    other arrays are the send times by the log, in ns since the start of the run.
    """

    records: NDArray[np.void]
    first_sent_ns: NDArray[np.int64]
    last_sent_ns: NDArray[np.int64]
    next_reading_ns: NDArray[np.int64]


def match_requests(
    records: NDArray[np.void], log: SentRequests, run_id: str, start_ns: int
) -> MatchedRequests:
    """Match the successful requests of a run with those that the endpoint answered.

    Both sides know the slot of a request, which is its position in the schedule: the client in its
    records, the endpoint in the request id "RUN_ID-SLOT". Requests of other runs are left out.
    """
    prefix = f"{run_id}-"
    number_by_slot = {
        int(request.id.removeprefix(prefix)): request.number
        for request in log.requests
        if request.id.startswith(prefix) and request.status == 200
    }
    send_times = find_send_times(log, start_ns)

    record_indices = []
    matched_sends = []
    has_first_token = (records["status"] == 0) & (records["first_token_ns"] >= 0)
    for record_index in np.flatnonzero(has_first_token).tolist():
        request_number = number_by_slot.get(int(records["slot"][record_index]))
        if request_number in send_times:
            record_indices.append(record_index)
            matched_sends.append(send_times[request_number])

    return MatchedRequests(
        records=records[np.array(record_indices, np.int64)],
        first_sent_ns=np.array([sends.first_token_ns for sends in matched_sends], np.int64),
        last_sent_ns=np.array([sends.last_token_ns for sends in matched_sends], np.int64),
        next_reading_ns=np.array([sends.next_reading_ns for sends in matched_sends], np.int64),
    )


def compare_with_log(
    records: NDArray[np.void], log: SentRequests, run_id: str, start_ns: int
) -> TimingAccuracy | None:
    """Compare the request records of a run with the log of its endpoint.

    `start_ns` is the start of the run on the clock of the log. Returns None if no successful
    request is in both.
    """
    requests = match_requests(records, log, run_id, start_ns)
    if not len(requests.records):
        return None

    due_ns = requests.records["due_ns"]
    reported_first_token_ns = requests.records["first_token_ns"]
    reported_ttft_ns = reported_first_token_ns - due_ns
    true_ttft_ns = requests.first_sent_ns - due_ns
    request_error_ns = np.abs(reported_first_token_ns - requests.first_sent_ns)

    true_ttft_p50_ms = quantile_ms(true_ttft_ns, 0.5)
    true_ttft_p99_ms = quantile_ms(true_ttft_ns, 0.99)
    uncertainty_ns = requests.records["stamp_error_ns"]
    server_delay_ns = np.maximum(requests.next_reading_ns - requests.first_sent_ns, 0)

    return TimingAccuracy(
        request_count=len(requests.records),
        true_ttft_p50_ms=true_ttft_p50_ms,
        true_ttft_p99_ms=true_ttft_p99_ms,
        ttft_p50_error_ms=quantile_ms(reported_ttft_ns, 0.5) - true_ttft_p50_ms,
        ttft_p99_error_ms=quantile_ms(reported_ttft_ns, 0.99) - true_ttft_p99_ms,
        tpot_p50_relative_error=compute_tpot_error(requests),
        request_error_p50_ms=quantile_ms(request_error_ns, 0.5),
        request_error_p99_ms=quantile_ms(request_error_ns, 0.99),
        request_error_max_ms=quantile_ms(request_error_ns, 1.0),
        uncertainty_p50_ms=quantile_ms(uncertainty_ns, 0.5),
        uncertainty_p99_ms=quantile_ms(uncertainty_ns, 0.99),
        within_uncertainty=bounded_fraction(requests, uncertainty_ns),
        within_uncertainty_and_server_delay=bounded_fraction(
            requests, uncertainty_ns + server_delay_ns
        ),
    )


def bounded_fraction(requests: MatchedRequests, max_lateness_ns: NDArray[np.int64]) -> float:
    """Return the fraction of the requests whose first token was reported within its bound.

    A token may be reported up to `max_lateness_ns` after the endpoint sent it, and never before,
    because nothing arrives before it was sent. Both bounds have the tolerance of one send.
    """
    lateness_ns = requests.records["first_token_ns"] - requests.first_sent_ns
    is_too_early = lateness_ns < -SEND_TOLERANCE_NS
    is_too_late = lateness_ns > max_lateness_ns + SEND_TOLERANCE_NS
    return float(np.mean(~is_too_early & ~is_too_late))


def compute_tpot_error(requests: MatchedRequests) -> float | None:
    """Return the relative error of the median TPOT, or None if no response has two tokens.

    TPOT is the time from the first to the last token, divided by the number of tokens after the
    first one.
    """
    records = requests.records
    has_two_tokens = records["output_tokens"] > 1
    if not has_two_tokens.any():
        return None

    later_tokens = records["output_tokens"][has_two_tokens] - 1
    reported_ns = records["last_token_ns"] - records["first_token_ns"]
    true_ns = requests.last_sent_ns - requests.first_sent_ns
    reported_tpot_ns = quantile_of(reported_ns[has_two_tokens] / later_tokens, 0.5)
    true_tpot_ns = quantile_of(true_ns[has_two_tokens] / later_tokens, 0.5)

    return reported_tpot_ns / true_tpot_ns - 1


def quantile_ms(values_ns: NDArray[np.generic], quantile: float) -> float:
    """Return a quantile in ms, rounded to 0.1 microseconds."""
    return round(quantile_of(values_ns, quantile) / 1e6, 4)


class MeasuredLoad(NamedTuple):
    """One load: what it cost the client and the endpoint, and how accurate its times are.

    `cost` has the keys of `rig.measure_client_and_server` and of the script ours.py, for example
    `cpu_s`, `wall_s` and `server_core_fraction`.
    """

    cost: dict[str, Any]
    accuracy: TimingAccuracy


def measure_load(events_per_s: float, duration_s: float, *, lockstep: bool) -> MeasuredLoad:
    """Run one load and compare its records with the endpoint's log.

    With `lockstep`, all responses get their events at the same time, and otherwise spread out.
    Raises SystemExit if a request failed.
    """
    with tempfile.TemporaryDirectory(prefix="loadgen-truth-") as run_dir:
        log_path = Path(run_dir) / "sends"
        cost = run_client(run_dir, log_path, events_per_s, duration_s, lockstep=lockstep)
        log = parse_log(log_path.read_bytes())
        records = store.read_run(Path(run_dir)).rows

    accuracy = compare_with_log(records, log, cost["run_id"], cost["start_ns"])
    failed_requests = cost["requests"] - cost["ok"]
    if accuracy is None or failed_requests:
        raise SystemExit(f"{failed_requests} of {cost['requests']} requests failed")

    return MeasuredLoad(cost, accuracy)


def run_client(
    run_dir: str, log_path: Path, events_per_s: float, duration_s: float, *, lockstep: bool
) -> dict[str, Any]:
    """Run loadgen against an endpoint that logs every send, and return what this cost.

    The client is the script ours.py, which runs as a process of its own on one core. It stores its
    run in `run_dir`.
    """
    endpoint_options = {
        "ttft": "normal:120ms,25ms",
        "itl": f"{ITL_MS}ms",
        "lockstep": lockstep,
        "log_events": "all",
        "log": str(log_path),
    }
    with rig.serve_endpoint(**endpoint_options) as server:
        arguments = {
            "url": server.url,
            "folder": run_dir,
            "requests": {"input_tokens": 20, "output_tokens": TOKENS_PER_RESPONSE},
            "request_rate": events_per_s / TOKENS_PER_RESPONSE,
            "duration": duration_s,
        }
        return rig.measure_client_and_server(
            server.url, lambda: rig.run_contender("ours.py", "load", arguments)
        )


class CheckedValue(NamedTuple):
    """A value that has a limit: an upper bound, or else a lower bound."""

    description: str
    value: float
    limit: float
    is_upper_bound: bool = True

    def format_line(self) -> str:
        """Return the value, and whether it keeps its limit."""
        verdict = rig.format_limit_check(self.value, self.limit, is_upper_bound=self.is_upper_bound)
        return f"{self.description} {self.value:.4g}: {verdict}"


def check_limits(events_per_s: float, accuracy: TimingAccuracy) -> list[CheckedValue]:
    """Return the values that have a limit at this rate, an empty list if there is none."""
    if events_per_s not in TTFT_ERROR_LIMITS:
        return []

    ttft_limits = TTFT_ERROR_LIMITS[int(events_per_s)]
    ttft_p50_error_ms = abs(accuracy.ttft_p50_error_ms)
    ttft_p99_error_ms = abs(accuracy.ttft_p99_error_ms)
    tpot_error = abs(accuracy.tpot_p50_relative_error or 0.0)
    checked_values = [
        CheckedValue("TTFT p50 error, ms", ttft_p50_error_ms, ttft_limits.p50_ms),
        CheckedValue("TTFT p99 error, ms", ttft_p99_error_ms, ttft_limits.p99_ms),
        CheckedValue("TPOT p50 relative error", tpot_error, MAX_TPOT_P50_RELATIVE_ERROR),
        CheckedValue(
            "fraction of errors within the timestamp uncertainty + 0.1 ms",
            accuracy.within_uncertainty,
            MIN_WITHIN_UNCERTAINTY_FRACTION,
            is_upper_bound=False,
        ),
    ]
    if events_per_s == UNCERTAINTY_LIMIT_RATE:
        checked_values.append(
            CheckedValue(
                "median timestamp uncertainty, ms",
                accuracy.uncertainty_p50_ms,
                MAX_MEDIAN_UNCERTAINTY_MS,
            )
        )

    return checked_values


COLUMNS = (
    "load",
    "requests",
    "true TTFT p50 / p99, ms",
    "error of TTFT p50 / p99, ms",
    "error per request p50 / p99 / max, ms",
    "error of TPOT p50",
    "timestamp uncertainty p50 / p99, ms",
    "within uncertainty / and server delay",
    "client CPU",
    "server CPU",
    "reads/event",
    "remarks",
)


def create_row(load_name: str, load: MeasuredLoad) -> list[str]:
    """Return the cells of a load, in the order of COLUMNS."""
    accuracy = load.accuracy
    request_errors_ms = (
        f"{accuracy.request_error_p50_ms:.3f}",
        f"{accuracy.request_error_p99_ms:.3f}",
        f"{accuracy.request_error_max_ms:.2f}",
    )
    within_bounds = (
        f"{accuracy.within_uncertainty:.2%}",
        f"{accuracy.within_uncertainty_and_server_delay:.2%}",
    )
    tpot_error = "-"
    if accuracy.tpot_p50_relative_error is not None:
        tpot_error = f"{accuracy.tpot_p50_relative_error:+.3%}"

    return [
        load_name,
        f"{accuracy.request_count:,}",
        f"{accuracy.true_ttft_p50_ms:.2f} / {accuracy.true_ttft_p99_ms:.2f}",
        f"{accuracy.ttft_p50_error_ms:+.3f} / {accuracy.ttft_p99_error_ms:+.3f}",
        " / ".join(request_errors_ms),
        tpot_error,
        f"{accuracy.uncertainty_p50_ms:.3f} / {accuracy.uncertainty_p99_ms:.3f}",
        " / ".join(within_bounds),
        f"{load.cost['cpu_s'] / load.cost['wall_s']:.0%}",
        f"{load.cost['server_core_fraction']:.0%}",
        f"{load.cost['reads_per_event']:.2f}",
        rig.describe_caveats(load.cost),
    ]


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__, offers_realtime_priority=True)
    parser.add_argument("--rates", default="10000,25000", help="events/s, separated by commas")
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="duration of each load; a shorter one has too few requests for a p99",
    )
    return rig.parse_arguments(parser, rates="2000", seconds=1.0)


def main() -> None:
    """Print the errors by load, and whether they are within the limits."""
    args = parse_command_line()
    print(
        f"{args.seconds:g} s of Poisson arrivals, {TOKENS_PER_RESPONSE} tokens {ITL_MS} ms apart; "
        "client and endpoint have one core each.\n"
        "Error of a quantile: reported - true. "
        "Error per request: |reported - true| time of the first token.\n"
    )

    rows = []
    limit_lines = []
    for lockstep in (False, True):
        for events_per_s in map(float, args.rates.split(",")):
            load = measure_load(events_per_s, args.seconds, lockstep=lockstep)
            load_name = f"{events_per_s:,.0f} events/s, {'lockstep' if lockstep else 'spread'}"
            rows.append(create_row(load_name, load))
            checked_values = check_limits(events_per_s, load.accuracy)
            limit_lines += [f"- {load_name}: {value.format_line()}" for value in checked_values]

    print(rig.format_table(COLUMNS, rows))
    print()
    print("\n".join(limit_lines))


if __name__ == "__main__":
    main()
