"""Checks whether our run and the result of another tool measured the same server and load. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

from loadgen.core.results.manifest import RunManifest, StagePlan
from loadgen.explain.other_result import OtherResult
from loadgen.explain.our_run import LoadgenRun

SAME_LOAD_WITHIN = 0.01
"""Rates and lengths that differ by less than this share count as equal."""

MAX_TOKEN_RATIO = 1.5
"""Mean lengths of requests that differ by more than this factor come from different requests.

Two tokenizers, or a chat template that one tool counts, make a smaller difference.
"""

LOCAL_HOSTS = {"localhost": "127.0.0.1", "[::1]": "127.0.0.1", "0.0.0.0": "127.0.0.1"}
"""Names of this machine, by which the same server can be reached."""


class ComparedField(NamedTuple):
    """A property of the server or of the load, as text. An unknown value is "".

    Attributes:
        name: The name of the property, such as "concurrency".
        loadgen_value: The value in the run of loadgen.
        other_value: The value in the result of the other tool.
    """

    name: str
    loadgen_value: str
    other_value: str

    @property
    def differs(self) -> bool:
        """Whether both values are known and differ."""
        is_known = bool(self.loadgen_value and self.other_value)
        return is_known and self.loadgen_value != self.other_value

    @property
    def is_unknown(self) -> bool:
        """Whether only the run of loadgen has a value."""
        return bool(self.loadgen_value) and not self.other_value


class Comparability(NamedTuple):
    """How the loads of a run of loadgen and of another tool differ.

    Attributes:
        differences: The properties that differ, such as "concurrency: 16 vs. 8". The value of
            loadgen is first.
        unknown: The properties that the file of the other tool does not name.
        remarks: Further differences between the loads that change metrics, as sentences.
    """

    differences: tuple[str, ...]
    unknown: tuple[str, ...]
    remarks: tuple[str, ...]


def check_comparability(loadgen_run: LoadgenRun, other_result: OtherResult) -> Comparability:
    """Return how the servers and loads of the two results differ, as far as this is known."""
    stage = _find_measured_stage(loadgen_run.manifest)
    fields = list(_list_fields(loadgen_run, other_result, stage))
    differences = [
        f"{field.name}: {field.loadgen_value} vs. {field.other_value}"
        for field in fields
        if field.differs
    ]
    unknown_names = [field.name for field in fields if field.is_unknown]
    remarks = _list_remarks(loadgen_run, other_result, stage)
    return Comparability(tuple(differences), tuple(unknown_names), tuple(remarks))


def _find_measured_stage(manifest: RunManifest) -> StagePlan:
    """Return the first load stage that is measured, or an empty one if the run has no stages."""
    for stage in manifest.stages:
        if stage.measured:
            return stage
    return StagePlan()


def _list_fields(
    loadgen_run: LoadgenRun, other_result: OtherResult, stage: StagePlan
) -> Iterator[ComparedField]:
    """Yield the properties that must be equal for the metrics to be comparable.

    Args:
        loadgen_run: The run of loadgen.
        other_result: The result of the other tool.
        stage: The measured load of loadgen's run.
    """
    target = loadgen_run.summary.target
    other_target = other_result.result.target
    yield ComparedField("model", target.model, other_result.result.model)
    yield ComparedField("server", _normalize_url(target.url), _normalize_url(other_target))

    facts = other_result.definitions.facts
    other_concurrency = other_result.find_fact(facts.concurrency)
    other_rate_per_s = other_result.find_fact(facts.rate_per_s)
    yield _compare_load(stage, other_concurrency, other_rate_per_s)

    loadgen_tokens = _mean_requested_tokens(loadgen_run)
    other_tokens = other_result.find_fact(facts.output_tokens)
    yield _compare_numbers("output tokens", loadgen_tokens, other_tokens)

    yield from _list_different_lengths(loadgen_run, other_result)


class _CountedLength(NamedTuple):
    """The mean tokens of a request as both tools counted them. None if unknown."""

    name: str
    loadgen_tokens: float | None
    other_tokens: float | None


def _list_different_lengths(
    loadgen_run: LoadgenRun, other_result: OtherResult
) -> Iterator[ComparedField]:
    """Yield the mean token counts of a request that differ by more than MAX_TOKEN_RATIO.

    Two tools that sent the same requests may count 100 and 110 tokens with two tokenizers, but not
    100 and 200.
    """
    lengths = [
        _CountedLength(
            name="counted prompt tokens per request",
            loadgen_tokens=loadgen_run.compute_mean_tokens("input_tokens"),
            other_tokens=other_result.input_tokens_per_request,
        ),
        _CountedLength(
            name="counted output tokens per request",
            loadgen_tokens=loadgen_run.compute_mean_tokens("output_tokens"),
            other_tokens=other_result.output_tokens_per_request,
        ),
    ]
    for length in lengths:
        if not length.loadgen_tokens or not length.other_tokens:
            continue

        smaller_count = min(length.loadgen_tokens, length.other_tokens)
        larger_count = max(length.loadgen_tokens, length.other_tokens)
        if larger_count > MAX_TOKEN_RATIO * smaller_count:
            loadgen_text = f"{length.loadgen_tokens:.4g}"
            other_text = f"{length.other_tokens:.4g}"
            yield ComparedField(length.name, loadgen_text, other_text)


def _compare_load(
    stage: StagePlan, other_concurrency: float | None, other_rate_per_s: float | None
) -> ComparedField:
    """Return the loads of loadgen and of the other tool, so that they can be compared.

    A load is either a number of requests in flight (concurrency) or a request rate. If the two
    tools use different kinds of load, both are described as texts, which differ.

    Args:
        stage: The load of loadgen's run.
        other_concurrency: The requests in flight of the other tool, or None.
        other_rate_per_s: The request rate of the other tool, or None.
    """
    has_concurrency = bool(stage.concurrency)
    has_rate = stage.rate is not None
    other_has_only_rate = other_concurrency is None and other_rate_per_s is not None
    other_has_only_concurrency = other_rate_per_s is None and other_concurrency is not None

    if has_concurrency and other_has_only_rate:
        return ComparedField("load", f"{stage.concurrency} in flight", f"{other_rate_per_s:g}/s")
    if has_concurrency:
        return _compare_numbers("concurrency", stage.concurrency, other_concurrency)
    if has_rate and other_has_only_concurrency:
        return ComparedField("load", f"{stage.rate:g}/s", f"{other_concurrency:g} in flight")
    return _compare_numbers("request rate", stage.rate, other_rate_per_s)


def _compare_numbers(
    name: str, loadgen_number: float | None, other_number: float | None
) -> ComparedField:
    """Return a number of loadgen and of another tool as texts, "" for an unknown number.

    Texts are compared for equality, so numbers that differ by at most SAME_LOAD_WITHIN get the same
    text: 100 and 100.5 are both "100".
    """
    loadgen_text = "" if loadgen_number is None else f"{loadgen_number:g}"
    if _is_nearly_equal(loadgen_number, other_number):
        return ComparedField(name, loadgen_text, loadgen_text)

    other_text = "" if other_number is None else f"{other_number:g}"
    return ComparedField(name, loadgen_text, other_text)


def _is_nearly_equal(first: float | None, second: float | None) -> bool:
    """Return True if two known numbers differ by at most SAME_LOAD_WITHIN of the larger one."""
    if first is None or second is None:
        return False
    return abs(first - second) <= SAME_LOAD_WITHIN * max(abs(first), abs(second))


def _mean_requested_tokens(loadgen_run: LoadgenRun) -> float | None:
    """Return the mean output tokens that requests asked for, or None if no request has a number."""
    requested_tokens = loadgen_run.measured.columns["asked_output"]
    known_tokens = requested_tokens[requested_tokens > 0]
    return float(known_tokens.mean()) if len(known_tokens) else None


def _normalize_url(url: str) -> str:
    """Return the server of a URL as "host:port", without the scheme, user name and path.

    Names of the local machine become its address, so that two URLs of a server are equal:
    "http://localhost:8000/v1" and "127.0.0.1:8000" are both "127.0.0.1:8000". A URL without a port
    has only the host. Return "" for an empty URL.
    """
    if not url:
        return ""

    # Without "//", urlsplit would take the host for a path.
    url_with_slashes = url if "//" in url else f"//{url}"
    _, _, host_and_port = urlsplit(url_with_slashes).netloc.rpartition("@")
    host, colon, port = host_and_port.rpartition(":")
    if not colon:
        return LOCAL_HOSTS.get(host_and_port, host_and_port)
    return f"{LOCAL_HOSTS.get(host, host)}:{port}"


def _list_remarks(
    loadgen_run: LoadgenRun, other_result: OtherResult, stage: StagePlan
) -> Iterator[str]:
    """Yield sentences on what else may differ between the loads: the start, and the API.

    Args:
        loadgen_run: The run of loadgen.
        other_result: The result of the other tool.
        stage: The measured load of loadgen's run. Its virtual users start over `ramp_s` seconds.
    """
    definitions = other_result.definitions
    if stage.ramp_s and definitions.starts_at_once:
        yield (
            f"Our virtual users started over {stage.ramp_s:.2g} s, and those of "
            f"{definitions.tool} start at once. For the same start, add --stagger 0 "
            "to loadgen run."
        )

    api = loadgen_run.manifest.api
    if api != "chat":
        yield f"Our run used the API {api}. Check that the other tool used it, too."
