"""The image and the Job that run loadgen beside a server: as somebody without root, with flags that loadgen knows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from loadgen.shell import app as cli
from loadgen.shell.parsing import parser, spread

DEPLOY = Path(__file__).parent.parent / "deploy"


def test_the_job_runs_what_loadgen_understands(tmp_path: Path) -> None:
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
    typed = [
        f"{flag}={changed.get(flag, value)}" if equals else flag for flag, equals, value in parts
    ]
    with pytest.raises(SystemExit) as ending:
        cli.main(typed)
    assert ending.value.code in (0, 1, 3) and (tmp_path / "run" / "summary.json").is_file()


def test_the_ray_job_and_the_script_for_slurm_type_what_loadgen_takes() -> None:
    job = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    script = (DEPLOY / "loadgen.sbatch").read_text().replace('"$@"', "rag --url http://host:8000")
    (submitted,) = re.findall(r"loadgen run .*", script)
    for line in (job["spec"]["entrypoint"], submitted):
        name, *words = shlex.split(line)[1:]
        parser().commands[name].make_context("loadgen", spread(words))


def test_the_image_runs_as_somebody_without_root() -> None:
    job = yaml.safe_load((DEPLOY / "job.yaml").read_text())
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    (user,) = (line.split()[1] for line in lines if line.startswith("USER "))
    assert int(user) == job["spec"]["template"]["spec"]["securityContext"]["runAsUser"] > 0
    assert 'ENTRYPOINT ["loadgen"]' in lines


def test_the_role_has_no_right_but_those_that_are_used() -> None:
    """What each is for stands in the commands; a real API server has seen that they are enough."""
    role = yaml.safe_load((DEPLOY / "role.yaml").read_text())
    rights = {
        (of, verb) for rule in role["rules"] for of in rule["resources"] for verb in rule["verbs"]
    }
    assert role["kind"] == "Role" and not any("*" in pair for pair in rights)
    made = {"configmaps", "secrets", "services"}
    assert {verb for of, verb in rights if of in made} == {"create"}
    assert (
        ("jobs", "patch") in rights
        and ("pods/exec", "create") in rights
        and ("events", "list") in rights
    )
