"""Signals as a terminal sends them: to the process group, twice, when it closes; in every command and phase."""

from __future__ import annotations

import socket
from collections.abc import Callable
from signal import SIGHUP, SIGINT, SIGTERM
from typing import Any

import places
from scene import NOTHING, RECORDED, Row, Scene

from loadgen.commands import COMMANDS

LOAD = "--request-rate 60/s --warmup 0 --server-metrics off --energy off --out out"
FILES = {
    "c.yaml": "name: c\nhorizon: 1s\nlevels:\n  - {name: a, workload: w.yaml, rate: 60/s, duration: 60s, warmup: 0, "
    "grace: 1s, must: [{ttft: {limit: 5s, at: p90}}]}\n",
    "q.jsonl": '{"prompt": "one and one?", "reference": "two"}\n' * 400,
    "t.jsonl": "".join(
        f'{{"timestamp": {n * 100}, "input_length": 90, "output_length": 9, "hash_ids": []}}\n'
        for n in range(5000)
    ),
}
SENDS = {  # every command that sends, without and with load
    "doctor": "doctor --url {url}",
    "run": f"run w.yaml --url {{url}} -d 60s {LOAD}",
    "run --workers 2": f"run w.yaml --url {{url}} -d 60s --workers 2 {LOAD}",
    "sweep": "sweep w.yaml --url {url} --request-rate 60,80 -d 60s --warmup 0 --server-metrics off --out out",
    "search": "search w.yaml --url {url} --slo ttft:1s:p90 --start 60 -d 60s --server-metrics off --out out",
    "validate": "validate c.yaml --url {url} --server-metrics off --out out",
    "mlperf": "mlperf server -b llama3.1-8b --url {url} --target-qps 60 --min-duration 60 --out out",
    "answers": "answers q.jsonl --url {url} --max-tokens 30 --out out",
}
READS = {  # every command that reads a result
    "report": "report run",
    "compare": "compare run run --anyway",
    "bundle": "bundle run -o b.zip",
    "export": "export run --as vllm -o vllm.json",
    "fit": "fit t.jsonl -o fitted.yaml",
    "cost": "cost run --accept-sample-prices",
}
SERVES = {"ui": "ui .", "sim": "sim --port 0"}


def laid_out(scene: Scene) -> None:
    for name, text in FILES.items():
        (scene.folder / name).write_text(text)


def early(command: str, *numbers: int) -> Callable[[Scene], None]:
    def do(scene: Scene) -> None:
        laid_out(scene)
        scene.go(command)
        scene.heard()
        scene.strike(*numbers)

    return do


def computing(command: str, *numbers: int) -> Callable[[Scene], None]:
    def do(scene: Scene) -> None:
        laid_out(scene)
        places.unpack("raw", scene.folder)
        next(scene.folder.glob("*/run.json")).parent.rename(scene.folder / "run")
        scene.go(command)
        scene.computing()
        scene.strike(*numbers)

    return do


def asking(command: str, *numbers: int) -> Callable[[Scene], None]:
    """The target accepts and says nothing."""

    def do(scene: Scene) -> None:
        laid_out(scene)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            silent.setblocking(False)
            scene.url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            scene.go(command)
            held: list[Any] = []

            def came() -> bool:
                try:
                    held.append(silent.accept())
                except BlockingIOError:
                    return False
                return True

            scene.until(came)
            scene.strike(*numbers)
            scene.ended()
            for connection, _ in held:
                connection.close()

    return do


def loading(command: str, *numbers: int) -> Callable[[Scene], None]:
    def do(scene: Scene) -> None:
        laid_out(scene)
        scene.go(command)
        scene.loading()
        scene.strike(*numbers)

    return do


def serving(command: str, word: str, *numbers: int) -> Callable[[Scene], None]:
    def do(scene: Scene) -> None:
        scene.go(command)
        scene.until(lambda: word in scene.said())
        scene.strike(*numbers)

    return do


def rows() -> list[Row]:
    found = []
    for command in ("--help", *(row.name for row in COMMANDS.builtin_rows)):
        always = command in ("run", "verify")
        found.append(
            Row(
                f"start-{command.strip('-')}",
                "Ctrl-C",
                command,
                "modules are read",
                (130,),
                "interrupted",
                NOTHING,
                early(command, SIGINT),
                always,
            )
        )
    for name, typed in READS.items():
        for attack, numbers in {
            "Ctrl-C twice": (SIGINT, SIGINT),
            "terminal closed": (SIGHUP,),
        }.items():
            found.append(
                Row(
                    f"reads-{name}-{len(numbers)}",
                    attack,
                    typed,
                    "it computes",
                    (130,),
                    "interrupted",
                    NOTHING,
                    computing(typed, *numbers),
                    (name, len(numbers)) == ("report", 2),
                )
            )
    for name, typed in SENDS.items():
        for attack, numbers in {
            "Ctrl-C": (SIGINT,),
            "terminal closed, then TERM": (SIGHUP, SIGTERM),
        }.items():
            found.append(
                Row(
                    f"asks-{name.replace(' ', '')}-{len(numbers)}",
                    attack,
                    typed,
                    "the target is silent",
                    (130,),
                    "interrupted",
                    NOTHING,
                    asking(typed, *numbers),
                    (name, len(numbers)) == ("search", 1),
                )
            )
    for name, typed in SENDS.items():
        if name in ("doctor", "answers"):
            continue
        for attack, numbers in {
            "Ctrl-C twice": (SIGINT, SIGINT),
            "terminal closed": (SIGHUP,),
        }.items():
            found.append(
                Row(
                    f"load-{name.replace(' ', '')}-{len(numbers)}",
                    attack,
                    typed,
                    "under load",
                    (130,),
                    "interrupted",
                    RECORDED,
                    loading(typed, *numbers),
                    (name, len(numbers)) in (("run --workers 2", 2), ("validate", 1)),
                )
            )
    for name, typed in SERVES.items():
        word = {"ui": "Ctrl-C ends it", "sim": "http"}[name]
        for attack, numbers in {
            "Ctrl-C twice": (SIGINT, SIGINT),
            "terminal closed": (SIGHUP,),
        }.items():
            found.append(
                Row(
                    f"serves-{name}-{len(numbers)}",
                    attack,
                    typed,
                    "it serves",
                    (0,),
                    word,
                    NOTHING,
                    serving(typed, word, *numbers),
                )
            )
    return found
