"""The Helm chart says what `loadgen kube run` says."""

from __future__ import annotations

import base64
from pathlib import Path

import make_chart
import pytest
import yaml
from pods import check

from loadgen.kube import manifests
from loadgen.kube.manifests import JobAsked

CHART = Path(__file__).parent.parent.parent / "deploy" / "chart"


def test_the_templates_are_made_of_the_manifests() -> None:
    made = make_chart.templates()
    assert {name: (CHART / "templates" / name).read_text("utf-8") for name in made} == made, (
        "python tests/make_chart.py"
    )


def test_every_value_is_used_and_every_used_one_is_there() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    text = "".join(make_chart.templates().values())
    assert {name for name in values if f".Values.{name}" in text} == set(values)
    assert text.count(".Values.") == sum(text.count(f".Values.{name}") for name in values)


@pytest.mark.optional
@pytest.mark.parametrize("workers", [[], ["--workers=8"]])
def test_helm_makes_the_manifests_of_the_command(workers: list[str]) -> None:
    """By Helm's own engine, as the package helm-python-sdk has it (75 MB, which nothing else needs)."""
    helm = pytest.importorskip("helm_python", reason="pip install helm-python-sdk")
    arguments = ["run", "rag", "--url=http://a", *workers]
    values = {
        "pods": 3,
        "cpus": 4,
        "secret": "key",
        "arguments": arguments,
        "files": {"w.yaml": "a: 1\n"},
    }
    with helm.Chart.load(str(CHART)) as chart:
        rendered = chart.render(values, name="bench", namespace="perf")
    (job,) = yaml.safe_load_all(rendered["loadgen/templates/job.yaml"])
    ours = [*arguments, *([] if workers else ["--workers", "3"])]
    asked = JobAsked(
        name="bench",
        image="loadgen:latest",
        pods=3,
        arguments=ours,
        secret="key",
        cpus=4,
        stop=False,
    )
    assert job == manifests.job(asked)
    config, secret, service = yaml.safe_load_all(rendered["loadgen/templates/beside.yaml"])
    token = base64.b64decode(secret["data"]["token"])
    assert len(token) == 32 and config.pop("data") == {"w.yaml": "a: 1\n"}
    expected = manifests.beside("bench", {}, {"token": token})
    expected[0].pop("binaryData")
    assert [config, secret, service] == expected
    for made in (job, config, secret, service):
        check(made)
