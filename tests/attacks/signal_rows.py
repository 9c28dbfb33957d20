"""Attacks by signals, as a terminal sends them to the process group, in each command and phase."""

from __future__ import annotations

import socket
from collections.abc import Callable
from signal import SIGHUP, SIGINT, SIGTERM
from typing import Any

import repository_paths
from scene import NOTHING, RECORDED, Row, Scene

from loadgen.commands import COMMANDS

LOAD = "--request-rate 60/s --warmup 0 --server-metrics off --energy off --out out"
FILES = {
    "c.yaml": "name: c\nhorizon: 1s\nlevels:\n  - {name: a, workload: w.yaml, rate: 60/s, "
    "duration: 60s, warmup: 0, "
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
    "sweep": "sweep w.yaml --url {url} --request-rate 60,80 -d 60s --warmup 0 --server-metrics "
    "off --out out",
    "search": "search w.yaml --url {url} --slo ttft:1s:p90 --start 60 -d 60s --server-metrics off "
    "--out out",
    "validate": "validate c.yaml --url {url} --server-metrics off --out out",
    "mlperf": "mlperf server -b llama3.1-8b --url {url} --target-qps 60 --min-duration 60 --out "
    "out",
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
        repository_paths.unpack("raw", scene.folder)
        next(scene.folder.glob("*/run.json")).parent.rename(scene.folder / "run")
        scene.go(command)
        scene.computing()
        scene.strike(*numbers)

    return do


def asking(command: str, *numbers: int) -> Callable[[Scene], None]:
    """Interrupt a command while its target accepts a connection and never responds."""

    def do(scene: Scene) -> None:
        laid_out(scene)
        with socket.create_server(("127.0.0.1", 0)) as silent_server:
            silent_server.setblocking(False)
            scene.url = f"http://127.0.0.1:{silent_server.getsockname()[1]}"
            scene.go(command)
            connections: list[Any] = []

            def has_connection() -> bool:
                try:
                    connections.append(silent_server.accept())
                except BlockingIOError:
                    return False
                return True

            scene.until(has_connection)
            scene.strike(*numbers)
            scene.ended()
            for connection, _ in connections:
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
        scene.until(lambda: word in scene.read_output())
        scene.strike(*numbers)

    return do


def interrupt_at_start() -> list[Row]:
    """Return an interrupt of every command while its modules are read."""
    attacks = []
    for command in ("--help", *(row.name for row in COMMANDS.builtin_rows)):
        always = command in ("run", "verify")
        attacks.append(
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
    return attacks


def interrupt_readers() -> list[Row]:
    """Return interrupts of every command that reads a result."""
    attacks = []
    for name, command_line in READS.items():
        for attack, numbers in {
            "Ctrl-C twice": (SIGINT, SIGINT),
            "terminal closed": (SIGHUP,),
        }.items():
            attacks.append(
                Row(
                    f"reads-{name}-{len(numbers)}",
                    attack,
                    command_line,
                    "it computes",
                    (130,),
                    "interrupted",
                    NOTHING,
                    computing(command_line, *numbers),
                    (name, len(numbers)) == ("report", 2),
                )
            )
    return attacks


def interrupt_first_requests() -> list[Row]:
    """Return interrupts of every command that sends, while its target is silent."""
    attacks = []
    for name, command_line in SENDS.items():
        for attack, numbers in {
            "Ctrl-C": (SIGINT,),
            "terminal closed, then TERM": (SIGHUP, SIGTERM),
        }.items():
            attacks.append(
                Row(
                    f"asks-{name.replace(' ', '')}-{len(numbers)}",
                    attack,
                    command_line,
                    "the target is silent",
                    (130,),
                    "interrupted",
                    NOTHING,
                    asking(command_line, *numbers),
                    (name, len(numbers)) == ("search", 1),
                )
            )
    return attacks


def interrupt_loads() -> list[Row]:
    """Return interrupts of every command that sends, under load."""
    attacks = []
    for name, command_line in SENDS.items():
        if name in ("doctor", "answers"):
            continue
        for attack, numbers in {
            "Ctrl-C twice": (SIGINT, SIGINT),
            "terminal closed": (SIGHUP,),
        }.items():
            attacks.append(
                Row(
                    f"load-{name.replace(' ', '')}-{len(numbers)}",
                    attack,
                    command_line,
                    "under load",
                    (130,),
                    "interrupted",
                    RECORDED,
                    loading(command_line, *numbers),
                    (name, len(numbers)) in (("run --workers 2", 2), ("validate", 1)),
                )
            )
    return attacks


def interrupt_servers() -> list[Row]:
    """Return interrupts of every command that serves."""
    attacks = []
    for name, command_line in SERVES.items():
        marker = {"ui": "Ctrl-C ends it", "sim": "http"}[name]
        for attack, numbers in {
            "Ctrl-C twice": (SIGINT, SIGINT),
            "terminal closed": (SIGHUP,),
        }.items():
            attacks.append(
                Row(
                    f"serves-{name}-{len(numbers)}",
                    attack,
                    command_line,
                    "it serves",
                    (0,),
                    marker,
                    NOTHING,
                    serving(command_line, marker, *numbers),
                )
            )
    return attacks


def rows() -> list[Row]:
    """Return all attacks by signals."""
    return [
        *interrupt_at_start(),
        *interrupt_readers(),
        *interrupt_first_requests(),
        *interrupt_loads(),
        *interrupt_servers(),
    ]
