"""For the documentation site: pages that lie outside docs/ in the repository, and links to them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = {  # file of the repository -> page of the site
    "loadgen/README.md": "architecture.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/simulation.md": "simulation-figures.md",
    "benchmarks/trust.md": "trust.md",
    "benchmarks/search_truth.md": "search-truth.md",
    "benchmarks/hot_path.md": "hot-path.md",
    "benchmarks/figures.md": "figures.md",
    "benchmarks/attacks.md": "attacks.md",
    "benchmarks/servers.md": "servers-seen.md",
    "results/gb300-rack-simulated/README.md": "gb300-rack.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/ that are there."""
    for source, page in OUTSIDE.items():
        if (ROOT / source).exists():
            text = (ROOT / source).read_text("utf-8")
            files.append(File.generated(config, page, content=_moved(text, Path(source).parent)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let a link that leaves docs/ lead to the page of the site, where there is one; else only its words stay."""
    return _moved(markdown, Path("docs")) if page.file.src_uri not in OUTSIDE.values() else markdown


def _moved(markdown: str, folder: Path) -> str:
    def link(match: re.Match[str]) -> str:
        words, path, anchor = match[1], match[2], match[3] or ""
        target = posixpath.normpath((folder / path).as_posix())
        if target in OUTSIDE:
            return f"[{words}]({OUTSIDE[target]}{anchor})"
        if target.startswith("docs/"):
            return f"[{words}]({target.removeprefix('docs/')}{anchor})"
        return words

    return LINK.sub(link, markdown)
