"""The lists of keys and terms in the documentation are generated from the schemas."""

from __future__ import annotations

import re

import make_keys
import pytest

from loadgen.core.slo import METRIC_ALIASES
from loadgen.figures import METRICS


@pytest.mark.parametrize("name", make_keys.PAGES)
def test_the_lists_of_keys_equal_their_generated_text(name: str) -> None:
    text = (make_keys.DOCS / name).read_text("utf-8")
    assert text == make_keys.page(name), "python tests/make_keys.py"
    assert "made by tests/make_keys.py" in text


@pytest.mark.parametrize("name", make_keys.TABLES)
def test_every_key_has_a_description_on_one_page(name: str) -> None:
    rows = make_keys.keys(name).splitlines()
    assert rows
    assert not [row for row in rows if row.endswith(": ")]
    texts = [(make_keys.DOCS / page).read_text("utf-8") for page in make_keys.PAGES]
    assert sum(f"<!-- keys of {name}: made" in text for text in texts) == 1


def _names_in_code(text: str) -> list[str]:
    """Return the names between backticks of a text."""
    return re.findall(r"`(\w+)`", text)


def test_the_metrics_that_an_slo_may_limit_are_all_documented() -> None:
    page = (make_keys.DOCS / "reference/workload-file.md").read_text("utf-8")
    match = re.search(r"(?s)- The limits can be on (.*?)\. The names\s(.*?)\n- ", page)
    assert match is not None
    metrics, aliases = match.groups()
    documented_metrics = _names_in_code(metrics)
    assert set(documented_metrics) == {
        row.name for row in METRICS.builtin_rows if "slo" in row.places
    }
    assert set(_names_in_code(aliases)) == METRIC_ALIASES.keys()


def test_the_metrics_that_a_term_of_a_contract_may_limit_are_all_documented() -> None:
    _, *other_metrics = [row.name for row in METRICS.builtin_rows if "contract" in row.places]
    documented_metrics = _names_in_code(make_keys.TERM_MEANINGS["ttft"])
    assert set(documented_metrics) == set(other_metrics)
