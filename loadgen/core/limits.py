"""The limits of a measurement: of its validity, and of its warnings.

A run that exceeds a limit is INVALID. The limits of single metrics (`event_error_share`,
`tpot_error_share`) only keep these metrics from being reported, and the run may stay VALID.
"""

import msgspec

# The defaults. A workload may change them for a run, and the run stores the change.
SEND_LAG_SHARE = 0.05
"""p99 send delay, as a fraction of the TTFT p50."""
STAMP_ERROR_SHARE = 0.05
"""p99 timestamp uncertainty, as a fraction of the TTFT p50."""
EVENT_ERROR_SHARE = 0.10
"""p99 uncertainty of the times between events, as a fraction of the ITL (inter-chunk) p50."""
TPOT_ERROR_SHARE = 0.05
"""p99 TPOT uncertainty, (first + last timestamp uncertainty) / (n - n1), relative to TPOT p50."""
CPU_SHARE = 0.90
"""CPU use of a worker in any full second of the measurement window, as a fraction of one core."""
FAILURE_SHARE = 0.01
"""Fraction of the requests that may fail. Above it, failures caused by the client make a run
INVALID. Failures of the server are a caveat, and a run without an SLO ends with exit code 1."""
NOT_OFFERED_SHARE = 0.05
"""Requests that the client did not send, as a fraction of all scheduled requests."""

NOT_OFFERED = 0.01
"""Above this fraction of requests that the client did not send, the verdict has a caveat."""
UNFINISHED_SHARE = 0.01
"""Above this fraction of requests that the drain left unfinished, objectives are undecided."""

# Limits of the warnings. A run that exceeds one stays valid, and its summary has a warning.
COUNT_DISAGREEMENT = 0.02
"""Relative difference between two counts of the same tokens."""
PROMPT_LENGTHS = 0.05
"""Relative difference between the requested and the counted tokens of generated prompts. Above it,
it is another load."""
CONTRADICTING_TOKENS = 2
"""A token count contradicts its stream if it differs by more than this many tokens and more than
CONTRADICTING. Split tool calls, end tokens and parts of characters cause small differences."""
CONTRADICTING = 0.05
CONTRADICTING_SHARE = 0.01
"""Above this fraction of contradicting responses, metrics based on tokens are not reported."""
NO_SPAN_SHARE = 0.01
"""Above this fraction of responses that came in one event, objectives of TPOT are undecided."""
UNSEEN_OUTPUT = 0.01
"""Above this fraction of ok responses with tokens but no output event, TTFT is not reported."""
LENGTH_MISMATCH = 0.02
"""Fraction of requests whose output is not as long as requested."""
SHORTENED = 0.05
"""Fraction of the requested output tokens that are missing. Above it, it is another load."""
CACHED_SHARE = 0.05
"""Fraction of cached prompt tokens, if the workload does not share prompts."""
GAP_VARIATION = 0.10
"""Difference between the planned and the measured inter-arrival CV."""
GAPS_NEEDED = 30
"""Fewer gaps between sends do not show their CV."""
ITL_TOKENS_PER_EVENT = 0.01
"""Above this fraction of events with a second token, inter-chunk latency is not ITL."""
LONG_ANSWER = 20
"""Up to this many tokens, a response without text does not keep inter-chunk latency from being ITL,
also if no end token was expected."""
MODEL_ERROR = (0.05, 0.25)
"""The error of the simulated servers, from the best to the worst: docs/evidence/simulation.md."""
FEWEST_ANSWERS = 11
"""Fewer scored completions do not decide about their mean or fraction."""
STALL_NS = 1_000_000_000
"""A time between output events that a reader notices as a stall."""


class ValidityLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The validity limits of a run, as fractions (0.05 is 5 %)."""

    send_lag_share: float = SEND_LAG_SHARE
    stamp_error_share: float = STAMP_ERROR_SHARE
    event_error_share: float = EVENT_ERROR_SHARE
    tpot_error_share: float = TPOT_ERROR_SHARE
    cpu_share: float = CPU_SHARE
    failure_share: float = FAILURE_SHARE
    not_offered_share: float = NOT_OFFERED_SHARE
