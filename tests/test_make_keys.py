"""The lists of keys and terms in the documentation are generated from the schemas."""

from __future__ import annotations

import make_keys
import pytest


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
