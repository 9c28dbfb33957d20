"""The server's prefix cache as a condition of a load: what is asked for, what is built, what is seen."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from loadgen.errors import Faults
from loadgen.execution.plan import Settings
from loadgen.execution.run import execute
from loadgen.report import text
from loadgen.requests.build import build
from loadgen.requests.tokenizer import load_tokenizer
from loadgen.workload import Workload, load, read_flags, recipe_fingerprint

SHAPE = "input_tokens: {uniform: {min: 900, max: 1500}}, output_tokens: 20"


def workload(folder: Path, more: str, shape: str = SHAPE, **flags: str) -> Workload:
    (folder / "w.yaml").write_text(
        f"name: w\nrequests: {{{shape}{more}}}\nstages: [{{arrival: {{poisson: 5/s}}, count: 300}}]\n"
    )
    return load(str(folder / "w.yaml"), read_flags(**flags))


@pytest.mark.parametrize(("cache", "share"), [("cold", 0.0), ("warm", 1.0), ("{hit_rate: 60%}", 0.6)])
def test_prompts_share_what_is_asked_for_and_the_server_sees_it(tmp_path: Path, cache: str, share: float) -> None:
    one = workload(tmp_path, f", prefixes: 2, cache: {cache}", seed="3")
    prompts = build(one, 3, 1, load_tokenizer(), 8)
    texts = [prompts[number].prompt for number in range(40)]
    lengths = [prompts[number].input_tokens + 8 for number in range(40)]
    groups: dict[int, list[int]] = {}
    for number in range(40):
        groups.setdefault(prompts.group_of(number), []).append(number)
    assert len(groups) == 2
    for members in groups.values():
        for a, b in pairwise(members):
            words = zip(texts[a].split(), texts[b].split(), strict=False)
            equal = next(i for i, (x, y) in enumerate(words) if x != y)
            built = min(share * lengths[a], share * lengths[b], lengths[a] - 4, lengths[b] - 4) - 8
            assert abs(equal - max(built, 0)) <= 2
    assert len(set(texts)) == 40
    summary, _ = execute(one, Settings(url="sim:gb300-vm", out=tmp_path / "out"))
    assert summary.cache_asked == share
    assert summary.tokens.cached_share == pytest.approx(share, abs=0.05)  # whole blocks, and each group grows
    assert "cache_differs" not in [code.code for code in summary.verdict.warning_codes]
    assert f"{share:.0%}".rstrip("%") in text.render(summary) and "asked for)" in text.render(summary)


def test_a_cache_that_is_too_small_is_told(tmp_path: Path) -> None:
    one = workload(tmp_path, ", prefixes: 300, cache: {hit_rate: 60%}", seed="3")
    summary, _ = execute(one, Settings(url="sim:gb300-vm", out=tmp_path / "out"))
    code = next(code for code in summary.verdict.warning_codes if code.code == "cache_differs")
    assert code.values["asked"] == 0.6 and code.values["share"] == summary.tokens.cached_share < 0.5


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (", cache: hot", "is no state of a cache"), (", cache: 0.6", "is no state of a cache"),
        (", cache: {hit_rate: 0.6}", "is no state of a cache"), (", cache: {hit_rate: 160%}", "is more than 100%"),
        (", cache: warm, shared_prefix_tokens: 5", "both cache and shared_prefix_tokens"),
        (", cache: warm, turns: {count: 2, tool_result_tokens: 5}", "both cache and turns"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_it_is_said(tmp_path: Path, more: str, what: str) -> None:
    with pytest.raises(Faults, match=what):
        workload(tmp_path, more)


def test_the_salt_is_fresh_unless_given_and_the_recipe_has_the_share(tmp_path: Path) -> None:
    assert workload(tmp_path, ", cache: cold").salt == "fresh"
    assert workload(tmp_path, ", cache: cold", salt="blue").salt == "blue"
    assert workload(tmp_path, "").salt is None
    of = [recipe_fingerprint(workload(tmp_path, more), "server") for more in ("", ", cache: cold", ", cache: warm")]
    assert len(set(of)) == 3
