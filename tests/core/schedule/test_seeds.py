"""Seed and salt: which runs repeat prompts, and which must not share them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import exits
from tokenizers import Tokenizer, models, pre_tokenizers

import loadgen
from loadgen.compare.comparison import compare
from loadgen.contracts.run import prepare_workload_of_run
from loadgen.core import seeds
from loadgen.core.errors import CombinedError
from loadgen.core.execution.load_description import describe_load
from loadgen.core.results.manifest import RunManifest, decode_manifest
from loadgen.core.workload import load, read_flags
from loadgen.mlperf import rules
from loadgen.mlperf import run as mlperf
from loadgen.runs.comparison_side import ComparedRun, Side
from loadgen.search import experiment

SIM = "sim:gb300-vm"
SMALL = {
    "url": SIM,
    "num_requests": 20,
    "input_tokens": 60,
    "output_tokens": 4,
    "concurrency": 2,
    "warmup": "0",
}


def headers(folder: Path) -> list[RunManifest]:
    return [decode_manifest(file.read_bytes()) for file in sorted(folder.rglob("run.json"))]


def run(folder: Path, **flags: Any) -> loadgen.Result:
    return loadgen.run("qa", **(SMALL | {"out": folder} | flags))


def words_file(folder: Path, *content: str) -> str:
    """Write a tokenizer file of whole words and return its path."""
    vocabulary = {word: i for i, word in enumerate(("?", *content))}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    model.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def test_a_salt_is_derived_from_the_seed_specified_or_random() -> None:
    assert seeds.resolve_salt(7, None) == seeds.resolve_salt(7, None) != seeds.resolve_salt(8, None)
    assert seeds.resolve_salt(7, "blue") == "blue"
    assert seeds.resolve_salt(7, "fresh") != seeds.resolve_salt(7, "fresh")
    assert (
        len(
            {
                seeds.resolve_salt(7, None),
                seeds.salt_of_run(7, None, "c1"),
                seeds.salt_of_run(7, None, "c2"),
            }
        )
        == 3
    )
    assert seeds.salt_of_run(7, "blue", "c1") == "blue.c1"


def test_the_python_api_accepts_a_salt(tmp_path: Path) -> None:
    summary, repeated_summary, fresh = (
        run(tmp_path / name, seed=3, **more).summary
        for name, more in (("a", {}), ("b", {}), ("c", {"salt": "fresh"}))
    )

    assert summary.fingerprints == repeated_summary.fingerprints
    assert summary.run.salt == repeated_summary.run.salt == seeds.resolve_salt(3, None)
    assert summary.fingerprints.prompts != fresh.fingerprints.prompts
    assert summary.fingerprints.schedule == fresh.fingerprints.schedule

    notes = compare(
        [
            Side(name=name, runs=(ComparedRun(name=name, summary=s),))
            for name, s in (("a", summary), ("b", repeated_summary))
        ]
    )

    assert any("the prompts are equal" in note for note in notes.notes)

    notes = compare(
        [
            Side(name=name, runs=(ComparedRun(name=name, summary=s),))
            for name, s in (("a", summary), ("c", fresh))
        ]
    )

    assert any("different texts" in note for note in notes.notes) and not any(
        "the prompts are equal" in n for n in notes.notes
    )


def test_two_tokenizer_files_give_two_fingerprints(tmp_path: Path) -> None:
    files = [
        words_file(tmp_path / name, *word_pair)
        for name, word_pair in (("x", ("ab", "cd")), ("y", ("ab", "ef")))
    ]
    summary, other, packaged = (
        run(tmp_path / name, seed=3, tokenizer=file).summary
        for name, file in (("a", files[0]), ("b", files[1]), ("c", None))
    )

    assert len({s.fingerprints.recipe for s in (summary, other, packaged)}) == 3
    assert summary.run.tokenizer == other.run.tokenizer

    sides = [
        Side(name=name, runs=(ComparedRun(name=name, summary=s),))
        for name, s in (("a", summary), ("b", other))
    ]

    assert any(
        text.startswith("tokenizer file: tokenizer.json (")
        for text in compare(sides).work_differences
    )


@pytest.mark.parametrize("command", ["sweep", "run"])
def test_load_points_of_one_seed_send_different_prompts(command: str, tmp_path: Path) -> None:
    flags = [
        "qa",
        "--url",
        SIM,
        "-c",
        "1,2",
        "-n",
        "20",
        "--input-tokens",
        "60",
        "--output-tokens",
        "4",
    ]

    assert exits(command, *flags, "--seed", "3", "-o", str(tmp_path / "a")) == 0
    manifest, second_run_manifest = headers(tmp_path / "a")
    assert manifest.seed == second_run_manifest.seed == 3
    assert manifest.fingerprints.prompts != second_run_manifest.fingerprints.prompts
    assert exits(command, *flags, "--seed", "3", "-o", str(tmp_path / "b")) == 0
    assert [h.fingerprints.prompts for h in headers(tmp_path / "b")] == [
        manifest.fingerprints.prompts,
        second_run_manifest.fingerprints.prompts,
    ]
    alone = run(tmp_path / "alone", seed=3, salt=second_run_manifest.salt, concurrency=2)
    assert alone.summary.fingerprints.prompts == second_run_manifest.fingerprints.prompts


def test_a_sweep_without_a_seed_is_reproduced_by_its_stored_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "qa",
        "--url",
        SIM,
        "-c",
        "1,2",
        "-n",
        "20",
        "--input-tokens",
        "60",
        "--output-tokens",
        "4",
    ]
    exits("sweep", *flags, "-o", str(tmp_path / "a"))
    seed = experiment.read_plan(tmp_path / "a").seed

    assert f"Reproduce with --seed {seed}" in capsys.readouterr().err.splitlines()

    exits("sweep", *flags, "--seed", str(seed), "-o", str(tmp_path / "b"))
    first_fingerprints, repeated_fingerprints = (
        [h.fingerprints for h in headers(tmp_path / name)] for name in "ab"
    )

    assert first_fingerprints == repeated_fingerprints and len(first_fingerprints) == 2


def test_a_search_without_a_seed_prints_and_stores_a_random_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "qa",
        "--url",
        SIM,
        "--slo",
        "ttft:2s",
        "--max-probes",
        "2",
        "-d",
        "5s",
        "--start",
        "2",
    ]
    exits("search", *flags, "-o", str(tmp_path / "a"))
    seed = experiment.read_plan(tmp_path / "a").seed

    assert f"Reproduce with --seed {seed}" in capsys.readouterr().err.splitlines()
    assert experiment.choose_seed(tmp_path / "a", None) == seed

    exits("search", *flags, "--seed", str(seed), "-o", str(tmp_path / "b"))
    first_run_manifests, repeated_manifests = (headers(tmp_path / name) for name in "ab")
    assert len({h.fingerprints.prompts for h in first_run_manifests}) == len(first_run_manifests)
    assert [h.fingerprints.prompts for h in first_run_manifests] == [
        h.fingerprints.prompts for h in repeated_manifests
    ]


def test_runs_of_a_contract_and_of_a_peak_have_different_prompts() -> None:
    workload = load("qa", overrides=read_flags(seed=3))
    runs = [
        prepare_workload_of_run(workload, level, repeat, None, None)
        for level in ("a", "b")
        for repeat in (1, 2)
    ]

    assert (
        len({(requested_workload.seed, requested_workload.salt) for requested_workload in runs})
        == 4
    )
    assert runs[0].seed == 3 != runs[1].seed
    assert prepare_workload_of_run(load("qa"), "a", 2, None, None).seed is None
    assert prepare_workload_of_run(load("qa"), "a", 1, 5, "blue").salt == "blue.a.r1"

    test = rules.create_test("llama2-70b", "server", None)
    data = mlperf.synthetic_data(test)._replace(seed=9)
    requested_workload = mlperf.build_workload(test, data, qps=10)

    assert (requested_workload.seed, requested_workload.salt, requested_workload.schedule_seed) == (
        9,
        None,
        test.seeds.schedule,
    )


def test_a_salt_without_effect_or_with_a_space_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "hello"}\n')
    file = tmp_path / "w.yaml"
    file.write_text("name: t\nrequests: {from: rows.jsonl, output_tokens: 4}\n")

    with pytest.raises(CombinedError, match="--> --salt blue"):
        load(str(file), read_flags(request_rate=1, num_requests=1, salt="blue"))
    with pytest.raises(CombinedError, match="--> --salt two words"):
        load("qa", read_flags(salt="two words"))
    assert (
        exits("mlperf", "server", "-b", "llama2-70b", "--target-qps", "1", "--salt", "two words")
        == 2
    )
    assert exits("validate", "chatbot", "--seed", "-1") == 2


def test_a_dry_run_prints_a_salt_that_does_not_follow_from_the_seed() -> None:
    from loadgen.core.execution.plan import Settings

    assert (
        "reproduce with --seed 3\n"
        in describe_load(load("qa", overrides=read_flags(seed=3)), Settings()).text
    )
    salted = load("qa", overrides=read_flags(seed=3, salt="blue"))
    assert "--seed 3 --salt blue\n" in describe_load(salted, Settings()).text
