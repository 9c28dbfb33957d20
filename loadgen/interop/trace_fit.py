"""A workload fitted to a trace: its arrival process, its lengths, and how well each of them fits.

`fit_workload.py` writes it as a workload file and `fit_text.py` writes the report.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadgen.core import format, units
from loadgen.core.errors import UserError
from loadgen.core.units import NS_PER_S
from loadgen.core.workload.trace import NO_VALUE, Trace
from loadgen.interop.distribution_fits import (
    DistributionFit,
    fit_interarrival_times,
    fit_lengths,
    prefer_parametric,
)
from loadgen.interop.fit_conversations import (
    ConversationFit,
    Mask,
    TraceConversations,
    find_conversations,
    fit_conversations,
)
from loadgen.interop.trace_statistics import is_overdispersed, rank_correlation

MIN_REQUESTS = 20
"""Fewer requests are too few to fit distributions to."""
HOUR_NS = units.UNIT_NS["h"]
MIN_RATE_PER_S = 1e-6
"""The rate of an hour without arrivals. A workload needs a rate above 0."""
MIN_MEAN_GAP = 1e-9
"""Stands for a mean gap of 0, by which a variance cannot be divided."""
MIN_REUSED_SHARE = 0.01
"""Prompts with less in common are modelled without shared prefixes."""
MAX_PREFIXES = 1000
"""The most prefixes in a fitted workload. More make no difference to a server's cache."""
NOTABLE_TIE_SHARE = 0.01
"""Up to this share of simultaneous arrivals, the resolution of the recorded times does not matter.
"""
MAX_CLASS_NAME = 40
"""The most characters of a label in the name of a class, before a number is added."""

Gaps = NDArray[np.float64]
"""Times between arrivals, in multiples of their mean."""


class ArrivalFit(Struct, frozen=True, kw_only=True):
    """The arrival process of a trace. TraceConversations count as one arrival.

    Attributes:
        rates_per_s: The mean rate of the trace, or that of each hour if the rate varies.
        stage_ns: How long each of these rates lasts.
        gaps: The fits of the times between arrivals, the one that the workload uses first.
        clock_step_ns: The resolution of the recorded times, 0 if it is too fine to matter.
    """

    rates_per_s: tuple[float, ...]
    stage_ns: tuple[int, ...]
    gaps: tuple[DistributionFit, ...]
    clock_step_ns: int

    @property
    def is_hourly(self) -> bool:
        """Whether the rate varies, so that each hour has a rate of its own."""
        return len(self.rates_per_s) > 1


class RequestFit(Struct, frozen=True, kw_only=True):
    """The lengths and shared prefixes of requests. In each tuple, the fit to use is first.

    Attributes:
        input_tokens: The fits of prompt lengths.
        output_tokens: The fits of response lengths.
        reused_share: The share of prompt tokens that an unlimited prefix cache would contain.
        prefixes: How many prefixes the workload shares between prompts, 0 for none.
    """

    input_tokens: tuple[DistributionFit, ...]
    output_tokens: tuple[DistributionFit, ...]
    reused_share: float
    prefixes: int


class ClassFit(RequestFit, frozen=True, kw_only=True):
    """A class of requests: those with one label, either in conversations or alone.

    Attributes:
        name: The name of the class in the workload.
        requests: The number of its requests in the trace.
        arrivals: The number of its conversations, or of its requests that stand alone.
        conversations: The distributions of its conversations, None if its requests stand alone.
    """

    name: str
    requests: int
    arrivals: int
    conversations: ConversationFit | None = None


class TraceFit(RequestFit, frozen=True, kw_only=True):
    """A workload fitted to a trace, and what the workload cannot reproduce.

    Attributes:
        trace: The trace.
        arrivals: The arrival process.
        length_correlation: The rank correlation of prompt and response lengths. A workload draws
            them independently.
        sessions: The number of sessions that the trace names.
        conversations: The number of conversations that the workload describes.
        conversations_lost_reason: Why the workload does not describe conversations, "" if it does
            or if there are none.
        subagents: The number of sub-agent conversations, which the workload starts independently.
        classes: The classes of requests, if the trace has labels or conversations.
    """

    trace: Trace
    arrivals: ArrivalFit
    length_correlation: float
    sessions: int
    conversations: int = 0
    conversations_lost_reason: str = ""
    subagents: int = 0
    classes: tuple[ClassFit, ...] = ()


class _PrefixReuse(NamedTuple):
    """How much of the prompts repeats earlier prompts, and by how many shared prefixes."""

    share: float
    prefixes: int


class _ClassRows(NamedTuple):
    """The requests of one class of the workload.

    Attributes:
        label: The index of their label in the labels of the trace, or NO_VALUE without a label.
        are_conversations: Whether they are all in conversations, or all on their own.
        mask: For each request of the trace, whether it belongs to the class.
    """

    label: int
    are_conversations: bool
    mask: Mask


