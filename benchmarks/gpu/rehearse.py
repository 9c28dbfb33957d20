"""What can be measured in an hour with a GPU? In steps of at most ten minutes that can be resumed.

    python benchmarks/gpu/rehearse.py OUT        # on the machine with the GPU; repeat until exit 0
    python benchmarks/gpu/rehearse.py OUT --seconds 20 --lanes 2 --output-tokens 32   # on a CPU
    python benchmarks/gpu/rehearse.py --smoke    # seconds, against a simulated endpoint

It inspects the machine, starts the best engine that can be started (TensorRT-LLM, vLLM, SGLang,
llama.cpp, transformers) with random weights in the shape of a Llama 2
(`benchmarks/gpu/weights.py`), and then runs doctor, the four workloads in closed and open loop,
cold and warm cache, search, and validate with a bundle. Each step leaves OUT/steps/NAME.json and is
not repeated; a step starts only if it ends within `--minutes`. Exit code 75 means that steps are
left: run the same command again. OUT/README.md is the record.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

sys.path.append(str(Path(__file__).parent.parent))
import engines
import page
import rig
import weights

WORKLOADS = ("qa", "rag", "summarization", "agentic")
WORKLOADS_DIR = Path(__file__).parent.parent.parent / "workloads"
LOADGEN = [sys.executable, "-P", "-m", "loadgen"]
NO_PROGRESS = ("--progress", "off")
UNFINISHED_EXIT_CODE = 75
# Exit codes of loadgen after a run: valid, objective missed, invalid. Other codes are errors.
COMPLETED_EXIT_CODES = (0, 1, 3)
PRINTED_ERROR_CHARACTERS = 1500

WARMUP_FRACTION = 0.1  # of a load; in it the engine captures its graphs and fills its caches
OPEN_LOOP_FRACTION = 0.7  # of the rate that the closed loop reached
MIN_RATE_PER_S = 0.2  # of an open loop: a slower one would hardly send a request
MIN_CACHE_TEST_PROMPTS = 12  # fewer give no useful median
MAX_CACHE_TEST_CONCURRENCY = 4  # a low load, so that TTFT shows the cache and not a queue
MAX_SEARCH_TRIALS = 6
STEP_OVERHEAD_S = 20  # of the processes that a step starts and stops
ENGINE_STOP_TIMEOUT_S = 20

CONTRACT = """name: rehearsal
description: Twice the usual times of the closed loop, at half its rate.
confidence: 95%
horizon: {horizon_s:g}s
levels:
  - name: half
    workload: qa.yaml
    rate: {rate:.4g}/s
    duration: {duration_s:g}s
    warmup: 1s
    must:
      - ttft: {{limit: {max_ttft_ms:.0f}ms, at: p50}}
      - tpot: {{limit: {max_tpot_ms:.2f}ms, at: p50}}
      - errors: {max_errors_percent:.0f}%
