"""The figures that a report says, as text, as Markdown or on a page."""

from __future__ import annotations

import re
from html import unescape

NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?")


def find_numbers(rendered_text: str) -> set[str]:
    """Every number in a text, as it is printed there."""
    return {number.rstrip(",").lstrip("+-") for number in NUMBER.findall(rendered_text)}


def of_page(page: str) -> str:
    """Return the text of a page without its drawings."""
    main = page.split("<main>")[1].split("<noscript>", maxsplit=1)[0]
    main = re.sub(r'<div class="top">.*?</div>', "", main, flags=re.S)
    main = re.sub(r'<div class="bars">.*?</div></div>\n?(?=<(?!div><span>))', "", main, flags=re.S)
    main = re.sub(
        r'<details id="glossary">.*?</details>', "", main, flags=re.S
    )  # the same on every page
    main = re.sub(r"<figure.*?</figure>", "", main, flags=re.S)
    return unescape(re.sub(r"<[^>]+>", " ", main)).replace("\u00a0", " ")