def fit_trace(trace: Trace) -> TraceFit:
    """Fit a workload to a trace.

    Arrivals are only requests that begin a conversation or stand alone, because a workload sends
    the later requests of a conversation after the responses before them.

    Raises:
        UserError: There are too few requests, or all of them arrive at the same time.
    """
    _check_requests(trace)
    conversations = find_conversations(trace)
    arrivals = trace.select(conversations.starts)
    _check_arrivals(arrivals)
    reuse = _measure_prefix_reuse(trace)

    return TraceFit(
        trace=trace,
        arrivals=_fit_arrivals(arrivals),
        input_tokens=prefer_parametric(fit_lengths(trace.input_tokens)),
        output_tokens=prefer_parametric(fit_lengths(trace.output_tokens)),
        length_correlation=rank_correlation(trace.input_tokens, trace.output_tokens),
        reused_share=reuse.share,
        prefixes=reuse.prefixes,
        sessions=int(trace.session.max()) + 1,
        conversations=len(np.unique(trace.session[conversations.later])),
        conversations_lost_reason=conversations.not_modelled_reason,
        subagents=conversations.subagents,
        classes=_fit_classes(trace, conversations),
    )


def _check_requests(trace: Trace) -> None:
    """Check that a trace has enough requests to fit distributions to, and not all at one time.

    Raises:
        UserError: There are too few requests, or no gaps between them.
    """
    if len(trace) < MIN_REQUESTS:
        raise UserError(
            "too_few",
            f"{format.counted(len(trace), 'request')} are too few to fit distributions",
            str(trace.path),
            f"use a trace with {MIN_REQUESTS} requests or more",
        )
    # The first request is at 0, so the times are all equal if the last one is at 0, too.
    if trace.end_ns == 0:
        raise UserError(
            "too_few",
            "distributions cannot be fitted, because all requests have the same time",
            str(trace.path),
            "replay the trace instead: --set trace_replay=sessions",
        )


def _check_arrivals(arrivals: Trace) -> None:
    """Raise UserError if too few requests begin a conversation or stand alone."""
    if len(arrivals) < MIN_REQUESTS or arrivals.end_ns == 0:
        problem = f"{len(arrivals)} conversation starts are too few to fit distributions"
        raise UserError("too_few", problem, str(arrivals.path), "a longer trace")


# -- arrivals ------------------------------------------------------------------------------------


class _HourlyArrivals(NamedTuple):
    """The arrivals of a trace by hour.

    Attributes:
        hours: The hour of each arrival, from 0.
        counts: The number of arrivals in each hour.
        length_ns: The length of each hour. The last one ends with the trace.
    """

    hours: NDArray[np.int64]
    counts: NDArray[np.int64]
    length_ns: NDArray[np.int64]

    @property
    def rates_per_ns(self) -> NDArray[np.float64]:
        """The rate of each hour."""
        rates: NDArray[np.float64] = self.counts / self.length_ns
        return rates

    @property
    def full_hour_counts(self) -> list[int]:
        """The counts without that of a last hour that is shorter than the others."""
        has_partial_hour = len(self.counts) > 1 and self.length_ns[-1] < HOUR_NS
        counts: list[int] = self.counts.tolist()
        return counts[:-1] if has_partial_hour else counts


class _ArrivalRates(NamedTuple):
    """The rates of arrivals, one after the other, and the gaps that remain to be modelled.

    Attributes:
        rates_per_s: The mean rate of the trace, or that of each hour.
        stage_ns: How long each rate lasts.
        gaps: The gaps between arrivals in multiples of the mean gap at their rate.
    """

    rates_per_s: tuple[float, ...]
    stage_ns: tuple[int, ...]
    gaps: Gaps


def _fit_arrivals(arrivals: Trace) -> ArrivalFit:
    """Fit an arrival process: its rates, and the distribution of the gaps between arrivals.

    Gaps are fitted in multiples of the mean gap. Timestamps of many traces are rounded, for example
    to seconds, which the fit of the gaps takes into account.
    """
    rates = _find_rates(arrivals)
    clock_step_ns = _find_clock_step_ns(arrivals.due_ns)
    mean_gap_ns = NS_PER_S / arrivals.rate
    gap_fits = fit_interarrival_times(rates.gaps, clock_step=clock_step_ns / mean_gap_ns)

    return ArrivalFit(
        rates_per_s=rates.rates_per_s,
        stage_ns=rates.stage_ns,
        gaps=tuple(gap_fits),
        clock_step_ns=clock_step_ns,
    )