"""
MIN_CONTRACT_S = 60
MIN_CONTRACT_REQUESTS = 12  # fewer do not decide whether a median keeps its limit
REQUESTS_FOR_USUAL_ERROR_LIMIT = 80  # fewer do not decide whether 5 % of errors are exceeded
USUAL_MAX_ERRORS_PERCENT = 5


class StepStore:
    """The results of finished steps: one JSON file per step, so that a later invocation resumes."""

    def __init__(self, steps_dir: Path) -> None:
        self._steps_dir = steps_dir
        steps_dir.mkdir(parents=True, exist_ok=True)

    def read(self, step_name: str) -> dict[str, Any] | None:
        """Return the result of a step, or None if the step is not finished."""
        path = self._steps_dir / f"{step_name}.json"
        if not path.exists():
            return None
        result: dict[str, Any] = json.loads(path.read_bytes())
        return result

    def require(self, step_name: str) -> dict[str, Any]:
        """Return the result of an earlier step; raise SystemExit if it is not finished."""
        result = self.read(step_name)
        if result is None:
            raise SystemExit(f"the step {step_name} has to run first")
        return result

    def write(self, step_name: str, result: Mapping[str, object]) -> None:
        """Store the result of a step.

        The file appears when it is complete, so an interrupted step is never taken for a finished
        one.
        """
        unfinished_path = self._steps_dir / f".{step_name}"
        unfinished_path.write_text(json.dumps(result, indent=1) + "\n")
        unfinished_path.rename(self._steps_dir / f"{step_name}.json")


class Session:
    """One invocation of the script: its options, and how its steps run loadgen.

    Attributes:
        output_dir: The folder of all results.
        store: The results of finished steps.
        load_s: The duration of a load in seconds.
        concurrency: The requests in flight of a closed loop.
        output_tokens: The length of a response, or None for that of the workload.
        target_options: The options of loadgen that name the engine's URL, model and tokenizer.
    """

    def __init__(
        self, args: argparse.Namespace, store: StepStore, target_options: list[str]
    ) -> None:
        self.output_dir: Path = args.out
        self.store = store
        self.load_s: float = args.seconds
        self.concurrency: int = args.lanes
        self.output_tokens: int | None = args.output_tokens
        self.target_options = target_options
        self._model_dir: Path = args.model
        self._energy_sources: list[str] = args.energy or []
        self._nvml = engines.NvmlEnergy()

    @property
    def duration_options(self) -> list[str]:
        """The options of loadgen for the duration of a load and of its warm-up."""
        return ["-d", f"{self.load_s}s", "--warmup", f"{WARMUP_FRACTION * self.load_s}s"]

    @property
    def length_options(self) -> list[str]:
        """The option of loadgen for the length of a response; empty for that of the workload."""
        if self.output_tokens is None:
            return []
        return ["--output-tokens", str(self.output_tokens)]

    @property
    def energy_options(self) -> list[str]:
        """The options of loadgen for the sources of energy readings."""
        options = []
        for source in self._energy_sources:
            options += ["--energy", source]
        return options

    def run_load(self, run_name: str, arguments: list[str]) -> dict[str, Any]:
        """Run a load against the engine and return its facts as a JSON object.

        Args:
            run_name: The name of the folder in which loadgen writes the run.
            arguments: The workload and the options that differ from load to load.
        """
        run_dir = self.output_dir / run_name
        shutil.rmtree(run_dir, ignore_errors=True)  # an earlier invocation may have been killed
        options = [*self.length_options, *self.energy_options, "--server-timing", *NO_PROGRESS]

        energy_before_mj = self._nvml.read_total_mj()
        self.run_loadgen(["run", *arguments, *options, *self.target_options, "-o", run_name])
        energy_after_mj = self._nvml.read_total_mj()

        joules = None
        if energy_before_mj is not None and energy_after_mj is not None:
            joules = (energy_after_mj - energy_before_mj) / 1000

        summary = json.loads((run_dir / "summary.json").read_bytes())
        return page.select_facts(summary, joules)._asdict()

    def run_loadgen(
        self, arguments: list[str], accepted_codes: tuple[int, ...] = COMPLETED_EXIT_CODES
    ) -> str:
        """Run loadgen in the output folder, append its output to log.txt, and return its stdout.

        Raises SystemExit if the exit code is none of `accepted_codes`.
        """
        completed = subprocess.run(
            [*LOADGEN, *arguments],
            cwd=self.output_dir,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        self._log_command(arguments, completed)
        if completed.returncode not in accepted_codes:
            end_of_stdout = completed.stdout[-PRINTED_ERROR_CHARACTERS:]
            end_of_stderr = completed.stderr[-PRINTED_ERROR_CHARACTERS:]
            raise SystemExit(
                f"loadgen ended with {completed.returncode}:\n{end_of_stdout}{end_of_stderr}"
            )
        return completed.stdout

    def _log_command(
        self, arguments: list[str], completed: subprocess.CompletedProcess[str]
    ) -> None:
        """Print a loadgen command with its exit code, and append it and its output to log.txt.

        The path of the model is written as MODEL, because it describes only this machine.
        """
        command_line = shlex.join(["loadgen", *arguments])
        command_line = command_line.replace(str(self._model_dir), "MODEL")
        print(f"$ {command_line}  -> {completed.returncode}", flush=True)

        output = completed.stdout + completed.stderr
        with (self.output_dir / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"$ {command_line}\n{output}-> {completed.returncode}\n\n")


# -- the steps: loads ------------------------------------------------------------------------------


def check_endpoint(session: Session) -> dict[str, Any]:
    """Check the engine with `loadgen doctor` and return its report."""
    output = session.run_loadgen(["doctor", *session.target_options, "--json"])
    report: dict[str, Any] = json.loads(output)
    return report


def run_single_requests(session: Session) -> dict[str, Any]:
    """Run a load of one request at a time and return its facts.

    `fit.py` fits a simulator preset to this load.
    """
    return session.run_load("alone", ["summarization", "-c", "1", *session.duration_options])


def run_closed_loop(session: Session, workload: str) -> dict[str, Any]:
    """Run a workload with a fixed number of requests in flight and return the run's facts."""
    concurrency = str(session.concurrency)
    return session.run_load(
        f"{workload}-closed", [workload, "-c", concurrency, *session.duration_options]
    )


