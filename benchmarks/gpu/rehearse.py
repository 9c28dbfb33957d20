"""An hour with a GPU, in steps of at most ten minutes that go on where they were left.

    python benchmarks/gpu/rehearse.py OUT                  # on the machine with the GPU; again until it ends with 0
    python benchmarks/gpu/rehearse.py OUT --seconds 20 --lanes 2 --output-tokens 32     # the same on a CPU: a rehearsal
    python benchmarks/gpu/rehearse.py --smoke              # seconds, against a simulated endpoint

Looks what is there, starts the best engine that can be started (TensorRT-LLM, vLLM, SGLang, llama.cpp, transformers)
with random weights in the shape of a Llama 2 (`benchmarks/gpu/weights.py`), and then: doctor, the four profiles in
closed and open loop, cold and warm cache, search, validate with a bundle. Each step leaves OUT/steps/NAME.json and is
not done twice; a step begins only if it ends within `--minutes`. Exit code 75: steps are left, the same command goes
on. OUT/README.md is the record. Nothing is downloaded: llama.cpp may be brought along as a source archive
(`--llama-archive`, built with CUDA if nvcc is there). Answers of random weights mean nothing, and they end where
`ignore_eos` lets them end: nothing here says how true answers are, nor how much speculation gains.
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
UNFINISHED = 75  # exit code: steps are left
LOADGEN = [sys.executable, "-P", "-m", "loadgen"]
OPEN_SHARE = 0.7  # of the closed loop's rate
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
FEWEST, USUAL = 12, 80  # requests of a contract: that a p50 can be told, and that 5 % of errors can


class Session:
    """This invocation: where it writes, what it was given, and the endpoint once it is there."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.out: Path = given.out
        self.model: Path = given.model
        self.seconds: float = given.seconds
        self.lanes: int = given.lanes
        self.output_tokens: int | None = given.output_tokens
        self.length = ["--output-tokens", str(given.output_tokens)] if given.output_tokens else []
        self.energy = [word for source in given.energy or () for word in ("--energy", source)]
        self.steps = [step for step in STEPS if not given.smoke or step.name in SMOKE]
        self.url, self.flags = "", list[str]()
        self.nvml = engines.Nvml()
        (self.out / "steps").mkdir(parents=True, exist_ok=True)

    def kept(self, step: str) -> dict[str, Any] | None:
        """What a step has left, None where it is still to be done."""
        file = self.out / "steps" / f"{step}.json"
        found: dict[str, Any] | None = json.loads(file.read_bytes()) if file.exists() else None
        return found

    def keep(self, step: str, value: dict[str, Any]) -> None:
        scratch = self.out / "steps" / f".{step}"
        scratch.write_text(json.dumps(value, indent=1) + "\n")
        scratch.rename(self.out / "steps" / f"{step}.json")

    def command(self, *words: str, codes: tuple[int, ...] = (0, 1, 3)) -> str:
        """Carry out `loadgen WORDS` in OUT, with its text in OUT/log.txt; returns what it printed."""
        done = subprocess.run(
            [*LOADGEN, *words],
            cwd=self.out,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        shown = shlex.join(["loadgen", *words]).replace(str(self.model), "MODEL")
        with (self.out / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"$ {shown}\n{done.stdout}{done.stderr}-> {done.returncode}\n\n")
        print(f"$ {shown}  -> {done.returncode}", flush=True)
        if done.returncode not in codes:
            raise SystemExit(
                f"loadgen ended with {done.returncode}:\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
            )
        return done.stdout

    def load(self, name: str, *words: str) -> dict[str, Any]:
        """A run; returns its summary with the joules that the driver counted meanwhile."""
        shutil.rmtree(self.out / name, ignore_errors=True)  # of an invocation that was ended
        load = [*words, *self.length, *self.energy, "--server-timing", "--progress", "off"]
        before = self.nvml.millijoules()
        self.command("run", *load, "--url", self.url, *self.flags, "-o", name)
        after = self.nvml.millijoules()
        summary: dict[str, Any] = json.loads((self.out / name / "summary.json").read_bytes())
        joules = None if before is None or after is None else (after - before) / 1e3
        return summary | {"nvml_joules": joules}


# -- the steps -----------------------------------------------------------------------------------------------------


def doctor(session: Session) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(
        session.command("doctor", "--url", session.url, *session.flags, "--json")
    )
    return told


def alone(session: Session) -> dict[str, Any]:
    """One request at a time: what the engine does when nobody else asks. `fit.py` fits a preset to it."""
    load = ["-c", "1", "-d", f"{session.seconds}s", "--warmup", f"{session.seconds / 10}s"]
    return page.facts(session.load("alone", "summarization", *load))


def closed(profile: str) -> Callable[[Session], dict[str, Any]]:
    def step(session: Session) -> dict[str, Any]:
        load = [
            "-c",
            str(session.lanes),
            "-d",
            f"{session.seconds}s",
            "--warmup",
            f"{session.seconds / 10}s",
        ]
        return page.facts(session.load(f"{profile}-closed", profile, *load))

    return step


def rate(session: Session, profile: str) -> float:
    """Requests or tasks a second of the closed loop."""
    found = session.kept(f"{profile}-closed") or {}
    return max(float(found["completed_per_s"] or 0.0), 0.2)


def tpot_ms(found: dict[str, Any]) -> float:
    """The middle of TPOT; where it was withheld, as on a busy host, that of TTFT, which is more."""
    return float(found["tpot_p50_ms"] or found["ttft_p50_ms"])


def opened(profile: str) -> Callable[[Session], dict[str, Any]]:
    def step(session: Session) -> dict[str, Any]:
        load = [
            "--request-rate",
            f"{OPEN_SHARE * rate(session, profile):.4g}",
            "-d",
            f"{session.seconds}s",
        ]
        load += ["--warmup", f"{session.seconds / 10}s"]
        return page.facts(session.load(f"{profile}-open", profile, *load))

    return step


def cache(warm: bool) -> Callable[[Session], dict[str, Any]]:
    """The same prompts twice: of the second time they are in the prefix cache, if there is one."""

    def step(session: Session) -> dict[str, Any]:
        count = str(
            max(12, session.lanes)
        )  # no more than there are slots, which keep one prompt each in llama.cpp
        name = "cache-warm" if warm else "cache-cold"
        same = [
            "--seed",
            "7",
            "--salt",
            "cache",
            "-c",
            str(min(session.lanes, 4)),
            "-n",
            count,
            "--warmup",
            "0",
        ]
        return page.facts(session.load(name, "summarization", *same))

    return step


def search(session: Session) -> dict[str, Any]:
    usual = session.kept("qa-closed") or {}
    ttft, tpot = 3 * usual["ttft_p50_ms"], 2 * tpot_ms(usual)
    shutil.rmtree(session.out / "search", ignore_errors=True)
    session.command(
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
        str(4 * session.lanes),
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
    found: dict[str, Any] = json.loads((session.out / "search/capacity.json").read_bytes())
    return found


def contract(rate: float, seconds: float, ttft_ms: float, tpot_ms: float) -> str:
    """Three lengths of a load, longer for a slow engine; of few requests a looser limit of errors is all they show."""
    seconds = max(3 * seconds, 60, FEWEST / rate)
    return CONTRACT.format(
        rate=rate,
        seconds=seconds,
        horizon=seconds / 4,
        ttft=max(2 * ttft_ms, 1),
        tpot=max(2 * tpot_ms, 0.01),
        errors=max(5, 5 * USUAL / (rate * seconds)),
    )


def validate(session: Session) -> dict[str, Any]:
    usual = session.kept("qa-closed") or {}
    text = contract(rate(session, "qa") / 2, session.seconds, usual["ttft_p50_ms"], tpot_ms(usual))
    (session.out / "contract.yaml").write_text(text)
    workload = (Path(__file__).parent.parent.parent / "workloads/qa.yaml").read_text()
    if session.output_tokens:  # those of the closed loop, whose rate and times are promised
        workload = re.sub(
            r"output_tokens: \d+", f"output_tokens: {session.output_tokens}", workload
        )
    (session.out / "qa.yaml").write_text(workload)
    for left in ("validation", "bundle.zip"):
        shutil.rmtree(session.out / left, ignore_errors=True)
        (session.out / left).unlink(missing_ok=True)
    session.command(
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
    session.command("verify", "bundle.zip", codes=(0,))
    found: dict[str, Any] = json.loads((session.out / "validation/verdict.json").read_bytes())
    return found


class Step(NamedTuple):
    name: str
    seconds: float  # of load, in lengths of a load
    does: Callable[[Session], dict[str, Any]]


SMOKE = {
    "doctor",
    "alone",
    "qa-closed",
    "qa-open",
    "cache-cold",
}  # a contract takes a minute of load
STEPS = (
    Step("doctor", 0.5, doctor),
    Step("alone", 1.2, alone),
    *(Step(f"{profile}-closed", 1.5, closed(profile)) for profile in PROFILES),
    *(Step(f"{profile}-open", 1.5, opened(profile)) for profile in PROFILES),
    Step("cache-cold", 1.0, cache(warm=False)),
    Step("cache-warm", 1.0, cache(warm=True)),
    Step("search", 7.0, search),
    Step("validate", 4.0, validate),
)


# -- the endpoint --------------------------------------------------------------------------------------------------


def prepared(session: Session, given: argparse.Namespace) -> tuple[engines.Engine, str]:
    """The engine and its program, with its weights made; looked for once, then as it was found."""
    look = session.kept("look")
    if look is None:
        look = engines.look()
        if given.llama_archive and "llamacpp" not in look["engines"]:
            cuda = bool(look["gpus"] and look["cuda_compiler"])
            look["engines"]["llamacpp"] = engines.built(
                given.llama_archive, given.model.parent / "llama", cuda
            )
        session.keep("look", look)
    asked = given.engine or ("llamacpp" if given.llama_archive else "")
    engine = engines.chosen(look, asked)
    program = look["engines"].get(engine.name) or engines.program(engine)
    chosen = session.kept("engine")
    if chosen is None:
        shape = given.shape or engines.shape(look, engine)
        if engine.form:
            form = frozenset({engine.form})
            size = weights.SHAPES[shape]._replace(context=engines.CONTEXT)
            weights.make(given.model, size, form, four_bits=shape != "tiny")
            for name, text in engine.files:
                (given.model / name).write_text(text)
        session.keep("engine", {"engine": engine.name, "shape": shape if engine.form else "none"})
    return engine, program


@contextlib.contextmanager
def serving(session: Session, given: argparse.Namespace) -> Iterator[None]:
    """The engine, while inside."""
    engine, program = prepared(session, given)
    gpus = len((session.kept("look") or {})["gpus"])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    line = engine.start.format(
        bin=program,
        model=given.model,
        port=port,
        gpus=max(gpus, 1),
        context=engines.CONTEXT,
        python=sys.executable,
        cache=engines.CONTEXT * given.lanes,
        slots=given.lanes,
        layers=999 if gpus else 0,
        threads=max(len(os.sched_getaffinity(0)) // 2, 1),
        device="cuda" if gpus else "cpu",
    )
    session.url = f"http://127.0.0.1:{port}"
    session.flags = [flag.format(model=given.model) for flag in engine.flags]
    if engine.form:
        session.flags += ["--tokenizer", str(given.model / "tokenizer.json")]
    settings = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(session.out / ".hub")}
    with (session.out / "server.txt").open("ab") as log:
        process = subprocess.Popen(
            shlex.split(line),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=settings,
            start_new_session=True,
        )
    try:
        _wait(process, session.url, engine.ready, given.start_minutes * 60)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, ready: str, at_most_s: float) -> None:
    given_up_at = time.monotonic() + at_most_s
    while time.monotonic() < given_up_at:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer,
        ):
            if ready.encode() in answer.read():
                return
        if process.poll() is not None:
            break
        select.select([], [], [], 0.5)
    raise SystemExit("the engine does not serve: see server.txt in the folder")


def steps_left(session: Session) -> list[Step]:
    return [step for step in session.steps if session.kept(step.name) is None]


def go(session: Session, given: argparse.Namespace, begun: float) -> None:
    """Steps, as many as fit into the time of this invocation."""
    with serving(session, given):
        for step in steps_left(session):
            needs = step.seconds * session.seconds + 20
            if time.monotonic() - begun + needs > given.minutes * 60:
                print(f"{step.name} needs {needs:.0f} s: the next invocation does it")
                return
            at = time.monotonic()
            session.keep(step.name, step.does(session))
            print(f"{step.name}: {time.monotonic() - at:.0f} s", flush=True)


def main() -> None:
    begun = time.monotonic()
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
            signal.SIGTERM, lambda *_: sys.exit(UNFINISHED)
        )  # the engine does not outlive this process
        if steps_left(session):
            go(session, args, begun)
        left = [step.name for step in steps_left(session)]
        names = ("look", "engine", *(step.name for step in session.steps))
        text = page.page({name: session.kept(name) for name in names})
        (session.out / "README.md").write_text(text)
        print(text)
    if left:
        print(f"left: {', '.join(left)}; the same command goes on")
        sys.exit(UNFINISHED)


if __name__ == "__main__":
    main()
