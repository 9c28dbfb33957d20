"""`loadgen fit` finds the distributions from which a trace was drawn, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import repository_paths
import trace_rows
from expected_errors import refused
from loadgen_sdk import Measurement, record_shape

import loadgen
from loadgen.cli import app as cli
from loadgen.core.errors import LoadgenError
from loadgen.core.requests import tokenizer as tokens
from loadgen.core.requests.build import build_prompts
from loadgen.core.schedule.build import build_schedule
from loadgen.core.workload import load
from loadgen.core.workload.loading import workload_from_mapping
from loadgen.core.workload.traces import read_trace
from loadgen.interop import fit_text
from loadgen.interop.distribution_fits import fit_interarrival_times, fit_lengths
from loadgen.interop.fit_workload import render_workload
from loadgen.interop.gamma_distribution import gamma_cdf
from loadgen.interop.trace_fit import TraceFit, fit_trace


@pytest.mark.parametrize(
    ("shape", "x", "p"),
    [(0.5, 0.1, 0.345279), (0.5, 5, 0.998435), (3, 3, 0.576810), (3, 10, 0.997231)],
)
def test_the_gamma_distribution_function_equals_reference_values(
    shape: float, x: float, p: float
) -> None:
    assert gamma_cdf(shape, np.array([x]))[0] == pytest.approx(p, abs=1e-6)
    assert gamma_cdf(5000.0, np.array([5000.0]))[0] == pytest.approx(0.50188, abs=1e-4)


def test_only_the_true_distribution_fits() -> None:
    right = wrong = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        samples_by_name = {
            "normal": rng.normal(500, 100, 10_000),
            "lognormal": rng.lognormal(6, 0.7, 10_000),
            "uniform": rng.uniform(9.5, 1000.5, 10_000),
        }
        for law, values in samples_by_name.items():
            fits = {
                distribution_fit.distribution: distribution_fit.is_good
                for distribution_fit in fit_lengths(
                    np.clip(np.rint(values), 1, None).astype(np.int32)
                )
            }
            right += fits[law]
            wrong += sum(fits[other] for other in samples_by_name if other != law)
        bursty, even = rng.gamma(0.5, 2, 2000), rng.exponential(1, 2000)
        [first_distribution_fit, second_distribution_fit] = fit_interarrival_times(
            bursty / bursty.mean()
        )
        right += first_distribution_fit.distribution == "gamma" and first_distribution_fit.is_good
        wrong += second_distribution_fit.is_good
        right += fit_interarrival_times(even / even.mean())[0].distribution == "poisson"

    assert right >= 97 and wrong == 0


def trace_of(path: Path, workload: dict[str, object], seed: int, step_s: float = 0.0) -> Path:
    """Write a trace of the requests that a workload sends and return its path."""
    trace_workload = workload_from_mapping({"name": "made", **workload})
    due = build_schedule(trace_workload, seed).columns().due_ns / 1e9
    due = np.floor(due / step_s) * step_s if step_s else due
    prompts = build_prompts(trace_workload, seed, 1, tokens.load_tokenizer(None))
    read, write = (
        prompts.sample_lengths(direction, range(len(due))) for direction in ("input", "output")
    )  # type: ignore[attr-defined]
    rows = zip(due.tolist(), read, write, strict=True)
    path.write_text(
        "timestamp,input_length,output_length\n"
        + "".join(f"{at:.6f},{i},{o}\n" for at, i, o in rows)
    )
    return path


GENERATED: dict[str, object] = {
    "requests": {
        "input_tokens": {"lognormal": {"median": 800, "sigma": 0.9}},
        "output_tokens": {"normal": {"mean": 300, "stddev": 60}},
    },
    "stages": [{"arrival": {"gamma": {"rate": "4/s", "burstiness": 0.4}}, "count": 4000}],
}


def test_fitting_a_trace_restores_its_workload(tmp_path: Path) -> None:
    fitted_trace_fit = fit_trace(read_trace(trace_of(tmp_path / "t.csv", GENERATED, 3)))

    assert not fitted_trace_fit.arrivals.is_hourly and fitted_trace_fit.arrivals.rates_per_s[
        0
    ] == pytest.approx(4, rel=0.1)
    assert (
        fitted_trace_fit.arrivals.gaps[0].distribution,
        fitted_trace_fit.arrivals.gaps[0].is_good,
    ) == (
        "gamma",
        True,
    )
    assert fitted_trace_fit.arrivals.gaps[0].parameters["burstiness"] == pytest.approx(
        0.4, rel=0.15
    )
    read_distribution_fit, write = (
        fitted_trace_fit.input_tokens[0],
        fitted_trace_fit.output_tokens[0],
    )
    assert (
        read_distribution_fit.distribution,
        read_distribution_fit.is_good,
        write.distribution,
        write.is_good,
    ) == (
        "lognormal",
        True,
        "normal",
        True,
    )
    assert read_distribution_fit.parameters["median"] == pytest.approx(
        800, rel=0.1
    ) and read_distribution_fit.parameters["sigma"] == pytest.approx(0.9, rel=0.1)
    assert write.parameters["mean"] == pytest.approx(300, rel=0.05)

    (tmp_path / "w.yaml").write_text(render_workload(fitted_trace_fit, "t"))
    fitted_workload = load(str(tmp_path / "w.yaml"))
    assert (
        fitted_workload.stages[0].arrival.tag == "gamma"
        and fitted_workload.requests.input_tokens.tag == "lognormal"
    )  # type: ignore[union-attr]


def test_rounded_times_do_not_hide_the_distribution(tmp_path: Path) -> None:
    poisson = {**GENERATED, "stages": [{"arrival": {"poisson": "50/s"}, "count": 4000}]}
    fitted_trace_fit = fit_trace(read_trace(trace_of(tmp_path / "t.csv", poisson, 5, step_s=0.001)))
    assert (
        fitted_trace_fit.arrivals.gaps[0].distribution,
        fitted_trace_fit.arrivals.gaps[0].is_good,
        fitted_trace_fit.arrivals.clock_step_ns,
    ) == ("poisson", True, 1_000_000)


def test_changing_rates_become_stages_and_other_lengths_become_values(tmp_path: Path) -> None:
    hours = {
        "requests": {
            "input_tokens": {"empirical": {"values": [100, 5000], "weights": [3, 1]}},
            "output_tokens": 7,
        },
        "stages": [
            {"arrival": {"poisson": f"{rate}/min"}, "duration": "1h"} for rate in (10, 60, 20)
        ],
    }
    fitted_trace_fit = fit_trace(read_trace(trace_of(tmp_path / "t.csv", hours, 4)))

    assert [round(rate * 60) for rate in fitted_trace_fit.arrivals.rates_per_s] == pytest.approx(
        [10, 60, 20], abs=3
    )
    chosen_distribution_fit = fitted_trace_fit.input_tokens[0]
    assert (
        chosen_distribution_fit.distribution,
        chosen_distribution_fit.parameters["values"],
        fitted_trace_fit.output_tokens[0].distribution,
    ) == (
        "empirical",
        [100, 5000],
        "fixed",
    )
    assert chosen_distribution_fit.parameters["weights"][0] / sum(
        chosen_distribution_fit.parameters["weights"]
    ) == pytest.approx(0.75, abs=0.05)
    (tmp_path / "w.yaml").write_text(render_workload(fitted_trace_fit, "t"))
    assert [stage.name for stage in load(str(tmp_path / "w.yaml")).stages] == [
        "hour-00",
        "hour-01",
        "hour-02",
    ]

    steady = {
        **hours,
        "stages": [{"arrival": {"gamma": {"rate": "20/min", "burstiness": 0.5}}, "duration": "6h"}],
    }

    assert not fit_trace(
        read_trace(trace_of(tmp_path / "s.csv", steady, 4))
    ).arrivals.is_hourly  # bursts alone are no change


def test_labels_become_classes_with_separate_distributions(tmp_path: Path) -> None:
    """The classes of the fitted run are the features that the SDK recorded."""

    def build_measurement(at: int, feature: str) -> Measurement:
        return Measurement(
            api="chat",
            streamed=True,
            status="ok",
            started=at,
            started_unix_ns=at + 10**18,
            done=at + 10**6,
            output_tokens=7,
            token_source="server",
            labels={"feature": feature},
        )

    with record_shape(tmp_path / "traffic.jsonl", labels=("feature",)) as shape:
        for number in range(90):
            feature = "search" if number % 3 else "Chat (beta)"
            prompt = "word " * (40 if number % 3 else 400)
            arguments = {"messages": [{"role": "user", "content": f"{number} {prompt}"}]}
            shape.end(
                shape.begin(number * 10**8, arguments), build_measurement(number * 10**8, feature)
            )
        rare = shape.begin(91 * 10**8, {"messages": [{"role": "user", "content": "Hello"}]})
        shape.end(rare, build_measurement(91 * 10**8, "rare"))
    fitted_trace_fit = fit_trace(read_trace(tmp_path / "traffic.jsonl"))
    assert sorted((part.name, part.requests) for part in fitted_trace_fit.classes) == [
        ("Chat-beta", 30),
        ("other", 1),
        ("search", 60),
    ]
    (tmp_path / "w.yaml").write_text(render_workload(fitted_trace_fit, "t"))
    assert any("search: 60 requests" in line for line in fit_text.render_fit(fitted_trace_fit))
    result = loadgen.run(str(tmp_path / "w.yaml"), url="sim:gb300-vm", out=str(tmp_path / "out"))
    ran = {part.name: part.requests.ok for part in result.summary.classes}
    assert ran["search"] > ran["Chat-beta"] > ran["other"] - 1


def test_the_fit_command_writes_a_workload_that_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"timestamp": 100 * n, "input_length": 1024, "output_length": 9, "hash_ids": [1, 10 + n]}
        for n in range(99)
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def ended(*arguments: str) -> int:
        with pytest.raises(SystemExit) as ending:
            cli.main(["fit", *arguments])
        return int(ending.value.code or 0)

    assert ended(str(path), "-o", str(tmp_path / "w.yaml")) == 0
    out = capsys.readouterr().out
    assert "49 %" in out and "w.yaml" in out
    workload = load(str(tmp_path / "w.yaml"))
    assert workload.requests.cache == pytest.approx(0.493, abs=0.01)  # type: ignore[union-attr]
    assert ended(str(path)) == 0
    printed = capsys.readouterr()
    assert "requests:" in printed.out and "Arrivals" in printed.err
    assert ended(str(path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["fits"]["input_tokens"][0]["law"] == "fixed"
    assert (
        ended(str(path), "--trace-slice", "5s..1s") == 2
        and "end after it starts" in capsys.readouterr().err
    )
    assert (
        ended(str(path), "--trace-slice", "..1s") == 2
        and "10 requests are too few" in capsys.readouterr().err
    )
    with refused(LoadgenError, "too_few"):
        path.write_text("".join(json.dumps({**row, "timestamp": 0}) + "\n" for row in rows))
        fit_trace(read_trace(path))


def talk(
    session: int, sizes: int, begin_s: float, *, took: bool = True, grow: int = 40
) -> list[dict[str, object]]:
    """Return the trace rows of a conversation.

    The first prompt has 200 tokens, later messages `grow` tokens, and responses 30 tokens; users
    pause for 2 s.
    """
    rows = []
    for turn in range(sizes):
        pause = {"delay": 2000.0} if took and turn else {}
        at, read = round((begin_s + 3 * turn) * 1000), 200 + (session % 7) + turn * (30 + grow)
        lengths = {
            "input_length": read,
            "output_length": 30,
            "block_size": 16,
            "input_source": "server",
        }
        rows.append({"timestamp": at, "session_id": f"s{session}", **lengths, **pause})
    return rows


def test_conversations_of_a_trace_are_fitted_by_distributions(tmp_path: Path) -> None:
    def fitted(name: str, talks: list[list[dict[str, object]]]) -> TraceFit:
        (tmp_path / name).write_text(
            "".join(json.dumps(row) + "\n" for rows in talks for row in rows)
        )
        return fit_trace(read_trace(tmp_path / name))

    begins = list(enumerate(np.cumsum(np.random.default_rng(7).exponential(1.0, 120)).tolist()))
    trace_fit = fitted("mixed.jsonl", [talk(n, (1, 3, 5)[n * 7 // 5 % 3], at) for n, at in begins])
    assert trace_fit.conversations == 80 and not trace_fit.conversations_lost_reason
    assert trace_fit.arrivals.rates_per_s[0] == pytest.approx(120 / begins[-1][1], rel=0.05), (
        "of starts, not of requests"
    )
    single, talks = trace_fit.classes
    assert (single.name, single.arrivals) == ("single", 40)
    assert (talks.name, talks.arrivals, talks.requests) == ("conversations", 80, 320)
    assert talks.conversations is not None
    assert sorted(set(talks.conversations.later_requests[0].parameters.get("values", (2, 4)))) == [
        2,
        4,
    ]
    assert talks.conversations.added_tokens[0].parameters == {
        "value": 40
    } and talks.conversations.think_ms[0].parameters == {"value": 2000}
    (tmp_path / "w.yaml").write_text(render_workload(trace_fit, "t"))
    result = loadgen.run(
        str(tmp_path / "w.yaml"), url="sim:gb300-vm", seed=1, out=str(tmp_path / "out")
    )
    by_name = {part.name: part for part in result.summary.classes}
    assert by_name["conversations"].requests.ok > 3 * by_name["single"].requests.ok
    assert any("80 conversations" in line for line in fit_text.render_fit(trace_fit))
    assert fit_text.fit_to_json(trace_fit, "")["conversations"] == 80

    only = fitted("only.jsonl", [talk(n, 3, at) for n, at in begins])
    assert [part.name for part in only.classes] == [
        "conversations"
    ] and "classes:" not in render_workload(only, "t")
    for name, reason, talks_of in (
        (
            "untold",
            "neither the end of responses",
            [talk(n, 3, at, took=False) for n, at in begins],
        ),
        (
            "shrink",
            "do not contain the earlier messages",
            [talk(n, 3, at, grow=-60) for n, at in begins],
        ),
        (
            "few",
            "2 conversations are too few",
            [talk(n, 1 + (n < 2), at) for n, at in begins],
        ),
    ):
        lost_trace_fit = fitted(f"{name}.jsonl", talks_of)
        assert (
            reason in lost_trace_fit.conversations_lost_reason
            and not lost_trace_fit.conversations
            and not lost_trace_fit.classes
        )
        assert reason in " ".join(" ".join(fit_text.render_fit(lost_trace_fit)).split())


def test_each_agent_and_sub_agent_is_fitted_as_a_conversation(tmp_path: Path) -> None:
    """Where one had a sub-agent, every request of all of them stood alone."""
    calls = [trace_rows.call(at, 200 + 150 * at, 20, *range(at + 1)) for at in range(3)]
    inner = trace_rows.subagent(
        0.6, *(trace_rows.call(0.7 + at, 90 + 60 * at, 10, 50) for at in range(2))
    )
    for call in (*calls, *inner["requests"]):
        call["api_time"] = 0.2
    rows = [
        trace_rows.weka(f"a{number}", calls[0], *([inner] if number % 2 else []), *calls[1:])
        for number in range(30)
    ]
    fitted_trace_fit = fit_trace(read_trace(trace_rows.written(tmp_path / "weka.jsonl", *rows)))

    assert (
        fitted_trace_fit.conversations_lost_reason,
        fitted_trace_fit.conversations,
        fitted_trace_fit.subagents,
    ) == (
        "",
        45,
        15,
    )
    rendered_text = " ".join(fit_text.render_fit(fitted_trace_fit))
    assert "15 sub-agent conversations" in rendered_text
    assert "cache hit rate" not in rendered_text, "a workload of conversations alone asks for none"
    assert (
        load(
            str(trace_rows.written(tmp_path / "w.yaml", render_workload(fitted_trace_fit, "w")))
        ).requests
        is not None
    )


@pytest.mark.commands
def test_recorded_application_traffic_is_fitted_replayed_and_sized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the steps of docs/reference/sdk-telemetry.md: record, fit, sweep, size, validate.

    Labels and conversations are preserved.
    """
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "traffic.jsonl"
    begins = np.cumsum(np.random.default_rng(3).exponential(0.5, 60)).tolist()
    with record_shape(file, labels=("feature",)) as shape:
        for number, begin in enumerate(begins):
            feature = "support" if number % 2 else "search"
            messages: list[dict[str, str]] = []
            at = round(begin * 1e9)
            for turn in range(3 if feature == "support" else 1):
                messages = [
                    *messages,
                    {"role": "user", "content": f"{number} {turn} " + "word " * (60 + number % 9)},
                ]
                call_shape = shape.begin(at, {"messages": messages})
                done = at + 10**9
                measurement = Measurement(
                    api="chat",
                    streamed=True,
                    status="ok",
                    started=at,
                    started_unix_ns=at + 10**18,
                    done=done,
                    output_tokens=20,
                    token_source="server",
                    labels={"feature": feature},
                )
                shape.end(call_shape, measurement)
                messages = [*messages, {"role": "assistant", "content": "answer " * 20}]
                at = done + 2 * 10**9

    def typed(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ending:
            cli.main([str(word) for word in arguments])
        return (int(ending.value.code or 0), *capsys.readouterr())

    page = (
        (repository_paths.ROOT / "docs/reference/sdk-telemetry.md")
        .read_text("utf-8")
        .partition("## From production to load test")[2]
    )
    commands, contract = re.findall(
        r"(?m)^```(?:yaml)?\n((?:loadgen|name).*?)^```", page, re.DOTALL
    )[:2]
    (tmp_path / "contract.yaml").write_text(contract)
    outputs = {}
    for line in commands.replace("http://localhost:8000", "sim:gb300-vm").splitlines():
        _, name, *arguments = line.split()
        code, outputs[name], err = typed(name, *arguments)
        assert code == 0, (line, err)
    assert [*outputs] == ["fit", "sweep", "size", "validate"]
    assert {*load("traffic.yaml").requests.classes} == {"search", "support-conversations"}
    assert "support-conversations" in outputs["fit"] and "PASS" in outputs["validate"]
    (run,) = [
        *Path("results").glob("*/levels/*/summary.json"),
        *Path("results").rglob("summary.json"),
    ][:1]
    classes = json.loads(run.read_text())["classes"]
    assert {part["name"] for part in classes} == {"search", "support-conversations"}