def run_open_loop(session: Session, workload: str) -> dict[str, Any]:
    """Run a workload at a fixed rate and return the run's facts.

    The rate is a fraction of that which the closed loop reached, so that the engine can sustain it.
    """
    rate = OPEN_LOOP_FRACTION * read_closed_loop_rate(session, workload)
    return session.run_load(
        f"{workload}-open", [workload, "--request-rate", f"{rate:.4g}", *session.duration_options]
    )


def read_closed_loop_rate(session: Session, workload: str) -> float:
    """Return the completed requests (or tasks of an agent) per second of a closed loop.

    If it completed almost none, return MIN_RATE_PER_S, so that a load at this rate has requests.
    """
    facts = page.RunFacts(**session.store.require(f"{workload}-closed"))
    return max(facts.completed_per_s or 0.0, MIN_RATE_PER_S)


def run_with_fixed_prompts(session: Session, run_name: str) -> dict[str, Any]:
    """Run a load whose prompts are the same in every invocation, and return its facts.

    The first such run meets a cold prefix cache, and the second one a warm cache. The seed and the
    salt determine the prompts. There is one prompt for each slot of the engine, because llama.cpp
    keeps only the last prompt of each slot in its cache.
    """
    concurrency = min(session.concurrency, MAX_CACHE_TEST_CONCURRENCY)
    prompts = max(session.concurrency, MIN_CACHE_TEST_PROMPTS)
    fixed_prompts = ["--seed", "7", "--salt", "cache"]
    size = ["-c", str(concurrency), "-n", str(prompts), "--warmup", "0"]
    return session.run_load(run_name, ["summarization", *fixed_prompts, *size])


# -- the steps: search and contract ----------------------------------------------------------------


class TypicalLatencies(NamedTuple):
    """The median latencies of a load in ms."""

    ttft_ms: float
    tpot_ms: float


def read_typical_latencies(session: Session) -> TypicalLatencies:
    """Return the median latencies of the closed loop of the workload `qa`.

    If its TPOT was not reported, its TTFT takes that place, which is larger.
    """
    facts = page.RunFacts(**session.store.require("qa-closed"))
    if facts.ttft_p50_ms is None:
        raise SystemExit("the load qa-closed has no TTFT, from which limits could be derived")
    return TypicalLatencies(facts.ttft_p50_ms, facts.tpot_p50_ms or facts.ttft_p50_ms)


def search_capacity(session: Session) -> dict[str, Any]:
    """Search for the highest concurrency with acceptable latencies, and return the capacity.

    Acceptable are three times the median TTFT and twice the median TPOT of the closed loop.
    """
    latencies = read_typical_latencies(session)
    arguments = [
        "search",
        "qa",
        *session.target_options,
        *session.length_options,
        "--slo",
        f"ttft:{3 * latencies.ttft_ms:.0f}ms:p50",
        "--slo",
        f"tpot:{2 * latencies.tpot_ms:.2f}ms:p50",
        "--over",
        "concurrency",
        "--low",
        "1",
        "--high",
        str(4 * session.concurrency),
        "-d",
        f"{session.load_s}s",
        "--max-probes",
        str(MAX_SEARCH_TRIALS),
        "--no-sustain",
        "-o",
        "search",
        *NO_PROGRESS,
    ]
    search_dir = session.output_dir / "search"
    shutil.rmtree(search_dir, ignore_errors=True)
    session.run_loadgen(arguments)
    capacity: dict[str, Any] = json.loads((search_dir / "capacity.json").read_bytes())
    return capacity


