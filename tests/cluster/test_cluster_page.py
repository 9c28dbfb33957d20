"""The commands of docs/guides/many-machines.md: plain Ray, the rack and the script for Slurm.

Run `pytest -m kills -n 0 tests/cluster/test_cluster_page.py`; it takes a minute and a half. Only
addresses, rates and durations of the commands are changed, and `ray start` gets `--block`, because
`ray stop` would end every Ray process of this machine.
"""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import pytest
import repository_paths
from servers import shared

pytestmark = [pytest.mark.optional, pytest.mark.kills, pytest.mark.processes]

PAGE = (repository_paths.ROOT / "docs/guides/many-machines.md").read_text("utf-8")
SMALL = "--object-store-memory=80000000"
SHORTER = {"500": "8", "3500": "8", "5m": "3s", "10m": "3s", "12": "4", "16": "2"}
SCRIPTS = {
    "ray": f'exec {sys.executable} -c "from ray.scripts.scripts import main; main()" "$@"',
    "loadgen": f'exec {sys.executable} -P -m loadgen "$@"',
    "python": f'exec {sys.executable} "$@"',
    # of Slurm: the names of the nodes; a step, which is run here
    "scontrol": "echo load-1; echo load-2",
    "srun": 'while [ "${1#-}" != "$1" ]; do [ "$1" = -w ] && shift; shift; done; '
    'echo $$ >> "$STEPS"; exec "$@"',
}


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a home directory with the virtual environment `~/lg` of the page.

    Ray stores its sockets there too, so its path is short.
    """
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'loadgen[ray]'")
    home_dir = Path(tempfile.mkdtemp(prefix="lg", dir="/tmp"))
    folder = home_dir / "lg" / "bin"
    folder.mkdir(parents=True)
    for name, script in SCRIPTS.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    (folder / "activate").write_text(f'export PATH="{folder}:$PATH"\n')
    for name, value in {
        "HOME": home_dir,
        "RAY_TMPDIR": home_dir,
        "RAY_USAGE_STATS_ENABLED": 0,
        "STEPS": home_dir / "steps",
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    yield home_dir
    shutil.rmtree(home_dir, ignore_errors=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken_server:
        return int(taken_server.getsockname()[1])


def ended(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()


class Done(NamedTuple):
    returncode: int
    output: str


def typed(line: str, folder: Path, **more: str) -> Done:
    """Run a line of bash and return its output.

    The output goes to a file, because a node that the line leaves running would keep a pipe open.
    """
    with open(folder / "said", "w+") as output_file:
        process = subprocess.run(
            line,
            shell=True,
            executable="/bin/bash",
            stdout=output_file,
            stderr=output_file,
            cwd=folder,
            timeout=120,
            check=False,
            env=os.environ | more,
        )
    text = (folder / "said").read_text("utf-8", "replace")
    print(f"{line}\n{text}")
    assert "Traceback" not in text
    return Done(process.returncode, text)


def shorter(line: str, url: str) -> str:
    """Return a command of the page with the rate, duration and addresses of a test."""
    line = re.sub(r"http://[0-9.]+:8000", url, line).replace("--workers 3", "--workers 2")
    return shlex.join(SHORTER.get(word, word) for word in shlex.split(line, comments=True)).replace(
        "'~/lg", "~/lg'"
    )


def rack_file(folder: Path) -> str:
    urls = [shared(number=number).url for number in range(2)]
    (folder / "rack.yaml").write_text(
        "".join(f"- {{name: n{i}, url: '{url}'}}\n" for i, url in enumerate(urls))
    )
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i} " * 20}) + "\n" for i in range(60))
    )
    return urls[0]


@pytest.mark.usefixtures("home")
def test_commands_of_the_cluster_page_run_on_a_plain_ray_cluster(tmp_path: Path) -> None:
    (block,) = re.findall(r"## Plain Ray.*?\n(    # on the head.*?)\n\n\S", PAGE, re.DOTALL)
    lines = [
        line.strip()
        for line in block.splitlines()
        if line.strip() and not line.strip().startswith("#")
    ]
    starts, (run, stop) = lines[:-2], lines[-2:]

    assert len(starts) == 2 and stop.split("#")[0].strip() == "~/lg/bin/ray stop"

    port, url = str(free_port()), rack_file(tmp_path)
    with ExitStack() as nodes:
        for line in starts:
            here = line.replace("6379", port).replace("HEAD", "127.0.0.1")
            node = subprocess.Popen(
                f"exec env {here} {SMALL} --block",
                shell=True,
                executable="/bin/bash",
                text=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            nodes.callback(ended, node)
            wait_for(port)
        cluster = {"RAY_ADDRESS": f"127.0.0.1:{port}"}
        both = (
            f"import ray; ray.init('127.0.0.1:{port}', log_to_driver=False); "
            "print(len(ray.nodes()))"
        )
        typed(f'until [ "$(python -c "{both}")" = 2 ]; do sleep 1; done', tmp_path)
        done = typed(shorter(run, url).replace("~/lg/bin/loadgen", "loadgen"), tmp_path, **cluster)
        assert done.returncode in (0, 1, 3), done.output  # 1, 3: a busy host's senders are late
        assert "cluster: 1 worker on 1 node" in done.output, "as many as this load can use"
        rack = re.search(r"## A rack, rehearsed.*?\n((?:    loadgen [^\n]*\n)+)", PAGE, re.DOTALL)
        assert rack is not None
        codes = []
        for line in rack[1].splitlines():
            done = typed(shorter(line, url), tmp_path, **cluster)
            codes.append((line.split()[1], done.returncode))
        assert [name for name, _ in codes] == ["doctor", "mlperf", "bundle", "verify"]
        assert (
            codes[0][1] == 0
            and codes[1][1] in (0, 1, 3)
            and codes[2:] == [("bundle", 0), ("verify", 0)]
        ), codes


def wait_for(port: str) -> None:
    """Until a head listens there."""
    given_up_at = monotonic() + 60
    while monotonic() < given_up_at:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", int(port)), 1).close()
            return
        select.select([], [], [], 0.2)


def test_the_slurm_script_runs_to_the_end_of_its_load(home: Path, tmp_path: Path) -> None:
    """Substitutes of the three Slurm commands run the steps on this machine."""
    script = (repository_paths.ROOT / "deploy/loadgen.sbatch").read_text("utf-8")
    script = script.replace("port=6379", f"port={free_port()}").replace(
        "ray start", f"ray start {SMALL}"
    )
    (tmp_path / "loadgen.sbatch").write_text(script)
    rack_file(tmp_path)
    (line,) = re.findall(r"    sbatch deploy/loadgen.sbatch (.*)\n", PAGE)
    done = typed(
        f"bash loadgen.sbatch {shlex.join(SHORTER.get(word, word) for word in shlex.split(line))}",
        tmp_path,
        SLURM_JOB_NODELIST="load-[1-2]",
        SLURM_JOB_ID="7",
        SLURM_CPUS_PER_TASK="2",
        SLURM_SUBMIT_DIR=str(tmp_path),
    )
    try:
        assert done.returncode in (0, 1, 3), done.output
        assert "2 workers on 2 nodes" in done.output, done.output
        assert (tmp_path / "results" / "7" / "run.json").is_file()
    finally:
        steps = [int(step) for step in (home / "steps").read_text().split()]
        for signalled, at_most_s in (
            (signal.SIGTERM, 40.0),
            (signal.SIGKILL, 5.0),
        ):  # as Slurm ends a job
            for step in steps:
                with suppress(ProcessLookupError):
                    os.kill(step, signalled)
            until = monotonic() + at_most_s
            while any(Path(f"/proc/{step}").exists() for step in steps) and monotonic() < until:
                select.select([], [], [], 0.2)
