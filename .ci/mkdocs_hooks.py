"""MkDocs hooks: add pages from outside `docs/`, adapt links to them, and show the version."""

from __future__ import annotations

import importlib.metadata
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE_PAGES = {
    "loadgen/README.md": "architecture.md",
    "benchmarks/README.md": "evidence/benchmarks.md",
    "benchmarks/simulation.md": "evidence/simulation-figures.md",
    "benchmarks/trust.md": "evidence/trust.md",
    "benchmarks/search_truth.md": "evidence/search-truth.md",
    "benchmarks/hot_path.md": "evidence/hot-path.md",
    "benchmarks/figures.md": "evidence/figures.md",
    "benchmarks/attacks.md": "evidence/attacks.md",
    "benchmarks/servers.md": "evidence/servers-seen.md",
    "results/gb300-rack-simulated/README.md": "evidence/gb300-rack.md",
    "results/mlperf-endpoints-simulated/README.md": "evidence/mlperf-endpoints.md",
    "examples/recipes/README.md": "recipes/index.md",
    "examples/recipes/dynamo.md": "recipes/dynamo.md",
    "examples/recipes/transformers.md": "recipes/transformers.md",
    "examples/recipes/vllm.md": "recipes/vllm.md",
    "examples/recipes/llama-cpp.md": "recipes/llama-cpp.md",
    "examples/recipes/litellm.md": "recipes/litellm.md",
    "examples/recipes/sglang.md": "recipes/sglang.md",
    "examples/recipes/tensorrt-llm.md": "recipes/tensorrt-llm.md",
    "examples/recipes/azure-openai.md": "recipes/azure-openai.md",
    "examples/recipes/hosted-api.md": "recipes/hosted-api.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Maps a file of the repository to the page of the site that shows it."""
BEFORE_PLUGINS = 50
"""The priority of a hook that runs before the plugins, which have 0 unless they set another."""
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Show the version of loadgen, which the pages describe, in the footer of every page."""
    config.copyright = f"loadgen {importlib.metadata.version('loadgen')}"
    return config


@event_priority(BEFORE_PLUGINS)
def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside `docs/` that exist, so that plugins such as llmstxt see them."""
    for source, page in OUTSIDE_PAGES.items():
        if (ROOT / source).exists():
            text = (ROOT / source).read_text("utf-8")
            content = _adapt_links(text, source, page)
            files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adapt the links of a page in `docs/` that lead out of that folder."""
    page_path: str = page.file.src_uri
    if page_path in OUTSIDE_PAGES.values():
        return markdown  # `on_files` adapted its links
    return _adapt_links(markdown, f"docs/{page_path}", page_path)


def _adapt_links(markdown: str, source: str, page: str) -> str:
    """Return the text with links that work on the site.

    A link to a file that the site shows leads to its page. Of a link to any other file outside
    `docs/`, only the text remains.

    Args:
        markdown: The text of the page.
        source: The path of its file in the repository.
        page: The path of the page on the site.
    """
    source_folder = posixpath.dirname(source)
    page_folder = posixpath.dirname(page) or "."

    def adapt_link(match: re.Match[str]) -> str:
        text, path, anchor = match[1], match[2], match[3] or ""
        target = posixpath.normpath(posixpath.join(source_folder, path))
        if target in OUTSIDE_PAGES:
            target_page = OUTSIDE_PAGES[target]
        elif target.startswith("docs/"):
            target_page = target.removeprefix("docs/")
        else:
            return text
        return f"[{text}]({posixpath.relpath(target_page, page_folder)}{anchor})"

    return LINK.sub(adapt_link, markdown)
