"""Several endpoints in one run: the file that names them, who gets what, one that dies, and the rack's two totals."""

from pathlib import Path

import pytest

from loadgen import run, store, targets
from loadgen.errors import Faults, TargetError
from loadgen.plan import Endpoint, Settings
from loadgen.sim import embedded
from loadgen.sim.options import Options
from loadgen.workload import Overrides, load

QUICK = Options(ttft="2ms", itl="0.2ms")


def workload(tmp_path: Path, turns: int = 0, **flags: str) -> run.Workload:
    file = tmp_path / "w.yaml"
    more = f", turns: {{count: {turns}, tool_result_tokens: 3}}" if turns else ""
    file.write_text(f"name: many\nrequests: {{input_tokens: 8, output_tokens: 4{more}}}\n")
    return load(str(file), Overrides(**flags))


def test_a_file_says_all(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k-file\n")
    file = tmp_path / "t.yaml"
    file.write_text(
        "- {name: a, url: 'http://h1:8000', api_key_env: KEY_A, gpus: 4, shape: S, region: R}\n"
        "- {url: 'http://h2:8000/v1', api_key_file: key}\n"
    )
    first, second = targets.load(file, {"KEY_A": "k-env"})
    assert first == Endpoint(url="http://h1:8000", name="a", api_key="k-env", gpus=4, shape="S", region="R")
    assert (second.name, second.api_key, second.gpus) == ("h2:8000", "k-file", None)
    assert "k-env" not in repr(first)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- {name: a}\n", ["t.yaml:1:3", "without url"]),
        ("- {url: 'http://h', nme: x}\n", ["t.yaml:1:21", "unknown key 'nme'"]),
        ("- {url: 'ftp://h'}\n", ["t.yaml:1:9"]),
        ("- {name: a, url: 'http://h1'}\n- {name: a, url: 'http://h2'}\n", ["t.yaml:2:3", "second target named 'a'"]),
        ("- {url: 'http://h', gpus: -1}\n- [1]\n", ["t.yaml:1:27", "t.yaml:2:3", "mapping"]),
        ("- {url: 'http://h', api_key_env: NOT_THERE}\n", ["NOT_THERE is not set"]),
        ("targets: []\n", ["no targets"]),
        ("", ["t.yaml"]),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "t.yaml"
    file.write_text(text)
    with pytest.raises(Faults) as faults:
        targets.load(file, {})
    for word in words:
        assert word in str(faults.value)


def test_the_same_url_twice() -> None:
    with pytest.raises(Faults) as faults:
        targets.from_urls(["http://h", "http://h/v1"], None, None, "", "")
    assert "given twice" in str(faults.value)


def test_virtual_time_stands_alone() -> None:
    with pytest.raises(Faults) as faults:
        targets.from_urls(["sim:gb300-vm", "http://h"], None, None, "", "")
    assert "virtual time" in str(faults.value)


@pytest.mark.parametrize("route", ["round-robin", "sticky", "least-in-flight"])
def test_routes(tmp_path: Path, route: str) -> None:
    with embedded.start(QUICK) as one, embedded.start(QUICK) as two:
        ends = tuple(Endpoint(url=e.url, name=name) for e, name in ((one, "one"), (two, "two")))
        settings = Settings(url=one.url, targets=ends, route=route, out=tmp_path / "out")  # type: ignore[arg-type]
        turns = 3 if route == "sticky" else 0
        summary, folder = run.execute(workload(tmp_path, turns, concurrency="4", num_requests="20"), settings)
    rows = store.read(folder).rows
    assert summary.requests.ok == len(rows) == (60 if turns else 20)
    assert {part.target.name for part in summary.targets} == {"one", "two"}
    if route == "round-robin":
        assert (rows["target"] == rows["slot"] % 2).all()
    if route == "sticky":
        assert (rows["target"] == rows["session"] % 2).all()
    assert summary.rack is not None and summary.rack.targets == 2
    own = [part.own_output_per_s for part in summary.targets]
    assert summary.rack.sum_of_rates_per_s == pytest.approx(sum(rate or 0.0 for rate in own))
    assert summary.rack.single_clock_per_s == summary.tokens.output_per_s


@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_one_dies(tmp_path: Path, policy: str) -> None:
    with embedded.start(QUICK) as one, embedded.start(QUICK) as two:
        ends = (Endpoint(url=one.url, name="one"), Endpoint(url=two.url, name="two"))
        settings = Settings(url=one.url, targets=ends, on_target_failure=policy, out=tmp_path / "out")  # type: ignore[arg-type]

        def kill(_: object) -> None:
            two.stop()

        summary, folder = run.execute(workload(tmp_path, concurrency="2", num_requests="200"), settings, on_drive=kill)
    rows = store.read(folder).rows
    assert len(rows) == 200
    dead = rows[rows["target"] == 1]
    assert not (dead["status"] == 0).any()
    assert any("target two stopped answering" in warning for warning in summary.verdict.warnings)
    if policy == "continue":
        assert (rows[rows["target"] == 0]["status"] == 0).all() and summary.requests.ok == 100
    else:
        assert summary.requests.cancelled > 0


def test_targets_must_serve_the_same(tmp_path: Path) -> None:
    with embedded.start(QUICK) as one, embedded.start(Options(model="other")) as two:
        ends = (Endpoint(url=one.url, name="one"), Endpoint(url=two.url, name="two"))
        settings = Settings(url=one.url, targets=ends, out=tmp_path / "out")
        with pytest.raises(TargetError, match="serves other"):
            run.execute(workload(tmp_path, concurrency="1", num_requests="1"), settings)
