"""The probe of a run counts the tokens of its prompts with the tokenizer of the load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loadgen_sdk.probe.http_types import HttpResponse
from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.transport.target import Target
from tiny_tokenizer import train

from loadgen.core.execution import probing
from loadgen.core.execution.plan import Settings
from loadgen.core.requests.tokenizer import load_tokenizer

TEMPLATE_TOKENS = 7


class CountingServer:
    """A server in memory that counts the tokens of a prompt."""

    def __init__(self, count: Callable[[str], int]) -> None:
        self._count = count

    async def connect(self) -> int:
        return 1_000_000

    async def send_request(
        self, _method: str, _path: str, _headers: Any, body: bytes
    ) -> HttpResponse:
        if not body:
            return HttpResponse(404, {}, b"")
        request = json.loads(body)
        output_tokens = request["max_tokens"]
        prompt_tokens = self._count(request["messages"][0]["content"]) + TEMPLATE_TOKENS
        choice = {"message": {"content": "x"}, "finish_reason": "length"}
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
        response = {"choices": [choice], "usage": usage}
        return HttpResponse(
            200, {"content-type": "application/json"}, json.dumps(response).encode(), 1_000_000
        )


def probed(count: Callable[[str], int], tokenizer: str | None) -> ProbeResult:
    settings = Settings(model="m", stream=False, server="vllm", tokenizer=tokenizer)
    server: Any = CountingServer(count)
    samples = probing.probe_samples(tokenizer)
    return asyncio.run(probing.probe_target(settings, Target.parse("http://h"), server, samples))


def test_the_token_ratio_is_one_if_the_server_uses_the_same_tokenizer(tmp_path: Path) -> None:
    path = train(tmp_path / "tokenizer.json")
    probe_result = probed(load_tokenizer(str(path)).count, str(path))
    assert (probe_result.token_ratio, probe_result.template_tokens) == (1.0, TEMPLATE_TOKENS)


def test_the_token_ratio_exceeds_two_if_the_server_counts_characters(tmp_path: Path) -> None:
    path = train(tmp_path / "tokenizer.json")
    probe_result = probed(len, str(path))  # one token for each character
    assert probe_result.token_ratio is not None and probe_result.token_ratio > 2


def test_without_a_tokenizer_the_token_ratio_uses_the_packaged_vocabulary() -> None:
    probe_result = probed(load_tokenizer().count, None)
    assert probe_result.token_ratio == pytest.approx(1.0)
    assert probe_result.template_tokens == TEMPLATE_TOKENS