def _find_rates(arrivals: Trace) -> _ArrivalRates:
    """Return the rate of each hour if the rate of a trace varies, and otherwise its mean rate."""
    hourly = _group_by_hour(arrivals)
    hourly_gaps = _relative_gaps(arrivals.due_ns, hourly.hours, hourly.rates_per_ns)
    if not _has_varying_rate(hourly, hourly_gaps):
        return _ArrivalRates(
            rates_per_s=(arrivals.rate,),
            stage_ns=(arrivals.end_ns,),
            gaps=_relative_gaps_at_mean_rate(arrivals),
        )

    hourly_rates_per_s = hourly.rates_per_ns * NS_PER_S
    return _ArrivalRates(
        rates_per_s=tuple(max(float(rate), MIN_RATE_PER_S) for rate in hourly_rates_per_s),
        stage_ns=tuple(hourly.length_ns.tolist()),
        gaps=hourly_gaps,
    )


def _group_by_hour(arrivals: Trace) -> _HourlyArrivals:
    """Return the arrivals by hour, counted from the first one."""
    hours = arrivals.due_ns // HOUR_NS
    counts = np.bincount(hours)
    length_ns = np.full(len(counts), HOUR_NS)
    length_ns[-1] = arrivals.end_ns - (len(counts) - 1) * HOUR_NS
    return _HourlyArrivals(hours, counts, length_ns)


def _has_varying_rate(hourly: _HourlyArrivals, relative_gaps: Gaps) -> bool:
    """Return True if the rate of a trace differs from hour to hour by more than chance explains.

    Bursts make the numbers of arrivals in equal hours differ even at a constant rate. How much they
    differ then, follows from the gaps between arrivals: for independent gaps (a renewal process),
    the variance of a count divided by its mean is the squared coefficient of variation of the gaps.

    Args:
        hourly: The arrivals by hour.
        relative_gaps: The gaps within hours, in multiples of the mean gap of their hour.
    """
    if len(hourly.counts) < 2:
        return False
    mean_gap = max(float(relative_gaps.mean()), MIN_MEAN_GAP)
    squared_cv_of_gaps = float(relative_gaps.var()) / mean_gap**2
    return is_overdispersed(hourly.full_hour_counts, dispersion=squared_cv_of_gaps)


def _relative_gaps(
    due_ns: NDArray[np.int64], stages: NDArray[np.int64], rates_per_ns: NDArray[np.float64]
) -> Gaps:
    """Return the gaps between arrivals of the same stage, in multiples of the stage's mean gap.

    Gaps of stages with different rates become comparable in this way. Without two arrivals in the
    same stage, the result is one gap of the mean length.

    Args:
        due_ns: When each request arrived, in order.
        stages: The number of the stage of each request.
        rates_per_ns: The rate of each stage.
    """
    gaps_ns = np.diff(due_ns)
    is_within_stage = stages[1:] == stages[:-1]
    if not is_within_stage.any():
        return np.ones(1)
    rates_of_gaps = rates_per_ns[stages[1:]]
    relative_gaps: Gaps = (gaps_ns * rates_of_gaps)[is_within_stage]
    return relative_gaps


def _relative_gaps_at_mean_rate(arrivals: Trace) -> Gaps:
    """Return the gaps between all arrivals in multiples of their mean gap."""
    stages = np.zeros(len(arrivals), np.int64)
    rate_per_ns = len(arrivals) / arrivals.end_ns
    return _relative_gaps(arrivals.due_ns, stages, np.array([rate_per_ns]))


def _find_clock_step_ns(due_ns: NDArray[np.int64]) -> int:
    """Return the step of which all times are multiples, or 0 if it is too fine to matter.

    It matters if it makes a notable share of the requests appear to arrive at the same time.
    """
    clock_step_ns = int(np.gcd.reduce(due_ns))
    tie_share = (np.diff(due_ns) == 0).mean()
    return clock_step_ns if tie_share > NOTABLE_TIE_SHARE else 0


# -- classes -------------------------------------------------------------------------------------


def _fit_classes(trace: Trace, conversations: TraceConversations) -> tuple[ClassFit, ...]:
    """Return the classes of the requests of a trace, or () if they are all of one kind.

    The requests of a label are one class, or two if only some of them are in conversations.
    Requests without a label, and those of labels with fewer than MIN_REQUESTS, form the class
    "other".
    """
    groups = _divide_into_classes(trace, conversations)
    if len(groups) == 1 and not groups[0].are_conversations:
        return ()

    has_labels = len({group.label for group in groups}) > 1
    names: set[str] = set()

    classes = []
    for group in groups:
        title = _class_title(trace, group) if has_labels else _title_without_label(group)
        name = _unique_class_name(title, names)
        names.add(name)
        classes.append(_fit_class(trace, conversations, group, name))

    return tuple(classes)


