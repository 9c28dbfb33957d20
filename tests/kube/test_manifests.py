"""What goes to Kubernetes: objects that its API knows, what the command line names, and no key where others read."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pods import check, typed

from loadgen.kube import manifests, state
from loadgen.kube.kubectl import Kubectl
from loadgen.kube.manifests import JobAsked

SECRET = "sk-never-shown-4711"


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What `--manifests` prints, by kind."""
    assert typed("run", *words, "--manifests") == 0
    return {one["kind"]: one for one in yaml.safe_load_all(capsys.readouterr().out)}


def arguments(made: dict[str, Any]) -> list[str]:
    found: list[str] = made["Job"]["spec"]["template"]["spec"]["containers"][0]["args"]
    return found[3:]


@pytest.mark.parametrize("pods", [1, 3])
def test_the_api_of_kubernetes_knows_every_field(pods: int) -> None:
    asked = JobAsked(
        name="a",
        image="i",
        pods=pods,
        arguments=["run", "qa"],
        secret="s",
        hidden=("LOADGEN_ARGUMENT_0",),
    )
    owner = {"name": "a", "uid": "1"}
    made = [manifests.job(asked), *manifests.beside("a", {"w.yaml": b"x"}, {"token": b"t"}, owner)]
    for manifest in made:
        check(manifest)
    assert {one["kind"] for one in made} == {"Job", "ConfigMap", "Secret", "Service"}
    made[0]["spec"]["backofLimitPerIndex"] = 1
    with pytest.raises(jsonschema.ValidationError, match="backofLimitPerIndex"):
        check(made[0])


def test_a_pod_has_the_name_that_it_is_called_by() -> None:
    asked = JobAsked(name="bench", image="i", pods=2, arguments=[], secret="s", cpus=4)
    job, (_, _, service) = manifests.job(asked), manifests.beside("bench", {}, {})
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"] == "bench"
    assert (
        service["spec"]["selector"] == {manifests.JOB_NAME: "bench"}
        and service["spec"]["clusterIP"] == "None"
    )
    assert manifests.agents("bench", 2, 4) == "agents:bench-0.bench:7077*4,bench-1.bench:7077*4"


def test_files_go_along_and_keys_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    workload, key = tmp_path / "my load.yaml", tmp_path / "key.txt"
    workload.write_text("name: mine\nrequests: {input_tokens: 8, output_tokens: 4}\n")
    key.write_text(SECRET)
    header = f"Authorization: Bearer {SECRET}"
    made = shown(
        capsys,
        str(workload),
        "--url=http://vllm:8000",
        "-c",
        "2",
        "-d",
        "3s",
        "--pods=2",
        "--namespace",
        "perf",
        "--insecure",
        "--api-key-file",
        str(key),
        "-H",
        header,
        "-o",
        str(tmp_path / "out"),
        "--force",
        "--name",
        "bench",
    )
    assert arguments(made) == [
        "run",
        "/etc/loadgen/files/workload.yaml",
        "--url",
        "http://vllm:8000",
        "-c",
        "2",
        "-d",
        "3s",
        "--insecure",
        "--api-key-file",
        "/etc/loadgen/keys/1-key.txt",
        "-H",
        "$(LOADGEN_ARGUMENT_0)",
        "--workers",
        "2",
    ]
    assert (
        base64.b64decode(made["ConfigMap"]["binaryData"]["workload.yaml"]) == workload.read_bytes()
    )
    assert set(made["Secret"]["data"]) == {"token", "1-key.txt", "LOADGEN_ARGUMENT_0"}
    told = json.dumps(made)
    assert not any(form in told for form in (SECRET, base64.b64encode(SECRET.encode()).decode()))
    assert made["Job"]["metadata"]["name"] == "bench"


