"""Keys and terms in the documents are those that the schemas of these files know."""

from __future__ import annotations

import make_keys
import pytest


@pytest.mark.parametrize("name", make_keys.PAGES)
def test_the_tables_are_what_the_schemas_say(name: str) -> None:
    text = (make_keys.DOCS / name).read_text("utf-8")
    assert text == make_keys.page(name), "python tests/make_keys.py"
    assert "made by tests/make_keys.py" in text


@pytest.mark.parametrize("name", make_keys.TABLES)
def test_every_key_of_a_list_says_what_it_is(name: str) -> None:
    rows = make_keys.keys(name).splitlines()
    assert rows
    assert not [row for row in rows if row.endswith(": ")]
    texts = [(make_keys.DOCS / page).read_text("utf-8") for page in make_keys.PAGES]
    assert sum(f"<!-- keys of {name}: made" in text for text in texts) == 1
