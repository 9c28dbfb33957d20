"""Every change of the table applies, and tests notice it."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from loadgen_sdk import compiled
from make_mutations import PAGE, code

from mutations.draw import find_changes
from mutations.guard import ProjectCopy, project_copy
from mutations.table import ROOT, Mode, Mutation, modes_of, read_dropped, read_mutations

MUTATIONS = read_mutations()
SAMPLE_SEED = 7
SAMPLE_SIZE = 6
IS_COMPILED = compiled.module is not None


def cases(mutations: list[Mutation]) -> list[tuple[Mutation, Mode]]:
    return [
        (mutation, mode)
        for mutation in mutations
        for mode in modes_of(mutation, is_compiled=IS_COMPILED)
    ]


def sample_cases() -> list[tuple[Mutation, Mode]]:
    """Return a random sample of changes, each in one of its modes."""
    return random.Random(SAMPLE_SEED).sample(cases(MUTATIONS), SAMPLE_SIZE)


def case_name(value: object) -> str | None:
    return value.name if isinstance(value, Mutation) else str(value)


@pytest.fixture(scope="module")
def project() -> Iterator[ProjectCopy]:
    with project_copy() as copy:
        yield copy


def test_the_table_of_mutations_has_forty_changes_most_of_them_random() -> None:
    mutations = [mutation for mutation in MUTATIONS if mutation.seed is not None]
    assert len(MUTATIONS) >= 40
    assert len(mutations) > len(MUTATIONS) / 2
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def test_every_dropped_mutation_has_a_reason() -> None:
    assert all(dropped.reason for dropped in read_dropped())
    assert len(read_dropped()) < len(MUTATIONS) / 2


def test_every_dropped_mutation_quotes_the_current_source() -> None:
    for dropped in read_dropped():
        changed = dropped.apply(dropped.source())
        compile(changed, dropped.file, "exec")


def test_a_mutation_of_text_outside_the_source_is_refused() -> None:
    mutation = MUTATIONS[0]
    dropped = read_dropped()[0]
    for change in (mutation, dropped):
        with pytest.raises(ValueError):
            replace(change, old="no line of the source").apply(change.source())


@pytest.mark.parametrize("mutation", MUTATIONS, ids=case_name)
def test_every_mutation_applies_to_the_current_source(mutation: Mutation) -> None:
    source = mutation.source()
    changed = mutation.apply(source)
    assert changed != source
    compile(changed, mutation.file, "exec")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=case_name)
def test_the_tests_of_every_mutation_exist(mutation: Mutation) -> None:
    assert mutation.tests

    for test in mutation.tests:
        path, _, function = test.partition("::")
        file = ROOT / path
        assert file.exists(), test
        if function:
            assert re.search(
                rf"^def {re.escape(function)}\(", file.read_text("utf-8"), re.MULTILINE
            )


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("a = b < c", "a = b <= c"),
        ("a = b + c", "a = b - c"),
        ("a = b and c", "a = b or c"),
        ("a = not b", "a = b"),
        ("a = min(b, c)", "a = max(b, c)"),
        ("a = 7", "a = 8"),
    ],
)
def test_a_random_mutation_changes_one_operator_extreme_or_constant(
    source: str, changed: str
) -> None:
    assert [change.new_text for change in find_changes("file.py", source)] == [changed]


@pytest.mark.processes
def test_a_mutation_without_effect_survives(project: ProjectCopy) -> None:
    """The guard cannot pass because its tests fail anyway."""
    harmless = Mutation(
        name="a comment",
        rule="A comment has no effect.",
        file="loadgen/core/schedule/forecast.py",
        old="NS_PER_S = 1e9",
        new="NS_PER_S = 1e9  # the same",
        tests=(
            "tests/core/stats/test_quantiles.py::test_the_index_of_a_quantile_is_floor_of_n_times_p",
        ),
    )

    assert project.run(harmless, Mode(is_pure=False)).failed_test == ""


@pytest.mark.processes
@pytest.mark.parametrize(("mutation", "mode"), sample_cases(), ids=case_name)
def test_a_sample_of_mutations_fails_its_tests(
    project: ProjectCopy, mutation: Mutation, mode: Mode
) -> None:
    check_noticed(project, mutation, mode)


@pytest.mark.optional
@pytest.mark.mutations
def test_the_page_has_every_change_of_the_table() -> None:
    page = PAGE.read_text("utf-8")
    missing = [
        mutation.name
        for mutation in MUTATIONS
        if f"{code(mutation.old)} becomes {code(mutation.new)}" not in page
    ]
    assert missing == [], "run python tests/make_mutations.py"


@pytest.mark.optional
@pytest.mark.mutations
@pytest.mark.processes
@pytest.mark.parametrize(("mutation", "mode"), cases(MUTATIONS), ids=case_name)
def test_every_mutation_fails_its_tests(
    project: ProjectCopy, mutation: Mutation, mode: Mode
) -> None:
    check_noticed(project, mutation, mode)


def check_noticed(project: ProjectCopy, mutation: Mutation, mode: Mode) -> None:
    outcome = project.run(mutation, mode)
    assert outcome.failed_test, f"no test fails: {mutation.rule}"
