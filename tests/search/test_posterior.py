"""The posterior of a server's capacity."""

from __future__ import annotations

import math

import numpy as np
import pytest
from synthetic_searches import run_with_chance

from loadgen.core.stats.students_t import normal_cdf
from loadgen.search import posterior as posterior_module
from loadgen.search.load_search import LoadSearch
from loadgen.search.posterior import CapacityPosterior, TrialOutcome
from loadgen.search.search_settings import (
    FULL_LENGTH_LAPSE,
    SearchSettings,
)

pytestmark = pytest.mark.commands


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("high", [1e6, 140.0])
def test_an_outcome_updates_the_probability_of_every_load(high: float, passed: bool) -> None:
    posterior = CapacityPosterior(high / 1e4, high, sampling_sigma=0.01)
    z = (posterior.log_loads[:, None] - math.log(100)) / posterior.sigmas
    wanted = posterior.weights * (
        FULL_LENGTH_LAPSE / 2 + (1 - FULL_LENGTH_LAPSE) * normal_cdf(z if passed else -z)
    )
    posterior.update(TrialOutcome(100, passed, FULL_LENGTH_LAPSE))
    assert np.allclose(posterior.weights, wanted / wanted.sum(), rtol=1e-12, atol=0)


def test_the_likelihood_of_an_outcome_is_computed_once() -> None:
    """A search computes its posterior anew after each trial, from all outcomes so far."""
    posterior_module._log_likelihood.cache_clear()
    search = run_with_chance(
        LoadSearch(SearchSettings(low=50, high=200, precision=0.01)), 101.5, 0.004, 1
    )
    cache_info = posterior_module._log_likelihood.cache_info()
    assert cache_info.misses == search.result.trial_count < cache_info.hits