def validate_contract(session: Session) -> dict[str, Any]:
    """Validate a contract at half the rate of the closed loop, and return the verdict.

    The validation writes a bundle of its results, and `loadgen verify` checks that bundle.
    """
    latencies = read_typical_latencies(session)
    rate = read_closed_loop_rate(session, "qa") / 2
    contract = format_contract(rate, session.load_s, latencies.ttft_ms, latencies.tpot_ms)
    validation_dir = session.output_dir / "validation"
    bundle = session.output_dir / "bundle.zip"
    (session.output_dir / "contract.yaml").write_text(contract)
    (session.output_dir / "qa.yaml").write_text(format_qa_workload(session.output_tokens))
    shutil.rmtree(validation_dir, ignore_errors=True)
    bundle.unlink(missing_ok=True)

    outputs = ["--bundle", bundle.name, "-o", validation_dir.name]
    session.run_loadgen(
        ["validate", "contract.yaml", *session.target_options, *outputs, *NO_PROGRESS]
    )
    session.run_loadgen(["verify", bundle.name], accepted_codes=(0,))
    verdict: dict[str, Any] = json.loads((validation_dir / "verdict.json").read_bytes())
    return verdict


def format_contract(rate: float, load_s: float, ttft_ms: float, tpot_ms: float) -> str:
    """Return the YAML of a contract whose limits are twice the median latencies of an engine.

    Its load lasts three times as long as another load of the rehearsal, or longer if the engine is
    so slow that there would be too few requests to decide the contract. The limit on errors is 5 %,
    or more for a slow engine, because a decision on few errors needs more requests than one on a
    median.

    Args:
        rate: The requests per second.
        load_s: The duration of another load in seconds.
        ttft_ms: The median TTFT of the engine.
        tpot_ms: The median TPOT of the engine.
    """
    duration_s = max(3 * load_s, MIN_CONTRACT_S, MIN_CONTRACT_REQUESTS / rate)
    expected_requests = rate * duration_s
    error_limit_factor = max(1, REQUESTS_FOR_USUAL_ERROR_LIMIT / expected_requests)

    return CONTRACT.format(
        rate=rate,
        duration_s=duration_s,
        horizon_s=duration_s / 4,
        max_ttft_ms=max(2 * ttft_ms, 1),
        max_tpot_ms=max(2 * tpot_ms, 0.01),
        max_errors_percent=USUAL_MAX_ERRORS_PERCENT * error_limit_factor,
    )


def format_qa_workload(output_tokens: int | None) -> str:
    """Return the YAML of the packaged workload `qa`, with another length of its responses.

    With None, their length stays that of the packaged workload.
    """
    workload = (WORKLOADS_DIR / "qa.yaml").read_text()
    if output_tokens is None:
        return workload
    return re.sub(r"output_tokens: \d+", f"output_tokens: {output_tokens}", workload)


# -- the list of steps -----------------------------------------------------------------------------


class Step(NamedTuple):
    """A step of the rehearsal.

    Attributes:
        name: The name of its result.
        duration_in_loads: How long it takes, as a multiple of the duration of a load.
        run: The function that runs it and returns the result, a JSON object.
    """

    name: str
    duration_in_loads: float
    run: Callable[[Session], dict[str, Any]]


STEPS = (
    Step("doctor", 0.5, check_endpoint),
    Step("alone", 1.2, run_single_requests),
    *(
        Step(f"{workload}-closed", 1.5, partial(run_closed_loop, workload=workload))
        for workload in WORKLOADS
    ),
    *(
        Step(f"{workload}-open", 1.5, partial(run_open_loop, workload=workload))
        for workload in WORKLOADS
    ),
    Step("cache-cold", 1.0, partial(run_with_fixed_prompts, run_name="cache-cold")),
    Step("cache-warm", 1.0, partial(run_with_fixed_prompts, run_name="cache-warm")),
    Step("search", 7.0, search_capacity),
    Step("validate", 4.0, validate_contract),
)
# Without a contract, whose load takes a minute
SMOKE_STEP_NAMES = {"doctor", "alone", "qa-closed", "qa-open", "cache-cold"}


