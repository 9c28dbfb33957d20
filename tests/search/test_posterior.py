"""What outcomes say of a load: the work that a search does for it."""

from __future__ import annotations

from test_search import psychometric

from loadgen.search import posterior
from loadgen.search.load_search import LoadSearch
from loadgen.search.search_settings import SearchSettings


def test_what_an_outcome_says_is_computed_once() -> None:
    """A search makes its belief anew after each trial, from all outcomes so far."""
    posterior._log_likelihood.cache_clear()
    asking = psychometric(
        LoadSearch(SearchSettings(low=50, high=200, precision=0.01)), 101.5, 0.004, 1
    )
    made = posterior._log_likelihood.cache_info()
    assert made.misses == asking.result.trial_count < made.hits
