"""Reads the result file of another tool with the facts that its definitions depend on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from loadgen.core.errors import UserError
from loadgen.explain.damaged_values import check_possible_values
from loadgen.explain.server_log import ServerTimes, read_server_times
from loadgen.formats import ForeignResult
from loadgen.interop import kind as tool_result_kind
from loadgen.interop import reader
from loadgen.interop.result_values import find_number, find_value, latency_metrics
from loadgen.interop.tool_definitions import (
    TOOL_DEFINITIONS,
    LatencyName,
    ToolDefinitions,
    find_tool_definitions,
)


class OtherResult(NamedTuple):
    """The result of another tool.

    Attributes:
        result: Its metrics, and what its file says about the run.
        definitions: How the tool defines its metrics.
        document: The JSON object in the file.
        server_times: What a simulated server sent to the tool. None without its log.
    """

    result: ForeignResult
    definitions: ToolDefinitions
    document: Mapping[str, object]
    server_times: ServerTimes | None = None

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the tool by loadgen's names for them, such as `ttft_ms.p99`."""
        return self.result.metrics

    @property
    def name(self) -> str:
        """The tool with the version that wrote the file, or else that of the definitions."""
        version = self.result.version or self.definitions.version
        return f"{self.definitions.tool} {version}"

    @property
    def sent_no_warm_up(self) -> bool:
        """Whether the file says that the tool sent no warm-up. False if it says nothing."""
        path = self.definitions.facts.warm_up
        value = find_value(self.document, path) if path else None
        return value is not None and not value

    @property
    def input_tokens_per_request(self) -> float | None:
        """The mean input tokens of a successful request, by the token counts of the tool.

        None if the file has no token count or no successful request.
        """
        tokens = self.metrics.get("tokens.input")
        requests = self.metrics.get("requests.ok")
        if tokens is None or not requests:
            return None
        return tokens / requests

    @property
    def output_tokens_per_request(self) -> float | None:
        """The mean output tokens of a successful request, by the token counts of the tool.

        A file may have only rates: 500 tokens/s at 5 requests/s are 100 tokens per request. None if
        the file has neither counts nor rates.
        """
        tokens = self.metrics.get("tokens.output")
        requests = self.metrics.get("requests.ok")
        if tokens and requests:
            return tokens / requests

        tokens_per_s = self.metrics.get("tokens.output_per_s")
        requests_per_s = self.metrics.get("load.completed_rps")
        if tokens_per_s and requests_per_s:
            return tokens_per_s / requests_per_s
        return None

    @property
    def duration_s(self) -> float | None:
        """The time over which the tool computed its request rate, or None if it is not known.

        A tool that reports 100 requests and 5 requests/s measured for 20 s.
        """
        counts_failed = self.definitions.counts_failed_requests
        counted_metric = "requests.scheduled" if counts_failed else "requests.ok"
        requests = self.metrics.get(counted_metric)
        requests_per_s = self.metrics.get("load.completed_rps")
        if not requests or not requests_per_s:
            return None
        return requests / requests_per_s

    @property
    def tokens_per_chunk(self) -> float:
        """How many tokens the tool counts in a chunk of a response, 1 for most tools.

        Some tools tokenize each chunk again (`splits_chunks`). Their ITL is the time between these
        tokens, and their TPOT is the time between the tokens that the server counts, one per chunk.
        So a TPOT of 20 ms and an ITL of 10 ms mean 2 tokens per chunk. Without both metrics, the
        number is 1.
        """
        if not self.definitions.splits_chunks:
            return 1.0

        tpot_ms = self.metrics.get("tpot_ms.mean")
        itl_ms = self.metrics.get("inter_chunk_ms.mean")
        if not tpot_ms or not itl_ms:
            return 1.0
        return max(tpot_ms / itl_ms, 1.0)

    def find_fact(self, path: str) -> float | None:
        """Return a number at a path of the file, or None if the file does not have it."""
        return find_number(self.document, path) if path else None

    def find_client_send_ms(self, name: LatencyName, statistic: str) -> float | None:
        """Return the part of a latency in which the client sent the request, in ms.

        The file of a tool may have the mean of this time. It may also have each statistic of TTFT
        twice, from the start and from the end of sending: 52 ms and 50 ms are 2 ms of sending.
        Return None if the file has neither.

        Args:
            name: The latency, such as "ttft".
            statistic: "mean" or a percentile such as "p99".
        """
        facts = self.definitions.facts
        if statistic == "mean" and name in ("ttft", "e2e"):
            return self._find_statistic_ms(facts.client_send_ms, statistic)
        if name != "ttft":
            return None

        ttft_ms = self.metrics.get(f"ttft_ms.{statistic}")
        ttft_after_sending_ms = self._find_statistic_ms(facts.time_after_send_ms, statistic)
        if ttft_ms is None or ttft_after_sending_ms is None:
            return None
        return ttft_ms - ttft_after_sending_ms

    def _find_statistic_ms(self, path: str, statistic: str) -> float | None:
        """Return a statistic of the latency at a path of the file, in ms, or None."""
        statistics = find_value(self.document, path) if path else None
        return latency_metrics("time", statistics).get(f"time.{statistic}")


def read_other_result(path: Path, server_log: Path | None = None) -> OtherResult:
    """Return the result of another tool in a file or directory.

    Args:
        path: The file or directory.
        server_log: The log of the simulated server that the tool measured, if there is one.

    Raises:
        UserError: The file cannot be read, no known tool has written it, it has a damaged value, or
            the definitions of the tool are not known.
    """
    file_path = _find_result_file(path)
    result = reader.read_result(file_path)
    definitions = find_tool_definitions(result.tool)
    if definitions is None:
        known_tools = ", ".join(row.tool for row in TOOL_DEFINITIONS)
        raise UserError(
            "unsupported",
            f"the definitions of {result.tool} are not known",
            str(file_path),
            f"known: {known_tools}",
        )

    document = _read_document(file_path)
    check_possible_values(result, document, definitions)

    # The log may begin with requests from before the load, so only the last ones count.
    server_times = None
    if server_log is not None:
        ok_count = result.metrics.get("requests.ok")
        response_count = None if ok_count is None else int(ok_count)
        server_times = read_server_times(server_log, response_count)

    return OtherResult(result, definitions, document, server_times)


def _find_result_file(path: Path) -> Path:
    """Return the result file of another tool: the path itself, or a file in this directory.

    Raises:
        UserError: There is no such file.
    """
    if not path.exists():
        raise UserError(
            "missing_file",
            "there is no such file",
            str(path),
            "give the result file of the other tool as the second argument",
        )

    file_path = tool_result_kind.find_result_file(path)
    if file_path is None:
        raise UserError(
            "wrong_format",
            "this directory has no result file of another tool",
            str(path),
            "give the file itself; to compare two runs of loadgen, use: loadgen compare",
        )
    return file_path


def _read_document(path: Path) -> Mapping[str, object]:
    """Return the JSON object in the result file of a tool, which must not be empty.

    Some tools append the object of each run as a line (JSON Lines). The last line is then the
    newest run. Return {} if the JSON value is not an object.
    """
    text = path.read_text("utf-8", "replace")
    try:
        document = json.loads(text)
    except ValueError:
        lines = [line for line in text.splitlines() if line.strip()]
        document = json.loads(lines[-1])
    return document if isinstance(document, dict) else {}