def list_steps(*, smoke: bool) -> list[Step]:
    """Return the steps of the rehearsal in their order; the smoke form has only the short ones."""
    if smoke:
        return [step for step in STEPS if step.name in SMOKE_STEP_NAMES]
    return list(STEPS)


def list_unfinished_steps(steps: list[Step], store: StepStore) -> list[Step]:
    """Return the steps that have no result yet, in their order."""
    return [step for step in steps if store.read(step.name) is None]


# -- the engine ------------------------------------------------------------------------------------


class PreparedEngine(NamedTuple):
    """An engine whose program is built and whose model is written."""

    engine: engines.Engine
    program: str  # the path of the executable
    gpu_count: int


def prepare_engine(store: StepStore, args: argparse.Namespace) -> PreparedEngine:
    """Choose the engine, write its model, and return what is needed to start it.

    The choice is stored as the step "engine", so that later invocations do not write the model
    again.
    """
    machine = load_machine_facts(store, args)
    engine = engines.choose_engine(machine, choose_engine_name(args))
    if store.read("engine") is None:
        shape_name = "none"
        if engine.weight_format:
            shape_name = args.shape or engines.choose_shape(machine, engine)
            write_engine_model(engine, args.model, shape_name)
        store.write("engine", {"engine": engine.name, "shape": shape_name})

    program = machine["engines"].get(engine.name) or engines.find_program(engine)
    return PreparedEngine(engine, program, gpu_count=len(machine["gpus"]))


def load_machine_facts(store: StepStore, args: argparse.Namespace) -> engines.Machine:
    """Return the facts about this machine.

    The first invocation collects them and stores them as the step "machine". It also builds
    llama.cpp, if its source archive was supplied and it is not installed.
    """
    stored_machine = store.read("machine")
    if stored_machine is not None:
        return cast(engines.Machine, stored_machine)

    machine = engines.inspect_machine()
    if args.llama_archive and "llamacpp" not in machine["engines"]:
        has_cuda = bool(machine["gpus"]) and bool(machine["cuda_compiler"])
        build_dir = args.model.parent / "llama"
        program = engines.build_llama_server(args.llama_archive, build_dir, with_cuda=has_cuda)
        machine["engines"]["llamacpp"] = program
    store.write("machine", machine)
    return machine


def choose_engine_name(args: argparse.Namespace) -> str:
    """Return the name of the requested engine, or "" to use the best one.

    A supplied source archive of llama.cpp is a request for that engine.
    """
    if args.engine:
        return str(args.engine)
    return "llamacpp" if args.llama_archive else ""


def write_engine_model(engine: engines.Engine, model_dir: Path, shape_name: str) -> None:
    """Write a model with random weights in the format of an engine.

    Its context is as long as the longest task of the rehearsal. Some engines also need a
    configuration file next to the model.
    """
    shape = replace(weights.SHAPES[shape_name], context_tokens=engines.CONTEXT_TOKENS)
    weight_formats = frozenset({engine.weight_format})
    matrix_format = weights.choose_matrix_format(shape_name)
    weights.write_model(model_dir, shape, weight_formats, matrix_format)
    for file_name, text in engine.model_files:
        (model_dir / file_name).write_text(text)


@contextlib.contextmanager
def serve_engine(store: StepStore, args: argparse.Namespace) -> Iterator[list[str]]:
    """Run the engine inside the `with` block.

    Yields:
        The options of loadgen that name its URL, its model and its tokenizer.
    """
    engine, program, gpu_count = prepare_engine(store, args)
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    command = engines.build_start_command(
        engine, program, args.model, port, gpu_count, slots=args.lanes
    )
    process = start_engine_process(command, args.out)
    try:
        wait_until_ready(process, url, engine.ready_marker, args.start_minutes * 60)
        yield ["--url", url, *list_model_options(engine, args.model)]
    finally:
        stop_process_group(process)


def find_free_port() -> int:
    """Return a TCP port on which nothing listens at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def list_model_options(engine: engines.Engine, model_dir: Path) -> list[str]:
    """Return the options of loadgen that name the engine's model and its tokenizer."""
    options = [option.format(model_dir=model_dir) for option in engine.loadgen_options]
    has_model_files = bool(engine.weight_format)
    if has_model_files:
        options += ["--tokenizer", str(model_dir / "tokenizer.json")]
    return options


