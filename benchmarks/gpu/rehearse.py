"""What can be measured in an hour with a GPU? In steps of at most ten minutes that can be resumed.

    python benchmarks/gpu/rehearse.py OUT        # on the machine with the GPU; repeat until exit 0
    python benchmarks/gpu/rehearse.py OUT --seconds 20 --lanes 2 --output-tokens 32   # on a CPU
    python benchmarks/gpu/rehearse.py --smoke    # seconds, against a simulated endpoint

It inspects the machine, starts the best engine that can be started (TensorRT-LLM, vLLM, SGLang,
llama.cpp, transformers) with random weights in the shape of a Llama 2
(`benchmarks/gpu/weights.py`), and then runs doctor, the four profiles in closed and open loop, cold
and warm cache, search, and validate with a bundle. Each step leaves OUT/steps/NAME.json and is not
repeated; a step starts only if it ends within `--minutes`. Exit code 75 means that steps are left:
run the same command again. OUT/README.md is the record.

Nothing is downloaded: llama.cpp may be supplied as a source archive (`--llama-archive`, built with
CUDA if nvcc is installed). Responses of random weights mean nothing and end where `ignore_eos` lets
them end. So nothing here shows how correct responses are, or how much speculation gains.
"""

from __future__ import annotations

import argparse
import contextlib
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
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parent.parent))
import engines
import page
import rig
import weights

PROFILES = ("qa", "rag", "summarization", "agentic")
UNFINISHED_EXIT_CODE = 75  # exit code: steps are left
LOADGEN = [sys.executable, "-P", "-m", "loadgen"]
OPEN_LOOP_FRACTION = 0.7  # of the closed loop's rate
CONTRACT = """name: rehearsal
description: Twice the usual times of the closed loop, at half its rate.
confidence: 95%
horizon: {horizon:g}s
levels:
  - name: half
    workload: qa.yaml
    rate: {rate:.4g}/s
    duration: {seconds:g}s
    warmup: 1s
    must:
      - ttft: {{limit: {ttft:.0f}ms, at: p50}}
      - tpot: {{limit: {tpot:.2f}ms, at: p50}}
      - errors: {errors:.0f}%
"""
MIN_CONTRACT_REQUESTS, USUAL_CONTRACT_REQUESTS = (
    12,
    80,
)  # requests of a contract: that a p50 can be told, and that 5 % of errors can


