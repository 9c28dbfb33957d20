"""Tests of estimated prompt tokens: pictures, sounds, files, schemas and token ids."""

from __future__ import annotations

import asyncio
import base64
import struct
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loadgen_sdk import Throttle, instrument, record_shape
from loadgen_sdk.app import prompt_text
from loadgen_sdk.app.media_tokens import (
    UNKNOWN_SIZE,
    ImageSize,
    estimate_audio_tokens,
    estimate_image_tokens,
    read_image_size,
)
from loadgen_sdk.app.prompt_text import estimate_tokens, read_prompt
from scripted_server import CHAT, answer, serving


def png(width: int, height: int, padding: int = 0) -> str:
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height)
    return base64.b64encode(head + bytes(padding)).decode()


def jpeg(width: int, height: int) -> str:
    preview = b"\xff\xe1" + struct.pack(">H", 40_002) + bytes(40_000)
    frame = b"\xff\xc0" + struct.pack(">HBHH", 17, 8, height, width) + bytes(12)
    return base64.b64encode(b"\xff\xd8" + preview + frame).decode()


def wav(seconds: int, rate: int) -> str:
    head = (
        b"RIFF" + bytes(4) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, rate // 2, rate, 2, 16)
    )
    return base64.b64encode(head + bytes(seconds * rate - len(head))).decode()


GIF = base64.b64encode(b"GIF89a" + struct.pack("<HH", 30, 40)).decode()
WEBP_LOSSY = base64.b64encode(
    b"RIFF\0\0\0\0WEBPVP8 " + bytes(10) + struct.pack("<HH", 30, 40)
).decode()
WEBP_LOSSLESS = base64.b64encode(
    b"RIFF\0\0\0\0WEBPVP8L" + bytes(5) + struct.pack("<I", 29 | 39 << 14)
).decode()
WEBP_LARGE = base64.b64encode(b"RIFF\0\0\0\0WEBPVP8X" + bytes(8) + b"\x1d\0\0\x27\0\0").decode()


@pytest.mark.parametrize(
    "data",
    [png(30, 40), jpeg(30, 40), GIF, WEBP_LOSSY, WEBP_LOSSLESS, WEBP_LARGE],
    ids=lambda data: data[:8],
)
def test_the_size_of_an_image_is_read_from_its_bytes(data: str) -> None:
    assert read_image_size(data + "=" * (-len(data) % 4)) == (30, 40)


@pytest.mark.parametrize("data", ["", "AAAA", "no base64!", png(0, 5), jpeg(30, 40)[:100]])
def test_damaged_image_data_has_no_size(data: str) -> None:
    assert read_image_size(data) is None


@pytest.mark.parametrize(
    ("model", "size", "detail", "tokens"),
    [
        # Tiles: the examples of OpenAI's page.
        ("gpt-4o", (1024, 1024), "high", 765),
        ("gpt-4o", (2048, 4096), "high", 1105),
        ("gpt-4o", (4096, 8192), "low", 85),
        ("gpt-4o-mini", (512, 512), "high", 2833 + 5667),
        ("openai/gpt-5-2025-08-07", (512, 512), "auto", 210),
        ("some-llama", (1024, 1024), "", 765),
        # Patches: what its page and those who measured say of a model, a size and a detail.
        ("gpt-4.1-mini", (1024, 1024), "", 1659),
        ("gpt-5.2", (1920, 1080), "", 2448),
        ("gpt-5.4", (4032, 3024), "", 2942),
        ("gpt-5.4", (4032, 3024), "original", 11868),
        ("gpt-5.5", (4032, 3024), "", 11868),
        ("gpt-5.6-sol", (2560, 1440), "high", 2931),
        ("gpt-5.6-sol", (2560, 1440), "original", 4320),
        ("gpt-6-astra", (4032, 3024), "auto", 14364),
        ("gpt-6-astra", (640, 480), "low", 231),
        ("gpt-5-nano", (32, 32), "", 3),
        # Squares: the examples of Anthropic's page.
        ("claude-sonnet-4-5", (200, 200), "", 64),
        ("claude-sonnet-4-5", (1000, 1000), "", 1296),
        ("claude-haiku-4-5", (1920, 1080), "", 1560),
        ("claude-sonnet-4-6", (1075, 1520), "", 1551),
        ("claude-3-5-sonnet-latest", (2000, 1500), "", 1564),
        ("claude-opus-4-7", (1920, 1080), "", 2691),
        ("claude-sonnet-5", (3840, 2160), "", 4784),
        ("us.anthropic.claude-opus-4-7-v1:0", (1920, 1080), "", 2691),
        ("bedrock/anthropic.claude-sonnet-4-5-20250929-v1:0", (1000, 1000), "", 1296),
    ],
)
def test_tokens_of_an_image_follow_from_its_size(
    model: str, size: tuple[int, int], detail: str, tokens: int
) -> None:
    assert estimate_image_tokens(model, ImageSize(*size), detail) == tokens


