"""The figures of requests, one row each: what they are called and mean, what they rest on, and where they are shown.

A leaf, like every table: a row names its functions as text. Accumulator, summary, SLO, registry, text, page, compare,
Prometheus and `docs/summary.md` go by these rows. A figure is one value per request (or one per gap, or per event, of
all requests together); the summary holds their distribution.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any, Literal

from msgspec import Struct

from loadgen.plugins import OpenTable

Place = Literal["slo", "contract", "latency", "client", "requests", "prometheus"]
PLACES: dict[Place, str] = {
    "slo": "what `--slo`, `--stop-when` and the `slo` of a workload may limit",
    "contract": "what a contract may promise",
    "latency": "table of latencies of text and page",
    "client": "table of the load generator itself",
    "requests": "column of `Run.requests()`",
    "prometheus": "histogram of `--prometheus`",
}
"""Where a figure can be shown or named, beside summary.json and `compare`, which have all of them."""


class FigureRow(Struct, frozen=True):
    """One figure. Instants and times are ns; of another unit than ms, values are millionths of it, as ns are of a ms.

    name: its key. words: its name for readers. meaning: its definition, in one line. unit: that of the summary.
    values: (Columns) -> int64 for every row, `columns.UNDEFINED` where it has none; "": it has none per request.
    sample: of which requests there are values: ok, sent; or pooled over all gaps, or all events, of all requests.
    needs: what an answer must have for it: nothing, output, a stream, or tokens enough.
    least: (Columns) -> for each unfinished request at least how large the value would have become; "": not known.
    guards: the codes of `metrics.reasons` that withhold it.
    better: -1 lower is better, +1 higher, 0 neither. compared: the quantiles that `compare` shows without being asked.
    block: where it stands in the summary; "": a field of its own.
    shown: see PLACES. under: its words in a table, beneath the figure before it. unlike: the figure that it must differ
    from to be shown in a table.
    """

    name: str
    words: str
    meaning: str
    values: str = ""
    sample: Literal["ok", "sent", "gaps", "events"] = "ok"
    unit: str = "ms"
    needs: Literal["", "output", "stream", "tokens"] = "output"
    least: str = ""
    guards: tuple[str, ...] = ()
    better: Literal[-1, 0, 1] = -1
    compared: tuple[str, ...] = ()
    block: str = "figures"
    shown: tuple[Place, ...] = ()
    under: str = ""
    unlike: str = ""

    @property
    def field(self) -> str:
        """Its key in its block of the summary: `ttft_ms`."""
        return f"{self.name}_ms" if self.unit == "ms" else self.name

    @property
    def path(self) -> str:
        """Where its distribution stands in the summary: `ttft_ms`, `figures.thinking_ms`."""
        return f"{self.block}.{self.field}" if self.block else self.field


class FigureTable(OpenTable[FigureRow]):
    """The table, which is asked for all its rows in every run: a cache says whether there are any but ours."""

    def here(self) -> tuple[FigureRow, ...]:
        """Ours, and those of other packages, which count as used."""
        if not self._wanted or self._none_told:
            return self.own
        for plugin in self.plugins:
            if plugin.row is not None:
                self._note(plugin)
        return (*self.own, *self.others())

    @cached_property
    def _none_told(self) -> bool:
        return not self.told("name")

    def called(self, name: str) -> FigureRow | None:
        """The row of a name among those that are here."""
        return next((row for row in self.here() if row.name == name), None)

    def at(self, place: Place) -> tuple[FigureRow, ...]:
        """The rows that are shown at a place; of other packages, only a time per request can be limited."""
        found = [row for row in self.here() if place in row.shown]
        if place in ("slo", "contract"):
            found = [row for row in found if row in self.own or (row.values and row.unit == "ms")]
        return tuple(found)

    def values(self, name: str) -> Any:
        """The function of a figure that has a value per request. Raises KeyError for a name of none."""
        return _own_values(name) or self._values_of_others(name)

    def _values_of_others(self, name: str) -> Any:
        row = self.called(name)
        if row is None or not row.values:
            raise KeyError(name)
        return self.function(row, row.values, _one_each)


def _one_each(found: Any, columns: Any) -> None:
    """What a plug-in's figure gives."""
    if getattr(found, "shape", None) != (len(columns),) or found.dtype.kind not in "iu":
        given = (
            f"{found.dtype} of shape {found.shape}"
            if hasattr(found, "dtype")
            else type(found).__name__
        )
        raise TypeError(f"it gave {given}, not an int64 for each of {len(columns)} requests")