class Session:
    """One invocation: its folder, its options, and the endpoint once it runs."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.out: Path = args.out
        self.model: Path = args.model
        self.seconds: float = args.seconds
        self.concurrency: int = args.lanes
        self.output_tokens: int | None = args.output_tokens
        self.length = ["--output-tokens", str(args.output_tokens)] if args.output_tokens else []
        self.energy = [option for source in args.energy or () for option in ("--energy", source)]
        self.steps = [step for step in STEPS if not args.smoke or step.name in SMOKE_STEPS]
        self.url, self.flags = "", list[str]()
        self.nvml = engines.NvmlEnergy()
        (self.out / "steps").mkdir(parents=True, exist_ok=True)

    def read_step(self, step: str) -> dict[str, Any] | None:
        """Return what a step has stored, or None if it is still to be done."""
        path = self.out / "steps" / f"{step}.json"
        value: dict[str, Any] | None = json.loads(path.read_bytes()) if path.exists() else None
        return value

    def store_step(self, step: str, value: dict[str, Any]) -> None:
        """Store the result of a step, so that it is never incomplete."""
        scratch = self.out / "steps" / f".{step}"
        scratch.write_text(json.dumps(value, indent=1) + "\n")
        scratch.rename(self.out / "steps" / f"{step}.json")

    def run_loadgen(self, *arguments: str, codes: tuple[int, ...] = (0, 1, 3)) -> str:
        """Run loadgen in the output folder, log what it prints, and return its stdout."""
        completed = subprocess.run(
            [*LOADGEN, *arguments],
            cwd=self.out,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        command_line = shlex.join(["loadgen", *arguments]).replace(str(self.model), "MODEL")
        with (self.out / "log.txt").open("a", encoding="utf-8") as log:
            log.write(
                f"$ {command_line}\n{completed.stdout}{completed.stderr}-> "
                f"{completed.returncode}\n\n"
            )
        print(f"$ {command_line}  -> {completed.returncode}", flush=True)
        if completed.returncode not in codes:
            raise SystemExit(
                f"loadgen ended with "
                f"{completed.returncode}:\n{completed.stdout[-1500:]}{completed.stderr[-1500:]}"
            )
        return completed.stdout

    def run_load(self, name: str, *arguments: str) -> dict[str, Any]:
        """Run a load; return its summary with the joules that the driver counted meanwhile."""
        shutil.rmtree(self.out / name, ignore_errors=True)  # of an invocation that was ended
        run_arguments = [
            *arguments,
            *self.length,
            *self.energy,
            "--server-timing",
            "--progress",
            "off",
        ]
        before = self.nvml.millijoules()
        self.run_loadgen("run", *run_arguments, "--url", self.url, *self.flags, "-o", name)
        after = self.nvml.millijoules()
        summary: dict[str, Any] = json.loads((self.out / name / "summary.json").read_bytes())
        joules = None if before is None or after is None else (after - before) / 1e3
        return summary | {"nvml_joules": joules}


# -- the steps --


def run_doctor(session: Session) -> dict[str, Any]:
    """Check the endpoint with `loadgen doctor`."""
    report: dict[str, Any] = json.loads(
        session.run_loadgen("doctor", "--url", session.url, *session.flags, "--json")
    )
    return report


def run_alone(session: Session) -> dict[str, Any]:
    """Run one request at a time; `fit.py` fits a preset to this load."""
    options = ["-c", "1", "-d", f"{session.seconds}s", "--warmup", f"{session.seconds / 10}s"]
    return page.select_facts(session.run_load("alone", "summarization", *options))


def closed_loop_step(profile: str) -> Callable[[Session], dict[str, Any]]:
    """Return the step that runs a profile in a closed loop."""

    def run_closed_loop(session: Session) -> dict[str, Any]:
        """Run the closed loop."""
        options = [
            "-c",
            str(session.concurrency),
            "-d",
            f"{session.seconds}s",
            "--warmup",
            f"{session.seconds / 10}s",
        ]
        return page.select_facts(session.run_load(f"{profile}-closed", profile, *options))

    return run_closed_loop


def closed_loop_rate(session: Session, profile: str) -> float:
    """Return requests or tasks per second of the closed loop."""
    closed_loop = session.read_step(f"{profile}-closed") or {}
    return max(float(closed_loop["completed_per_s"] or 0.0), 0.2)


def typical_tpot_ms(run_facts: dict[str, Any]) -> float:
    """Return TPOT p50, or TTFT p50 (which is larger) if TPOT was not reported."""
    return float(run_facts["tpot_p50_ms"] or run_facts["ttft_p50_ms"])


def open_loop_step(profile: str) -> Callable[[Session], dict[str, Any]]:
    """Return the step that runs a profile in an open loop."""

    def run_open_loop(session: Session) -> dict[str, Any]:
        """Run the open loop."""
        options = [
            "--request-rate",
            f"{OPEN_LOOP_FRACTION * closed_loop_rate(session, profile):.4g}",
            "-d",
            f"{session.seconds}s",
        ]
        options += ["--warmup", f"{session.seconds / 10}s"]
        return page.select_facts(session.run_load(f"{profile}-open", profile, *options))

    return run_open_loop


def cache_step(warm: bool) -> Callable[[Session], dict[str, Any]]:
    """Return the step that sends some prompts; the second time they are in the prefix cache."""

    def run_same_prompts(session: Session) -> dict[str, Any]:
        """Send the prompts."""
        request_count = str(
            max(12, session.concurrency)
        )  # no more than there are slots, which keep one prompt each in llama.cpp
        name = "cache-warm" if warm else "cache-cold"
        options = [
            "--seed",
            "7",
            "--salt",
            "cache",
            "-c",
            str(min(session.concurrency, 4)),
            "-n",
            request_count,
            "--warmup",
            "0",
        ]
        return page.select_facts(session.run_load(name, "summarization", *options))

    return run_same_prompts


def run_search(session: Session) -> dict[str, Any]:
    """Search the capacity over the concurrency."""
    closed_loop = session.read_step("qa-closed") or {}
    ttft, tpot = 3 * closed_loop["ttft_p50_ms"], 2 * typical_tpot_ms(closed_loop)
    shutil.rmtree(session.out / "search", ignore_errors=True)
    session.run_loadgen(
        "search",
        "qa",
        "--url",
        session.url,
        *session.flags,
        *session.length,
        "--slo",
        f"ttft:{ttft:.0f}ms:p50",
        "--slo",
        f"tpot:{tpot:.2f}ms:p50",
        "--over",
        "concurrency",
        "--low",
        "1",
        "--high",
        str(4 * session.concurrency),
        "-d",
        f"{session.seconds}s",
        "--max-probes",
        "6",
        "--no-sustain",
        "-o",
        "search",
        "--progress",
        "off",
    )
    capacity: dict[str, Any] = json.loads((session.out / "search/capacity.json").read_bytes())
    return capacity


def format_contract(rate: float, seconds: float, ttft_ms: float, tpot_ms: float) -> str:
    """Return a contract of three lengths of a load, longer for a slow engine.

    With few requests only a looser limit of errors can be decided.
    """
    seconds = max(3 * seconds, 60, MIN_CONTRACT_REQUESTS / rate)
    return CONTRACT.format(
        rate=rate,
        seconds=seconds,
        horizon=seconds / 4,
        ttft=max(2 * ttft_ms, 1),
        tpot=max(2 * tpot_ms, 0.01),
        errors=max(5, 5 * USUAL_CONTRACT_REQUESTS / (rate * seconds)),
    )


def run_validation(session: Session) -> dict[str, Any]:
    """Validate a contract and verify its bundle."""
    closed_loop = session.read_step("qa-closed") or {}
    text = format_contract(
        closed_loop_rate(session, "qa") / 2,
        session.seconds,
        closed_loop["ttft_p50_ms"],
        typical_tpot_ms(closed_loop),
    )
    (session.out / "contract.yaml").write_text(text)
    workload = (Path(__file__).parent.parent.parent / "workloads/qa.yaml").read_text()
    if session.output_tokens:  # those of the closed loop, whose rate and times are promised
        workload = re.sub(
            r"output_tokens: \d+", f"output_tokens: {session.output_tokens}", workload
        )
    (session.out / "qa.yaml").write_text(workload)
    for stale_name in ("validation", "bundle.zip"):
        shutil.rmtree(session.out / stale_name, ignore_errors=True)
        (session.out / stale_name).unlink(missing_ok=True)
    session.run_loadgen(
        "validate",
        "contract.yaml",
        "--url",
        session.url,
        *session.flags,
        "--bundle",
        "bundle.zip",
        "-o",
        "validation",
        "--progress",
        "off",
    )
    session.run_loadgen("verify", "bundle.zip", codes=(0,))
    verdict: dict[str, Any] = json.loads((session.out / "validation/verdict.json").read_bytes())
    return verdict


class Step(NamedTuple):
    """A step of the rehearsal, with its duration in lengths of a load."""

    name: str
    seconds: float  # of load, in lengths of a load
    run: Callable[[Session], dict[str, Any]]


SMOKE_STEPS = {
    "doctor",
    "alone",
    "qa-closed",
    "qa-open",
    "cache-cold",
}  # a contract takes a minute of load
STEPS = (
    Step("doctor", 0.5, run_doctor),
    Step("alone", 1.2, run_alone),
    *(Step(f"{profile}-closed", 1.5, closed_loop_step(profile)) for profile in PROFILES),
    *(Step(f"{profile}-open", 1.5, open_loop_step(profile)) for profile in PROFILES),
    Step("cache-cold", 1.0, cache_step(warm=False)),
    Step("cache-warm", 1.0, cache_step(warm=True)),
    Step("search", 7.0, run_search),
    Step("validate", 4.0, run_validation),
)


# -- the endpoint --


def prepare_engine(session: Session, args: argparse.Namespace) -> tuple[engines.Engine, str]:
    """Return the engine and its program, with its weights made.

    The choice is stored, so that later invocations use the same engine.
    """
    machine = session.read_step("look")
    if machine is None:
        machine = engines.inspect_machine()
        if args.llama_archive and "llamacpp" not in machine["engines"]:
            cuda = bool(machine["gpus"] and machine["cuda_compiler"])
            machine["engines"]["llamacpp"] = engines.build_llama_server(
                args.llama_archive, args.model.parent / "llama", cuda
            )
        session.store_step("look", machine)
    engine_name = args.engine or ("llamacpp" if args.llama_archive else "")
    engine = engines.choose_engine(machine, engine_name)
    program = machine["engines"].get(engine.name) or engines.find_program(engine)
    stored_choice = session.read_step("engine")
    if stored_choice is None:
        shape = args.shape or engines.choose_shape(machine, engine)
        if engine.weight_format:
            formats = frozenset({engine.weight_format})
            size = weights.SHAPES[shape]._replace(context=engines.CONTEXT)
            weights.write_model(args.model, size, formats, four_bits=shape != "tiny")
            for name, text in engine.model_files:
                (args.model / name).write_text(text)
        session.store_step(
            "engine", {"engine": engine.name, "shape": shape if engine.weight_format else "none"}
        )
    return engine, program


@contextlib.contextmanager
def serve_engine(session: Session, args: argparse.Namespace) -> Iterator[None]:
    """Run the engine inside the `with` block."""
    engine, program = prepare_engine(session, args)
    gpus = len((session.read_step("look") or {})["gpus"])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    command_line = engine.start_command.format(
        bin=program,
        model=args.model,
        port=port,
        gpus=max(gpus, 1),
        context=engines.CONTEXT,
        python=sys.executable,
        cache=engines.CONTEXT * args.lanes,
        slots=args.lanes,
        layers=999 if gpus else 0,
        threads=max(len(os.sched_getaffinity(0)) // 2, 1),
        device="cuda" if gpus else "cpu",
    )
    session.url = f"http://127.0.0.1:{port}"
    session.flags = [flag.format(model=args.model) for flag in engine.loadgen_options]
    if engine.weight_format:
        session.flags += ["--tokenizer", str(args.model / "tokenizer.json")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(session.out / ".hub")}
    with (session.out / "server.txt").open("ab") as log:
        process = subprocess.Popen(
            shlex.split(command_line),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, session.url, engine.ready_marker, args.start_minutes * 60)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_ready(
    process: subprocess.Popen[bytes], url: str, ready_marker: str, timeout_s: float
) -> None:
    """Wait until the engine lists its models; raise SystemExit if it does not."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response,
        ):
            if ready_marker.encode() in response.read():
                return
        if process.poll() is not None:
            break
        select.select([], [], [], 0.5)
    raise SystemExit("the engine does not serve: see server.txt in the folder")


