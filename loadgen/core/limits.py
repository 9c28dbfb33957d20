"""The limits of a measurement: of its validity, and of its warnings. Pure.

A run that exceeds one of them is INVALID. The limits of one family of figures (`event_error_share`, `tpot_error_share`)
withhold that family instead, and the run may stay VALID.
"""

import msgspec

# The defaults. `Limits` of a workload changes them for a run, and the run stores the change.
SEND_LAG_SHARE = 0.05  # p99 send lag, as a share of TTFT p50
STAMP_ERROR_SHARE = 0.05  # p99 stamp error, as a share of TTFT p50
EVENT_ERROR_SHARE = (
    0.10  # p99 error of the gaps between events, as a share of ITL (inter-chunk) p50
)
TPOT_ERROR_SHARE = (
    0.05  # p99 error of TPOT, (first + last stamp error) / (n - n1), as a share of TPOT p50
)
CPU_SHARE = 0.90  # of one core, per worker, in any full second of the measured window
FAILURE_SHARE = 0.01
"""Share of the requests that may fail. Above it, failures on the client's side make a run INVALID.
Failures of the server are a reservation, and a run without an SLO ends with exit code 1."""
NOT_OFFERED_SHARE = 0.05  # starts that the client dropped, as a share of all scheduled requests

NOT_OFFERED = 0.01  # of the starts, dropped by the client: beyond it, a reservation
UNFINISHED_SHARE = (
    0.01  # of the requests that count: above it, what the drain cut leaves every SLO term undecided
)


# Limits of the warnings. A run beyond one of them stays valid, and its summary carries a warning.
COUNT_DISAGREEMENT = 0.02  # between two counts of the same tokens
PROMPT_LENGTHS = 0.05
"""Difference between the requested and the counted tokens of generated prompts. Beyond it, it is
another load."""
CONTRADICTING_TOKENS = (
    2  # a count that differs from its stream by more tokens than this, and by more than
)
CONTRADICTING = 0.05  # this share, contradicts it: split tool calls, end tokens and UTF-8 pieces differ honestly
CONTRADICTING_SHARE = (
    0.01  # of the answers: beyond it, what rests on the counts of tokens is withheld
)
NO_SPAN_SHARE = 0.01  # of the answers with tokens enough for a TPOT: came in one event, so that it is not decided
UNSEEN_OUTPUT = (
    0.01  # of the ok responses, with tokens but no output event: above it, TTFT is withheld
)
LENGTH_MISMATCH = 0.02  # of requests whose output is not as long as asked
SHORTENED = (
    0.05  # of the output tokens asked for, missing in the answers: beyond it, it is another load
)
CACHED_SHARE = 0.05  # of prompt tokens, when the workload declares no sharing
GAP_VARIATION = 0.10  # between the planned and the real coefficient of variation of send gaps
GAPS_NEEDED = 30  # fewer send gaps than this say nothing about their variation
ITL_TOKENS_PER_EVENT = (
    0.01  # share of events with a second token, above which inter-chunk gaps are not ITL
)
LONG_ANSWER = 20  # tokens: one without text is few enough to leave the gaps ITL, also where no end token was due
MODEL_ERROR = (
    0.05,
    0.25,
)  # of the simulated servers, from least to most: docs/evidence/simulation.md
FEWEST_ANSWERS = 11  # scored answers, before their mean or share decides anything
STALL_NS = (
    1_000_000_000  # a gap between output events that a reader of the answer notices as a stall
)


class ValidityLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The validity limits used for a run, as shares (0.05 is 5 %)."""

    send_lag_share: float = SEND_LAG_SHARE
    stamp_error_share: float = STAMP_ERROR_SHARE
    event_error_share: float = EVENT_ERROR_SHARE
    tpot_error_share: float = TPOT_ERROR_SHARE
    cpu_share: float = CPU_SHARE
    failure_share: float = FAILURE_SHARE
    not_offered_share: float = NOT_OFFERED_SHARE