def _divide_into_classes(trace: Trace, conversations: TraceConversations) -> list[_ClassRows]:
    """Divide the requests of a trace into classes of the workload, and leave out empty classes.

    The requests of a class have the same label, and they are either all in conversations or all on
    their own. For example, requests with the labels "chat" and "search", of which only the former
    are in conversations, are two classes.
    """
    labels = _merge_rare_labels(
        _labels_by_conversation(trace, conversations), label_count=len(trace.labels)
    )
    groups = []

    # Requests without a label, or with a rare one, have NO_VALUE in place of the label.
    for label in (NO_VALUE, *range(len(trace.labels))):
        has_label = labels == label
        for are_conversations in (False, True):
            mask = has_label & (conversations.is_member == are_conversations)
            if mask.any():
                groups.append(_ClassRows(label, are_conversations, mask))

    return groups


def _labels_by_conversation(trace: Trace, conversations: TraceConversations) -> NDArray[np.int64]:
    """Return the label of each request, where a conversation has the label of its first request."""
    labels = np.array(trace.label)
    # The requests of a conversation are in order of time, so the label is passed on from the first.
    for later, previous in zip(
        conversations.later.tolist(), conversations.previous.tolist(), strict=True
    ):
        labels[later] = labels[previous]
    return labels


def _merge_rare_labels(labels: NDArray[np.int64], label_count: int) -> NDArray[np.int64]:
    """Return the labels with NO_VALUE in place of those of fewer than MIN_REQUESTS requests."""
    counts = np.bincount(labels[labels >= 0], minlength=label_count)
    rare_labels = np.flatnonzero(counts < MIN_REQUESTS)
    return np.where(np.isin(labels, rare_labels), NO_VALUE, labels)


def _fit_class(
    trace: Trace, conversations: TraceConversations, rows: _ClassRows, name: str
) -> ClassFit:
    """Fit the distributions of one class of requests."""
    requests = trace.select(np.flatnonzero(rows.mask))
    reuse = _measure_prefix_reuse(requests)

    conversation_fit = None
    if rows.are_conversations:
        conversation_fit = fit_conversations(trace, conversations, rows.mask)

    return ClassFit(
        name=name,
        requests=len(requests),
        arrivals=int(rows.mask[conversations.starts].sum()),
        conversations=conversation_fit,
        input_tokens=prefer_parametric(fit_lengths(requests.input_tokens)),
        output_tokens=prefer_parametric(fit_lengths(requests.output_tokens)),
        reused_share=reuse.share,
        prefixes=reuse.prefixes,
    )


def _title_without_label(rows: _ClassRows) -> str:
    """Return the title of a class in a trace whose classes differ by conversations only."""
    return "conversations" if rows.are_conversations else "single"


def _class_title(trace: Trace, rows: _ClassRows) -> str:
    label = "other" if rows.label == NO_VALUE else trace.labels[rows.label]
    return f"{label} conversations" if rows.are_conversations else label


def _unique_class_name(title: str, existing_names: set[str]) -> str:
    """Return a title as a valid name of a class: letters, digits and dashes, and not yet used."""
    base = re.sub(r"[^A-Za-z0-9]+", "-", title).strip("-")[:MAX_CLASS_NAME] or "label"
    name = base
    number = 2
    while name in existing_names:
        name = f"{base}-{number}"
        number += 1
    return name


def _measure_prefix_reuse(trace: Trace) -> _PrefixReuse:
    """Return the share of prompt tokens that repeat earlier ones, and the number of prefixes.

    The number of prefixes is 0 if the share is too small to matter. Otherwise it is estimated by
    the number of ways in which several prompts begin, but it is at least 1, because tokens are
    reused, and at most MAX_PREFIXES.
    """
    share = trace.reused_share() or 0.0
    if share < MIN_REUSED_SHARE:
        return _PrefixReuse(share, prefixes=0)
    shared_beginnings = _count_shared_first_blocks(trace)
    return _PrefixReuse(share, prefixes=min(max(shared_beginnings, 1), MAX_PREFIXES))


def _count_shared_first_blocks(trace: Trace) -> int:
    """Return how many different first blocks are those of several prompts.

    A prompt is a list of block hashes. Prompts with the same first hash begin with the same text.
    `trace.hashes` has the hashes of all prompts, one prompt after the other, and
    `trace.hash_starts` has the index at which each prompt starts there, and the end of the last.
    """
    starts = trace.hash_starts[:-1]
    ends = trace.hash_starts[1:]
    has_hashes = ends > starts
    first_hashes = trace.hashes[starts[has_hashes]]
    _, prompts_per_hash = np.unique(first_hashes, return_counts=True)
    return int((prompts_per_hash > 1).sum())