_COLUMNS = "loadgen.core.metrics.columns"
_OUTCOMES = "loadgen.core.metrics.outcomes"

FIGURES = FigureTable(
    "loadgen.figures",
    FigureRow,
    (
        FigureRow(
            name="ttft",
            words="TTFT",
            meaning="time to first token: first event with generated output - due. Role-only, empty and comment events "
            "do not count, reasoning does; waiting for a connection and the generator's lateness do",
            values=f"{_COLUMNS}:ttft",
            least=f"{_OUTCOMES}:least_ttft",
            compared=("p50", "p99"),
            block="",
            shown=("slo", "contract", "latency", "requests", "prometheus"),
        ),
        FigureRow(
            name="ttft_from_sent",
            words="TTFT from sent",
            meaning="first token - sent",
            values=f"{_COLUMNS}:ttft_from_sent",
            least=f"{_OUTCOMES}:least_ttft_from_sent",
            block="",
            shown=("slo", "contract", "latency", "requests"),
            under="from sent",
        ),
        FigureRow(
            name="first_answer",
            words="First answer",
            meaning="first output that is not reasoning - due",
            values=f"{_COLUMNS}:first_answer",
            least=f"{_OUTCOMES}:least_first_answer",
            block="",
            shown=("slo", "contract", "latency", "requests"),
            under="first answer",
            unlike="ttft",
        ),
        FigureRow(
            name="tpot",
            words="TPOT",
            meaning="time per output token of one request: (last token - first token) / (n - n1); n output tokens as "
            "the server counts them less reasoning that was never streamed, n1 tokens of the first output event where "
            "the server says it, else 1. None where n <= n1, and where all output came at one instant (one event, one "
            "write): there is no span",
            values=f"{_COLUMNS}:tpot",
            needs="tokens",
            least=f"{_OUTCOMES}:least_tpot",
            guards=("tpot_unsure", "counts_contradict"),
            compared=("p50", "p99"),
            block="",
            shown=("slo", "contract", "latency", "requests", "prometheus"),
        ),
        FigureRow(
            name="tpot_mlperf",
            words="TPOT (MLPerf)",
            meaning="LoadGen's: (e2e - ttft) // (n - 1), both from due",
            values=f"{_COLUMNS}:tpot_mlperf",
            needs="tokens",
            least=f"{_OUTCOMES}:least_tpot_mlperf",
            guards=("tpot_unsure", "counts_contradict"),
            block="",
        ),
        FigureRow(
            name="e2e_per_token",
            words="E2E per token",
            meaning="normalised TPOT: E2E / n, n output tokens as the server counts them; the wait for the first token "
            "is inside. None where n is 0 or not known",
            values=f"{_COLUMNS}:e2e_per_token",
            least=f"{_OUTCOMES}:least_e2e_per_token",
            needs="tokens",
            guards=("counts_contradict",),
            shown=("slo", "requests"),
        ),
        FigureRow(
            name="acceptance",
            words="Accepted drafts",
            meaning="of speculative decoding: accepted / drafted tokens of a request, as the server accounts for it",
            values=f"{_COLUMNS}:acceptance",
            unit="%",
            better=1,
            shown=("requests",),
        ),
        FigureRow(
            name="accepted_length",
            words="Accepted length",
            meaning="of speculative decoding: output tokens / (output tokens - accepted ones) of a request: tokens of "
            "a step, the model's own counted",
            values=f"{_COLUMNS}:accepted_length",
            unit="tokens",
            needs="tokens",
            guards=("counts_contradict",),
            better=1,
            shown=("requests",),
        ),
        FigureRow(
            name="itl",
            words="ITL",
            meaning="inter-token latency: the gaps between events, when every event carries one token; else it is not "
            "given, and `itl_absent` says why",
            sample="gaps",
            needs="stream",
            guards=("events_unsure", "counts_contradict"),
            block="",
            shown=("contract", "latency"),
        ),
        FigureRow(
            name="inter_chunk",
            words="Gap between events",
            meaning="every gap between successive output events, all requests pooled; quantiles from a histogram, "
            "wrong by at most 0.1 %; count, mean, min and max exact",
            sample="gaps",
            needs="stream",
            guards=("events_unsure",),
            block="",
            shown=("contract", "latency"),
        ),
        FigureRow(
            name="e2e",
            words="E2E",
            meaning="last output or finish event - due; never the end of the body",
            values=f"{_COLUMNS}:e2e",
            needs="",
            least=f"{_OUTCOMES}:least_e2e",
            compared=("p50", "p99"),
            block="",
            shown=("slo", "contract", "latency", "requests", "prometheus"),
        ),
        FigureRow(
            name="max_gap",
            words="Largest gap",
            meaning="the largest gap between output events of one request",
            values=f"{_COLUMNS}:max_gap",
            needs="tokens",
            least=f"{_OUTCOMES}:least_max_gap",
            guards=("events_unsure", "largest_gap_unsure"),
            block="",
            shown=("contract", "latency", "requests"),
        ),
        FigureRow(
            name="connect",
            words="Connect",
            meaning="from due until a new connection was ready, at least 0; 0 of requests whose connection had served "
            "before",
            values=f"{_COLUMNS}:connect",
            sample="sent",
            needs="",
            block="",
            shown=("client",),
        ),
        FigureRow(
            name="tcp",
            words="TCP connect",
            meaning="of the first request of each connection: how long TCP took, be it before the request was due. "
            "Names are looked up before the load (`dns_ms`): no request waits for that",
            values=f"{_COLUMNS}:tcp",
            sample="sent",
            needs="",
            shown=("client", "requests"),
            under="TCP",
            better=0,
        ),
        FigureRow(
            name="tls",
            words="TLS handshake",
            meaning="the same of the TLS handshake of its connection; none without TLS",
            values=f"{_COLUMNS}:tls",
            sample="sent",
            needs="",
            shown=("client", "requests"),
            under="TLS",
            better=0,
        ),
        FigureRow(
            name="send_lag",
            words="Send lag",
            meaning="sent - due, the generator's own doing: all that passed before the first byte went to the kernel",
            values=f"{_COLUMNS}:send_lag",
            sample="sent",
            needs="",
            block="",
            shown=("client", "requests", "prometheus"),
        ),
        FigureRow(
            name="client_lag",
            words="Client lag",
            meaning="first token: from the kernel's stamp to its reading",
            values=f"{_COLUMNS}:client_lag",
            sample="sent",
            block="",
            shown=("client", "prometheus"),
        ),
        FigureRow(
            name="stamp_error",
            words="Stamp error",
            meaning="first token: how wrong its stamp can be; 0 when the read carried one packet's worth",
            values=f"{_COLUMNS}:stamp_error",
            sample="sent",
            block="",
            shown=("client",),
        ),
        FigureRow(
            name="event_error",
            words="Stamp error of all events",
            meaning="of every output event: how long before its stamp it may have come; 0 for the newest of a read and "
            "for all of one chunk, which is one write of the server",
            sample="events",
            needs="stream",
            block="",
            shown=("client",),
            under="all events",
        ),
        FigureRow(
            name="tpot_error",
            words="Error of TPOT",
            meaning="of a request: (first + last stamp error) / (n - n1); no samples when not known",
            values=f"{_COLUMNS}:tpot_error",
            needs="tokens",
            block="",
            shown=("client",),
            under="of TPOT",
        ),
        FigureRow(
            name="max_gap_error",
            words="Error of the largest gap",
            meaning="of a request: stamp error of the event at the end of its largest gap; no samples when not known",
            values=f"{_COLUMNS}:max_gap_error",
            needs="tokens",
            block="",
        ),
    ),
)


@cache
def _own_values(name: str) -> Any:
    row = FIGURES.find(name, foreign=False)
    return FIGURES.function(row, row.values) if row is not None and row.values else None


def words(name: str) -> str:
    """The name of a figure for readers; its key where no figure here has it."""
    row = FIGURES.called(name)
    return name if row is None else row.words


def needs(name: str) -> str:
    """What an answer must have for a figure; "" for a name of none."""
    row = FIGURES.called(name)
    return "" if row is None else row.needs


def per_request(name: str) -> bool:
    """Whether a figure has a value per request, and its row is here."""
    row = FIGURES.called(name)
    return row is not None and bool(row.values)


def guarded(code: str) -> tuple[str, ...]:
    """The figures that a guard withholds."""
    return tuple(row.name for row in FIGURES.here() if code in row.guards)


POOLED = tuple(row.name for row in FIGURES.own if row.sample == "gaps")
"""Those over all gaps of all requests: they have quantiles, but no value per request."""
