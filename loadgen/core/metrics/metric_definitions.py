"""The built-in rows of the table `loadgen.figures`: metrics of requests, gaps and events."""

from loadgen.core.metrics import bounds, outcomes, request_metrics
from loadgen.figures import MetricDefinition

ROWS = (
    MetricDefinition(
        name="ttft",
        words="TTFT",
        meaning=(
            "time to first token: first event with generated output - due. Role-only, empty and "
            "comment events do not count, reasoning does; waiting for a connection and the "
            "generator's lateness do"
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
        meaning="first token - sent",
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
        meaning="first output that is not reasoning - due",
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
            "time per output token of one request: (last token - first token) / (n - n1); n "
            "output tokens as the server counts them less reasoning that was never streamed, n1 "
            "tokens of the first output event where the server says it, else 1. None where n <= "
            "n1, and where all output came at one instant (one event, one write): there is no "
            "span"
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
        meaning="LoadGen's: (e2e - ttft) // (n - 1), both from due",
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
            "normalised TPOT: E2E / n, n output tokens as the server counts them; the wait for "
            "the first token is inside. None where n is 0 or not known"
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
            "of speculative decoding: accepted / drafted tokens of a request, as the server "
            "accounts for it"
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
            "of speculative decoding: output tokens / (output tokens - accepted ones) of a "
            "request: tokens of a step, the model's own counted"
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
            "inter-token latency: the gaps between events, when every event carries one token; "
            "else it is not given, and `itl_absent` says why"
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
        words="Gap between events",
        meaning=(
            "every gap between successive output events, all requests pooled; quantiles from a "
            "histogram, wrong by at most 0.1 %; count, mean, min and max exact"
        ),
        sample="gaps",
        uncertainty_limit="event_error_share",
        needs="stream",
        block="",
        shown=("contract", "latency"),
    ),
    MetricDefinition(
        name="e2e",
        words="E2E",
        meaning="last output or finish event - due; never the end of the body",
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
        words="Largest gap",
        meaning="the largest gap between output events of one request",
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
            "from due until a new connection was ready, at least 0; 0 of requests whose "
            "connection had served before"
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
            "of the first request of each connection: how long TCP took, be it before the "
            "request was due. Names are looked up before the load (`dns_ms`): no request waits "
            "for that"
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
        meaning="the same of the TLS handshake of its connection; none without TLS",
        values=request_metrics.tls,
        sample="sent",
        needs="",
        shown=("client", "requests"),
        under="TLS",
        better=0,
    ),
    MetricDefinition(
        name="send_lag",
        words="Send lag",
        meaning=(
            "sent - due, the generator's own doing: all that passed before the first byte went "
            "to the kernel"
        ),
        values=request_metrics.send_lag,
        sample="sent",
        needs="",
        block="",
        shown=("client", "requests", "prometheus"),
    ),
    MetricDefinition(
        name="client_lag",
        words="Client lag",
        meaning="first token: from the kernel's stamp to its reading",
        values=request_metrics.client_lag,
        sample="sent",
        block="",
        shown=("client", "prometheus"),
    ),
    MetricDefinition(
        name="stamp_error",
        words="Stamp error",
        meaning=(
            "first token: how wrong its stamp can be; 0 when the read carried one packet's worth"
        ),
        values=request_metrics.stamp_error,
        sample="sent",
        block="",
        shown=("client",),
    ),
    MetricDefinition(
        name="event_error",
        words="Stamp error of all events",
        meaning=(
            "of every output event: how long before its stamp it may have come; 0 for the "
            "newest of a read and for all of one chunk, which is one write of the server"
        ),
        sample="events",
        needs="stream",
        block="",
        shown=("client",),
        under="all events",
    ),
    MetricDefinition(
        name="tpot_error",
        words="Error of TPOT",
        meaning="of a request: (first + last stamp error) / (n - n1); no samples when not known",
        values=request_metrics.tpot_error,
        needs="tokens",
        block="",
        shown=("client",),
        under="of TPOT",
    ),
    MetricDefinition(
        name="max_gap_error",
        words="Error of the largest gap",
        meaning=(
            "of a request: stamp error of the event at the end of its largest gap; no samples "
            "when not known"
        ),
        values=request_metrics.max_gap_error,
        needs="tokens",
        block="",
    ),
)
