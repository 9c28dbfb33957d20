"""The models of a workload file in Python: checked, immutable, and fit for pickling."""

from __future__ import annotations

import copy
import pickle

import pytest
from pydantic import ValidationError

from loadgen.core.workload import FixedTokens, Synthetic, UniformTokens, load, packaged_files


@pytest.mark.parametrize("name", packaged_files())
def test_a_copy_of_a_workload_is_equal(name: str) -> None:
    workload = load(name)
    assert pickle.loads(pickle.dumps(workload)) == workload
    assert copy.deepcopy(workload) == workload
    assert type(workload).model_validate(workload.model_dump()) == workload


def test_equal_requests_have_equal_hashes() -> None:
    requests, second_synthetic = (
        Synthetic(input_tokens=FixedTokens(value=3), output_tokens=UniformTokens(min=1, max=2))
        for _ in range(2)
    )
    assert requests == second_synthetic
    assert hash(requests) == hash(second_synthetic)
    assert requests.model_copy(update={"prefixes": 2}) != requests


def test_a_model_is_immutable() -> None:
    length = FixedTokens(value=3)
    with pytest.raises(ValidationError, match="frozen"):
        length.value = 4


def test_values_from_python_are_validated() -> None:
    length = FixedTokens(value=3)

    with pytest.raises(ValidationError, match="prefixes"):
        Synthetic(input_tokens=length, output_tokens=length, prefixes=0)
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        FixedTokens(value=0)
    with pytest.raises(
        ValidationError, match="has a shared prefix of 9 tokens in prompts of only 3 tokens"
    ):
        Synthetic(input_tokens=length, output_tokens=length, shared_prefix_tokens=9)