def start_engine_process(command: list[str], output_dir: Path) -> subprocess.Popen[bytes]:
    """Start an engine in a process group of its own, with its output in server.txt.

    The engine must not download anything, so the Hugging Face Hub is offline and its cache empty.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(output_dir / ".hub")}
    with (output_dir / "server.txt").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )


def wait_until_ready(
    process: subprocess.Popen[bytes], url: str, ready_marker: str, timeout_s: float
) -> None:
    """Wait until an engine serves requests, which is when its model list has `ready_marker`.

    Raises SystemExit if the engine ends or is not ready in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s and process.poll() is None:
        if ready_marker in read_model_list(url):
            return
        time.sleep(0.5)

    raise SystemExit("the engine does not serve: see server.txt in the folder")


def read_model_list(url: str) -> str:
    """Return the body of GET /v1/models, or "" while the engine does not answer it."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response:
            body: bytes = response.read()
    except OSError:
        return ""
    return body.decode(errors="replace")


def stop_process_group(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process and its children, and kill those that do not end in time."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(ENGINE_STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# -- the script ------------------------------------------------------------------------------------


def run_steps(
    steps: list[Step], store: StepStore, args: argparse.Namespace, deadline_s: float
) -> None:
    """Start the engine and run the steps, until one would end after the deadline.

    `deadline_s` is a time of the monotonic clock.
    """
    with serve_engine(store, args) as target_options:
        session = Session(args, store, target_options)
        for step in steps:
            step_start_s = time.monotonic()
            expected_s = step.duration_in_loads * session.load_s + STEP_OVERHEAD_S
            if step_start_s + expected_s > deadline_s:
                print(f"{step.name} needs {expected_s:.0f} s: the next invocation does it")
                return

            store.write(step.name, step.run(session))
            print(f"{step.name}: {time.monotonic() - step_start_s:.0f} s", flush=True)


def write_record(steps: list[Step], store: StepStore, output_dir: Path) -> None:
    """Write a page with the results of all steps so far to README.md, and print it."""
    names = ["machine", "engine", *(step.name for step in steps)]
    text = page.format_page({name: store.read(name) for name in names})
    (output_dir / "README.md").write_text(text)
    print(text)


def exit_as_unfinished(_signal_number: int, _frame: object) -> None:
    """End this process after SIGTERM as if its time were over.

    Raising SystemExit, and not dying at once, stops the engine, too.
    """
    sys.exit(UNFINISHED_EXIT_CODE)


def main() -> None:
    """Run the unfinished steps for which there is time, and write the page about all results.

    Exit with UNFINISHED_EXIT_CODE if steps are left for another invocation.
    """
    started_s = time.monotonic()
    args = parse_command_line()
    deadline_s = started_s + args.minutes * 60
    steps = list_steps(smoke=args.smoke)
    signal.signal(signal.SIGTERM, exit_as_unfinished)
    with tempfile.TemporaryDirectory() as scratch:
        args.out = (args.out or Path(scratch) / "out").absolute()
        args.model = (args.model or args.out.with_name(f"{args.out.name}-model")).absolute()
        store = StepStore(args.out / "steps")
        unfinished_steps = list_unfinished_steps(steps, store)
        if unfinished_steps:
            run_steps(unfinished_steps, store, args, deadline_s)

        write_record(steps, store, args.out)
        unfinished_steps = list_unfinished_steps(steps, store)

    if unfinished_steps:
        names = ", ".join(step.name for step in unfinished_steps)
        print(f"Steps left: {names}. Run the same command again.")
        sys.exit(UNFINISHED_EXIT_CODE)


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
        "--output-tokens", type=int, help="length of a response, in place of that of the workload"
    )
    parser.add_argument(
        "--energy",
        action="append",
        help="an energy source of `loadgen run`, in addition to NVML; repeatable",
    )
    add_engine_options(parser)

    args = rig.parse_arguments(parser, seconds=1.0, lanes=2, output_tokens=8, engine="simulated")
    if args.out is None and not args.smoke:
        parser.error("OUT is missing: the folder for all results")

    return args


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the engine and its model."""
    parser.add_argument(
        "--engine",
        choices=engines.ENGINES_BY_NAME,
        default="",
        help="this engine instead of the best",
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


if __name__ == "__main__":
    main()
