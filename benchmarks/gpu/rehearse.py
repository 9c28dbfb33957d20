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
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
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
QUIET = ("--progress", "off")
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
    """One invocation: its folder, its options, and the endpoint once it runs.

    `length_options` and `energy_options` are options of every `loadgen run`. `url` and
    `target_options` name the endpoint. `nvml` reads the energy counters of the GPUs.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.out: Path = args.out
        self.model: Path = args.model
        self.seconds: float = args.seconds
        self.concurrency: int = args.lanes
        self.output_tokens: int | None = args.output_tokens

        self.length_options: list[str] = []
        if args.output_tokens:
            self.length_options = ["--output-tokens", str(args.output_tokens)]

        self.energy_options = [
            option for source in args.energy or () for option in ("--energy", source)
        ]
        self.steps = [step for step in STEPS if not args.smoke or step.name in SMOKE_STEPS]
        self.url = ""
        self.target_options: list[str] = []
        self.nvml = engines.NvmlEnergy()
        (self.out / "steps").mkdir(parents=True, exist_ok=True)

    def read_step(self, step: str) -> dict[str, Any] | None:
        """Return what a step has stored, or None if it is still to be done."""
        path = self.out / "steps" / f"{step}.json"
        value: dict[str, Any] | None = json.loads(path.read_bytes()) if path.exists() else None
        return value

    def require_step(self, step: str) -> dict[str, Any]:
        """Return what an earlier step has stored; raise SystemExit if it was not done."""
        value = self.read_step(step)
        if value is None:
            raise SystemExit(f"the step {step} has to run first")
        return value

    def store_step(self, step: str, value: dict[str, Any]) -> None:
        """Store the result of a step, so that the file is never incomplete."""
        scratch = self.out / "steps" / f".{step}"
        scratch.write_text(json.dumps(value, indent=1) + "\n")
        scratch.rename(self.out / "steps" / f"{step}.json")

    def run_loadgen(self, *arguments: str, codes: tuple[int, ...] = (0, 1, 3)) -> str:
        """Run loadgen in the output folder, log what it prints, and return its stdout.

        Raises SystemExit if the exit code is none of `codes`.
        """
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
        """Run a load; return its summary with the joules that the GPUs used meanwhile.

        `arguments` are the workload and options of `loadgen run`.
        """
        # An earlier invocation may have been ended during this load.
        shutil.rmtree(self.out / name, ignore_errors=True)
        options = [
            *self.length_options,
            *self.energy_options,
            "--server-timing",
            *QUIET,
            "--url",
            self.url,
            *self.target_options,
            "-o",
            name,
        ]
        before_mj = self.nvml.millijoules()
        self.run_loadgen("run", *arguments, *options)
        after_mj = self.nvml.millijoules()
        summary: dict[str, Any] = json.loads((self.out / name / "summary.json").read_bytes())

        joules = None
        if before_mj is not None and after_mj is not None:
            joules = (after_mj - before_mj) / 1e3

        return summary | {"nvml_joules": joules}

    def duration_options(self) -> list[str]:
        """Return the options for the length of a load and its warm-up, a tenth of it.

        In the warm-up, the engine captures its graphs and fills its caches.
        """
        return ["-d", f"{self.seconds}s", "--warmup", f"{self.seconds / 10}s"]


# -- the steps --


def run_doctor(session: Session) -> dict[str, object]:
    """Check the endpoint with `loadgen doctor`."""
    output = session.run_loadgen("doctor", "--url", session.url, *session.target_options, "--json")
    report: dict[str, Any] = json.loads(output)
    return report


def run_alone(session: Session) -> dict[str, object]:
    """Run one request at a time; `fit.py` fits a preset to this load."""
    options = ["-c", "1", *session.duration_options()]
    return page.select_facts(session.run_load("alone", "summarization", *options))


def run_closed_loop(session: Session, profile: str) -> dict[str, object]:
    """Run a profile in a closed loop and return the facts that the page prints of it."""
    options = ["-c", str(session.concurrency), *session.duration_options()]
    return page.select_facts(session.run_load(f"{profile}-closed", profile, *options))


def closed_loop_rate(session: Session, profile: str) -> float:
    """Return completed requests or tasks per second of the closed loop, at least 0.2."""
    closed_loop = session.require_step(f"{profile}-closed")
    return max(float(closed_loop["completed_per_s"] or 0.0), 0.2)


def typical_tpot_ms(run_facts: dict[str, Any]) -> float:
    """Return TPOT p50, or TTFT p50 (which is larger) if TPOT was not reported."""
    return float(run_facts["tpot_p50_ms"] or run_facts["ttft_p50_ms"])


def run_open_loop(session: Session, profile: str) -> dict[str, object]:
    """Run a profile in an open loop, at a fraction of the rate of its closed loop."""
    rate = OPEN_LOOP_FRACTION * closed_loop_rate(session, profile)
    options = ["--request-rate", f"{rate:.4g}", *session.duration_options()]
    return page.select_facts(session.run_load(f"{profile}-open", profile, *options))


def run_same_prompts(session: Session, name: str) -> dict[str, object]:
    """Send some prompts, the same in each step, so that the second step meets a warm prefix cache.

    There are no more prompts than slots, because llama.cpp keeps one prompt in each slot.
    """
    options = [
        "--seed",
        "7",
        "--salt",
        "cache",
        "-c",
        str(min(session.concurrency, 4)),
        "-n",
        str(max(12, session.concurrency)),
        "--warmup",
        "0",
    ]
    return page.select_facts(session.run_load(name, "summarization", *options))


def run_search(session: Session) -> dict[str, Any]:
    """Search for the highest concurrency with acceptable latencies, and return the capacity.

    Acceptable are three times the TTFT and twice the TPOT of the closed loop.
    """
    closed_loop = session.require_step("qa-closed")
    ttft_limit_ms = 3 * closed_loop["ttft_p50_ms"]
    tpot_limit_ms = 2 * typical_tpot_ms(closed_loop)
    shutil.rmtree(session.out / "search", ignore_errors=True)
    target = ["--url", session.url, *session.target_options, *session.length_options]
    slo = ["--slo", f"ttft:{ttft_limit_ms:.0f}ms:p50", "--slo", f"tpot:{tpot_limit_ms:.2f}ms:p50"]
    load = ["--over", "concurrency", "--low", "1", "--high", str(4 * session.concurrency)]
    length = ["-d", f"{session.seconds}s", "--max-probes", "6", "--no-sustain"]
    session.run_loadgen("search", "qa", *target, *slo, *load, *length, "-o", "search", *QUIET)
    capacity: dict[str, Any] = json.loads((session.out / "search/capacity.json").read_bytes())

    return capacity


MIN_CONTRACT_S = 60


USUAL_MAX_ERRORS_PERCENT = 5


def format_contract(rate: float, load_s: float, ttft_ms: float, tpot_ms: float) -> str:
    """Return a contract whose limits are twice these latencies, at this rate.

    Its load lasts three times as long as the other loads (`load_s`), and longer for a slow engine,
    so that there are enough requests to decide on a p50. A limit of 5 % on errors needs more
    requests, so it is looser for a slow engine.
    """
    contract_s = max(3 * load_s, MIN_CONTRACT_S, MIN_CONTRACT_REQUESTS / rate)
    requests = rate * contract_s
    max_errors_percent = USUAL_MAX_ERRORS_PERCENT * max(1, USUAL_CONTRACT_REQUESTS / requests)

    return CONTRACT.format(
        rate=rate,
        seconds=contract_s,
        horizon=contract_s / 4,
        ttft=max(2 * ttft_ms, 1),
        tpot=max(2 * tpot_ms, 0.01),
        errors=max_errors_percent,
    )


def run_validation(session: Session) -> dict[str, Any]:
    """Validate a contract at half the rate of the closed loop, and verify its bundle."""
    closed_loop = session.require_step("qa-closed")
    contract = format_contract(
        closed_loop_rate(session, "qa") / 2,
        session.seconds,
        closed_loop["ttft_p50_ms"],
        typical_tpot_ms(closed_loop),
    )
    (session.out / "contract.yaml").write_text(contract)
    (session.out / "qa.yaml").write_text(read_qa_workload(session.output_tokens))
    shutil.rmtree(session.out / "validation", ignore_errors=True)
    (session.out / "bundle.zip").unlink(missing_ok=True)
    target = ["--url", session.url, *session.target_options]
    results = ["--bundle", "bundle.zip", "-o", "validation"]
    session.run_loadgen("validate", "contract.yaml", *target, *results, *QUIET)
    session.run_loadgen("verify", "bundle.zip", codes=(0,))
    verdict: dict[str, Any] = json.loads((session.out / "validation/verdict.json").read_bytes())

    return verdict


def read_qa_workload(output_tokens: int | None) -> str:
    """Return the packaged qa workload, with as many output tokens as the closed loop had."""
    workload = (Path(__file__).parent.parent.parent / "workloads/qa.yaml").read_text()
    if not output_tokens:
        return workload
    return re.sub(r"output_tokens: \d+", f"output_tokens: {output_tokens}", workload)


class Step(NamedTuple):
    """A step of the rehearsal.

    `loads` is its duration in lengths of a load (`--seconds`), and `run` returns what is stored.
    """

    name: str
    loads: float
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
    *(
        Step(f"{profile}-closed", 1.5, partial(run_closed_loop, profile=profile))
        for profile in PROFILES
    ),
    *(
        Step(f"{profile}-open", 1.5, partial(run_open_loop, profile=profile))
        for profile in PROFILES
    ),
    Step("cache-cold", 1.0, partial(run_same_prompts, name="cache-cold")),
    Step("cache-warm", 1.0, partial(run_same_prompts, name="cache-warm")),
    Step("search", 7.0, run_search),
    Step("validate", 4.0, run_validation),
)


# -- the endpoint --


def prepare_engine(session: Session, args: argparse.Namespace) -> tuple[engines.Engine, str]:
    """Return the engine and the path of its program, after its weights were written.

    The machine and the choice of the engine are stored as the steps "look" and "engine", so that
    later invocations use the same engine.
    """
    machine = session.read_step("look")
    if machine is None:
        machine = inspect_and_build(args)
        session.store_step("look", machine)

    engine_name = args.engine or ("llamacpp" if args.llama_archive else "")
    engine = engines.choose_engine(machine, engine_name)
    program = machine["engines"].get(engine.name) or engines.find_program(engine)

    if session.read_step("engine") is None:
        shape = "none"
        if engine.weight_format:
            shape = args.shape or engines.choose_shape(machine, engine)
            write_engine_model(engine, args.model, shape)
        session.store_step("engine", {"engine": engine.name, "shape": shape})

    return engine, program


def inspect_and_build(args: argparse.Namespace) -> dict[str, Any]:
    """Return the facts of this machine, after llama.cpp was built if its source was supplied."""
    machine = engines.inspect_machine()
    if args.llama_archive and "llamacpp" not in machine["engines"]:
        has_cuda = bool(machine["gpus"] and machine["cuda_compiler"])
        build_dir = args.model.parent / "llama"
        program = engines.build_llama_server(args.llama_archive, build_dir, has_cuda)
        machine["engines"]["llamacpp"] = program
    return machine


def write_engine_model(engine: engines.Engine, model_dir: Path, shape: str) -> None:
    """Write random weights of a shape in the format of an engine, and its configuration files."""
    dimensions = weights.SHAPES[shape]._replace(context=engines.CONTEXT)
    weight_formats = frozenset({engine.weight_format})
    weights.write_model(model_dir, dimensions, weight_formats, four_bits=shape != "tiny")
    for name, text in engine.model_files:
        (model_dir / name).write_text(text)


@contextlib.contextmanager
def serve_engine(session: Session, args: argparse.Namespace) -> Iterator[None]:
    """Run the engine inside the `with` block, and set the session's endpoint."""
    engine, program = prepare_engine(session, args)
    gpu_count = len(session.require_step("look")["gpus"])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    command_line = engine.start_command.format(
        bin=program,
        model=args.model,
        port=port,
        gpus=max(gpu_count, 1),
        context=engines.CONTEXT,
        python=sys.executable,
        cache=engines.CONTEXT * args.lanes,
        slots=args.lanes,
        layers=999 if gpu_count else 0,
        threads=max(len(os.sched_getaffinity(0)) // 2, 1),
        device="cuda" if gpu_count else "cpu",
    )
    session.url = f"http://127.0.0.1:{port}"

    session.target_options = [flag.format(model=args.model) for flag in engine.loadgen_options]
    if engine.weight_format:
        session.target_options += ["--tokenizer", str(args.model / "tokenizer.json")]

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
        _end_process_group(process)


def _end_process_group(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process and its children, and kill those that do not end within 20 s."""
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
    """Wait until the engine lists its models; raise SystemExit if it does not.

    It serves when its list of models contains `ready_marker`.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if ready_marker in _read_model_list(url):
            return
        if process.poll() is not None:
            break
        time.sleep(0.5)

    raise SystemExit("the engine does not serve: see server.txt in the folder")


def list_steps_left(session: Session) -> list[Step]:
    """Return the steps that are still to be done."""
    return [step for step in session.steps if session.read_step(step.name) is None]


def _read_model_list(url: str) -> str:
    """Return the engine's list of models, or "" while it does not listen."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
            text: str = response.read().decode(errors="replace")
    except OSError:
        return ""
    return text


def run_steps(session: Session, args: argparse.Namespace, started_s: float) -> None:
    """Run as many steps as fit into the time of this invocation, which began at `started_s`."""
    with serve_engine(session, args):
        for step in list_steps_left(session):
            needed_s = step.loads * session.seconds + 20
            if time.monotonic() - started_s + needed_s > args.minutes * 60:
                print(f"{step.name} needs {needed_s:.0f} s: the next invocation does it")
                return
            step_started_s = time.monotonic()
            session.store_step(step.name, step.run(session))
            print(f"{step.name}: {time.monotonic() - step_started_s:.0f} s", flush=True)


def main() -> None:
    """Run steps, write the record, and exit with 75 if steps are left."""
    started_s = time.monotonic()
    args = parse_command_line()
    with tempfile.TemporaryDirectory() as scratch:
        args.out = (args.out or Path(scratch) / "out").absolute()
        args.model = (args.model or args.out.with_name(f"{args.out.name}-model")).absolute()
        session = Session(args)

        # An exit instead of a sudden end, so that the engine does not outlive this process
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(UNFINISHED_EXIT_CODE))
        if list_steps_left(session):
            run_steps(session, args, started_s)

        write_record(session)
        steps_left = [step.name for step in list_steps_left(session)]

    if steps_left:
        print(f"left: {', '.join(steps_left)}; the same command goes on")
        sys.exit(UNFINISHED_EXIT_CODE)


def write_record(session: Session) -> None:
    """Write what all steps so far have stored as README.md, and print it."""
    names = ("look", "engine", *(step.name for step in session.steps))
    text = page.format_page({name: session.read_step(name) for name in names})
    (session.out / "README.md").write_text(text)
    print(text)


def parse_command_line() -> argparse.Namespace:
    """Parse the options of the script."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("out", nargs="?", type=Path, help="the folder for all results")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a load")
    parser.add_argument(
        "--minutes", type=float, default=9.5, help="no step starts that would end later than this"
    )
    parser.add_argument(
        "--lanes", type=int, default=16, help="concurrency of the closed loops; slots of llama.cpp"
    )
    parser.add_argument(
        "--output-tokens", type=int, help="length of a response, in place of the profiles' own"
    )
    parser.add_argument(
        "--energy",
        action="append",
        help="an energy source of `loadgen run`, in addition to NVML; repeatable",
    )
    parser.add_argument(
        "--engine", choices=engines.BY_NAME, default="", help="this engine instead of the best"
    )
    parser.add_argument(
        "--shape", choices=weights.SHAPES, help="this shape instead of the largest that fits"
    )
    parser.add_argument(
        "--model", type=Path, help="the folder of the weights; by default next to OUT"
    )
    parser.add_argument(
        "--llama-archive", type=Path, help="a source archive of llama.cpp (.tar.gz) to build"
    )
    parser.add_argument(
        "--start-minutes", type=float, default=8.0, help="how long the engine may take to start"
    )

    args = rig.parse_arguments(parser, seconds=1.0, lanes=2, output_tokens=8, engine="simulated")
    if args.out is None and not args.smoke:
        parser.error("OUT is missing: the folder for all results")

    return args


if __name__ == "__main__":
    main()
