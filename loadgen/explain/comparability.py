"""Checks whether our run and the result of another tool measured the same server and load. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

from loadgen.core.results.manifest import RunManifest, StagePlan
from loadgen.explain.other_result import OtherResult
from loadgen.explain.our_run import OurRun

SAME_LOAD_WITHIN = 0.01
"""Rates and lengths that differ by less than this share count as equal."""

MAX_TOKEN_RATIO = 1.5
"""Mean lengths of requests that differ by more than this factor come from different requests.

Two tokenizers, or a chat template that one tool counts, make a smaller difference.
"""

LOCAL_HOSTS = {"localhost": "127.0.0.1", "[::1]": "127.0.0.1", "0.0.0.0": "127.0.0.1"}
"""Names of this machine, by which the same server can be reached."""


class ComparedField(NamedTuple):
    """A property of the server or of the load. Empty texts are not known.

    Attributes:
        name: Its name.
        ours: Its value in our run.
        theirs: Its value in the other result.
    """

    name: str
    ours: str
    theirs: str

    @property
    def differs(self) -> bool:
        """Whether both values are known and differ."""
        return bool(self.ours and self.theirs) and self.ours != self.theirs

    @property
    def is_unknown(self) -> bool:
        """Whether the other result does not say what ours has."""
        return bool(self.ours) and not self.theirs


class Comparability(NamedTuple):
    """What is known about the two loads.

    Attributes:
        differences: The properties that differ, such as "concurrency: 16 vs. 8". Ours is first.
        unknown: The properties that the other file does not name.
        remarks: Further differences between the loads that change metrics, as sentences.
    """

    differences: tuple[str, ...]
    unknown: tuple[str, ...]
    remarks: tuple[str, ...]


def check_comparability(ours: OurRun, theirs: OtherResult) -> Comparability:
    """Return how the servers and loads of the two results differ, as far as this is known."""
    stage = _find_measured_stage(ours.manifest)
    fields = list(_list_fields(ours, theirs, stage))
    return Comparability(
        differences=tuple(
            f"{field.name}: {field.ours} vs. {field.theirs}" for field in fields if field.differs
        ),
        unknown=tuple(field.name for field in fields if field.is_unknown),
        remarks=tuple(_list_remarks(ours, theirs, stage)),
    )


def _find_measured_stage(manifest: RunManifest) -> StagePlan:
    """Return the first load stage that is measured, or an empty one if the run has no stages."""
    for stage in manifest.stages:
        if stage.measured:
            return stage
    return StagePlan()


def _list_fields(ours: OurRun, theirs: OtherResult, stage: StagePlan) -> Iterator[ComparedField]:
    """Yield the properties that must be equal for the metrics to be comparable."""
    facts = theirs.definitions.facts
    target = ours.summary.target
    yield ComparedField("model", target.model, theirs.result.model)
    yield ComparedField("server", _normalize_url(target.url), _normalize_url(theirs.result.target))

    concurrency = theirs.find_fact(facts.concurrency)
    rate_per_s = theirs.find_fact(facts.rate_per_s)
    yield _compare_load(stage, concurrency, rate_per_s)

    our_tokens = _mean_requested_tokens(ours)
    yield _compare_numbers("output tokens", our_tokens, theirs.find_fact(facts.output_tokens))
    yield from _list_different_lengths(ours, theirs)


def _list_different_lengths(ours: OurRun, theirs: OtherResult) -> Iterator[ComparedField]:
    """Yield the mean lengths of the requests that are too different for the same requests.

    They are computed from the counted tokens. Lengths that two tokenizers may give to the same text
    are left out.
    """
    counted_lengths = (
        (
            "counted prompt tokens per request",
            ours.compute_mean_tokens("input_tokens"),
            theirs.input_tokens_per_request,
        ),
        (
            "counted output tokens per request",
            ours.compute_mean_tokens("output_tokens"),
            theirs.output_tokens_per_request,
        ),
    )
    for name, our_length, their_length in counted_lengths:
        if not our_length or not their_length:
            continue
        if max(our_length, their_length) > MAX_TOKEN_RATIO * min(our_length, their_length):
            yield ComparedField(name, f"{our_length:.4g}", f"{their_length:.4g}")


def _compare_load(
    stage: StagePlan, concurrency: float | None, rate_per_s: float | None
) -> ComparedField:
    """Return our load and that of the other tool: each is a concurrency or a request rate.

    Args:
        stage: Our load.
        concurrency: The concurrency of the other tool, or None.
        rate_per_s: Its request rate, or None.
    """
    has_only_rate = concurrency is None and rate_per_s is not None
    if stage.concurrency and has_only_rate:
        return ComparedField(
            "load", ours=f"{stage.concurrency} in flight", theirs=f"{rate_per_s:g}/s"
        )
    if stage.concurrency:
        return _compare_numbers("concurrency", stage.concurrency, concurrency)

    has_only_concurrency = rate_per_s is None and concurrency is not None
    if stage.rate is not None and has_only_concurrency:
        return ComparedField("load", ours=f"{stage.rate:g}/s", theirs=f"{concurrency:g} in flight")
    return _compare_numbers("request rate", stage.rate, rate_per_s)


def _compare_numbers(name: str, ours: float | None, theirs: float | None) -> ComparedField:
    """Return a number of both sides. Numbers within SAME_LOAD_WITHIN have the same text."""
    our_text = "" if ours is None else f"{ours:g}"
    their_text = "" if theirs is None else f"{theirs:g}"
    if ours is not None and theirs is not None:
        is_equal = abs(ours - theirs) <= SAME_LOAD_WITHIN * max(abs(ours), abs(theirs))
        their_text = our_text if is_equal else their_text
    return ComparedField(name, our_text, their_text)


def _mean_requested_tokens(ours: OurRun) -> float | None:
    """Return the mean requested output tokens of our requests, or None without a request for it."""
    requested = ours.measured.columns["asked_output"]
    known = requested[requested > 0]
    return float(known.mean()) if len(known) else None


def _normalize_url(url: str) -> str:
    """Return host and port of a URL, so that two ways to write the same server are equal."""
    if not url:
        return ""
    host_and_port = urlsplit(url if "//" in url else f"//{url}").netloc.rpartition("@")[2]
    host, colon, port = host_and_port.rpartition(":")
    if not colon:
        return LOCAL_HOSTS.get(host_and_port, host_and_port)
    return f"{LOCAL_HOSTS.get(host, host)}:{port}"


def _list_remarks(ours: OurRun, theirs: OtherResult, stage: StagePlan) -> Iterator[str]:
    """Yield what else differs between the loads and changes metrics."""
    manifest: RunManifest = ours.manifest
    if stage.ramp_s and theirs.definitions.starts_at_once:
        yield (
            f"Our virtual users started over {stage.ramp_s:.2g} s, and those of "
            f"{theirs.definitions.tool} start at once. For the same start, add --stagger 0 to "
            "loadgen run."
        )
    if manifest.api != "chat":
        yield f"Our run used the API {manifest.api}. Check that the other tool used it, too."
