"""The built-in rows of the table `loadgen.figures`: metrics of requests, gaps and events."""

from loadgen.core.metrics import bounds, outcomes, request_metrics
from loadgen.figures import MetricDefinition

ROWS = (
    MetricDefinition(
        name="ttft",
        label="TTFT",
        meaning=(
            "from the scheduled time of a request to the first event that contains "
            "generated output. Reasoning counts as output; events that carry only a role, "
            "empty events and comments do not. Waiting for a connection and the send delay "
            "are included"
        ),
        values=request_metrics.ttft,
        bounds=bounds.bound_ttft,
        uncertainty_limit="stamp_error_share",
        least=outcomes.least_ttft,
        compared=("p50", "p99"),
        block="",
        places=("slo", "contract", "latency", "requests", "prometheus"),
        guards=("output_unseen",),
    ),
    MetricDefinition(
        name="ttft_from_sent",
        label="TTFT from sent",
        meaning="from the time of sending to the first event that contains generated output",
        values=request_metrics.ttft_from_sent,
        bounds=bounds.bound_ttft_from_sent,
        uncertainty_limit="stamp_error_share",
        least=outcomes.least_ttft_from_sent,
        block="",
        places=("slo", "contract", "latency", "requests"),
        under="from sent",
        guards=("output_unseen",),
    ),
    MetricDefinition(
        name="first_answer",
        label="First answer",
        meaning="from the scheduled time to the first output that is not reasoning",
        values=request_metrics.first_answer,
        bounds=bounds.bound_first_answer,
        uncertainty_limit="stamp_error_share",
        least=outcomes.least_first_answer,
        block="",
        places=("slo", "contract", "latency", "requests"),
        under="first answer",
        hidden_if_same_as="ttft",
    ),
    MetricDefinition(
        name="tpot",
        label="TPOT",
        meaning=(
            "(last token - first token) / (n - n1) of one request, where n is the number of "
            "output tokens as the server counts them, without reasoning that was not "
            "streamed, and n1 the number of tokens in the first output event if the server "
            "says it, else 1. It is not defined if n <= n1, or if all output arrived at the "
            "same time"
        ),
        values=request_metrics.tpot,
        bounds=bounds.bound_tpot,
        uncertainty_limit="tpot_error_share",
        needs="tokens",
        least=outcomes.least_tpot,
        guards=("counts_contradict",),
        compared=("p50", "p99"),
        block="",
        places=("slo", "contract", "latency", "requests", "prometheus"),
    ),
    MetricDefinition(
        name="tpot_mlperf",
        label="TPOT (MLPerf)",
        meaning=(
            "(E2E - TTFT) // (n - 1) as MLPerf LoadGen defines it, both from the scheduled time"
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
        label="E2E per token",
        meaning=(
            "E2E latency / n, where n is the number of output tokens as the server counts "
            "them. It includes the wait for the first token, and is not defined if n is 0 "
            "or unknown"
        ),
        values=request_metrics.e2e_per_token,
        bounds=bounds.bound_e2e_per_token,
        uncertainty_limit="stamp_error_share",
        least=outcomes.least_e2e_per_token,
        needs="tokens",
        guards=("counts_contradict",),
        places=("slo", "requests"),
    ),
    MetricDefinition(
        name="acceptance",
        label="Accepted drafts",
        meaning=(
            "accepted / drafted tokens of a request with speculative decoding, as the "
            "server reports them"
        ),
        values=request_metrics.acceptance,
        unit="%",
        better=1,
        places=("requests",),
    ),
    MetricDefinition(
        name="accepted_length",
        label="Accepted length",
        meaning=(
            "output tokens / (output tokens - accepted tokens) of a request with "
            "speculative decoding, that is, the tokens per step of the model, its own token "
            "included"
        ),
        values=request_metrics.accepted_length,
        unit="tokens",
        needs="tokens",
        guards=("counts_contradict",),
        better=1,
        places=("requests",),
    ),
    MetricDefinition(
        name="itl",
        label="ITL",
        meaning=(
            "the times between consecutive output events if every event carries one token. "
            "Otherwise it is not reported, and `itl_absent` has the reason"
        ),
        sample="gaps",
        uncertainty_limit="event_error_share",
        needs="stream",
        guards=("counts_contradict",),
        block="",
        places=("contract", "latency"),
    ),
    MetricDefinition(
        name="inter_chunk",
        label="Inter-chunk latency",
        meaning=(
            "the times between consecutive output events, all requests together. "
            "Percentiles come from a histogram with an error of at most 0.1 %; count, mean, "
            "minimum and maximum are exact"
        ),
        sample="gaps",
        uncertainty_limit="event_error_share",
        needs="stream",
        block="",
        places=("contract", "latency"),
    ),
    MetricDefinition(
        name="e2e",
        label="E2E latency",
        meaning=(
            "from the scheduled time to the last output or finish event. The end of the "
            "body after it is not included"
        ),
        values=request_metrics.e2e,
        bounds=bounds.bound_e2e,
        uncertainty_limit="stamp_error_share",
        needs="",
        least=outcomes.least_e2e,
        compared=("p50", "p99"),
        block="",
        places=("slo", "contract", "latency", "requests", "prometheus"),
    ),
    MetricDefinition(
        name="max_gap",
        label="Max ITL",
        meaning="the longest time between two consecutive output events of one request",
        values=request_metrics.max_gap,
        bounds=bounds.bound_max_gap,
        uncertainty_limit="event_error_share",
        needs="tokens",
        least=outcomes.least_max_gap,
        block="",
        places=("contract", "latency", "requests"),
    ),
    MetricDefinition(
        name="connect",
        label="Connect",
        meaning=(
            "from the scheduled time to the time at which a new connection was "
            "ready. It is 0 for a request on a connection that was used before"
        ),
        values=request_metrics.connect,
        sample="sent",
        needs="",
        block="",
        places=("client",),
    ),
    MetricDefinition(
        name="tcp",
        label="TCP connect",
        meaning=(
            "how long TCP took to connect, for the first request of each connection, "
            "even if it connected before the scheduled time. Names are looked up "
            "before the load (`dns_ms`)"
        ),
        values=request_metrics.tcp,
        sample="sent",
        needs="",
        places=("client", "requests"),
        under="TCP",
        better=0,
    ),
    MetricDefinition(
        name="tls",
        label="TLS handshake",
        meaning=(
            "how long the TLS handshake took, for the first request of each connection. "
            "There are no values without TLS"
        ),
        values=request_metrics.tls,
        sample="sent",
        needs="",
        places=("client", "requests"),
        under="TLS",
        better=0,
    ),
    MetricDefinition(
        name="send_lag",
        label="Send delay",
        meaning=(
            "from the scheduled time to the time at which the first byte was passed "
            "to the kernel. The load generator causes this delay"
        ),
        values=request_metrics.send_lag,
        sample="sent",
        needs="",
        block="",
        places=("client", "requests", "prometheus"),
    ),
    MetricDefinition(
        name="client_lag",
        label="Receive delay",
        meaning=(
            "from the kernel's timestamp of the first token to the time at which the client read it"
        ),
        values=request_metrics.client_lag,
        sample="sent",
        guards=("no_kernel_times",),
        block="",
        places=("client", "prometheus"),
    ),
    MetricDefinition(
        name="stamp_error",
        label="Timestamp uncertainty",
        meaning=(
            "how much earlier the first token may have arrived than its timestamp says. It "
            "is 0 if the client read a single packet"
        ),
        values=request_metrics.stamp_error,
        sample="sent",
        block="",
        places=("client",),
    ),
    MetricDefinition(
        name="event_error",
        label="Timestamp uncertainty per event",
        meaning=(
            "how much earlier an output event may have arrived than its timestamp says. It "
            "is 0 for the newest event of a read and for all events of one chunk"
        ),
        sample="events",
        needs="stream",
        block="",
        places=("client",),
        under="per event",
    ),
    MetricDefinition(
        name="tpot_error",
        label="TPOT uncertainty",
        meaning=(
            "(timestamp uncertainty of the first token + that of the last token) / (n - n1) "
            "of a request"
        ),
        values=request_metrics.tpot_error,
        needs="tokens",
        block="",
        places=("client",),
        under="TPOT",
    ),
    MetricDefinition(
        name="max_gap_error",
        label="Max ITL uncertainty",
        meaning=(
            "the timestamp uncertainty of the event at the end of the longest pause of a request"
        ),
        values=request_metrics.max_gap_error,
        needs="tokens",
        block="",
    ),
)
