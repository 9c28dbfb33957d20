"""Reads requests from records for OpenTelemetry, by the GenAI conventions. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from loadgen.core.metrics.columns import OK, Columns
from loadgen.core.results.manifest import RunManifest
from loadgen.core.results.record import KINDS, STATUSES


class SentRequest(NamedTuple):
    """A request that was sent: columns of its record, and its latencies.

    The names and units of the fields are those of `record.ROW`. `ttft` and `tpot` are in
    nanoseconds.
    """

    slot: int
    target: int
    status: int
    kind: int
    due_ns: int
    sent_ns: int
    first_token_ns: int
    done_ns: int
    http_status: int
    finish_reason: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    output_source: int
    ttft: int
    tpot: int

    @property
    def error(self) -> str:
        """The kind of the error, or "" for a successful request."""
        if self.status == OK:
            return ""
        return KINDS[self.kind] or STATUSES[self.status]


# The fields of `SentRequest` that are computed from a record, and those that are columns of it.
# `iterate_sent_requests` relies on the order: the class has the columns first.
_MEASURES = ("ttft", "tpot")
_COLUMNS = tuple(name for name in SentRequest._fields if name not in _MEASURES)


def iterate_sent_requests(columns: Columns) -> Iterator[SentRequest]:
    """Yield the requests that were sent, and skip those that were dropped or cancelled before.

    Columns are converted to lists a block at a time, which is many times faster than reading each
    value from its array.
    """
    for block in columns.blocks():
        # One list of values for each field of `SentRequest`. `zip` turns them into one tuple of
        # fields for each request.
        values_by_field = [block[name].tolist() for name in _COLUMNS]
        values_by_field += [block.measure(name).tolist() for name in _MEASURES]
        for request in map(SentRequest._make, zip(*values_by_field, strict=True)):
            if request.sent_ns >= 0:  # A request that was never sent has -1.
                yield request


def get_operation_name(manifest: RunManifest) -> str:
    """Return the operation that all requests of a run are, such as "chat"."""
    return "chat" if manifest.api in ("chat", "messages") else "text_completion"


def build_target_attributes(manifest: RunManifest, target: int) -> dict[str, Any]:
    """Return the attributes that all requests to a target share, by the GenAI conventions.

    `target` is its index in the manifest.
    """
    facts = manifest.targets[target]
    url = urlsplit(facts.url)
    return {
        "gen_ai.operation.name": get_operation_name(manifest),
        "gen_ai.provider.name": facts.server or "unknown",
        "gen_ai.request.model": facts.model,
        "server.address": url.hostname or "",
        "server.port": url.port or 0,
        "loadgen.run": manifest.run,
    }
