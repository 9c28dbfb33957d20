"""The documentation site in a real browser: five pages on a desktop and on a phone."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
import repository_paths
from browser import Browser

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        browser.find() is None, reason="no Chromium on this machine (Debian: chromium)"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("mkdocs_llmstxt") is None,
        reason="the site cannot be built: pip install 'loadgen[docs]'",
    ),
]

PAGES = [
    "index.html",
    "get-started/first-run-vllm/index.html",
    "guides/find-capacity/index.html",
    "reference/cli/index.html",
    "evidence/accuracy/index.html",
]
WIDTHS_PX = [1400, 390]
OVERFLOW_PX = "document.documentElement.scrollWidth - window.innerWidth"
VISIBLE_TAB_TEXT = """[...document.querySelectorAll(".tabbed-set:first-of-type .tabbed-block")]
    .filter(block => block.offsetParent).map(block => block.innerText).join()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    config = ["--config-file", ".ci/mkdocs.yml", "--site-dir", str(directory)]
    subprocess.run(
        [*command, *config],
        cwd=repository_paths.ROOT,
        check=True,
        timeout=300,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    return directory


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.mark.parametrize("width_px", WIDTHS_PX)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_of_the_site_fits_the_window_and_loads_no_external_file(
    site: Path, chromium: Browser, page: str, width_px: int
) -> None:
    chromium.set_view(width=width_px, height=900)
    chromium.open(site / page)
    assert [url for url in chromium.requests if not url.startswith("file:")] == []
    assert chromium.evaluate(OVERFLOW_PX) <= 0
    assert chromium.evaluate("document.querySelector('h1').innerText.length") > 3
    footer = chromium.evaluate("document.querySelector('.md-copyright').innerText")
    assert footer.startswith("loadgen 0.")


def test_code_of_the_site_can_be_copied_and_tabs_switch_the_server(
    site: Path, chromium: Browser
) -> None:
    chromium.set_view(width=1400, height=900)
    chromium.open(site / "get-started/first-run-vllm/index.html")
    assert chromium.evaluate("document.querySelectorAll('.md-clipboard, .md-code__button').length")
    assert "vllm serve" in chromium.evaluate(VISIBLE_TAB_TEXT)
    chromium.evaluate("document.querySelectorAll('.tabbed-labels label')[1].click()")
    assert "sglang.launch_server" in chromium.evaluate(VISIBLE_TAB_TEXT)


def test_the_site_has_a_dark_mode(site: Path, chromium: Browser) -> None:
    chromium.set_view(width=1400, height=900, dark=True)
    chromium.open(site / "index.html")
    chromium.evaluate("localStorage.clear()")  # the theme stores the scheme of the first visit
    chromium.open(site / "index.html")
    scheme = chromium.evaluate("document.body.getAttribute('data-md-color-scheme')")
    assert scheme == "slate"


def test_the_file_llms_txt_lists_the_pages(site: Path) -> None:
    text = (site / "llms.txt").read_text("utf-8")
    assert text.startswith("# loadgen\n")
    for section in ("Get started", "Guides", "Concepts", "Reference", "Evidence"):
        assert f"\n## {section}\n" in text
    assert "guides/find-capacity" in text
