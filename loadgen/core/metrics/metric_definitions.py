"""The built-in rows of the table `loadgen.figures`: metrics of requests, gaps and events."""

from loadgen.core.metrics import bounds, outcomes, request_metrics
from loadgen.figures import MetricDefinition

ROWS = (
    MetricDefinition(
        name="ttft",
        words="TTFT",
        meaning=(
            "time to first token: first event with generated output - scheduled time. "
            "Reasoning counts as output; role-only, empty and comment events do not. Waiting "
            "for a connection and the client's send delay are included"
        ),
        values=request_metrics.ttft,
        bounds=bounds.bound_ttft,
        uncertainty_limit="stamp_error_share",
        least=outcomes.least_ttft,
        compared=("p50", "p99"),
        block="",
        shown=("slo", "contract", "latency", "requests", "prometheus"),
        guards=("output_unseen",),
    ),
    MetricDefinition(
        name="ttft_from_sent",
        words="TTFT from sent",
        meaning="first token - first byte sent",
        values=request_metrics.ttft_from_sent,
        bounds=bounds.bound_ttft_from_sent,
        uncertainty_limit="stamp_error_share",
        least=outcomes.least_ttft_from_sent,
        block="",
        shown=("slo", "contract", "latency", "requests"),
        under="from sent",
        guards=("output_unseen",),
    ),
    MetricDefinition(
        name="first_answer",
        words="First answer",
        meaning="first output that is not reasoning - scheduled time",
        values=request_metrics.first_answer,
        bounds=bounds.bound_first_answer,
        uncertainty_limit="stamp_error_share",
        least=outcomes.least_first_answer,
        block="",
        shown=("slo", "contract", "latency", "requests"),
        under="first answer",
        unlike="ttft",
    ),
    MetricDefinition(
        name="tpot",
        words="TPOT",
        meaning=(
            "time per output token of one request: (last token - first token) / (n - n1). n "
            "is the server's count of output tokens without reasoning that was not streamed; "
            "n1 is the number of tokens in the first output event if the server reports it, "
            "else 1. Undefined if n <= n1, or if all output arrived at one time"
        ),
        values=request_metrics.tpot,
        bounds=bounds.bound_tpot,
        uncertainty_limit="tpot_error_share",
        needs="tokens",
        least=outcomes.least_tpot,
        guards=("counts_contradict",),
        compared=("p50", "p99"),
        block="",
        shown=("slo", "contract", "latency", "requests", "prometheus"),
    ),
    MetricDefinition(
        name="tpot_mlperf",
        words="TPOT (MLPerf)",
        meaning=(
            "TPOT as MLPerf's LoadGen defines it: (E2E - TTFT) // (n - 1), both from the "
            "scheduled time"
        ),
        values=request_metrics.tpot_mlperf,
        bounds=bounds.bound_tpot_mlperf,
        uncertainty_limit="tpot_error_share",
        needs="tokens",
        least=outcomes.least_tpot_mlperf,
        guards=("counts_contradict",),
        block="",
    ),
    MetricDefinition(
        name="e2e_per_token",
        words="E2E per token",
        meaning=(
            "normalized latency: E2E / n with the server's count n of output tokens, which "
            "includes the wait for the first token. Undefined if n is 0 or unknown"
        ),
        values=request_metrics.e2e_per_token,
        bounds=bounds.bound_e2e_per_token,
        uncertainty_limit="stamp_error_share",
        least=outcomes.least_e2e_per_token,
        needs="tokens",
        guards=("counts_contradict",),
        shown=("slo", "requests"),
    ),
    MetricDefinition(
        name="acceptance",
        words="Accepted drafts",
        meaning=(
            "speculative decoding: accepted / drafted tokens of a request, as reported by the "
            "server"
        ),
        values=request_metrics.acceptance,
        unit="%",
        better=1,
        shown=("requests",),
    ),
    MetricDefinition(
        name="accepted_length",
        words="Accepted length",
        meaning=(
            "speculative decoding: tokens per step of a request, output tokens / (output "
            "tokens - accepted tokens)"
        ),
        values=request_metrics.accepted_length,
        unit="tokens",
        needs="tokens",
        guards=("counts_contradict",),
        better=1,
        shown=("requests",),
    ),
    MetricDefinition(
        name="itl",
        words="ITL",
        meaning=(
            "inter-token latency: time between output events if each event carries one token. "
            "Otherwise it is not reported, and `itl_absent` gives the reason"
        ),
        sample="gaps",
        uncertainty_limit="event_error_share",
        needs="stream",
        guards=("counts_contradict",),
        block="",
        shown=("contract", "latency"),
    ),
    MetricDefinition(
        name="inter_chunk",
        words="Inter-chunk latency",
        meaning=(
            "time between successive output events, pooled over all requests. Percentiles come "
            "from a histogram with an error of at most 0.1 %; count, mean, min and max are exact"
        ),
        sample="gaps",
        uncertainty_limit="event_error_share",
        needs="stream",
        block="",
        shown=("contract", "latency"),
    ),
    MetricDefinition(
        name="e2e",
        words="E2E latency",
        meaning=(
            "end-to-end latency: last output or finish event - scheduled time, without the "
            "end of the body"
        ),
        values=request_metrics.e2e,
        bounds=bounds.bound_e2e,
        uncertainty_limit="stamp_error_share",
        needs="",
        least=outcomes.least_e2e,
        compared=("p50", "p99"),
        block="",
        shown=("slo", "contract", "latency", "requests", "prometheus"),
    ),
    MetricDefinition(
        name="max_gap",
        words="Max ITL",
        meaning="the longest time between two output events of a request",
        values=request_metrics.max_gap,
        bounds=bounds.bound_max_gap,
        uncertainty_limit="event_error_share",
        needs="tokens",
        least=outcomes.least_max_gap,
        block="",
        shown=("contract", "latency", "requests"),
    ),
    MetricDefinition(
        name="connect",
        words="Connect",
        meaning=(
            "time from the scheduled time until a new connection was ready, at least 0. It is "
            "0 for requests on a reused connection"
        ),
        values=request_metrics.connect,
        sample="sent",
        needs="",
        block="",
        shown=("client",),
    ),
    MetricDefinition(
        name="tcp",
        words="TCP connect",
        meaning=(
            "time to establish the TCP connection, for the first request of each connection. "
            "It may be before the scheduled time. Names are looked up before the load "
            "(`dns_ms`)"
        ),
        values=request_metrics.tcp,
        sample="sent",
        needs="",
        shown=("client", "requests"),
        under="TCP",
        better=0,
    ),
    MetricDefinition(
        name="tls",
        words="TLS handshake",
        meaning=(
            "time of the TLS handshake, for the first request of each connection. There is "
            "none without TLS"
        ),
        values=request_metrics.tls,
        sample="sent",
        needs="",
        shown=("client", "requests"),
        under="TLS",
        better=0,
    ),
    MetricDefinition(
        name="send_lag",
        words="Send delay",
        meaning="first byte sent - scheduled time, as far as the client caused it",
        values=request_metrics.send_lag,
        sample="sent",
        needs="",
        block="",
        shown=("client", "requests", "prometheus"),
    ),
    MetricDefinition(
        name="client_lag",
        words="Receive delay",
        meaning=("time from the kernel's timestamp of the first token until the client read it"),
        values=request_metrics.client_lag,
        sample="sent",
        block="",
        shown=("client", "prometheus"),
    ),
    MetricDefinition(
        name="stamp_error",
        words="Timestamp uncertainty",
        meaning=(
            "largest error of the timestamp of the first token. It is 0 if the read contained "
            "one packet"
        ),
        values=request_metrics.stamp_error,
        sample="sent",
        block="",
        shown=("client",),
    ),
    MetricDefinition(
        name="event_error",
        words="Timestamp uncertainty per event",
        meaning=(
            "how long before its timestamp each output event may have arrived. It is 0 for "
            "the newest event of a read, and for all events of one chunk, which is one write "
            "of the server"
        ),
        sample="events",
        needs="stream",
        block="",
        shown=("client",),
        under="per event",
    ),
    MetricDefinition(
        name="tpot_error",
        words="TPOT uncertainty",
        meaning=(
            "largest error of the TPOT of a request: (first + last timestamp uncertainty) / "
            "(n - n1)"
        ),
        values=request_metrics.tpot_error,
        needs="tokens",
        block="",
        shown=("client",),
        under="TPOT",
    ),
    MetricDefinition(
        name="max_gap_error",
        words="Max ITL uncertainty",
        meaning=(
            "largest error of the max ITL of a request: the timestamp uncertainty of the "
            "event that ends it"
        ),
        values=request_metrics.max_gap_error,
        needs="tokens",
        block="",
    ),
)
