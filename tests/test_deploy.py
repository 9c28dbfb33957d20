"""The image and the Job that run loadgen beside a server: as somebody without root, with flags that loadgen knows."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from loadgen.shell import app as cli

DEPLOY = Path(__file__).parent.parent / "deploy"


def test_the_job_runs_what_loadgen_understands(tmp_path: Path) -> None:
    job = yaml.safe_load((DEPLOY / "job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    changed = {"--url": "sim:gb300-vm", "--duration": "2s", "--out": str(tmp_path / "run"), "--request-rate": "5"}
    parts = [argument.partition("=") for argument in container["args"]]
    typed = [f"{flag}={changed.get(flag, value)}" if equals else flag for flag, equals, value in parts]
    with pytest.raises(SystemExit) as ending:
        cli.main(typed)
    assert ending.value.code in (0, 1, 3) and (tmp_path / "run" / "summary.json").is_file()


def test_the_image_runs_as_somebody_without_root() -> None:
    job = yaml.safe_load((DEPLOY / "job.yaml").read_text())
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    (user,) = (line.split()[1] for line in lines if line.startswith("USER "))
    assert int(user) == job["spec"]["template"]["spec"]["securityContext"]["runAsUser"] > 0
    assert 'ENTRYPOINT ["loadgen"]' in lines