def list_steps_left(session: Session) -> list[Step]:
    """Return the steps that are still to be done."""
    return [step for step in session.steps if session.read_step(step.name) is None]


def run_steps(session: Session, args: argparse.Namespace, started_s: float) -> None:
    """Run as many steps as fit into the time of this invocation."""
    with serve_engine(session, args):
        for step in list_steps_left(session):
            needed_s = step.seconds * session.seconds + 20
            if time.monotonic() - started_s + needed_s > args.minutes * 60:
                print(f"{step.name} needs {needed_s:.0f} s: the next invocation does it")
                return
            step_started_s = time.monotonic()
            session.store_step(step.name, step.run(session))
            print(f"{step.name}: {time.monotonic() - step_started_s:.0f} s", flush=True)


def main() -> None:
    """Run steps, write the record, and exit with 75 if steps are left."""
    started_s = time.monotonic()
    parser = rig.create_parser(__doc__)
    parser.add_argument("out", nargs="?", type=Path, help="a folder for all of it")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a load")
    parser.add_argument("--minutes", type=float, default=9.5, help="of this invocation, at most")
    parser.add_argument(
        "--lanes", type=int, default=16, help="of the closed loops, and llama.cpp's slots"
    )
    parser.add_argument(
        "--output-tokens", type=int, help="of an answer; the profiles' own without it"
    )
    parser.add_argument(
        "--energy", action="append", help="of `loadgen run`: DCGM's page beside NVML, repeatable"
    )
    parser.add_argument(
        "--engine", choices=engines.BY_NAME, default="", help="not the best, but this one"
    )
    parser.add_argument(
        "--shape", choices=weights.SHAPES, help="not the largest that fits, but this one"
    )
    parser.add_argument(
        "--model", type=Path, help="where the weights are made; a folder beside OUT without it"
    )
    parser.add_argument(
        "--llama-archive", type=Path, help="llama.cpp's source, brought along: .tar.gz"
    )
    parser.add_argument(
        "--start-minutes", type=float, default=8.0, help="that the engine may take to start"
    )
    args = rig.parse_arguments(parser, seconds=1.0, lanes=2, output_tokens=8, engine="simulated")
    if args.out is None and not args.smoke:
        parser.error("OUT: where to?")
    with tempfile.TemporaryDirectory() as scratch:
        args.out = (args.out or Path(scratch) / "out").absolute()
        args.model = (args.model or args.out.with_name(f"{args.out.name}-model")).absolute()
        session = Session(args)
        signal.signal(
            signal.SIGTERM, lambda *_: sys.exit(UNFINISHED_EXIT_CODE)
        )  # the engine does not outlive this process
        if list_steps_left(session):
            run_steps(session, args, started_s)
        steps_left_names = [step.name for step in list_steps_left(session)]
        names = ("look", "engine", *(step.name for step in session.steps))
        text = page.format_page({name: session.read_step(name) for name in names})
        (session.out / "README.md").write_text(text)
        print(text)
    if steps_left_names:
        print(f"left: {', '.join(steps_left_names)}; the same command goes on")
        sys.exit(UNFINISHED_EXIT_CODE)


if __name__ == "__main__":
    main()
