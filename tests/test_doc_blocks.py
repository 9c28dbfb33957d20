"""Every YAML and JSON block of the documentation is one that the tool reads.

A block of YAML is a complete file or a part of a workload. Its top-level keys decide which reader
has to accept it.
"""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from test_docs import PAGES, ROOT

from loadgen.answers.questions import read_questions
from loadgen.cli.targets import load_targets
from loadgen.contracts.loading import load_contract
from loadgen.core.execution.system_file import read_system_file
from loadgen.core.workload import read_flags
from loadgen.core.workload.loading import load_from_options
from loadgen.pricing.price_file import load_prices
from loadgen.sim.presets.preset import load_preset

FENCE = re.compile(r"(?m)^```(\w*)\n([\s\S]*?)^```$")
SIMPLE_REQUESTS = {"input_tokens": 10, "output_tokens": 10}
SIMPLE_STAGES = [{"arrival": {"closed": 1}, "count": 1}]
PARTS_OF_WORKLOADS = {"requests", "trace", "classes", "stages", "slo", "stop_when"}
SIMPLE_LEVEL = """levels:
  - {name: load, workload: qa, rate: 1/s, duration: 1h, must: [{ttft: {limit: 2s, at: p95}}]}
"""


class Block(NamedTuple):
    """A block of a page: its language, its text, and where it stands."""

    page: Path
    language: str
    text: str

    @property
    def place(self) -> str:
        """Return the page and the first line of the block, for the names of tests."""
        return f"{self.page.relative_to(ROOT)}: {self.text.splitlines()[0][:40]}"


def _blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, and its indented blocks that begin with `# NAME.yaml`."""
    text = page.read_text("utf-8")
    blocks = [Block(page, language, body) for language, body in FENCE.findall(text)]
    for indented in re.findall(r"(?m)(?:^    .*\n)+", FENCE.sub("", text)):
        body = textwrap.dedent(indented)
        if re.match(r"# \w+\.yaml", body):
            blocks.append(Block(page, "yaml", body))
    return blocks


BLOCKS = [block for page in PAGES for block in _blocks_of(page)]
YAML_BLOCKS = [block for block in BLOCKS if block.language == "yaml"]
JSON_BLOCKS = [block for block in BLOCKS if block.language in ("json", "jsonl")]


@pytest.fixture
def reader_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files that the blocks name."""
    shutil.copy(ROOT / "docs/prices.example.yaml", tmp_path / "prices.yaml")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello"}\n')
    rows = [
        {"conversation_id": "c1", "turn": turn, "role": role, "content": "Hello"}
        for turn, role in enumerate(("user", "assistant", "user"), start=1)
    ]
    (tmp_path / "trajectories.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    trace = {"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}
    later = [json.dumps(trace | {"timestamp": minute * 60_000}) for minute in range(30)]
    (tmp_path / "traffic.jsonl").write_text("\n".join(later) + "\n")
    questions = [{"prompt": "2 + 2?", "reference": "4", "class": "facts"}] * 400
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)) + "\n")
    recorded = {"prompt": "2 + 2?", "reference_responses": ["4", "4"]}
    (tmp_path / "reference.jsonl").write_text(json.dumps(recorded) + "\n")
    classes = {
        name: {"weight": "50%", "requests": SIMPLE_REQUESTS}
        for name in ("search", "support-conversations")
    }
    (tmp_path / "traffic.yaml").write_text(
        yaml.safe_dump({"name": "traffic", "classes": classes, "stages": SIMPLE_STAGES})
    )
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "vm-02").write_text("sk-test\n")
    monkeypatch.setenv("RACK_KEY", "sk-test")
    return tmp_path


def _read_workload(text: str, folder: Path) -> None:
    """Read a part of a workload, which is completed with what it leaves out."""
    keys: set[str] = set(yaml.safe_load(text))
    assert keys <= {"name", "description", *PARTS_OF_WORKLOADS}, f"no file has the keys {keys}"
    missing: dict[str, Any] = {"name": "part"}
    if not keys & {"requests", "classes", "trace"}:
        missing["requests"] = SIMPLE_REQUESTS
    if "task:" in text and "requests" in missing:
        missing["requests"] = {"steps": {"plan": SIMPLE_REQUESTS}}
    if not keys & {"stages", "trace"}:
        missing["stages"] = SIMPLE_STAGES
    added = {key: value for key, value in missing.items() if key not in keys}
    file = folder / "workload.yaml"
    file.write_text(text + yaml.safe_dump(added) if added else text)
    load_from_options(str(file), None, read_flags())


def _read_block(text: str, folder: Path) -> None:
    """Read a block with the reader that its keys require. Raises CombinedError if it is refused."""
    text = text.replace("levels: [...]\n", SIMPLE_LEVEL)
    file = folder / "block.yaml"
    document = yaml.safe_load(text)
    named = document if isinstance(document, dict) else {}
    if "levels" in named and "name" not in named:
        text = f"name: contract\n{text}"
    file.write_text(text)
    if isinstance(document, list):
        load_targets(file)
    elif "levels" in named:
        load_contract(file)
    elif "currency" in named:
        load_prices(file)
    elif "provisioned_kw" in named:
        read_system_file(file)
    elif "extends" in named:
        load_preset(str(file))
    else:
        _read_workload(text, folder)


def test_the_documentation_has_blocks_of_yaml_and_json() -> None:
    assert len(YAML_BLOCKS) > 14
    assert JSON_BLOCKS


@pytest.mark.parametrize("block", YAML_BLOCKS, ids=lambda block: block.place)
def test_every_documented_block_of_yaml_is_valid(block: Block, reader_files: Path) -> None:
    _read_block(block.text, reader_files)


@pytest.mark.parametrize("block", JSON_BLOCKS, ids=lambda block: block.place)
def test_every_documented_block_of_json_is_valid(block: Block, tmp_path: Path) -> None:
    for line in block.text.splitlines():
        json.loads(line)
    if '"prompt"' in block.text:
        file = tmp_path / "questions.jsonl"
        file.write_text(block.text)
        assert read_questions(file, None)
