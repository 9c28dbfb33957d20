"""Traces of coding agents: Weka's (InferenceX AgentX) and TraceLab's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from loadgen.core.format import shortened
from loadgen.core.units import NS_PER_S, InvalidValueError
from loadgen.core.workload.trace_formats import (
    UNKNOWN_NS,
    TraceRow,
    is_finite_number,
    parse_time_ns,
    parse_token_count,
)
from loadgen.interop.trace_values import (
    REQUEST_FIELDS,
    dicts_in,
    hash_to_id,
    parse_duration,
    parse_hash_ids,
    parse_request_fields,
    parse_session,
    parse_utc_date,
)

WEKA_REQUEST_FIELDS = tuple(name for name in REQUEST_FIELDS if name != "stop")
"""`stop` of a Weka row is the reason why the recorded response ended, and no parameter."""
WEKA_TRACE_MASK = 0x7FFFFFFF
WEKA_BLOCK_MASK = 0xFFFFFFFF
"""An id of a Weka block is 31 bits of its trace and 32 bits of its id in the trace."""

TRACELAB_BLOCK_TOKENS = 512
"""The tokens of the blocks that are made for the prefixes that TraceLab counts."""
TRACELAB_INPUTS = ("user_message", "tool_result")
"""Events after which a request is sent."""
TRACELAB_OUTPUTS = ("text", "reasoning", "tool_call")
"""Events that are output of a model."""


class _WekaTrace(NamedTuple):
    """The facts about a trace that all its requests need. A trace is the session of an agent.

    Attributes:
        name: The id of the trace.
        block_tokens: The tokens of a block.
        id_prefix: 31 bits that make the ids of its blocks different from those of other traces.
    """

    name: str
    block_tokens: float
    id_prefix: int


def parse_weka_trace(line: Mapping[str, object]) -> Iterator[TraceRow]:
    """Yield the requests in a line of Weka's traces, each of which is a session of a coding agent.

    The list `requests` of the line has the agent's own requests, and a marker for each sub-agent
    that it started. The marker contains the requests of the sub-agent, which are a session of their
    own.

    Raises:
        InvalidValueError: A field has a wrong value.
    """
    trace = _parse_weka_trace_facts(line)
    for entry in _weka_entries(line):
        is_subagent_marker = entry.get("type") == "subagent"
        if is_subagent_marker:
            yield from _parse_weka_subagent(trace, entry)
        else:
            yield _parse_weka_call(trace, entry, _weka_time_ns(entry), session=trace.name)


def _parse_weka_subagent(trace: _WekaTrace, marker: Mapping[str, object]) -> Iterator[TraceRow]:
    """Yield the requests of a sub-agent, which its marker contains."""
    session = f"{trace.name}::{marker.get('agent_id')}"
    calls = list(_weka_entries(marker))
    times_ns = _subagent_times_ns(marker, calls)
    for call, at_ns in zip(calls, times_ns, strict=True):
        yield _parse_weka_call(trace, call, at_ns, session)


def _parse_weka_trace_facts(line: Mapping[str, object]) -> _WekaTrace:
    """Return the name, the block size and the id prefix of the trace in a line.

    The prompt of a request is a list of block ids. Weka's ids are unique only within a trace (the
    scope "local"), so two traces may use the same id for different texts. The prefix, a hash of the
    name of the trace, makes the ids unique among all traces.

    Raises:
        InvalidValueError: A field has a wrong value, or the scope is not "local".
    """
    block_tokens = line.get("block_size")
    if not is_finite_number(block_tokens) or block_tokens <= 0:
        raise InvalidValueError(
            "invalid_value",
            f"block_size is {shortened(block_tokens)}",
            "write a number of tokens above 0",
            "block_size",
        )

    id_scope = line.get("hash_id_scope", "local")
    if id_scope != "local":
        raise InvalidValueError(
            "unsupported",
            f"hash_id_scope is {shortened(id_scope)}",
            "local: each trace has hashes of its own",
            "hash_id_scope",
        )

    name = str(line.get("id"))
    id_prefix = hash_to_id(name) & WEKA_TRACE_MASK
    return _WekaTrace(name, float(block_tokens), id_prefix)


def _weka_entries(parent: Mapping[str, object]) -> Iterator[dict[str, Any]]:
    """Yield the entries of a trace or of a sub-agent: requests, and markers of sub-agents.

    Raises:
        InvalidValueError: `requests` is no list, or an entry is no object.
    """
    entries = parent.get("requests")
    if not isinstance(entries, list):
        raise InvalidValueError(
            "wrong_type", f"requests is {shortened(entries)}", "write a list of calls", "requests"
        )

    for entry in entries:
        if not isinstance(entry, dict):
            problem = f"a request is {shortened(entry)}"
            raise InvalidValueError(
                "wrong_type", problem, "write an object with t, in and out", "requests"
            )
        yield entry


def _weka_time_ns(entry: Mapping[str, object]) -> int:
    """Return the ns of an entry from the start of its trace."""
    return parse_time_ns(entry.get("t"), float(NS_PER_S))


def _subagent_times_ns(
    marker: Mapping[str, object], calls: Sequence[Mapping[str, object]]
) -> list[int]:
    """Return the times of the calls of a sub-agent, in ns from the start of the trace.

    Most files count these times from the start of the trace, and some from the marker of the
    sub-agent. A call cannot come before its marker, so if a time is less than that of the marker,
    all times are counted from the marker.
    """
    marker_ns = _weka_time_ns(marker)
    times_ns = [_weka_time_ns(call) for call in calls]
    is_relative_to_marker = bool(times_ns) and min(times_ns) < marker_ns
    if is_relative_to_marker:
        return [marker_ns + at_ns for at_ns in times_ns]
    return times_ns


def _parse_weka_call(
    trace: _WekaTrace, call: Mapping[str, object], at_ns: int, session: str
) -> TraceRow:
    """Return one request of an agent or sub-agent. Raises InvalidValueError."""
    return TraceRow(
        at_ns=at_ns,
        input_tokens=parse_token_count(call.get("in"), "in", minimum=1),
        output_tokens=parse_token_count(call.get("out"), "out", minimum=0),
        hashes=[_weka_block_id(trace, block_id) for block_id in parse_hash_ids(call)],
        block_tokens=trace.block_tokens,
        session=session,
        group=trace.name,
        fields=parse_request_fields(call, WEKA_REQUEST_FIELDS),
        duration_ns=parse_duration(call, "api_time", NS_PER_S),
        pause_ns=parse_duration(call, "think_time", NS_PER_S),
    )


def _weka_block_id(trace: _WekaTrace, id_in_trace: int) -> int:
    """Return an id that no block of another trace has. Ids of Weka are unique only in a trace.

    The upper 31 bits are those of the trace, and the lower 32 bits those of the block.
    """
    return (trace.id_prefix << 32) | (id_in_trace & WEKA_BLOCK_MASK)


class TraceLabParser:
    """Parses TraceLab's rounds of coding agents, which count the cached tokens of each prompt.

    The cached tokens are those of the prompt before it in its session, so that both begin with the
    same blocks. All other blocks are new.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, list[int]] = {}
        self._next_block = 0

    def parse_round(self, row: Mapping[str, object]) -> TraceRow:
        """Return the request of a round, which is one call of a model by a coding agent.

        The row has the events of the round, such as the user's message, the results of tools and
        the text of the model. The request is sent after the last input event, and its response
        ends with the last output event. Without an output event the duration is unknown.

        Raises:
            InvalidValueError: A field of the row is missing or has a wrong value.
        """
        sent_ns = _tracelab_sent_ns(row)
        output_times_ns = _tracelab_times_ns(row, TRACELAB_OUTPUTS)

        duration_ns = UNKNOWN_NS
        if output_times_ns:
            duration_ns = max(0, max(output_times_ns) - sent_ns)

        prompt_tokens = parse_token_count(
            row.get("input_tokens_total"), "input_tokens_total", minimum=1
        )
        cached_tokens = parse_token_count(row.get("prefix_tokens"), "prefix_tokens", minimum=0)
        session = parse_session(row)

        # This number includes the tokens of reasoning. A missing number counts as 0.
        output_tokens = parse_token_count(row.get("output_tokens") or 0, "output_tokens", minimum=0)
        return TraceRow(
            at_ns=sent_ns,
            input_tokens=prompt_tokens,
            output_tokens=output_tokens,
            hashes=self._assign_blocks(session, prompt_tokens, cached_tokens),
            block_tokens=float(TRACELAB_BLOCK_TOKENS),
            session=session,
            duration_ns=duration_ns,
        )

    def _assign_blocks(self, session: str, prompt_tokens: int, cached_tokens: int) -> list[int]:
        """Return the block ids of a prompt and keep them for the next prompt of the session."""
        reused_count = min(cached_tokens, prompt_tokens) // TRACELAB_BLOCK_TOKENS
        reused = self._blocks.get(session, [])[:reused_count]
        new_count = prompt_tokens // TRACELAB_BLOCK_TOKENS - len(reused)
        blocks = [*reused, *range(self._next_block, self._next_block + new_count)]
        self._next_block += new_count
        self._blocks[session] = blocks
        return blocks


def _tracelab_sent_ns(row: Mapping[str, object]) -> int:
    """Return when a request was sent: after its last input, or before its first output.

    Raises:
        InvalidValueError: The row has neither.
    """
    inputs_ns = _tracelab_times_ns(row, TRACELAB_INPUTS)
    if inputs_ns:
        return max(inputs_ns)

    outputs_ns = _tracelab_times_ns(row, TRACELAB_OUTPUTS)
    if outputs_ns:
        return min(outputs_ns)

    raise InvalidValueError(
        "missing_value",
        "timing_events has no timestamp",
        "use a user_message or a tool_result with a timestamp",
        "timing_events",
    )


def _tracelab_times_ns(row: Mapping[str, object], event_types: Sequence[str]) -> list[int]:
    """Return the times of the events of some types in a row, in ns since 1970."""
    return [
        parse_utc_date(str(event.get("timestamp")))
        for event in dicts_in(row.get("timing_events"))
        if event.get("event_type") in event_types
    ]
