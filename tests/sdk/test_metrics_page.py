"""A page of metrics read plainly is what prometheus-client reads of it, or is left to that package."""

from __future__ import annotations

import random

import pytest
from loadgen_sdk.dialects import metrics_page
from loadgen_sdk.dialects.metrics_page import plain_samples
from prometheus_client.parser import text_string_to_metric_families

from loadgen.core.server_metrics.series import labels

NAMES = ("a", "a_total", "a_created", "h", "h_bucket", "h_sum", "_total", "x:y")
LABELS = ("x", "y", "le", "__n")
WORDS = ("", "1", "+Inf", "a b", " p ", "a,b", "a}b", "{", "#", " # ", "=", "é", "a\\\\b", 'q\\"r')
VALUES = ("1", "2.5", "-3e4", "+Inf", "NaN", "1e400", "+7", "1.", "9" * 30, "1_0", "0x1", "1 1234")
KINDS = ("counter", "counter", "gauge", "summary", "histogram", "untyped", "info")
HELPS = ("", " text", ' te "x', " a\\n", " ")


def of_the_package(text: str) -> list[tuple[str, str, float]]:
    families = text_string_to_metric_families(text)
    return [
        (one.name, labels(one.labels), float(one.value))
        for family in families
        for one in family.samples
    ]


def drawn_line(draw: random.Random) -> str:
    name = draw.choice(NAMES)
    pairs = ",".join(
        f'{draw.choice(LABELS)}="{draw.choice(WORDS)}"' for _ in range(draw.choice((0, 0, 1, 2)))
    )
    kinds = {
        "sample": f"{name}{{{pairs}}} {draw.choice(VALUES)}"
        if pairs
        else f"{name} {draw.choice(VALUES)}",
        "type": f"# TYPE {name} {draw.choice(KINDS)}",
        "help": f"# HELP {name}{draw.choice(HELPS)}",
        "rest": draw.choice(("", " ", "\r", "# EOF", "x y")),
    }
    return kinds[draw.choices(list(kinds), (12, 4, 3, 1))[0]]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_plain_is_read_as_the_package_reads_it(seed: int) -> None:
    draw = random.Random(seed)
    pages = ("\n".join(drawn_line(draw) for _ in range(draw.randrange(1, 7))) for _ in range(1000))
    plain = [(page, found) for page in pages if (found := plain_samples(page)) is not None]
    assert len(plain) > 100
    for page, found in plain:
        assert repr(found) == repr(of_the_package(page)), page  # by their texts: NaN is not NaN


@pytest.mark.parametrize(
    "line",
    [
        'a{x="\\n"} 1',
        "a 1 1234",
        "# EOF",
        'a{x="1",} 1',
        'a{x="1",x="2"} 1',
        'a{__x="1"} 1',
        '{"a"} 1',
        "a{x=1} 1",
        "# TYPE a unknown",
        "a\t1",
        "a nan",
        "a 1 # {} 2",
    ],
)
def test_what_is_not_plain_is_left_to_the_package(line: str) -> None:
    assert plain_samples(f"b 1\n{line}\n") is None


def test_a_type_behind_its_samples_is_left_to_the_package() -> None:
    assert plain_samples("# HELP a x\na 1\n# TYPE a counter\na 2\n") is None


def test_labels_that_come_again_are_looked_at_once() -> None:
    page = "\n".join([f'h_bucket{{of="once",le="{i % 3}"}} {i}' for i in range(300)])
    before = metrics_page._are_plain.cache_info().misses
    assert len(plain_samples(page) or ()) == len(plain_samples(page) or ()) == 300
    assert metrics_page._are_plain.cache_info().misses == before + 3
