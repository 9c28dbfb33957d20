"""What do the rules for the replay of agent trajectories change?

    python benchmarks/trajectories.py

The script writes a data set in the format of MLPerf Endpoints with the lengths of coding agents,
and replays it on a simulated server with one replica. It prints two tables. The first one shows the
share of prompt tokens that come from the prefix cache, with each rule for salts and each start of
the sessions. The second one shows how the end of the load changes the throughput.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import rig

from loadgen.sim import presets

# Short words, most of which are one token
VOCABULARY = (
    *("parse", "token", "file", "branch", "merge", "cache", "queue", "thread", "buffer", "socket"),
    *("test", "stack", "index", "value", "return", "update", "search", "commit", "build", "error"),
)


class Range(NamedTuple):
    """The smallest and the largest value of a random number."""

    low: float
    high: float


SYSTEM_PROMPT_WORDS = 1_500
USER_MESSAGE_WORDS = Range(100, 1_200)  # also for the results of tools
RESPONSE_WORDS = Range(30, 200)
# The range of tool times in AA-AgentPerf (artificialanalysis.ai/methodology/agentperf)
TOOL_TIME_S = Range(0.1, 5.0)
# A user who takes a break, as in real recordings
LONG_DELAY_S = 300.0
LONG_DELAY_SHARE = 0.02


def write_sessions(path: Path, session_count: int, max_turns: int) -> None:
    """Write a data set of agent sessions as JSON lines, in the format of MLPerf Endpoints.

    Each session has 2 to `max_turns` requests, and all sessions have the same system prompt. The
    texts are random, but equal arguments always give an equal file.
    """
    generator = random.Random(1)
    system_prompt = create_text(generator, SYSTEM_PROMPT_WORDS)
    with path.open("w", encoding="utf-8") as file:
        for number in range(session_count):
            request_count = generator.randint(2, max_turns)
            for turn, message in enumerate(create_messages(generator, request_count), start=1):
                row = {"conversation_id": f"s{number}", "turn": turn, **message}
                if turn == 1:
                    row["system"] = system_prompt
                file.write(json.dumps(row) + "\n")


def create_messages(generator: random.Random, request_count: int) -> Iterator[dict[str, Any]]:
    """Yield the messages of a session: for each request one of the user, and the response to it.

    The message of the user, or the result of a tool, is sent after a delay.
    """
    for _ in range(request_count):
        is_long_delay = generator.random() < LONG_DELAY_SHARE
        text = create_text(generator, draw_integer(generator, USER_MESSAGE_WORDS))
        delay_s = LONG_DELAY_S if is_long_delay else generator.uniform(*TOOL_TIME_S)
        yield {"role": "user", "content": text, "delay_seconds": delay_s}

        response = create_text(generator, draw_integer(generator, RESPONSE_WORDS))
        yield {"role": "assistant", "content": response}


def draw_integer(generator: random.Random, value_range: Range) -> int:
    """Return a random integer in a range, both ends included."""
    return generator.randint(int(value_range.low), int(value_range.high))


def create_text(generator: random.Random, word_count: int) -> str:
    """Return a text of random words."""
    return " ".join(generator.choices(VOCABULARY, k=word_count))


def write_preset(path: Path) -> None:
    """Write the preset of a simulated server with one replica.

    All requests then share one prefix cache, so the hit rate does not depend on the routing.
    """
    preset_path = Path(presets.__file__).parent / "gb300-vm-128k.yaml"
    preset = preset_path.read_text("utf-8")
    path.write_text(preset.replace("gpus_per_vm: 4", "gpus_per_vm: 1"), "utf-8")


class ReplayFiles(NamedTuple):
    """The files of a replay: the preset of the server, the data set, and the folder of the run."""

    preset: Path
    sessions: Path
    run_dir: Path


def replay(files: ReplayFiles, users: int, *options: str) -> dict[str, Any]:
    """Replay the data set with `loadgen run`, and return the summary of the run.

    `users` is the number of virtual users, and `options` are further options of the command.
    """
    command = [sys.executable, "-P", "-m", "loadgen", "run", "qa", "--warmup", "0", "--seed", "1"]
    command += ["--url", f"sim:{files.preset}", "--dataset", str(files.sessions), "-c", str(users)]
    command += ["--json", "-o", str(files.run_dir), "--force", *options]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if not completed.stdout:
        raise SystemExit(completed.stderr)

    summary: dict[str, Any] = json.loads(completed.stdout)
    return summary


def print_cache_hits(files: ReplayFiles, users: int, duration: str) -> None:
    """Print which part of the prompt tokens comes from the prefix cache under each rule.

    One rule is where the first session of each user begins: with its first request, or in the
    middle. The other rule is where the salt stands, a text that makes prompts unique: only what
    comes before it can be found in the cache of an earlier session. `duration` is that of each run.
    """
    print("| first sessions begin | salt | cached prompt tokens | TTFT p95 |\n|---|---|---:|---:|")
    for start in ("beginning", "middle"):
        for salt in ("session", "pass", "user", "none"):
            options = ["--set", f"trajectory_start={start}"]
            options += ["--set", f"trajectory_salt={salt}"]
            # Delays are cut to 10 s, because a run of some minutes would have too few requests.
            options += ["--set", "idle_cap=10s"]

            summary = replay(files, users, "-d", duration, *options)
            cached_share = summary["tokens"]["cached_share"]
            ttft_p95_ms = summary["ttft_ms"]["p95"]
            print(f"| {start} | {salt} | {cached_share:.1%} | {ttft_p95_ms:,.0f} ms |", flush=True)


def print_throughput_by_end(files: ReplayFiles, users: int, session_count: int) -> None:
    """Print the throughput of a load of `session_count` sessions, with two rules for its end.

    The load ends with the last response of all sessions ("all"), or as soon as a user has no
    further session to begin ("first").
    """
    print("\n| trajectory_end | output tokens/s | requests in flight | duration |")
    print("|---|---:|---:|---:|")
    for end in ("all", "first"):
        options = ["-n", str(session_count), "--set", f"trajectory_end={end}"]
        summary = replay(files, users, *options)
        tokens_per_s = summary["tokens"]["whole_output_per_s"]
        in_flight = summary["load"]["in_flight_mean"]
        duration_s = summary["window"]["whole"]["duration_s"]
        print(
            f"| {end} | {tokens_per_s:,.0f} | {in_flight:.1f} | {duration_s:,.0f} s |", flush=True
        )


def main() -> None:
    """Write the data set and the preset, and print both tables."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--sessions", type=int, default=100, help="recorded sessions")
    parser.add_argument("--max-turns", type=int, default=40, help="turns of the longest session")
    parser.add_argument("--users", type=int, default=24, help="virtual users")
    parser.add_argument("--duration", default="10m", help="length of the runs of the first table")
    args = rig.parse_arguments(parser, sessions=4, max_turns=4, users=2, duration="20s")

    with tempfile.TemporaryDirectory(prefix="loadgen-trajectories-") as temporary_folder:
        folder = Path(temporary_folder)
        files = ReplayFiles(folder / "one.yaml", folder / "sessions.jsonl", folder / "run")
        write_preset(files.preset)
        write_sessions(files.sessions, args.sessions, args.max_turns)
        print_cache_hits(files, args.users, args.duration)
        print_throughput_by_end(files, args.users, args.sessions)


if __name__ == "__main__":
    main()
