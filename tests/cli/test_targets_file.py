"""The file that names several endpoints, and URLs typed several times."""

from pathlib import Path

import pytest
from expected_errors import refused
from msgspec.structs import replace

from loadgen.cli import targets
from loadgen.cli.settings import build_settings
from loadgen.core.errors import CombinedError
from loadgen.core.execution.plan import Endpoint


def test_a_targets_file_sets_every_field_of_an_endpoint(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k-file\n")
    file = tmp_path / "t.yaml"
    file.write_text(
        "- {name: a, url: 'http://h1:8000', api_key_env: KEY_A, gpus: 4, shape: S, region: R}\n"
        "- {url: 'http://h2:8000/v1', api_key_file: key}\n"
    )
    first_endpoint, second_endpoint = targets.load_targets(file, {"KEY_A": "k-env"})

    assert first_endpoint == Endpoint(
        url="http://h1:8000", name="a", api_key="k-env", gpus=4, shape="S", region="R"
    )
    assert (second_endpoint.name, second_endpoint.api_key, second_endpoint.gpus) == (
        "h2:8000",
        "k-file",
        None,
    )
    assert "k-env" not in repr(first_endpoint)

    common = Endpoint(url="", api_key="k-all", gpus=8, shape="T", region="Q")
    file.write_text(file.read_text() + "- {name: c, url: 'http://h3'}\n")
    assert targets.load_targets(file, {"KEY_A": "k-env"}, common)[0] == first_endpoint
    assert targets.load_targets(file, {"KEY_A": "k-env"}, common)[2] == replace(
        common, url="http://h3", name="c"
    )


@pytest.mark.parametrize(
    ("written", "expected_errors"),
    [
        ("- {name: a}\n", ["t.yaml:1:3 missing_key"]),
        ("- {url: 'http://h', nme: x}\n", ["t.yaml:1:21 unknown_key"]),
        ("- {url: 'ftp://h'}\n", ["t.yaml:1:9 invalid_url"]),
        (
            "# two\n- {url: 'ftp://h'}\n- {url: 'http://h', gpus: 0}\n",
            ["t.yaml:2:9 invalid_url", "t.yaml:3:27 out_of_range"],
        ),
        (
            "- {name: a, url: 'http://h1'}\n- {name: a, url: 'http://h2'}\n",
            ["t.yaml:2:3 duplicate"],
        ),
        (
            "- {name: a, url: 'http://h1'}\n- {name: b, url: 'http://h1/v1'}\n",
            ["t.yaml:2:18 duplicate"],
        ),
        (
            "- {url: 'http://h', gpus: -1}\n- [1]\n",
            ["t.yaml:1:27 out_of_range", "t.yaml:2:3 wrong_type"],
        ),
        ("- {url: 'http://h', api_key_env: NOT_THERE}\n", ["t.yaml:1:34 unset_variable"]),
        ("targets: []\n", ["t.yaml:1:10 empty_file"]),
        ("- {name: a, url: 'http://h'}\n  b: {\n", ["t.yaml:2:3 invalid_syntax"]),
        ("", ["t.yaml:1:1 empty_file"]),
    ],
)
def test_errors_of_a_targets_file_are_reported_with_their_location(
    tmp_path: Path, written: str, expected_errors: list[str]
) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(written)

    with pytest.raises(CombinedError) as faults:
        targets.load_targets(file, {})

    errors = [
        f"{fault.where.removeprefix(f'{tmp_path}/').partition(' ')[0]} {fault.code}"
        for fault in faults.value.errors
    ]

    assert errors == expected_errors


def test_a_binary_key_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "t.yaml").write_text("- {url: 'http://h', api_key_file: key}\n")

    for options in (
        {"targets": tmp_path / "t.yaml"},
        {"url": "http://h", "api_key_file": tmp_path / "key"},
    ):
        with pytest.raises(CombinedError, match="key: not text") as faults:
            build_settings(options)
        assert [fault.code for fault in faults.value.errors] == ["wrong_encoding"]


def test_a_simulated_target_in_a_file_gives_the_same_error_as_an_option(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(
        "- {name: a, url: 'sim:gb300-vm'}\n- {name: b, url: 'http://h'}\n"
    )
    with pytest.raises(CombinedError) as exc_info:
        targets.load_targets(tmp_path / "t.yaml", {}, Endpoint(url=""))
    (fault,) = exc_info.value.errors
    assert "the only target" in str(fault) and "http://sim" not in str(fault)


def test_an_error_in_a_targets_file_does_not_print_the_password_of_a_url(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text("- {url: 'http://u:secret@h/x y'}\n")
    with pytest.raises(CombinedError) as faults:
        targets.load_targets(file, {})
    assert "secret" not in str(faults.value)


def test_a_repeated_url_is_refused() -> None:
    with refused(CombinedError, "duplicate", "--url"):
        targets.create_endpoints(["http://h", "http://h/v1"], Endpoint(url=""))


def test_a_simulated_target_together_with_another_url_is_refused() -> None:
    with refused(CombinedError, "conflict", "--url"):
        targets.create_endpoints(["sim:gb300-vm", "http://h"], Endpoint(url=""))


def test_targets_with_one_url_may_have_different_keys(tmp_path: Path) -> None:
    """Two tenants of one gateway."""
    file = tmp_path / "t.yaml"
    file.write_text(
        "".join(f"- {{name: {key}, url: 'http://h', api_key_env: {key}}}\n" for key in ("A", "B"))
    )
    assert [endpoint.api_key for endpoint in targets.load_targets(file, {"A": "1", "B": "2"})] == [
        "1",
        "2",
    ]