def test_tokens_of_an_audio_clip_follow_from_its_duration() -> None:
    assert estimate_audio_tokens(wav(3, 32_000)) == 30
    assert (
        estimate_audio_tokens(base64.b64encode(bytes(160_000)).decode()) == 100
    )  # 10 s at 128 kbit/s
    assert estimate_audio_tokens("") == 100


def user(*parts: Any) -> dict[str, Any]:
    return {"model": "gpt-4o", "messages": [{"role": "user", "content": [*parts]}], "max_tokens": 1}


URL = f"data:image/png;base64,{png(1024, 1024, 750_000)}"
PICTURES: list[Any] = [
    {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
    {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
    {"type": "input_image", "image_url": URL},
    {"type": "input_image", "file_id": "file-1", "detail": "auto"},
    {
        "type": "tool_result",
        "content": [{"type": "image", "source": {"type": "url", "url": "https://example.com"}}],
    },
    {"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": URL}},
    URL,
]


@pytest.mark.parametrize("part", PICTURES, ids=lambda part: str(part)[:50])
def test_the_base64_of_an_image_does_not_count_as_text(part: Any) -> None:
    assert UNKNOWN_SIZE == (1024, 1024)
    everything, output = estimate_tokens(user(part))
    assert output == 1 and 765 <= everything - output <= 765 + 20


def test_tokens_of_anthropic_images_and_documents_are_estimated() -> None:
    picture = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": png(200, 200)},
    }
    request = user(picture) | {"model": "claude-x"}

    assert estimate_tokens(request)[0] - 1 == 64 + 1

    page = {
        "type": "document",
        "source": {"type": "base64", "data": base64.b64encode(bytes(100_000)).decode()},
    }

    assert estimate_tokens(user(page))[0] - 1 == 2 * 2250 + 1
    text = {"type": "document", "source": {"type": "text", "data": "x" * 396}}
    assert estimate_tokens(user(text))[0] - 1 == 100


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ({"prompt": [1000, 2000, 3000]}, 3),
        ({"input": [[1000] * 50, [2000] * 7]}, 57),
        ({"input": ["x" * 40, "x" * 40]}, 20),
        (
            user({"type": "input_audio", "input_audio": {"data": wav(2, 32_000), "format": "wav"}}),
            21,
        ),
        (user({"type": "input_file", "file_id": "f"}), 2251),
        (
            {"prompt": "x" * 40, "tools": [{"type": "function", "function": {"name": "y" * 356}}]},
            110,
        ),
    ],
)
def test_tokens_of_ids_audio_files_and_tools_are_estimated(
    arguments: dict[str, Any], tokens: int
) -> None:
    assert estimate_tokens(arguments, has_output=False)[0] == tokens


def test_the_schema_of_a_response_class_counts_as_prompt_tokens() -> None:
    from pydantic import BaseModel

    class Answer(BaseModel):
        where: str

    bare, more = ({"prompt": "x" * 40, **extra} for extra in ({}, {"response_format": Answer}))
    assert estimate_tokens(more)[0] > estimate_tokens(bare)[0] + 10


class Strange(dict[str, Any]):
    """A part of a message that cannot be read twice."""

    def get(self, *_: Any) -> Any:
        raise RuntimeError("broken")


def test_a_large_image_passes_a_throttle_by_its_tokens_and_not_its_bytes() -> None:
    """A picture of 1 MB has few tokens, so it must not be booked by its number of bytes."""

    async def go(url: str) -> None:
        plain = openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0)
        async with instrument(
            plain, throttle=Throttle(tokens="200000/min", max_wait_s=0.05)
        ) as client:
            for part in (PICTURES[0], PICTURES[0], Strange()):
                await client.chat.completions.create(**user(part))

    with serving(answer(CHAT)) as server:
        asyncio.run(go(server.url))
        assert len(server.heard) == 3


def test_base64_data_is_excluded_from_the_hashes_of_a_trace(tmp_path: Path) -> None:
    texts = read_prompt(user(*PICTURES)).joined_texts

    assert all(
        len(text) < 1000 and "AAAA" not in text for several in texts.values() for text in several
    )

    with record_shape(tmp_path / "t.jsonl") as recorder:
        shape = recorder.begin(0, user(PICTURES[0], {"type": "text", "text": "What is this?"}))
        recorder.flush()
        assert (
            len(shape.block_hashes) == 1
            and shape.prompt_tokens == 765 + len("userWhat is this?") // 4
        )


@given(
    st.one_of(
        st.text(max_size=12),
        st.just("data:image/png;base64,AAAA"),
        st.dictionaries(
            st.sampled_from(("role", "content", "name", "type", "text")),
            st.one_of(
                st.none(),
                st.integers(0, 3),
                st.text(max_size=8),
                st.just("data:audio/wav;base64,AAAA"),
            ),
            max_size=3,
        ),
    )
)
def test_the_fast_path_for_plain_messages_reads_the_same_texts_as_the_general_one(
    message: Any,
) -> None:
    texts = prompt_text._texts_of_plain_message(message)
    if texts is not None:
        assert [*prompt_text._find_parts(message, "m")] == [
            prompt_text.PromptPart(text) for text in texts
        ]
