"""Tests of the image, the manifests, the Helm chart and the scripts in `deploy/`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from command_line import find_command

from loadgen.cli import app as cli
from loadgen.cli.invocation import expand_slo_flag

DEPLOY = Path(__file__).parent.parent / "deploy"
CHART = DEPLOY / "chart"
KUBERNETES = json.loads((Path(__file__).parent / "data/kubernetes_schemas.json").read_text())


def object_schema(required: list[str], **properties: Any) -> dict[str, Any]:
    """Return a JSON schema of an object that has no other properties than these."""
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


POD_TEMPLATE = {"$ref": "#/$defs/io.k8s.api.core.v1.PodTemplateSpec"}
START_PARAMETERS = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 1}
RAY_JOB = object_schema(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=object_schema(["name"], name={"type": "string"}),
    spec=object_schema(
        ["entrypoint", "rayClusterSpec"],
        entrypoint={"type": "string"},
        shutdownAfterJobFinishes={"type": "boolean"},
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"]},
        rayClusterSpec=object_schema(
            ["headGroupSpec"],
            rayVersion={"type": "string"},
            headGroupSpec=object_schema(
                ["template"], rayStartParams=START_PARAMETERS, template=POD_TEMPLATE
            ),
            workerGroupSpecs={
                "type": "array",
                "items": object_schema(
                    ["groupName", "template"],
                    groupName={"type": "string"},
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    rayStartParams=START_PARAMETERS,
                    template=POD_TEMPLATE,
                ),
            },
        ),
    ),
)
"""The fields of KubeRay's RayJob that are used here, from its CustomResourceDefinition."""


def validate_manifest(manifest: dict[str, Any]) -> None:
    """Raise ValidationError if Kubernetes or KubeRay would refuse the manifest."""
    kinds = KUBERNETES["kinds"] | {"RayJob": RAY_JOB}
    schema = kinds[manifest["kind"]] | {"$defs": KUBERNETES["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(manifest)


def test_the_kubernetes_job_runs_a_valid_command(tmp_path: Path) -> None:
    job = yaml.safe_load((DEPLOY / "job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]

    assert (
        pod["securityContext"]["runAsNonRoot"]
        and container["securityContext"]["readOnlyRootFilesystem"]
    )

    changed = {
        "--url": "sim:gb300-vm",
        "--duration": "2s",
        "--out": str(tmp_path / "run"),
        "--request-rate": "5",
    }
    parts = [argument.partition("=") for argument in container["args"]]
    arguments = [
        f"{flag}={changed.get(flag, value)}" if equals else flag for flag, equals, value in parts
    ]

    with pytest.raises(SystemExit) as ending:
        cli.main(arguments)
    assert ending.value.code in (0, 1, 3) and (tmp_path / "run" / "summary.json").is_file()


def test_the_ray_job_and_the_slurm_script_use_valid_options() -> None:
    job = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    script = (DEPLOY / "loadgen.sbatch").read_text().replace('"$@"', "rag --url http://host:8000")
    (submitted,) = re.findall(r"loadgen run .*", script)
    for line in (job["spec"]["entrypoint"], submitted):
        name, *arguments = shlex.split(line)[1:]
        find_command(name).make_context("loadgen", expand_slo_flag(arguments))


@pytest.mark.processes
def test_the_manifest_and_the_shard_scripts_use_valid_options() -> None:
    job = yaml.safe_load((DEPLOY / "shards.yaml").read_text())
    (pod_command,) = job["spec"]["template"]["spec"]["containers"][0]["args"]
    script = (DEPLOY / "shards.sbatch").read_text().replace("\\\n", " ").replace('"$@"', "rag")
    (slurm_command,) = re.findall(r"exec (loadgen run .*)", script)
    for command, count in (
        (pod_command.removeprefix("exec "), job["spec"]["completions"]),
        (slurm_command, 8),
    ):
        environment = {
            "JOB_COMPLETION_INDEX": "2",
            "SLURM_ARRAY_TASK_ID": "3",
            "SLURM_ARRAY_TASK_COUNT": "8",
            "SLURM_ARRAY_JOB_ID": "1",
            "SLURM_SUBMIT_DIR": "/home",
            "START_AT": "2126-12-01T10:00:00Z",
            "PATH": os.environ["PATH"],
        }
        echoed = subprocess.run(
            ["bash", "-c", f"printf '%s\\n' {command}"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        _, name, *arguments = echoed.stdout.splitlines()
        context = find_command(name).make_context("loadgen", expand_slo_flag(arguments))
        assert context.params["shard"] == f"3/{count}"
        assert context.params["start_at"] == "2126-12-01T10:00:00Z"


def test_the_image_runs_as_a_user_without_root_rights() -> None:
    job = yaml.safe_load((DEPLOY / "job.yaml").read_text())
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    (user,) = (line.split()[1] for line in lines if line.startswith("USER "))
    assert int(user) == job["spec"]["template"]["spec"]["securityContext"]["runAsUser"] > 0
    assert 'ENTRYPOINT ["loadgen"]' in lines


@pytest.mark.parametrize("name", ["job.yaml", "rayjob.yaml", "shards.yaml"])
def test_deployment_manifests_are_valid(name: str) -> None:
    for manifest in yaml.safe_load_all((DEPLOY / name).read_text()):
        validate_manifest(manifest)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("job.yaml", ["spec"]),
        ("rayjob.yaml", ["spec"]),
        ("rayjob.yaml", ["spec", "rayClusterSpec", "headGroupSpec", "template", "spec"]),
    ],
)
def test_a_misspelled_field_of_a_manifest_is_refused(name: str, path: list[str]) -> None:
    manifest = yaml.safe_load((DEPLOY / name).read_text())
    part = manifest
    for key in path:
        part = part[key]
    part["backofLimit"] = 1
    with pytest.raises(jsonschema.ValidationError, match="backofLimit"):
        validate_manifest(manifest)


def test_every_value_of_the_chart_is_used_and_every_used_value_exists() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert set(re.findall(r"\.Values\.(\w+)", templates)) == set(values)


@pytest.mark.optional
def test_helm_renders_valid_manifests() -> None:
    """Render the chart with Helm's own engine, from the package helm-python-sdk (75 MB)."""
    helm = pytest.importorskip("helm_python", reason="pip install helm-python-sdk")
    values = {
        "workers": 3,
        "secret": "target",
        "arguments": ["run", "rag", "--url=http://host:8000", "--metadata=note=two words"],
        "files": {"w.yaml": "a: 1\n"},
    }
    with helm.Chart.load(str(CHART)) as chart:
        rendered = chart.render(values, name="bench", namespace="load")
    config, ray_job = yaml.safe_load_all(rendered["loadgen/templates/rayjob.yaml"])
    validate_manifest(config)
    validate_manifest(ray_job)

    assert config["data"] == {"w.yaml": "a: 1\n"}
    assert shlex.split(ray_job["spec"]["entrypoint"]) == [
        "loadgen",
        *values["arguments"],
        "--ray=auto",
        "--workers=12",
        "--progress=plain",
        "--out=/results/bench",
    ]
