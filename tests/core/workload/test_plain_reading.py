"""What is read without pydantic is what pydantic reads, and what it refuses is left to it."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadgen import pydantic_twins
from loadgen.core.workload import fingerprints, loading
from loadgen.core.workload.fields import Fixed, Source, Uniform
from loadgen.core.workload.schema import Synthetic, Written
from loadgen.core.workload.yaml_marks import read_yaml
from loadgen.plain_reading import plainly

ROOT = Path(__file__).parents[3]
FILES = [*(ROOT / "workloads").glob("*.yaml"), *(ROOT / "contracts" / "workloads").glob("*.yaml")]
WRONG = (
    None,
    True,
    -1,
    0,
    1,
    2**70,
    1.5,
    "",
    "x\n",
    "1s",
    "99%",
    "10/s",
    [],
    {},
    {"fixed": 3},
    {"other": 1},
)
EVERY = """
name: every
requests: {input_tokens: {lognormal: {median: 90, sigma: 0.5, min: 40, max: 300}}, output_tokens: 5,
  chunks: {count: 1, tokens: 16}, images: {width: 64}, prompts: natural}
stages: [{arrival: {closed: {concurrency: 3, ramp: 1s}}, count: 9, warmup: true}, {arrival: {constant: inf}, count: 3},
  {arrival: {ramp: {from: 1/s, to: 2/s}}, duration: 9s}, {arrival: {poisson: 1/s}, duration: 9s},
  {spike: 3x for 5s}, {arrival: {poisson: 1/s},
  at_least: {duration: 9s, passes_of: 3}}]
slo: {ttft: {limit: 2s, at: p95}, inter_token_latency: 50ms, goodput: 95%, task: {within: 9s}}
stop_when: ["errors:20%"]
grace: 5s
limits: {cpu_share: 95%}
max_in_flight: 7
seed: 5
salt: fresh
"""


def _both(text: str, folder: Path) -> tuple[Any, Any, list[Any], list[Any]]:
    """What is read plainly, and by pydantic; None where it says no."""
    (top, first), (again, second) = (read_yaml(text, "w.yaml", {}) for _ in range(2))
    of_plain, of_pydantic = (
        Source(file="w.yaml", folder=folder, faults=faults) for faults in (first, second)
    )
    before = list(first)
    found = plainly(Written, top, of_plain)
    assert found is not None or of_plain.faults == before
    try:
        whole = pydantic_twins.made(Written, again, of_pydantic)
    except ValueError:
        whole = None
    return found, whole, before, of_pydantic.faults


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_packaged_workload_is_read_plainly(file: Path) -> None:
    found, whole, *_ = _both(file.read_text(), file.parent)
    assert (
        found == whole
        and repr(found) == repr(whole)
        and found.model_fields_set == whole.model_fields_set
    )
    said = {name: fingerprints._dumped(value) for name, value in found}
    assert fingerprints._recipe_hash(said) == fingerprints._recipe_hash(
        whole.model_dump(mode="json")
    )


def test_every_form_of_a_workload_is_read_plainly() -> None:
    found, whole, *_ = _both(EVERY, ROOT)
    assert found is not None and found == whole and repr(found) == repr(whole)
    said = {name: fingerprints._dumped(value) for name, value in found}
    assert fingerprints._recipe_hash(said) == fingerprints._recipe_hash(
        whole.model_dump(mode="json")
    )


def test_what_is_changed_at_random_is_read_alike_or_left_to_pydantic() -> None:
    rng = random.Random(34)
    texts = [EVERY, *(file.read_text() for file in FILES)]
    read = 0
    for _ in range(400):
        document = copy.deepcopy(yaml.safe_load(rng.choice(texts)))
        holder: Any = document
        while True:
            key = rng.choice(list(holder) if isinstance(holder, dict) else [*range(len(holder))])
            if not isinstance(holder[key], dict | list) or not holder[key] or rng.random() < 0.2:
                break
            holder = holder[key]
        if rng.random() < 0.2:
            del holder[key]
        else:
            holder[key] = rng.choice(WRONG)
        text = yaml.safe_dump(document, sort_keys=False)
        found, whole, before, faults = _both(text, ROOT / "contracts" / "workloads")
        assert found is None or (
            found == whole and repr(found) == repr(whole) and faults == before
        ), text
        read += found is not None
    assert 50 < read < 350


def test_faults_are_told_as_before() -> None:
    with pytest.raises(loading.Faults) as told:
        loading.of_mapping(
            {"name": "a", "requests": {"input_tokens": 0, "output": 3}, "slo": {"ttft": "2x"}}
        )
    assert [fault.code for fault in told.value.faults] == [
        "out_of_range",
        "unknown_key",
        "invalid_value",
    ]


def test_values_in_python_are_checked_and_travel() -> None:
    """A length without a quantity is read as one with it; what is pickled is equal, of its own class, and frozen."""
    made = Synthetic(input_tokens=Fixed(value=3), output_tokens=Uniform(min=1, max=2), prefixes=2)
    assert type(made.input_tokens).__name__ == "FixedTokens" and made.model_fields_set >= {
        "prefixes"
    }
    for again in (pickle.loads(pickle.dumps(made)), made.model_copy(), copy.deepcopy(made)):
        assert again == made and hash(again) == hash(made) and repr(again) == repr(made)
        assert type(again.input_tokens) is type(made.input_tokens)
    with pytest.raises(AttributeError, match="frozen"):
        made.prefixes = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"1 validation error for Synthetic\nprefixes"):
        Synthetic(input_tokens=Fixed(value=3), output_tokens=Fixed(value=3), prefixes=0)
    with pytest.raises(
        ValueError, match=r"1 validation error for Synthetic\ninput_tokens.fixed.value"
    ):
        Synthetic(input_tokens=Fixed(value=0), output_tokens=Fixed(value=3))
    with pytest.raises(ValueError, match="shares a prefix of 9"):
        Synthetic(input_tokens=Fixed(value=3), output_tokens=Fixed(value=3), shared_prefix_tokens=9)
