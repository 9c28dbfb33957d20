"""The commands of docs/how-to.md, typed in their order in one folder, as a reader types them."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest
from servers import shared

from loadgen.cli import app as cli

pytestmark = [pytest.mark.commands, pytest.mark.processes]

ROOT = Path(__file__).parent.parent
FILES = {
    "contracts": ROOT / "contracts",
    "docs": ROOT / "docs",
    "prices.yaml": ROOT / "docs/prices.example.yaml",
    "trace.jsonl": ROOT / "tests/data/oracle/trace.jsonl",
    "vllm-result.json": ROOT / "tests/data/rivals/vllm_bench_serve.json",
}
SHORTER = {"validate": ["--duration", "1m"]}
EXAMPLES = {"search": ("search.md", "tutorial.md"), "size": ("size.md", "tutorial.md")}
"""Command -> the pages that show what it prints of the machine that docs/how-to.md searches too."""
CODES = {
    # A minute shows nothing of four hours.
    "validate contracts/rag.yaml --url sim:gb300-vm --seed 1 -o poc": 4,
}


def commands(page: Path) -> list[list[str]]:
    return [
        shlex.split(line)[1:]
        for line in page.read_text("utf-8").splitlines()
        if line.startswith("    loadgen ")
    ]


def shown(page: str, command: str) -> list[str]:
    """The lines that a page shows below its first example of a command."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    below = text[text.index(f"    loadgen {command} rag ") :].splitlines()[1:]
    lines = list(itertools.takewhile(lambda line: not line or line.startswith("    "), below))
    return [" ".join(line.split()) for line in lines if line.strip() and "loadgen " not in line]


def test_every_command_ends_as_its_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loads in virtual time are those of the page, but for a validation's; those over HTTP take a second. What other
    pages show of the search and the size is what they print.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, file in FILES.items():
        (tmp_path / name).symlink_to(file)
    urls = [shared(number=number).url for number in range(2)]
    (tmp_path / "targets.yaml").write_text(
        "".join(f"- {{name: vm-{i}, url: '{url}'}}\n" for i, url in enumerate(urls))
    )
    (tmp_path / "our-folder").symlink_to("before/r1")
    found = commands(ROOT / "docs/how-to.md")
    assert len(found) > 12
    for words in found:
        typed, code = [*words, *SHORTER.get(words[0], [])], CODES.get(" ".join(words), 0)
        over_http = any(word.startswith("http://") or word == "--targets" for word in words)
        if over_http:
            short = {"5m": "1s", "8h": "1s", "500": "40", "100": "40"}
            typed = [short.get(word, re.sub("^http://.*", urls[0], word)) for word in typed]
        with pytest.raises(SystemExit) as left:
            cli.main(typed)
        said = "".join(capsys.readouterr())
        # a busy host's senders are late, and a run of a second says so
        assert left.value.code in ((code, 3) if over_http else (code,)), (
            f"{' '.join(typed)}\n{said}"
        )
        once = " ".join(said.replace("peak", "vm").split())
        for page in EXAMPLES.get(words[0], ()):
            assert shown(page, words[0]), page
            assert not [line for line in shown(page, words[0]) if line not in once], (
                f"docs/{page}: {once}"
            )
        assert words[0] != "sweep" or "INVALID" not in said, said