def test_names_are_such_as_kubernetes_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Service begins with a letter, before Kubernetes 1.36; a key of a ConfigMap is [-._a-zA-Z0-9]+."""
    workload = tmp_path / "2026_häufig.yaml"
    workload.write_text("name: mine\nrequests: {input_tokens: 8, output_tokens: 4}\n")
    extra = tmp_path / "größe.txt"
    extra.write_text("k")
    made = shown(
        capsys,
        str(workload),
        "--url=http://a",
        "-c",
        "2",
        "--duration=3s",
        "--api-key-file",
        str(extra),
    )
    assert re.fullmatch(r"h-ufig-[0-9a-f]{4}", made["Service"]["metadata"]["name"])
    assert "0-gr--e.txt" in made["Secret"]["data"]


def test_a_dollar_comes_to_the_pod_as_it_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """Kubernetes reads $(NAME) in an argument as a variable, and $$ as a dollar."""
    made = shown(
        capsys, "qa", "--url=http://a", "-c", "2", "--duration=3s", "--model", "$(POD_IP)$$5"
    )
    assert "$$(POD_IP)$$$$5" in arguments(made)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["qa", "-c", "2"], "--url"),
        (["qa", "-c", "2", "--url", "http://a", "--name", "Not_A_Name"], "--name Not_A_Name"),
        (["qa", "-c", "2", "--url", "http://a", "--name", "n" * 53], "--name nnn"),
        (["qa", "-c", "2", "--url", "http://a", "--name", "4k"], "--name 4k"),
        (["qa", "-c", "two", "--url", "http://a"], "-c"),
        (["own.yaml", "-c", "2", "-n", "2", "--url", "http://a"], "prompts.jsonl"),
        (["qa", "-c", "2", "--url", "http://a", "--tokenizer", "large.json"], "large.json"),
    ],
)
def test_what_the_pods_could_not_do_is_said_before_there_are_any(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: Sequence[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "large.json").write_bytes(bytes(800_000))
    (tmp_path / "own.yaml").write_text("name: own\nrequests: {from: prompts.jsonl}\n")
    assert typed("run", *words) == 2
    assert said in capsys.readouterr().err


# -- what Kubernetes says --------------------------------------------------------------------------------------------


def pod(number: int, made: str, **status: Any) -> dict[str, Any]:
    meta = {
        "name": f"b-{number}-{made}",
        "creationTimestamp": made,
        "annotations": {manifests.INDEX: str(number)},
    }
    return {"metadata": meta, "spec": {}, "status": status}


def job(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "b"}, "spec": {"completions": 2}, "status": status}


def test_a_pod_that_was_replaced_is_counted_and_the_youngest_shown() -> None:
    ended = {"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
    waits = {"state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
    found = state.of(
        job(),
        [
            pod(0, "1", phase="Running"),
            pod(1, "1", phase="Failed", containerStatuses=[ended]),
            pod(1, "2", phase="Pending", containerStatuses=[waits]),
        ],
    )
    assert found.phase == "running" and not found.over and found.lead is not None
    assert [(one.name, one.replaced, one.why) for one in found.pods] == [
        ("b-0-1", 0, ""),
        ("b-1-2", 1, "no such image"),
    ]
    (waiting,) = state.of(
        job(), [pod(0, "1", conditions=[{"status": "False", "message": "0/3 nodes"}])]
    ).pods
    assert waiting.why == "0/3 nodes" and state.of(job(), []).phase == "waiting"
    lost = {
        "type": "Ready",
        "status": "False",
        "lastTransitionTime": "2026-11-24T19:53:32Z",
    }  # as 1.36 says it
    found = state.of(
        job(), [pod(0, "1", phase="Running", conditions=[lost]), pod(1, "1", phase="Running")]
    )
    assert [one.why for one in found.pods] == ["its node does not answer", ""]
    assert found.waits_for == "its node does not answer" and found.whole


@pytest.mark.parametrize(("kind", "phase"), [("Failed", "failed"), ("Complete", "ended")])
def test_a_job_that_is_over_says_how(kind: str, phase: str) -> None:
    found = state.of(job(conditions=[{"type": kind, "status": "True", "message": "why"}]), [])
    assert (found.phase, found.over) == (phase, True)


def test_of_a_cluster_that_does_not_answer_kubectls_own_words_are_told() -> None:
    """Its libraries log the same five times before, each longer than what is shown."""
    logged = (
        b'E1127 14:14:27.8 19271 memcache.go:265] "Unhandled Error" err="couldn\'t get the list"\n'
        * 9
    )
    fault = Kubectl(("-n", "load")).failed(
        ("get", "jobs", "-l", "a=b"), logged + b"The connection was refused\n"
    )
    assert (fault.what, fault.where) == ("The connection was refused", "kubectl get jobs -n load")
    assert "memcache" in Kubectl().failed(("get", "job", "x"), logged).what, (
        "where it says nothing else"
    )
